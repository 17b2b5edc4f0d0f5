"""What this room adds to a training run."""

from __future__ import annotations

from spmd_trainer.callbacks.base import Callback
from spmd_trainer.training.job import Job
from spmd_trainer.training.schedule import Schedule
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
    policy, times = job.config.failure_policy, TimeRecord()
    parts = StepParts(RepeatCheck(policy.check_repeat_every))
    return [
        Watchdog(policy.watchdog_seconds, hang_seconds=policy.hang_seconds, window=parts.window),
        InvalidBatches(),
        parts,
        LossSpikes(),
        ReplicaCheck(policy.check_replicas_every),
        ProgressLines(Schedule.of_run(job.config).upcoming),
        Profiler(),
        times,
        RunPage(),
        LastTimes(times),
    ]
