"""The progress line: step, loss, throughput, time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

if TYPE_CHECKING:  # it brings in praxis, and checkpointing reads durations from here
    from spmd_trainer.metrics.packing import Scalars

# Shown when a task has them, besides the loss, and under which name.
_SHOWN = {
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "fraction_of_correct_next_step_preds": "next-token accuracy",
}
# A line is also logged when the last one is this many seconds old.
LONGEST_SILENCE = 30.0


class Progress:
    """Logs one line per interval of steps, and one in between when the last line is `LONGEST_SILENCE` old.

    Step time is that of the steps since the last line of an interval, evaluations and saves left out.

    Attributes:
      items_per_step: tokens (or examples) in a global batch.
      unit: what an item is called.
      flops_per_item: the model's, as `analysis.chips.model_flops` counts; None where that isn't known.
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
        self._last_line = 0.0

    def start(self, step: int) -> None:
        """Begins (or after a pause begins again) to take the time, at the state of this step."""
        self._last_line = self._clock()
        self._since = (step, self._last_line)

    def report(self, step: int, scalars: Scalars) -> dict[str, float]:
        """Logs the line when it is due.

        Args:
          step: the step that is done.
          scalars: what it gave.

        Returns:
          The timing scalars for the summaries; empty unless the step ends an interval.
        """
        now = self._clock()
        ends_interval = step % self._interval == 0 or step == self._num_steps
        if not ends_interval and now - self._last_line < LONGEST_SILENCE:
            return {}
        if self._since is None or step <= self._since[0]:
            return {}
        timing = self._log(step, scalars, (now - self._since[1]) / (step - self._since[0]))
        if not ends_interval:
            self._last_line = now
            return {}
        self.start(step)
        return timing

    def _log(self, step: int, scalars: Scalars, seconds: float) -> dict[str, float]:
        """Logs the line of a step, given the seconds per step; returns the timing scalars."""
        parts = [f"step {step}/{self._num_steps}", f"loss {scalars.loss:.4f}"]
        parts += [f"{text} {scalars.values[name]:.3f}" for name, text in _SHOWN.items() if name in scalars.values]
        rate = self.items_per_step / seconds
        left = (self._num_steps - step) * seconds
        parts += [f"{rate:,.0f} {self.unit}/s", f"{seconds * 1e3:.0f} ms/step"]
        timing = {"steps_per_sec": 1.0 / seconds, f"{self.unit}_per_sec": rate}
        if self.flops_per_item and self.peak_flops:
            timing["mfu"] = rate * self.flops_per_item / self.peak_flops
            parts.append(f"MFU {timing['mfu']:.1%}")
        parts.append(f"ETA {format_seconds(left)}")
        logging.info("%s", "  ".join(parts))
        return timing


def format_seconds(seconds: float) -> str:
    """Returns e.g. '42s', '3m05s', '2h10m'."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def format_duration(seconds: float) -> str:
    """Returns how long something took, e.g. '0.42 s', '4.2 s', '42 s', '3m05s', '2h10m'."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)
