"""Turns Ctrl-C, SIGTERM and SIGHUP into requests, which the training loop handles after the same step on all processes."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import types
from collections.abc import Iterator

import jax
import numpy as np
from absl import logging
from jax.experimental import multihost_utils

from spmd_trainer.training.live_status import ERASE_ROW, live


class Interrupted(Exception):
    """A signal interrupted work such as the final evaluation. The run repeats this work when it is restarted."""


class SaveRequest:
    """A signal's request to the training loop: save a checkpoint and, usually, exit.

    Attributes:
      leaves: True if the run exits after the requested save. Ctrl-C always requests this; SIGTERM and SIGHUP do by default.
      leaving: True once the training loop has received a request to exit, from `take`.
      answered: True once several processes have agreed on a save. No request can follow, because they can agree only once.
      training: True while the run takes training steps. When it is False, the last step is already saved, and a signal only
        interrupts the final evaluation or decode.
    """

    def __init__(self) -> None:
        self.leaves = False
        self.leaving = False
        self.answered = False
        self.training = True
        # Not a threading.Event: the handler could interrupt the main thread while that holds the Event's lock, and deadlock.
        self._asked = False

    def make(self, *, leaves: bool) -> None:
        """Records a request to save and, if `leaves` is True, to exit. Called by the signal handler."""
        self.leaves = leaves
        self._asked = True

    def take(self) -> bool:
        """Returns True if a save was requested since the last call. Called once per step."""
        if not self._asked:  # Don't clear the flag here: a signal that arrives now would be lost.
            return False
        self._asked = False
        self.leaving |= self.leaves
        return True

    def leave_if_asked(self) -> None:
        """Raises Interrupted if a signal requested the end of the run. Called by all processes between two batches."""
        if not self.leaving:
            self.take()
        if self.leaving:
            raise Interrupted


class AgreedSaveRequest(SaveRequest):
    """A SaveRequest for several processes. After a signal to one of them, `take` returns True on all, after the same step.

    JAX's preemption service receives the SIGTERM and picks the first step that no process has reached yet. The service does this
    only once in the life of a process. Therefore a run that continues after its save ignores later SIGTERMs.
    """

    def __init__(self, *, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves
        self._calls = 0

    def make(self, *, leaves: bool) -> None:
        """Raises SIGTERM, so that JAX's preemption service also handles Ctrl-C and SIGHUP. `leaves`: exit after the save."""
        self.leaves |= leaves
        signal.raise_signal(signal.SIGTERM)

    def take(self) -> bool:
        """Returns True if all processes have agreed to save after this step. All processes call it once per step or batch."""
        # Passes the number of calls instead of the step: the service begins at 1, and a resumed run doesn't begin at step 1.
        self._calls += 1
        if not multihost_utils.reached_preemption_sync_point(self._calls):
            return False
        self.leaves = self.leaving = bool(np.max(multihost_utils.process_allgather(np.int32(self.leaves))))
        self.answered = True
        first = "save this step, then" if self.training else "have saved the last step and"
        then = "exit" if self.leaves else "continue"
        logging.warning("a process received a signal: all %d processes %s %s", jax.process_count(), first, then)
        if not self.leaves and threading.current_thread() is threading.main_thread():
            text = (
                "SIGTERM: the processes can agree on a save only once, and have; this run continues, and saves at its usual "
                "intervals. Ctrl-C twice or SIGKILL ends it; started again, it resumes from the newest checkpoint"
            )
            signal.signal(signal.SIGTERM, lambda number, frame: _say(text))
        return True


def _say(text: str) -> None:
    """Writes a line to stderr from a signal handler. The logger can't be used, because the signal may have interrupted it."""
    with contextlib.suppress(OSError):  # SIGHUP: the terminal is gone
        os.write(2, f"{ERASE_ROW if live.display else ''}{text}\n".encode())


@contextlib.contextmanager
def save_requests(*, exit_after_ondemand_checkpoint: bool) -> Iterator[SaveRequest]:
    """Context manager that turns the first Ctrl-C, SIGTERM or SIGHUP into a `SaveRequest`.

    A second Ctrl-C or SIGTERM takes effect at once. A second SIGHUP does nothing, because a terminal that closes sends several.
    With several processes, a second SIGTERM does nothing either: schedulers send SIGTERM to each process, and it may reach some
    only after the save has started. If SIGHUP was ignored before, as under `nohup`, it stays ignored.

    Args:
      exit_after_ondemand_checkpoint: True if SIGTERM and SIGHUP also end the run. If False, each of these signals only requests a
        checkpoint (with several processes, only the first one does). Ctrl-C always ends the run.
    """
    several = jax.process_count() > 1
    request = AgreedSaveRequest(leaves=exit_after_ondemand_checkpoint) if several else SaveRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # With several processes, JAX's preemption service handles SIGTERM.
    numbers = {signal.SIGINT, signal.SIGHUP} if several else {signal.SIGINT, signal.SIGHUP, signal.SIGTERM}
    previous = {number: signal.getsignal(number) for number in numbers}
    if previous[signal.SIGHUP] is signal.SIG_IGN:
        del previous[signal.SIGHUP]

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: types.FrameType | None) -> None:
        leaves = number == signal.SIGINT or exit_after_ondemand_checkpoint
        name = signal.Signals(number).name
        if leaves:
            restore()
            if number == signal.SIGHUP:
                signal.signal(signal.SIGHUP, signal.SIG_IGN)
            again = "" if number == signal.SIGHUP else " (send it again to exit at once)"
            first = "finishing this step, saving" if request.training else "interrupting the final evaluation"
            _say(f"{name}: {first} and exiting{again}")
        else:
            first = "saving after this step" if request.training else "the last step is already saved"
            _say(f"{name}: {first}; the run continues")
        request.make(leaves=leaves)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
