"""The progress line: step, loss, throughput, time left."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import logging

from spmd_trainer.metrics.live_status import Memory, TrainingStatus
from spmd_trainer.sharding.messages import format_seconds

if TYPE_CHECKING:  # importing it imports praxis, and checkpointing imports only durations from here
    from spmd_trainer.metrics.packing import Scalars

# Metrics shown beside the loss if the task has them, and their labels.
_SHOWN = {
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "fraction_of_correct_next_step_preds": "next-token accuracy",
}
# A line is also logged when the last line is this many seconds old.
LONGEST_SILENCE = 30.0
# The live line uses the current interval's step time once the interval is this many seconds old.
_ENOUGH_SECONDS = 2.0


class Progress:
    """Logs one line per interval of steps, and one in between if the last line is `LONGEST_SILENCE` seconds old.

    The step time is the mean over the steps since the last interval ended, without evaluations and saves.

    Attributes:
      items_per_step: tokens (or examples) in a global batch.
      unit: name of an item.
      flops_per_item: the model's FLOPs as counted by `analysis.chips.model_flops`; None if unknown.
      peak_flops: peak FLOP/s of all devices; None if unknown. If both are known, the line shows the model FLOPs
        utilization.
      memory: of this process's devices, for the live line; None if unknown.
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
        self.memory: Memory | None = None
        # For the live line, which reads them on its own thread.
        self._latest: tuple[int, float, float | None] | None = None
        self._seconds: float | None = None

    def start(self, step: int) -> None:
        """Starts timing at this step, initially or after a pause."""
        self._last_line = self._clock()
        self._since = (step, self._last_line)

    def report(self, step: int, scalars: Scalars) -> dict[str, float]:
        """Logs a finished step's line if due. Returns timing scalars for the summaries at the end of an interval, else
        {}.
        """
        now = self._clock()
        self._latest = (step, now, scalars.loss)
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

    def status(self) -> TrainingStatus | None:
        """Returns the current status of training; None before `start`. Called by any thread."""
        since, latest, seconds = self._since, self._latest, self._seconds
        if since is None:
            return None
        step, now, loss = latest or (*since, None)
        steps, lasts = step - since[0], now - since[1]
        if steps > 0 and (seconds is None or lasts >= _ENOUGH_SECONDS):
            seconds = lasts / steps
        mfu = None
        if seconds and self.flops_per_item and self.peak_flops:
            mfu = self.items_per_step / seconds * self.flops_per_item / self.peak_flops
        return TrainingStatus(
            step=step,
            num_steps=self._num_steps,
            loss=loss,
            seconds_per_step=seconds,
            items_per_step=self.items_per_step,
            unit=self.unit,
            mfu=mfu,
            memory=self.memory,
        )

    def _log(self, step: int, scalars: Scalars, seconds: float) -> dict[str, float]:
        """Logs a step's line. Returns the timing scalars."""
        self._seconds = seconds
        parts = [f"step {step}/{self._num_steps}", f"loss {scalars.loss:.4f}"]
        parts += [f"{text} {scalars.means[name]:.3f}" for name, text in _SHOWN.items() if name in scalars.means]
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
