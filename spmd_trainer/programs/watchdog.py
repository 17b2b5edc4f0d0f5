"""Says in the log when a step hangs: which one, for how long, and where every thread stands."""

from __future__ import annotations

import faulthandler
import tempfile
import threading
import time
from collections.abc import Callable

from absl import logging


class Watchdog:
    """Watches one thing at a time that the training loop does, from a thread of its own. It reports, and ends nothing.

    with Watchdog(600) as watchdog:
        watchdog.begin("training step 12")
        ...
    """

    def __init__(
        self,
        seconds: float,
        *,
        report: Callable[[str], object] = logging.error,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Watches nothing yet.

        Args:
          seconds: what takes longer is reported; again after twice, four times, ... as long. 0 watches nothing.
          report: takes the report.
          clock: gives seconds.

        Raises:
          ValueError: `seconds` is negative.
        """
        if seconds < 0:
            raise ValueError(f"watchdog_seconds={seconds}; give a number of seconds, or 0 to switch the watchdog off")
        self._seconds = seconds
        self._report = report
        self._clock = clock
        self._watched = ("start", clock())
        self._reported: tuple[str, float] | None = None
        self._next = seconds
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def begin(self, what: str) -> None:
        """What came before has ended, and `what` begins. Costs nothing to speak of."""
        self._watched = (what, self._clock())

    def check(self) -> None:
        """Reports when it is time to. The thread calls this."""
        watched = self._watched
        if watched != self._reported:
            self._reported, self._next = watched, self._seconds
        what, since = watched
        taken = self._clock() - since
        if taken <= self._next:
            return
        self._next *= 2
        self._report(
            f"{what} has taken {taken:.0f} s so far (--watchdog_seconds={self._seconds:g}). It is neither ended nor given "
            f"up. Where every thread stands:\n{stacks()}"
        )

    def __enter__(self) -> Watchdog:
        self._watched = ("start", self._clock())
        if self._seconds:
            self._thread.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._closed.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(self._seconds / 10):
            self.check()


def stacks() -> str:
    """Returns the Python stack of every thread, the innermost call first."""
    # faulthandler writes to a file descriptor, without allocating or locking: it works whatever hangs.
    with tempfile.TemporaryFile("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()
