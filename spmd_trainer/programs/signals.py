"""Ctrl-C and SIGTERM as requests that the training loop answers between two steps."""

from __future__ import annotations

import contextlib
import signal
import threading
import types
from collections.abc import Iterator

from absl import logging


class SaveRequest:
    """What a signal asks of the loop.

    Attributes:
      leaves: after the save, whether the run ends. True after Ctrl-C; after SIGTERM unless it only asks for a checkpoint.
    """

    def __init__(self) -> None:
        self.leaves = False
        self._asked = threading.Event()

    def make(self, *, leaves: bool) -> None:
        """Called by the signal's handler."""
        self.leaves = leaves
        self._asked.set()

    def take(self) -> bool:
        """Returns whether a save was asked for since the last call."""
        asked = self._asked.is_set()
        self._asked.clear()
        return asked


@contextlib.contextmanager
def save_requests(*, exit_after_ondemand_checkpoint: bool) -> Iterator[SaveRequest]:
    """Turns the first Ctrl-C or SIGTERM into a `SaveRequest`; a second one acts at once.

    Args:
      exit_after_ondemand_checkpoint: whether SIGTERM also ends the run; if not, each SIGTERM asks for one checkpoint.
        Ctrl-C always ends it.
    """
    request = SaveRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: types.FrameType | None) -> None:
        leaves = number == signal.SIGINT or exit_after_ondemand_checkpoint
        name = signal.Signals(number).name
        if leaves:
            logging.warning("%s: finishing this step, saving, leaving (again to leave at once)", name)
            restore()
        else:
            logging.warning("%s: saving after this step, and going on", name)
        request.make(leaves=leaves)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
