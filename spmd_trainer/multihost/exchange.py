"""What the processes of a job tell each other: process 0's value, everybody's values, votes, being at one point.

Values travel through the key-value store of JAX's coordination service, not through the devices: that needs no compiled
program, works before a device is touched, cannot be mixed up with the collectives of a training step, and has a deadline. With
one process all of it is free.

All processes of the job must make the same calls. Calls of one name must come in the same order on every process; calls of
different names may come from different threads.
"""

from __future__ import annotations

import collections
import itertools
import json
import threading
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

from spmd_trainer.errors import UserError
from spmd_trainer.multihost import service
from spmd_trainer.sharding.messages import named_text, shortened

_Value = TypeVar("_Value")

# Processes read checkpoints of terabytes at different speeds. A process that died is found by its heartbeats, much sooner.
TIMEOUT_SECONDS = 1800.0
_PREFIX = "spmd_trainer/multihost"
_LONGEST_SHOWN = 200
# How long a vote waits for the slowest process. Its own errors are reported sooner: they end the whole job.
_VOTE_SECONDS = 600.0
# How soon a cancelled vote ends.
_POLL_SECONDS = 0.5

_lock = threading.Lock()
_calls: collections.Counter[str] = collections.Counter()


class DisagreementError(UserError):
    """Processes have different values, or one of them did not come; the message names processes and values."""


def broadcast(value: _Value, *, name: str = "broadcast", timeout: float = TIMEOUT_SECONDS) -> _Value:
    """Returns process 0's value on every process.

    Args:
      value: a JSON value; only process 0's counts.
      name: names the value in messages.
      timeout: seconds to wait for the other processes.

    Raises:
      DisagreementError: a process did not make this call in time.
    """
    if _count() == 1:
        return value
    values: list[_Value] = _exchange(name, value if service.joined()[1] == 0 else None, timeout, only_first=True)
    return values[0]


def gather(name: str, value: _Value, *, timeout: float = TIMEOUT_SECONDS) -> list[_Value]:
    """Returns the values of all processes, in the order of their numbers.

    Args:
      name: names the value in messages.
      value: a JSON value.
      timeout: seconds to wait for the other processes.

    Raises:
      DisagreementError: a process did not make this call in time.
    """
    if _count() == 1:
        return [value]
    values: list[_Value] = _exchange(name, value, timeout)
    return values


def agree(name: str, value: _Value, *, timeout: float = TIMEOUT_SECONDS) -> _Value:
    """Returns the value if every process has the same one.

    Args:
      name: names the value in messages, e.g. 'the random seed'.
      value: a JSON value.
      timeout: seconds to wait for the other processes.

    Raises:
      DisagreementError: on every process, if two values differ, with the processes and their values; or a process did not
        make this call in time.
    """
    values = gather(name, value, timeout=timeout)
    if any(other != values[0] for other in values):
        raise DisagreementError(f"the processes disagree about {name}: {_by_value(values)}")
    return value


def barrier(name: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Waits until every process is here.

    Args:
      name: names the point in messages, e.g. 'renaming step 20'.
      timeout: seconds to wait for the other processes.

    Raises:
      DisagreementError: a process did not come in time.
    """
    if _count() > 1:
        _exchange(name, None, timeout)


class Votes:
    """Votes, one after the other, in which every process says yes or no, and all hear who said yes.

    A vote may be held by any thread, and can be cancelled. Process 0 collects the votes, so a vote costs every other process one
    message and one answer.

    Attributes:
      count: number of processes.
    """

    def __init__(self, name: str):
        """Begins with the first vote.

        Args:
          name: what is voted on; unique in the life of the job.
        """
        self._client = _client()
        self.count, self._index = service.joined()
        self._name = name
        self._numbers = itertools.count()
        # Seconds of the votes so far, and when the one in progress began: one attribute, for other threads.
        self._times: tuple[float, float | None] = (0.0, None)

    @property
    def seconds(self) -> float:
        """How long all votes have taken, the one in progress included. Any thread may ask."""
        ended, since = self._times
        return ended if since is None else ended + time.monotonic() - since

    def ask(self, yes: bool, *, cancelled: threading.Event) -> tuple[int, ...] | None:
        """Returns the ids of the processes that said yes. Every process calls it, the same number of times.

        Args:
          yes: this process's vote.
          cancelled: once set, ends the wait; the result is then None.

        Raises:
          DisagreementError: a process did not vote in time.
        """
        self._times = (self.seconds, time.monotonic())
        try:
            return self._ask(yes, cancelled)
        finally:
            self._times = (self.seconds, None)

    def _ask(self, yes: bool, cancelled: threading.Event) -> tuple[int, ...] | None:
        number = next(self._numbers)
        before, here = (f"{_PREFIX}/{self._name}/{each}" for each in (number - 1, number))
        if self._index:
            self._client.key_value_set(f"{here}/{self._index}", json.dumps(yes))
            result = self._get(f"{here}/result", 0, cancelled)
            return None if result is None else tuple(json.loads(result))
        votes = [yes]
        for other in range(1, self.count):
            answer = self._get(f"{here}/{other}", other, cancelled)
            if answer is None:
                return None
            votes.append(json.loads(answer))
        agreeing = tuple(process for process, vote in enumerate(votes) if vote)
        self._client.key_value_set(f"{here}/result", json.dumps(agreeing))
        # All have read the result of the vote before, or they would not have voted now.
        self._client.key_value_delete(before)
        return agreeing

    def _get(self, key: str, process: int, cancelled: threading.Event) -> str | None:
        """Returns a value once its process has set it; None if the wait was cancelled."""
        ends = time.monotonic() + _VOTE_SECONDS
        while not cancelled.is_set():
            value = service.wait_for(self._client, key, _POLL_SECONDS)
            if value is not None:
                return value
            if time.monotonic() >= ends:
                raise DisagreementError(
                    f"process {process} did not answer within {_VOTE_SECONDS:.0f} s ({self._name}). It hangs, is far slower than "
                    "the others, or does something else: look at its log, then start the job again"
                )
        return None


def _exchange(name: str, value: object, timeout: float, *, only_first: bool = False) -> list[Any]:
    """Returns the values of all processes, or with `only_first` a list of process 0's value alone."""
    with _lock:
        _calls[name] += 1
        call = _calls[name]
    client, (count, index) = _client(), service.joined()
    before, here = (f"{_PREFIX}/{name}/{number}" for number in (call - 1, call))
    client.key_value_set(f"{here}/{index}", json.dumps(value))
    try:
        client.wait_at_barrier(here, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        if not service.has_timed_out(error):
            raise
        came = _numbers(client.key_value_dir_get(f"{here}/"))
        missing = [process for process in range(count) if process not in came]
        raise DisagreementError(
            f"{_processes(missing) or 'a process'} did not come to {name!r} (call {call}) within {timeout:g} s; "
            f"{_processes(sorted(came))} waited there. Its log says what it was doing"
        ) from error
    if index == 0 and call > 1:
        # All processes are here, so all of them have read the values of the call before.
        client.key_value_delete(before)
    if only_first:
        return [json.loads(client.blocking_key_value_get(f"{here}/0", int(timeout * 1000)))]
    texts = {int(key.rsplit("/", 1)[1]): text for key, text in client.key_value_dir_get(f"{here}/")}
    return [json.loads(texts[process]) for process in range(count)]


def _numbers(entries: Sequence[tuple[str, str]]) -> set[int]:
    return {int(key.rsplit("/", 1)[1]) for key, _ in entries}


def _processes(numbers: Sequence[int]) -> str:
    """Returns 'process 1' or 'processes 1, 2'; nothing for none."""
    return named_text(numbers, "process", "processes") if numbers else ""


def _by_value(values: Sequence[object]) -> str:
    """Returns 'process 0 has 1; processes 1, 2 have 2', in the order of the lowest process that has a value."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(json.dumps(value, sort_keys=True), []).append(process)
    return "; ".join(
        f"{_processes(numbers)} ha{'ve' if len(numbers) > 1 else 's'} {shortened(text, _LONGEST_SHOWN)}"
        for text, numbers in processes.items()
    )


def _client() -> service.Client:
    """Returns the client of a job of several processes."""
    client = service.client()
    if client is None:
        raise UserError(
            f"{jax.process_count()} processes have not joined each other: give --distributed=auto, or call "
            "jax.distributed.initialize()"
        )
    return client


def _count() -> int:
    """Returns the number of processes. Touches a device only if the processes have not joined each other."""
    return service.joined()[0] if service.client() is not None else jax.process_count()
