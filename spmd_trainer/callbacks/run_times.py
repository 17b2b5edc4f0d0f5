"""Keeps where the run's time goes in `run_times.jsonl`."""

from __future__ import annotations

import time

import jax

from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.metrics.run_times import RunTimesFile

# Summaries may be written at every step. The times are not: a kill may cost the record this many seconds, or this share of all.
_SECONDS_BETWEEN_LINES = 2.0
_SHARE_BETWEEN_LINES = 0.005


class TimeRecord(Callback):
    """Writes the times after each pause (the start, saves, evaluations, decodes), now and then with a summary, and at the end.

    The file stays small: within months of training it gets some thousand lines, besides those of the pauses.
    """

    def __init__(self) -> None:
        self._file: RunTimesFile | None = None
        self._written = 0.0

    def on_open(self, run: Run) -> None:
        """Process 0 notes when the run began."""
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = run.task.train.summary_interval_steps
        if jax.process_index() == 0:
            began = time.time() - (time.monotonic() - run.began)
            self._file = RunTimesFile(run.job_log_dir, round(began, 3))

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Writes the times with a summary, if the last line is not too young."""
        del scalars
        if step % self._interval:
            return
        now = time.monotonic()
        if now - self._written >= max(_SECONDS_BETWEEN_LINES, _SHARE_BETWEEN_LINES * (now - run.began)):
            self._write(run)

    def after_pause(self, run: Run, step: int) -> None:
        """Writes the times."""
        del step
        self._write(run)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Writes the times."""
        del error
        if self._written:  # else the run did not get to its first step
            self._write(run, "failed")

    def on_end(self, run: Run) -> None:
        """Writes the times."""
        self._write(run, "finished" if run.step >= run.num_steps or run.stop_reason else "stopped")

    def _write(self, run: Run, ended: str = "") -> None:
        if self._file is not None:
            self._written = time.monotonic()
            self._file.write(run.times.seconds(), run.first_step, run.step, ended)
