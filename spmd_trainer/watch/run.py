"""What this room adds to a training run."""

from __future__ import annotations

from spmd_trainer.callbacks.base import Callback
from spmd_trainer.training.job import Job
from spmd_trainer.training.periodic import Schedule
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.watch.invalid_batches import InvalidBatches
from spmd_trainer.watch.loss_spikes import LossSpikes
from spmd_trainer.watch.profiler import Profiler
from spmd_trainer.watch.progress import ProgressLines
from spmd_trainer.watch.repeat_check import RepeatCheck
from spmd_trainer.watch.replica_check import ReplicaCheck
from spmd_trainer.watch.run_page import RunPage
from spmd_trainer.watch.run_times import LastTimes, TimeRecord
from spmd_trainer.watch.step_parts import StepParts
from spmd_trainer.watch.watchdog import Watchdog


def of_run(job: Job) -> list[Callback]:
    """Returns the callbacks that watch a run of this job. Those of the same turn are called in this order."""
    config, times = job.config.of(TrainConfig), TimeRecord()
    parts = StepParts(RepeatCheck(config.check_repeat_every))
    return [
        Watchdog(config.watchdog_seconds, hang_seconds=config.hang_seconds, window=parts.window),
        InvalidBatches(),
        parts,
        LossSpikes(),
        ReplicaCheck(config.check_replicas_every),
        ProgressLines(Schedule.of_run(config).upcoming),
        Profiler(),
        times,
        RunPage(),
        LastTimes(times),
    ]
