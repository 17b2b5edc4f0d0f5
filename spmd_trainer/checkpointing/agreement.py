"""Makes checks and saves of checkpoints succeed or fail in the same way on all processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import jax

from spmd_trainer import multihost
from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointNotFoundError, CheckpointReadError

_Value = TypeVar("_Value")

# In order of precedence: a step is not reported as damaged if another process cannot read it.
_SHARED: tuple[type[CheckpointError], ...] = (CheckpointNotFoundError, CheckpointReadError)


def agreed_problem(check: Callable[[], str | None]) -> str | None:
    """Calls `check` on every process, and returns the same problem on all: that of the first process that has one.

    All processes must call it. Returns None if no process has a problem.

    Args:
      check: returns the problem that this process finds with a step; None if it finds none.

    Raises:
      CheckpointNotFoundError: on every process, if one process did not find the step.
      CheckpointReadError: on every process, if one process could not read it.
      Exception: any other exception of `check`, on the process where it was raised. Processes where `check` raised nothing
        raise a CheckpointError with its text.
    """
    found, error = None, None
    try:
        found = check()
    except Exception as raised:
        error = raised
    kind = next((kind for kind in _SHARED if isinstance(error, kind)), None)
    answer = {
        "problem": found,
        "kind": None if error is None else kind.__name__ if kind else "other",
        "error": None if error is None else str(error) if kind else f"{type(error).__name__}: {error}",
    }
    answers = multihost.gather("the check of a checkpoint", answer)
    for shared in _SHARED:
        text = next((str(other["error"]) for other in answers if other["kind"] == shared.__name__), None)
        if text is not None:
            raise shared(text) from error
    if error is not None:
        raise error
    for process, other in enumerate(answers):
        if other["error"] is not None:
            raise CheckpointError(f"process {process} failed: {other['error']}")
    return next((str(other["problem"]) for other in answers if other["problem"]), None)


def agreed(make: Callable[[], _Value]) -> _Value:
    """Calls `make` on every process, and returns its result. If it raises on one process, all raise, as in `agreed_problem`."""
    made: list[_Value] = []
    agreed_problem(lambda: made.append(make()))
    return made[0]


def decided_by_process_0(decide: Callable[[], _Value]) -> _Value:
    """Calls `decide` on process 0 alone, and returns its result on every process. All processes must call it.

    Args:
      decide: returns a JSON value, e.g. what process 0 sees in a directory.

    Raises:
      CheckpointNotFoundError, CheckpointReadError: on every process, if `decide` raises this error on process 0.
      Exception: any other exception of `decide`, on process 0. The other processes raise a CheckpointError with its text.
    """
    decided: list[_Value] = []

    def on_process_0() -> str | None:
        if jax.process_index() == 0:
            decided.append(decide())
        return None

    agreed_problem(on_process_0)
    return multihost.broadcast(decided)[0]


class SaveBarrier:
    """A barrier between processes for Orbax's writing threads. If a write fails on one process, the save fails on all.

    With Orbax's own barrier, the other processes would wait 20 minutes for the failed one. Every process must call the
    barrier the same number of times, from one thread at a time. A process whose write failed sends the reason instead of its
    next call; the corresponding calls on the other processes then raise an error.
    """

    def __init__(self, name: str) -> None:
        """Creates the barrier.

        Args:
          name: the barrier's name in messages. Barriers that are used at the same time need different names.
        """
        self._name = name
        self._agreed_to_fail = False

    def __call__(self, *, key: str, timeout_ms: int) -> None:
        """Waits for the other processes, for at most `timeout_ms` milliseconds. `key` is ignored.

        Raises:
          CheckpointError: the write has failed on another process.
        """
        del key
        self._meet(None, timeout_ms / 1000)

    def reporting_failure(self, write: Callable[[], None], give_up: Callable[[], None]) -> None:
        """Waits for a write in other threads, and tells the other processes if the write fails.

        Args:
          write: waits for the writing threads, and raises their exception.
          give_up: called if the write fails, before the other processes are told. Must release threads that wait for the write.
        """
        try:
            write()
        except BaseException as error:
            give_up()
            if not self._agreed_to_fail:
                self._meet(f"{type(error).__name__}: {error}", multihost.TIMEOUT_SECONDS)
            raise
        finally:
            self._agreed_to_fail = False

    def _meet(self, failure: str | None, timeout: float) -> None:
        # An error that is raised below need not be reported to the other processes again.
        self._agreed_to_fail = True
        failures = multihost.gather(self._name, failure, timeout=timeout)
        failed = next((process for process, text in enumerate(failures) if text is not None), None)
        if failed is not None and failure is None:
            raise CheckpointError(f"process {failed} could not write its part: {failures[failed]}")
        self._agreed_to_fail = False
