"""What becomes of a training step's scalars: progress lines, summaries, and the last ones as the run's result."""

from __future__ import annotations

import collections
import math
import time
from typing import Any

from absl import logging

from spmd_trainer.analysis import chips
from spmd_trainer.metrics.averages import StepAverages
from spmd_trainer.metrics.packing import ScalarPacking, Scalars
from spmd_trainer.metrics.progress import Progress, format_duration
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs.invalid_steps import InvalidSteps
from spmd_trainer.programs.job import Job


class Reports:
    """Steps whose scalars are still on the devices, and where they are reported once they are known.

    Attributes:
      progress: the progress line.
    """

    def __init__(self, job: Job, writers: SummaryWriters, *, began: float, stop_on_invalid_step: bool):
        """Reads the task's intervals.

        Args:
          job: the job.
          writers: take the summaries.
          began: `time.monotonic()` at the start of the run.
          stop_on_invalid_step: end the run at the first invalid step.

        Raises:
          UserError: `task.train.summary_accumulate_interval_steps` makes no sense.
        """
        train_p = job.task.train
        self.progress = _make_progress(job)
        # Read once: a field of a config costs the loop as much as waking a thread.
        self._interval = train_p.summary_interval_steps
        self._keep = train_p.max_inflight_steps
        self._averages = StepAverages(train_p.summary_accumulate_interval_steps, self._interval)
        self._writers = writers
        self._packing = ScalarPacking()
        self._invalid = InvalidSteps(job.task.learner, stop=stop_on_invalid_step)
        self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()
        self._began = began
        self._last: Scalars | None = None

    def start(self, job: Job, packing: ScalarPacking, step: int) -> None:
        """The steps after `step` are this job's, and their scalars are packed by `packing`."""
        self._packing = packing
        self.progress.items_per_step = _items_per_step(job)[0]
        self.progress.peak_flops = _peak_flops(job)
        self.progress.start(step)

    def add(self, step: int, packed: Any) -> None:
        """Adds a step just dispatched; reports the oldest ones until only `max_inflight_steps` are in flight."""
        self._in_flight.append((step, packed))
        # The first one is waited for: a person wants to know that training works, and not two slow steps later.
        self._report_until(self._keep if self._last is not None else 0)

    def drain(self) -> None:
        """Waits for every step in flight and reports it."""
        self._report_until(0)

    def last(self) -> dict[str, float]:
        """Returns the loss and the weighted scalars of the last step reported; empty before the first."""
        if self._last is None:
            return {}
        return ({} if self._last.loss is None else {"loss": self._last.loss}) | dict(self._last.values)

    def _report_until(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            step, packed = self._in_flight.popleft()
            scalars = self._packing.unpack(packed)
            if self._last is None:
                took = format_duration(time.monotonic() - self._began)
                logging.info("first step done: loss %.4f, %s after the start", scalars.loss, took)
            self._last = scalars
            counted = self._invalid.count
            invalid = self._invalid.look_at(step, scalars)
            timing = self.progress.report(step, scalars)
            if self._invalid.count == counted:
                self._averages.add(step, scalars)
            if step % self._interval == 0:
                self._writers.write("train", step, {**self._averages.take(scalars), **invalid, **timing})


def _items_per_step(job: Job) -> tuple[int, str]:
    """How much a step works on, and what of."""
    shapes = job.global_shape_dtype(job.process_inputs_shape_dtype)
    tokens = shapes.get("ids") if hasattr(shapes, "get") else None
    return (job.num_rows, "examples") if tokens is None else (math.prod(tokens.shape), "tokens")


def _make_progress(job: Job) -> Progress:
    items, unit = _items_per_step(job)
    train_p = job.task.train
    flops = chips.model_flops(job.partitioner.metadata.num_params(), 1) if unit == "tokens" else None
    return Progress(
        num_steps=int(train_p.num_train_steps),
        items_per_step=items,
        unit=unit,
        interval=train_p.log_train_output_interval_steps or train_p.summary_interval_steps,
        flops_per_item=flops,
        peak_flops=_peak_flops(job),
    )


def _peak_flops(job: Job) -> float | None:
    """FLOP/s of the mesh's devices, None where they aren't known."""
    devices = job.partitioner.mesh.devices
    return chips.peak_flops(devices.flat[0].device_kind, devices.size)
