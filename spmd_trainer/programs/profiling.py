"""A profile of some training steps, for TensorBoard, where the task asks for one."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator

from spmd_trainer.programs.job import Job


@contextlib.contextmanager
def profile_capture(job: Job) -> Iterator[Callable[[int], object]]:
    """Yields what is called after each step: at `profiler_capture_step` it takes a profile into `job_log_dir/profile`."""
    train_p = job.task.train
    if train_p.profiler_capture_step is None:
        yield lambda step: None
        return
    from clu import periodic_actions

    action = periodic_actions.Profile(
        logdir=str(job.settings.job_log_dir / "profile"),
        num_profile_steps=train_p.profiler_num_steps,
        profile_duration_ms=int(1000 * train_p.profiler_min_duration_sec),
        first_profile=train_p.profiler_capture_step,
        every_secs=None,
    )
    yield action
    # Ends a profile that spans the end of training.
    action(2**62, math.inf)
