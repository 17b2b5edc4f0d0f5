"""Work that must not keep a hanging process alive."""

from __future__ import annotations

import threading
from collections.abc import Callable

from absl import logging


def within(seconds: float, what: str, work: Callable[[], object]) -> None:
    """Does something in a thread of its own and waits for it, but not for ever. What it raises is logged.

    Args:
      seconds: the longest wait. The thread is then left behind; it keeps no process alive.
      what: names the work for the log, e.g. 'closing the logs'.
      work: what to do.
    """

    def run() -> None:
        try:
            work()
        except Exception:
            logging.exception("%s failed", what)

    thread = threading.Thread(target=run, name=what, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        logging.error("%s did not end within %g s", what, seconds)
