"""Profiles some training steps for TensorBoard, if the task sets `profiler_capture_step`."""

from __future__ import annotations

import time

import jax
from absl import logging

from spmd_trainer.callbacks import Callback, Run


class Profiler(Callback):
    """Profiles training steps after `task.train.profiler_capture_step`, into `job_log_dir/profile`.

    The profile spans at least `profiler_num_steps` steps, and at least `profiler_min_duration_sec` seconds.
    """

    def __init__(self) -> None:
        self._capture_step: int | None = None
        self._since: tuple[int, float] | None = None

    def on_start(self, run: Run) -> None:
        train_p = run.task.train
        self._capture_step = train_p.profiler_capture_step
        self._num_steps = train_p.profiler_num_steps
        self._seconds = train_p.profiler_min_duration_sec

    def after_dispatch(self, run: Run, step: int) -> None:
        if self._capture_step is None:
            return
        if self._since is None:
            if step == self._capture_step:
                jax.profiler.start_trace(str(run.job_log_dir / "profile"))
                self._since = (step, time.monotonic())
            return
        first, began = self._since
        if step - first >= self._num_steps and time.monotonic() - began >= self._seconds:
            self.on_end(run)

    def on_end(self, run: Run) -> None:
        """Ends a profile that is still running when training ends."""
        if self._since is not None:
            jax.block_until_ready(run.state)
            self.on_failure(run)

    def on_failure(self, run: Run, error: BaseException | None = None) -> None:
        """Ends and keeps a running profile, because it shows the steps before the failure."""
        del error
        if self._since is not None:
            jax.profiler.stop_trace()
            logging.info(
                "wrote a profile of the steps from %d on to %s", self._capture_step, run.job_log_dir / "profile"
            )
            self._capture_step = self._since = None
