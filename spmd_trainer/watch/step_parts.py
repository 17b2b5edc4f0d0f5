"""Measures the time of each part of a training step on this process: input, dispatch and devices.

All processes of a synchronous job take equally long for a step, so a step's time doesn't show which process is slow. The times
of its parts do. The input time is how long the loop waited for this process's own next batch. The dispatch time is that of the
host's own work, such as callbacks and the call of the compiled step. Neither of them includes waiting for the devices or for
other processes' input.
"""

from __future__ import annotations

import collections
import socket
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from spmd_trainer.callbacks import Callback, Run, StepFn, StepWatch
from spmd_trainer.step.packing import Scalars
from spmd_trainer.watch.device_watch import Clock, DeviceWatch
from spmd_trainer.watch.repeat_check import RepeatCheck

# Number of steps in a window.
WINDOW = 20
# Processes report windows at different moments, perhaps hundreds of steps apart. So for each of these numbers, a process reports
# the last two windows that end at a multiple of the number: then all processes have a window in common.
STRIDES = (5, 20, 80, 320)
_KEPT = 2 * STRIDES[-1] + WINDOW


class Parts(NamedTuple):
    """Times of one training step on this process, in seconds.

    Attributes:
      input: time for which the loop waited for this process's own batch.
      dispatch: time of the host's own work.
      whole: time from the beginning of this step to the beginning of the next step or pause.
    """

    step: int
    input: float
    dispatch: float
    whole: float


def spread(values: Iterable[float]) -> list[float]:
    """Returns the 15th, 25th, 50th and 85th percentiles of times in seconds, rounded to microseconds.

    Up to three outliers among 20 times, e.g. from garbage collections or bursts of load, don't affect the results.
    """
    ordered = sorted(values)
    count = len(ordered)
    found = (
        ordered[int(0.15 * count)],
        ordered[int(0.25 * count)],
        statistics.median(ordered),
        ordered[count - 1 - int(0.15 * count)],
    )
    return [round(value, 6) for value in found]


class StepParts(Callback, StepWatch):
    """Measures the times of the parts of training steps. The training loop calls the methods, which read a clock."""

    def __init__(
        self,
        repeats: RepeatCheck | None = None,
        watch: DeviceWatch | None = None,
        clock: Clock = time.monotonic,
        cpu_clock: Clock = time.thread_time,
    ):
        """Starts without measurements.

        Args:
          repeats: takes some training steps twice; None to take each step once.
          watch: measures the devices; closed at the end of the run. None: `on_open` makes one if there are several processes.
          clock: returns the time in seconds, as `time.monotonic`.
          cpu_clock: returns the CPU seconds of the calling thread, as `time.thread_time`.
        """
        self._repeats = repeats or RepeatCheck(0)
        self._watch = watch
        self._clock, self._cpu_clock = clock, cpu_clock
        self._steps: collections.deque[Parts] = collections.deque(maxlen=_KEPT)
        self._host = socket.gethostname()
        self._began: float | None = None
        self._step = 0
        self._for_others = self._own_input = self._waited = 0.0
        self._mark = self._cpu_mark = 0.0
        self._packed: Any = None
        self._step_seconds = 0.0

    def on_open(self, run: Run) -> None:
        """Begins to follow the run's steps. Measures device times only if there are several processes to compare."""
        run.step_watch = self
        if self._watch is None and jax.process_count() > 1:
            self._watch = DeviceWatch.of(run.mesh.local_devices)

    def on_end(self, run: Run, error: BaseException | None = None) -> None:
        del run, error
        if self._watch is not None:
            self._watch.close()

    on_failure = on_end

    def begin(self, began: float, for_others: float) -> None:
        """Notes that the previous step has ended, and that the loop now requests the next batch.

        Args:
          began: the current time, in seconds of the clock.
          for_others: seconds that this process's input has waited for other processes' input since the run began.
        """
        self.end(began)
        self._began, self._for_others, self._waited = began, for_others, 0.0
        self._step = 0

    def took_input(self, now: float, for_others: float) -> None:
        """Notes that the batch has arrived. `now`: the current time; `for_others`: as in `begin`."""
        if self._began is not None:
            wait = now - self._began
            own = max(0.0, wait - (for_others - self._for_others))
            self._own_input, self._waited = own, wait - own

    def around(self, fn: StepFn, run: Run) -> StepFn:
        """Returns the function that the loop calls instead of the compiled step `fn`; see `RepeatCheck.around`."""
        return self._repeats.around(fn, run)

    def dispatching(self) -> None:
        self._mark, self._cpu_mark = self._clock(), self._cpu_clock()

    def dispatched(self, step: int, packed: Any) -> None:
        """Notes that the call of the compiled step has returned.

        Args:
          step: number of the dispatched step.
          packed: an output of the step that isn't donated to the next step: a pytree of arrays.
        """
        called = self._mark
        taken = self._clock() - called
        # With host (CPU) devices, the call may wait for the previous step. Only this thread's CPU time is the host's own work.
        self._waited += max(0.0, taken - (self._cpu_clock() - self._cpu_mark))
        self._step = step
        if self._watch is not None:
            if self._packed is not None and self._step_seconds:
                self._watch.after_dispatch(called, self._packed, packed, self._step_seconds)
            self._packed = packed

    def waits(self) -> None:
        """Notes that the loop is about to wait for the scalars of an older step."""
        self._mark = self._clock()

    def reports(self, report: Callable[[int, Scalars], object]) -> Callable[[int, Scalars], None]:
        """Wraps `report`, which is called with a step's scalars, so that its time counts as the host's own work."""

        def timed(step: int, scalars: Scalars) -> None:
            self._waited += self._clock() - self._mark
            report(step, scalars)
            self._mark = self._clock()

        return timed

    def end(self, now: float | None = None) -> None:
        """Notes that the step has ended, e.g. before a pause. The time until the next call of `begin` isn't part of any step."""
        if self._began is None or not self._step:  # there was no batch
            return
        whole = (self._clock() if now is None else now) - self._began
        self._began = None
        dispatch = max(0.0, whole - self._own_input - self._waited)
        self._steps.append(Parts(self._step, self._own_input, dispatch, whole))
        self._step_seconds = whole if not self._step_seconds else min(whole, 1.1 * self._step_seconds)

    def steps(self) -> list[Parts]:
        """Returns the times of the last steps, oldest step first. Any thread may call this."""
        return list(self._steps)

    def window(self) -> dict[str, object] | None:
        """Returns the times in the last windows of 20 steps, for `slow.judge`. Any thread may call this.

        Returns:
          None before the first window is full, else JSON: 'host' is the host's name. 'device' and 'probe' are the `spread` of
          `DeviceWatch`'s times, and 'dry' is the share of measured steps before which the devices were idle; each may be None.
          'windows' has for each window its last 'step', and the `spread` of 'input', 'dispatch', 'own' (input + dispatch) and
          'whole'. Times are in seconds.
        """
        steps = self.steps()
        windows = [_window(steps[end - WINDOW : end]) for end in _ends(steps)]
        if not windows:
            return None
        watch = self._watch
        return {
            "host": self._host,
            "device": _spread_of(watch.steps) if watch else None,
            "probe": _spread_of(watch.probes) if watch else None,
            "dry": round(statistics.fmean(list(watch.dry)), 3) if watch and watch.dry else None,
            "windows": windows,
        }


def _ends(steps: Sequence[Parts]) -> list[int]:
    """Returns the windows to report, as the index after the last step of each window, in ascending order."""
    found = set()
    for stride in STRIDES:
        at = [i + 1 for i in range(len(steps) - 1, WINDOW - 2, -1) if steps[i].step % stride == 0]
        found |= {end for end in at[:2] if steps[end - 1].step - steps[end - WINDOW].step == WINDOW - 1}
    return sorted(found)


def _window(steps: Sequence[Parts]) -> dict[str, object]:
    return {
        "step": steps[-1].step,
        "input": spread(one.input for one in steps),
        "dispatch": spread(one.dispatch for one in steps),
        "own": spread(one.input + one.dispatch for one in steps),
        "whole": spread(one.whole for one in steps),
    }


def _spread_of(kept: Iterable[float]) -> list[float] | None:
    values = list(kept)
    return spread(values) if values else None
