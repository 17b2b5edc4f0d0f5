"""Log lines for long phases of a run: what is running, progress at growing intervals, and how long it took."""

from __future__ import annotations

import contextvars
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator

from absl import logging

from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.training.live_status import SHOWN_LIVE, PhaseStatus, live

# Seconds after the start of a phase at which progress lines are logged. Later, one line a minute is logged.
_MOMENTS = (10.0, 20.0, 40.0)
_current: contextvars.ContextVar[Phase | None] = contextvars.ContextVar("phase", default=None)


class Phase:
    """Context manager for a part of a run that may take long. A background thread logs progress at growing intervals.

        with Phase("evaluating heldout", announce_after=2.0, total=32) as phase:
            for batch in batches:
                ...
                phase.advance()

    logs nothing if the block takes less than 2 s, and otherwise

        evaluating heldout ...
        evaluating heldout: 10 s so far, 12 of 32 batches, about 17 s left
        evaluating heldout took 27 s

    While a nested phase of the same thread runs, the outer phase logs no progress. If the block raises an error, no last line is
    logged.

    Attributes:
      done: replaces '... took' in the last line, e.g. 'restored step 4'; set it inside the block.
    """

    def __init__(
        self,
        what: str,
        detail: str = "",
        *,
        announce_after: float = 0.0,
        total: int | None = None,
        report: Callable[[str], object] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Prepares the phase; entering the context starts it.

        Args:
          what: names the work in the log, e.g. 'compiling the train step'.
          detail: more about the work; shown only in the first line.
          announce_after: seconds before the first line is logged; a phase that ends earlier logs nothing (unless it sets
            `done`). 0 logs the first line at once.
          total: number of batches, or None if it is unknown.
          report: called with each line; None logs the lines.
          clock: returns the time in seconds.
        """
        self.done = ""
        self._what = what
        self._first_line = f"{what}: {detail}" if detail else f"{what} ..."
        self._moments = _moments(announce_after)
        self._total = total
        self._batches: int | None = None
        self._report = report or logging.info
        # A live display has a clock of its own.
        self._report_clock = report or functools.partial(logging.info, "%s", extra=SHOWN_LIVE)
        self._clock = clock
        self._announces_at_once = not announce_after
        self._announced = False
        self._inner = 0
        self._next = next(self._moments)
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"phase: {what}", daemon=True)

    def advance(self) -> None:
        self._batches = (self._batches or 0) + 1

    def status(self) -> PhaseStatus | None:
        """Returns the current status of the phase for a display; None while a nested phase of the same thread runs."""
        if self._inner:
            return None
        return PhaseStatus(self._what, self._clock() - self._began, self._batches, self._total)

    def check(self) -> None:
        """Logs a progress line if one is due. Called by the phase's thread."""
        seconds = self._clock() - self._began
        if seconds < self._next:
            return
        while self._next <= seconds:
            self._next = next(self._moments)
        if self._inner:
            return
        if self._announced:
            self._report_clock(f"{self._what}: {format_duration(seconds)} so far{self._batches_text(seconds)}")
        else:
            self._announce()

    def __enter__(self) -> Phase:
        self._began = self._clock()
        self._outer = _current.get()
        if self._outer is not None:
            self._outer._inner += 1
        self._token = _current.set(self)
        if self._announces_at_once:
            self._announce()
        self._thread.start()
        live.running.append(self.status)
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        seconds = self._clock() - self._began
        self._ended.set()
        self._thread.join()
        live.running.remove(self.status)
        _current.reset(self._token)
        if self._outer is not None:
            self._outer._inner -= 1
        if exc_type is not None:
            return
        if self.done:
            self._report(f"{self.done} in {format_duration(seconds)}")
        elif self._announced:
            self._report(f"{self._what} took {format_duration(seconds)}")

    def _announce(self) -> None:
        self._announced = True
        self._report(self._first_line)

    def _batches_text(self, seconds: float) -> str:
        if self._batches is None:
            return ""
        if self._total is None:
            return f", {self._batches} batches"
        left = (self._total - self._batches) * seconds / self._batches
        return f", {self._batches} of {self._total} batches, about {format_duration(max(left, 0.0))} left"

    def _run(self) -> None:
        while not self._ended.wait(max(0.0, self._next - (self._clock() - self._began))):
            self.check()


def _moments(announce_after: float) -> Iterator[float]:
    """Yields the times of a phase's log lines, in seconds after its start. Leaves out a first line at time 0."""
    if announce_after:
        yield announce_after
    for seconds in itertools.chain(_MOMENTS, itertools.count(60.0, 60.0)):
        if seconds > announce_after:
            yield seconds
