"""Votes of a job's processes, through JAX's coordination service, without touching devices.

Collectives on the devices would wait for the steps in flight, and only one thread may call them. A vote may be held by any
thread, can be cancelled, and ends with a message if a process doesn't answer in time. `multihost` exchanges single values.
"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

from spmd_trainer import multihost
from spmd_trainer.errors import UserError

_PREFIX = "spmd_trainer/exchange"
# How long to wait for the slowest process. Its own errors are reported sooner: they end the whole job.
DEADLINE_SECONDS = 600.0
# How soon a cancelled wait ends.
_POLL_SECONDS = 0.5


class Votes:
    """Votes, one after the other, in which every process says yes or no, and all hear who said yes.

    Process 0 collects the votes, so a vote costs every other process one message and one answer.

    Attributes:
      count: number of processes.
    """

    def __init__(self, name: str):
        """Begins with the first vote.

        Args:
          name: what is voted on; unique in the life of the job.
        """
        self._client = multihost.client()
        self.count, self._index = multihost.joined()
        self._name = name
        self._numbers = itertools.count()
        # Seconds of the votes so far, and when the one in progress began: one attribute, for other threads.
        self._times: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """How long all votes have taken, the one in progress included. Any thread may ask."""
        ended, since = self._times
        return ended if since is None else ended + time.monotonic() - since

    def ask(
        self, yes: bool, *, seconds: float = DEADLINE_SECONDS, cancelled: threading.Event | None = None
    ) -> tuple[int, ...] | None:
        """Returns the indices of the processes that said yes. Every process calls it, the same number of times.

        Args:
          yes: this process's vote.
          seconds: how long to wait for the others.
          cancelled: once set, ends the wait; the result is then None.

        Raises:
          UserError: a process did not vote in time.
        """
        self._times = (self.seconds, time.monotonic())
        try:
            return self._ask(yes, seconds, cancelled)
        finally:
            self._times = (self.seconds, None)

    def _ask(self, yes: bool, seconds: float, cancelled: threading.Event | None) -> tuple[int, ...] | None:
        number, client = next(self._numbers), self._client
        name, vote = f"{self._name}/{number}", "yes" if yes else "no"
        if self._index:
            client.key_value_set(f"{_PREFIX}/{name}/{self._index}", vote)
            result = _get(client, name, "result", 0, seconds, cancelled)
        else:
            votes = [vote]
            for other in range(1, self.count):
                answer = _get(client, name, str(other), other, seconds, cancelled)
                if answer is None:
                    return None
                votes.append(answer)
            result = ",".join(str(other) for other, answer in enumerate(votes) if answer == "yes")
            client.key_value_set(f"{_PREFIX}/{name}/result", result)
            if number:  # All have read the result of the vote before, or they would not have voted now.
                client.key_value_delete(f"{_PREFIX}/{self._name}/{number - 1}/")
        return None if result is None else tuple(int(other) for other in result.split(",") if other)


def _get(
    client: Any, name: str, key: str, process: int, seconds: float, cancelled: threading.Event | None = None
) -> str | None:
    """Returns a value once its process has set it; None if the wait was cancelled."""
    import jax

    ends = time.monotonic() + seconds
    while cancelled is None or not cancelled.is_set():
        wait = max(0.0, ends - time.monotonic()) if cancelled is None else _POLL_SECONDS
        try:
            return str(client.blocking_key_value_get(f"{_PREFIX}/{name}/{key}", max(1, int(wait * 1000))))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" not in str(error):
                raise
            if time.monotonic() >= ends:
                raise UserError(
                    f"process {process} did not answer within {seconds:.0f} s ({name}). It hangs, is far slower than the others, "
                    "or does something else: look at its log, then start the job again"
                ) from error
    return None
