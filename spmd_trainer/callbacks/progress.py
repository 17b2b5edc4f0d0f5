"""The progress lines of a training run."""

from __future__ import annotations

import math
import time

from absl import logging

from spmd_trainer.analysis import chips
from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.metrics.packing import Scalars
from spmd_trainer.metrics.progress import Progress
from spmd_trainer.sharding.messages import format_duration


class ProgressLines(Callback):
    """Logs the first step, then one line per `log_train_output_interval_steps`, with throughput and the time left."""

    def __init__(self) -> None:
        self._progress: Progress | None = None
        self._is_first = True

    def after_pause(self, run: Run, step: int) -> None:
        """Starts the clock again: evaluations, saves and compilation don't count as training."""
        self._progress = self._progress or _make_progress(run)
        self._progress.items_per_step = _items_per_step(run)[0]
        self._progress.peak_flops = _peak_flops(run)
        self._progress.start(step)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Logs the line where it is due, and gives its timing to the summaries."""
        if self._is_first:
            self._is_first = False
            took = format_duration(time.monotonic() - run.began)
            logging.info("first step done: loss %.4f, %s after the start", scalars.loss, took)
        if self._progress is not None:
            run.log(self._progress.report(step, scalars))


def _items_per_step(run: Run) -> tuple[int, str]:
    """Returns the number of tokens (or examples) in a global batch, and their unit."""
    tokens = run.batch.get("ids") if hasattr(run.batch, "get") else None
    return (run.num_rows, "examples") if tokens is None else (math.prod(tokens.shape), "tokens")


def _make_progress(run: Run) -> Progress:
    items, unit = _items_per_step(run)
    train_p = run.task.train
    metadata, flops = run.partitioner.metadata, None
    if unit == "tokens":
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
    devices = run.mesh.devices
    return chips.peak_flops(devices.flat[0].device_kind, devices.size)
