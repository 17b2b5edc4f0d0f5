"""The progress line: step, loss, throughput, time left."""

from __future__ import annotations

import time
from collections.abc import Callable

from absl import logging

from spmd_trainer.metrics.packing import Scalars

# Shown when a task has them, besides the loss.
_SHOWN = ("bits_per_byte", "accuracy", "fraction_of_correct_next_step_preds")


class Progress:
    """Logs one line per interval. Step time is that of the steps since the last line, evaluations and saves left out.

    Attributes:
      items_per_step: tokens (or examples) in a global batch.
      unit: what an item is called.
      flops_per_item: the model's, as `hardware.model_flops` counts; None where that isn't known.
      peak_flops: FLOP/s of all devices; None where they aren't known. With both, the line says the model FLOPs utilization.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        items_per_step: int,
        unit: str,
        interval: int,
        flops_per_item: float | None = None,
        peak_flops: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.items_per_step = items_per_step
        self.unit = unit
        self.flops_per_item = flops_per_item
        self.peak_flops = peak_flops
        self._num_steps = num_steps
        self._interval = max(1, interval)
        self._clock = clock
        self._since: tuple[int, float] | None = None

    def start(self, step: int) -> None:
        """Begins (or after a pause begins again) to take the time, at the state of this step."""
        self._since = (step, self._clock())

    def step_seconds(self, step: int) -> float | None:
        """Returns seconds per step since the last line, or None when no step was taken since."""
        if self._since is None or step <= self._since[0]:
            return None
        return (self._clock() - self._since[1]) / (step - self._since[0])

    def report(self, step: int, scalars: Scalars) -> dict[str, float]:
        """Logs the line when it is due; returns the timing scalars for the summaries (empty when not due)."""
        if step % self._interval and step != self._num_steps:
            return {}
        seconds = self.step_seconds(step)
        if seconds is None:
            return {}
        parts = [f"step {step}/{self._num_steps}", f"loss {scalars.loss:.4f}"]
        parts += [f"{name.replace('_', ' ')} {scalars.values[name]:.3f}" for name in _SHOWN if name in scalars.values]
        rate = self.items_per_step / seconds
        left = (self._num_steps - step) * seconds
        parts += [f"{rate:,.0f} {self.unit}/s", f"{seconds * 1e3:.0f} ms/step"]
        timing = {"steps_per_sec": 1.0 / seconds, f"{self.unit}_per_sec": rate}
        if self.flops_per_item and self.peak_flops:
            timing["mfu"] = rate * self.flops_per_item / self.peak_flops
            parts.append(f"MFU {timing['mfu']:.1%}")
        parts.append(f"ETA {format_seconds(left)}")
        logging.info("%s", "  ".join(parts))
        self.start(step)
        return timing


def format_seconds(seconds: float) -> str:
    """Returns e.g. '42s', '3m05s', '2h10m'."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"
