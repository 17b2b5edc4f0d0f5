"""The callbacks that this package adds to a training run."""

from __future__ import annotations

import jax
from absl import logging

from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.storage.run_files import PAGE, has_run
from spmd_trainer.training.job import Job
from spmd_trainer.training.periodic import Schedule
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.watch.expert_load import ExpertLoad
from spmd_trainer.watch.invalid_batches import InvalidBatches
from spmd_trainer.watch.loss_spikes import LossSpikes
from spmd_trainer.watch.pages import run_page
from spmd_trainer.watch.profiler import Profiler
from spmd_trainer.watch.progress import ProgressLines
from spmd_trainer.watch.repeat_check import RepeatCheck
from spmd_trainer.watch.replica_check import ReplicaCheck
from spmd_trainer.watch.run_times import LastTimes, TimeRecord
from spmd_trainer.watch.step_parts import StepParts
from spmd_trainer.watch.watchdog import Watchdog


def of_run(job: Job) -> list[Callback]:
    """Returns the callbacks that monitor a run of this job. Callbacks with equal `turn` are called in the order of this list."""
    config, times = job.config.of(TrainConfig), TimeRecord()
    parts = StepParts(RepeatCheck(config.check_repeat_every))
    return [
        Watchdog(config.watchdog_seconds, hang_seconds=config.hang_seconds, window=parts.window),
        InvalidBatches(),
        parts,
        LossSpikes(),
        ExpertLoad(),
        ReplicaCheck(config.check_replicas_every),
        ProgressLines(Schedule.of_run(config).upcoming),
        Profiler(),
        times,
        RunPage(),
        LastTimes(times),
    ]


class RunPage(Callback):
    """Writes `run.html` into the run's directory when the run ends. If this fails, only logs a warning."""

    turn = Turn.WRITES

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Writes the page of a run that has failed, if the run has taken a step since it was last started."""
        del error
        if run.step > run.first_step:
            self.on_end(run)

    def on_end(self, run: Run) -> None:
        if jax.process_index():
            return
        try:
            if has_run(run.job_log_dir):
                run_page.write_page([run.job_log_dir], run.job_log_dir / PAGE)
        except Exception:
            logging.warning("the page %s could not be written", run.job_log_dir / PAGE, exc_info=True)
