"""What the log says of a save: that it begins, and how long it took."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from absl import logging

from spmd_trainer.metrics.progress import format_duration


class SaveTimes:
    """Times one save, which goes on in the background while its caller does something else.

    The caller may hear that its save has started before or after the step is on disk; the last line is logged when both
    are known, and never when the save fails.
    """

    def __init__(
        self,
        what: str,
        *,
        report: Callable[[str], object] = logging.info,
        clock: Callable[[], float] = time.monotonic,
    ):
        """Begins to take the time. `what` is what is saved, e.g. 'step 200'."""
        self._what = what
        self._report = report
        self._clock = clock
        self._began = clock()
        self._waited: float | None = None
        self._took: float | None = None
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Logs that the save begins."""
        self._report(f"saving {self._what}")

    def caller_goes_on(self) -> None:
        """The caller waits no longer: its arrays are copied."""
        with self._lock:
            self._waited = self._clock() - self._began
            self._say_if_known()

    def is_on_disk(self) -> None:
        """All of the step is on disk, in every process. Called by the saving thread."""
        with self._lock:
            self._took = self._clock() - self._began
            self._say_if_known()

    def _say_if_known(self) -> None:
        if self._took is not None and self._waited is not None:
            self._report(
                f"saved {self._what} in {format_duration(max(self._took, self._waited))} "
                f"(the loop waited {format_duration(self._waited)})"
            )
