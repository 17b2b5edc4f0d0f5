"""Ctrl-C and SIGTERM as requests that the training loop answers between two steps, all processes after the same one."""

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


class Interrupted(Exception):
    """A signal has asked the run to leave in the middle of work that it makes up for when it is started again."""


class SaveRequest:
    """What a signal asks of the loop.

    Attributes:
      leaves: after the save, whether the run ends. True after Ctrl-C; after SIGTERM unless it only asks for a checkpoint.
      leaving: whether `take` has told the run to end.
      training: whether steps are being taken. After the last one all is saved, and a signal ends the final evaluation.
    """

    def __init__(self) -> None:
        self.leaves = False
        self.leaving = False
        self.training = True
        # No Event: its lock would be waited for by the very thread that the handler has interrupted holding it.
        self._asked = False

    def make(self, *, leaves: bool) -> None:
        """Called by the signal's handler."""
        self.leaves = leaves
        self._asked = True

    def take(self) -> bool:
        """Returns whether a save was asked for since the last call. Called once per step."""
        if not self._asked:  # then nothing is cleared: a signal that comes just now would be lost
            return False
        self._asked = False
        self.leaving |= self.leaves
        return True

    def leave_if_asked(self) -> None:
        """Raises Interrupted where a signal has asked for the end of the run. Called between two batches by all processes."""
        if not self.leaving:
            self.take()
        if self.leaving:
            raise Interrupted


class AgreedSaveRequest(SaveRequest):
    """The same among several processes: a signal to any of them makes `take` return True in all, after the same step.

    JAX's preemption service takes the SIGTERM and finds the step: the first that no process has reached yet. It does so
    once in the life of a process, and so a run that goes on after its save doesn't hear another SIGTERM.
    """

    def __init__(self, *, leaves: bool) -> None:
        super().__init__()
        self.leaves = leaves
        self._calls = 0

    def make(self, *, leaves: bool) -> None:
        """Called by Ctrl-C's handler; SIGTERM goes to JAX's service by itself."""
        self.leaves |= leaves
        signal.raise_signal(signal.SIGTERM)

    def take(self) -> bool:
        """Returns whether all processes have agreed on a save after this step. Called by all, once per step or batch."""
        # Counted from 1 in this process: the service begins there, and a step of a resumed run would be past it.
        self._calls += 1
        if not multihost_utils.reached_preemption_sync_point(self._calls):
            return False
        self.leaves = self.leaving = bool(np.max(multihost_utils.process_allgather(np.int32(self.leaves))))
        first = "save this step, then" if self.training else "have saved the last step:"
        then = "leaving" if self.leaves else "going on"
        logging.warning("a process got SIGTERM: all %d %s %s", jax.process_count(), first, then)
        if not self.leaves and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, _say_too_late)
        return True


def _say(text: str) -> None:
    """Writes a line to stderr from a signal's handler, which may have come in the middle of a logger's own write."""
    os.write(2, f"{text}\n".encode())


def _say_too_late(number: int, frame: types.FrameType | None) -> None:
    _say(
        "SIGTERM: the processes have agreed on a save once and cannot do it again; this run goes on, and saves at its "
        "intervals. Ctrl-C twice, or SIGKILL, ends it; started again it goes on from the newest checkpoint"
    )


@contextlib.contextmanager
def save_requests(*, exit_after_ondemand_checkpoint: bool) -> Iterator[SaveRequest]:
    """Turns the first Ctrl-C or SIGTERM into a `SaveRequest`; a second one acts at once.

    With several processes the second SIGTERM does nothing: schedulers send it to each process, some of them late, when the
    first has already begun the save that all wait for.

    Args:
      exit_after_ondemand_checkpoint: whether SIGTERM also ends the run; if not, each SIGTERM asks for one checkpoint
        (with several processes, the first one does). Ctrl-C always ends it.
    """
    several = jax.process_count() > 1
    request = AgreedSaveRequest(leaves=exit_after_ondemand_checkpoint) if several else SaveRequest()
    if threading.current_thread() is not threading.main_thread():
        yield request
        return
    # With several processes SIGTERM is JAX's own.
    numbers = (signal.SIGINT,) if several else (signal.SIGINT, signal.SIGTERM)
    previous = {number: signal.getsignal(number) for number in numbers}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: types.FrameType | None) -> None:
        leaves = number == signal.SIGINT or exit_after_ondemand_checkpoint
        name = signal.Signals(number).name
        if leaves:
            first = "finishing this step, saving" if request.training else "interrupting the final evaluation"
            _say(f"{name}: {first}, leaving (again to leave at once)")
            restore()
        else:
            _say(
                f"{name}: "
                + ("saving after this step, and" if request.training else "the last step is saved,")
                + " going on"
            )
        request.make(leaves=leaves)

    for number in previous:
        signal.signal(number, handle)
    try:
        yield request
    finally:
        restore()
