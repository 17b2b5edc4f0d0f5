"""The progress lines of a training run: step, loss, throughput, time left."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping

from absl import logging

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.sharding.messages import format_duration, format_seconds
from spmd_trainer.step.packing import Scalars
from spmd_trainer.train_states import PyTree
from spmd_trainer.training import ramps, rooms
from spmd_trainer.training.live_status import Memory, TrainingStatus, live

# Metrics shown beside the loss if the task has them, and their labels.
_SHOWN = {
    "bits_per_byte": "bits per byte",
    "accuracy": "accuracy",
    "fraction_of_correct_next_step_preds": "next-token accuracy",
}
# A progress line is also logged when the latest one is this many seconds old.
LONGEST_SILENCE = 30.0
# The terminal's live status line uses the current interval's step time once the interval is this many seconds old.
_ENOUGH_SECONDS = 2.0


class Progress:
    """Logs one progress line per interval of steps, and also whenever the latest line is `LONGEST_SILENCE` seconds old.

    The step time is the mean over the steps since the previous interval ended, without evaluations and saves.

    Attributes:
      items_per_step: number of tokens (or examples) in a global batch.
      flops_per_item: the model's FLOPs per token (or example), as the function `flops_per_item` returns them; {} if unknown.
      peak_flops: peak FLOP/s of all devices; None if unknown. If `peak_flops` and `flops_per_item` are known, the progress line
        shows the model FLOPs utilization.
      memory: memory use of this process's devices, for the terminal's live status line; None if unknown.
      shown: the step of the newest progress line; 0 before the first line.
    """

    def __init__(
        self,
        *,
        num_steps: int,
        items_per_step: int,
        unit: str,
        interval: int,
        flops_per_item: Mapping[str, float] | None = None,
        peak_flops: float | None = None,
        steps_left: Callable[[int], float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        self.items_per_step = items_per_step
        self.unit = unit
        self.flops_per_item = flops_per_item or {}
        self.peak_flops = peak_flops
        self._num_steps = num_steps
        self._steps_left = steps_left or (lambda step: num_steps - step)
        self._interval = max(1, interval)
        self._clock = clock
        self._since: tuple[int, float] | None = None
        self._last_line = 0.0
        self.memory: Memory | None = None
        self.shown = 0
        # For the live status line, which reads them on its own thread.
        self._latest: tuple[int, float, float | None] | None = None
        self._seconds: float | None = None

    def start(self, step: int) -> None:
        """Starts timing at this step, initially or after a pause."""
        self._last_line = self._clock()
        self._since = (step, self._last_line)

    def report(self, step: int, scalars: Scalars) -> dict[str, float]:
        """Logs a progress line for a finished step if one is due. Returns timing scalars at the end of an interval, else {}."""
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
        return TrainingStatus(
            step=step,
            num_steps=self._num_steps,
            loss=loss,
            seconds_per_step=seconds,
            items_per_step=self.items_per_step,
            unit=self.unit,
            utilization=self._utilization(self.items_per_step / seconds) if seconds else {},
            memory=self.memory,
            steps_left=self._steps_left(step),
        )

    def _log(self, step: int, scalars: Scalars, seconds: float) -> dict[str, float]:
        self._seconds, self.shown = seconds, step
        parts = [f"step {step}/{self._num_steps}", f"loss {scalars.loss:.4f}"]
        parts += [f"{text} {scalars.means[name]:.3f}" for name, text in _SHOWN.items() if name in scalars.means]
        rate = self.items_per_step / seconds
        left = self._steps_left(step) * seconds
        parts += [f"{rate:,.0f} {self.unit}/s", f"{seconds * 1e3:.0f} ms/step"]
        timing = {"steps_per_sec": 1.0 / seconds, f"{self.unit}_per_sec": rate}
        if utilization := self._utilization(rate):
            timing |= utilization
            # 'MFU 42.9% (6N 38.7%)', or 'MFU 6N 38.7%' if the other count is unknown.
            of_6n = f"6N {utilization['mfu_6n']:.1%}"
            parts.append(f"MFU {utilization['mfu']:.1%} ({of_6n})" if "mfu" in utilization else f"MFU {of_6n}")
        parts.append(f"ETA {format_seconds(left)}")
        logging.info("%s", "  ".join(parts))
        return timing

    def _utilization(self, rate: float) -> dict[str, float]:
        """Returns the model FLOPs utilization at `rate` items per second for each count in `flops_per_item`; {} if unknown."""
        peak = self.peak_flops
        return {name: rate * flops / peak for name, flops in self.flops_per_item.items()} if peak else {}


class ProgressLines(Callback):
    """Logs the first step, then a progress line with throughput and time left per `log_train_output_interval_steps`."""

    def __init__(self, upcoming: Callable[[int], Mapping[str, int]] = lambda step: {}) -> None:
        """Stores the argument.

        Args:
          upcoming: given a step, returns {event: the next step at which the event is due}; see `Schedule.upcoming`. The
            terminal's live status line shows these.
        """
        self._progress: Progress | None = None
        self._batch: PyTree = None
        self._is_first = True
        self._upcoming = upcoming

    def on_open(self, run: Run) -> None:
        live.training = lambda: self._status(run)
        self._summary_interval = run.task.train.summary_interval_steps

    def after_pause(self, run: Run, step: int) -> None:
        """Restarts the timing, so that evaluations, saves and compilation don't count as training time."""
        if self._progress is None:
            items, unit = items_per_step(run)
            train_p = run.task.train
            self._progress = Progress(
                num_steps=run.num_steps,
                items_per_step=items,
                unit=unit,
                interval=train_p.log_train_output_interval_steps or train_p.summary_interval_steps,
                peak_flops=_peak_flops(run),
                steps_left=functools.partial(ramps.steps_left, ramps.stages_of(train_p), num_steps=run.num_steps),
            )
        if run.batch is not self._batch:  # the first one, or that of another stage of a ramp
            self._batch = run.batch
            self._progress.items_per_step = items_per_step(run)[0]
            self._progress.flops_per_item = flops_per_item(run)
        self._progress.peak_flops = _peak_flops(run)
        self._progress.memory = _memory(run)
        self._progress.start(step)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Logs a progress line if one is due, and adds its throughput to the run's summaries."""
        if self._is_first:
            self._is_first = False
            took = format_duration(time.monotonic() - run.began)
            logging.info("first step done: loss %.4f, %s after the start", scalars.loss, took)
        if self._progress is None:
            return
        timing = self._progress.report(step, scalars)
        # Steps without a summary of their own: the curve of a short or slow run has what its lines show.
        if self._progress.shown == step and step % self._summary_interval and step not in (1, run.num_steps):
            run.summaries.write("train", step, {} if scalars.loss is None else {"loss": scalars.loss})
        if timing:
            self._progress.memory = memory = _memory(run)
            if memory is not None:
                timing |= {"device_bytes_in_use": float(memory.in_use), "device_peak_bytes": float(memory.peak)}
            run.log(timing)

    def on_end(self, run: Run, error: BaseException | None = None) -> None:
        del run, error
        live.training = None

    on_failure = on_end

    def _status(self, run: Run) -> TrainingStatus | None:
        """Returns the current status of the run; None before its first step. Called by the display's thread."""
        status = None if self._progress is None else self._progress.status()
        if status is None:
            return None
        activity = run.activity[0]
        is_step = activity.startswith("training step")
        return dataclasses.replace(status, due=self._upcoming(status.step), activity="" if is_step else activity)


def items_per_step(run: Run) -> tuple[int, str]:
    """Returns (number of tokens in a global batch, 'tokens'), or (number of examples, 'examples') if the batch has no tokens."""
    tokens = run.batch.get("ids") if hasattr(run.batch, "get") else None
    return (run.num_rows, "examples") if tokens is None else (math.prod(tokens.shape), "tokens")


def flops_per_item(run: Run) -> dict[str, float]:
    """Returns the model's training FLOPs per token, counted in two ways: {'mfu': ..., 'mfu_6n': ...}.

    'mfu_6n' is `kernels.chips.model_flops`. 'mfu' counts the matrix products that are computed: only the chosen experts, and
    causal attention over half of all keys. It leaves out embedding lookups and rematerialization, and treats a row of several
    texts as one text. Models without the method `matrix_flops` have no 'mfu'; `DecoderLanguageModel` has this method.
    Returns {} if the batches have no tokens, or if `kernels.chips` is not installed.
    """
    if items_per_step(run)[1] != "tokens" or (chips := rooms.find("kernels.chips")) is None:
        return {}
    metadata = run.partitioner.metadata
    trained, frozen = metadata.num_params(per_token=True), metadata.num_frozen_params(per_token=True)
    found = {"mfu_6n": float(chips.model_flops(trained, 1, num_frozen=frozen))}
    matrix_flops = getattr(run.task.model, "matrix_flops", None)
    return found if matrix_flops is None else {"mfu": matrix_flops(trained, frozen, run.batch.ids.shape[1]), **found}


def _peak_flops(run: Run) -> float | None:
    devices, chips = run.mesh.devices, rooms.find("kernels.chips")
    return None if chips is None else chips.peak_flops(devices.flat[0].device_kind, devices.size)


def _memory(run: Run) -> Memory | None:
    """Returns the memory use of this process's fullest device; None if the backend doesn't report it, as on CPU."""
    found = [stats for device in run.mesh.local_devices if (stats := device.memory_stats())]
    if not found:
        return None
    fullest = max(found, key=lambda stats: stats["bytes_in_use"])
    peak = max(stats.get("peak_bytes_in_use", stats["bytes_in_use"]) for stats in found)
    return Memory(fullest["bytes_in_use"], peak, fullest.get("bytes_limit"))
