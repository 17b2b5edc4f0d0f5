"""The progress lines of a training run."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Mapping

from absl import logging

from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.metrics.live_status import Memory, TrainingStatus, live
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.metrics.progress import Progress
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.training import rooms


class ProgressLines(Callback):
    """Logs the first step, then one line per `log_train_output_interval_steps`, with throughput and the time left."""

    def __init__(self, upcoming: Callable[[int], Mapping[str, int]] = lambda step: {}) -> None:
        """Shows nothing yet.

        Args:
          upcoming: returns what is due next after a step, and at which step; see `Schedule.upcoming`. For the live line.
        """
        self._progress: Progress | None = None
        self._is_first = True
        self._upcoming = upcoming

    def on_open(self, run: Run) -> None:
        """Lets a display look at this run."""
        live.training = lambda: self._status(run)

    def after_pause(self, run: Run, step: int) -> None:
        """Starts the clock again: evaluations, saves and compilation don't count as training."""
        self._progress = self._progress or _make_progress(run)
        self._progress.items_per_step = _items_per_step(run)[0]
        self._progress.peak_flops = _peak_flops(run)
        self._progress.memory = _memory(run)
        self._progress.start(step)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Logs the line where it is due, and gives its timing to the summaries."""
        if self._is_first:
            self._is_first = False
            took = format_duration(time.monotonic() - run.began)
            logging.info("first step done: loss %.4f, %s after the start", scalars.loss, took)
        if self._progress is not None and (timing := self._progress.report(step, scalars)):
            self._progress.memory = memory = _memory(run)
            if memory is not None:
                timing |= {"device_bytes_in_use": float(memory.in_use), "device_peak_bytes": float(memory.peak)}
            run.log(timing)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Ends what `on_open` began."""
        del run, error
        live.training = None

    def on_end(self, run: Run) -> None:
        """Ends what `on_open` began."""
        del run
        live.training = None

    def _status(self, run: Run) -> TrainingStatus | None:
        """Returns this moment of the run; None before its first step. Called by the display's thread."""
        status = None if self._progress is None else self._progress.status()
        if status is None:
            return None
        activity = run.activity[0]
        is_step = activity.startswith("training step")
        return dataclasses.replace(status, due=self._upcoming(status.step), activity="" if is_step else activity)


def _items_per_step(run: Run) -> tuple[int, str]:
    """Returns the number of tokens (or examples) in a global batch, and their unit."""
    tokens = run.batch.get("ids") if hasattr(run.batch, "get") else None
    return (run.num_rows, "examples") if tokens is None else (math.prod(tokens.shape), "tokens")


def _make_progress(run: Run) -> Progress:
    items, unit = _items_per_step(run)
    train_p = run.task.train
    metadata, flops = run.partitioner.metadata, None
    if unit == "tokens" and (chips := rooms.find("kernels.chips")) is not None:
        flops = chips.model_flops(metadata.num_params(), 1, num_frozen=metadata.num_frozen_params())
    return Progress(
        num_steps=run.num_steps,
        items_per_step=items,
        unit=unit,
        interval=train_p.log_train_output_interval_steps or train_p.summary_interval_steps,
        flops_per_item=flops,
        peak_flops=_peak_flops(run),
    )


def _peak_flops(run: Run) -> float | None:
    """Returns the FLOP/s of the mesh's devices, or None where they aren't known."""
    devices, chips = run.mesh.devices, rooms.find("kernels.chips")
    return None if chips is None else chips.peak_flops(devices.flat[0].device_kind, devices.size)


def _memory(run: Run) -> Memory | None:
    """Returns the memory of the fullest of this process's devices, or None where the backend doesn't say, as on CPU."""
    found = [stats for device in run.mesh.local_devices if (stats := device.memory_stats())]
    if not found:
        return None
    fullest = max(found, key=lambda stats: stats["bytes_in_use"])
    peak = max(stats.get("peak_bytes_in_use", stats["bytes_in_use"]) for stats in found)
    return Memory(fullest["bytes_in_use"], peak, fullest.get("bytes_limit"))
