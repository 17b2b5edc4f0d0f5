"""Writes the run's page, `run.html`, when the run ends."""

from __future__ import annotations

import jax
from absl import logging

from spmd_trainer.callbacks.base import Callback, Run, Turn
from spmd_trainer.storage.run_files import PAGE, has_run
from spmd_trainer.watch.pages import run_page


class RunPage(Callback):
    """Writes `run.html` into the run's directory. That it can't be written is a warning: the run is what matters."""

    turn = Turn.WRITES

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Writes the page of a run that has failed, if it had begun."""
        del error
        if run.step > run.first_step:
            self.on_end(run)

    def on_end(self, run: Run) -> None:
        """Process 0 writes the page."""
        if jax.process_index():
            return
        try:
            if has_run(run.job_log_dir):
                run_page.write_page([run.job_log_dir], run.job_log_dir / PAGE)
        except Exception:
            logging.warning("the page %s could not be written", run.job_log_dir / PAGE, exc_info=True)
