"""Exchanges values between the processes of a job: broadcast, gather, agreement and barrier.

Values travel through the key-value store of JAX's coordination service, not through the devices. This needs no compiled
program, works before a device is initialized, cannot be mixed up with the collectives of a training step, and has a timeout.
With one process, calls return at once. Process 0 collects the values and answers all; the others send one message per call.

All processes of the job must make the same calls. Calls with the same `name` must come in the same order on every process.
Calls with different names may come from different threads.
"""

from __future__ import annotations

import collections
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
# A cancelled wait ends within this time. It is also the least timeout of a wait, so that a value that is already set is seen.
_POLL_SECONDS = 0.5
# How much longer the other processes wait than process 0, whose answer says which processes are missing.
_ANSWER_SECONDS = 10.0

_lock = threading.Lock()
_calls: collections.Counter[str] = collections.Counter()
# Name of the call in which the main thread waits for the other processes.
_waits_at: str | None = None


class DisagreementError(UserError):
    """Processes have different values, or one of them did not make a call in time. The message names processes and values."""


class Cancelled(Exception):
    """A wait was cancelled by another thread of this process."""


def broadcast(value: _Value, *, name: str = "broadcast", timeout: float = TIMEOUT_SECONDS) -> _Value:
    """Returns process 0's value on every process, once all processes have called this. Arguments and errors: see `gather`."""
    return gather(name, value if service.joined()[1] == 0 else None, timeout=timeout)[0]  # type: ignore[return-value]


def gather(
    name: str, value: _Value, *, timeout: float = TIMEOUT_SECONDS, cancelled: threading.Event | None = None
) -> list[_Value]:
    """Returns the values of all processes, in the order of the process ids.

    Args:
      name: name of the value, for messages; must be the same on all processes.
      value: this process's value, which must be JSON-serializable.
      timeout: seconds to wait for the other processes.
      cancelled: an event. If a different thread sets it, the wait is given up and `Cancelled` is raised.

    Raises:
      DisagreementError: a process did not make this call in time.
      Cancelled: `cancelled` was set.
    """
    global _waits_at
    if _count() == 1:
        return [value]
    if threading.current_thread() is not threading.main_thread():
        return _exchange(name, value, timeout, cancelled)
    _waits_at = name
    try:
        return _exchange(name, value, timeout, cancelled)
    finally:
        _waits_at = None


def agree(name: str, value: _Value, *, timeout: float = TIMEOUT_SECONDS) -> _Value:
    """Returns the value if every process has the same one. Arguments and errors: see `gather`.

    Raises:
      DisagreementError: two values differ; raised on every process. The message lists the processes and their values.
    """
    values = gather(name, value, timeout=timeout)
    if any(other != values[0] for other in values):
        raise DisagreementError(f"the processes disagree about {name}: {_by_value(values)}")
    return value


def barrier(name: str, timeout: float = TIMEOUT_SECONDS) -> None:
    """Waits until every process has made this call. Arguments and errors: see `gather`."""
    gather(name, None, timeout=timeout)


def waits_at() -> str | None:
    """Returns the name of the call (see `gather`) in which the main thread waits for other processes; None if it doesn't wait.

    Any thread may call this.
    """
    return _waits_at


def _exchange(name: str, value: object, timeout: float, cancelled: threading.Event | None) -> list[Any]:
    with _lock:
        _calls[name] += 1
        call = _calls[name]
    client, (count, index) = _client(), service.joined()
    before, here = (f"{_PREFIX}/{name}/{number}" for number in (call - 1, call))
    ends = time.monotonic() + timeout
    if index:
        client.key_value_set(f"{here}/{index}", json.dumps(value))
        text = _wait_for(client, f"{here}/answer", ends + _ANSWER_SECONDS, cancelled)
        answer = {"missing": [0]} if text is None else json.loads(text)
    else:
        values = {0: value}
        for other in range(1, count):
            text = _wait_for(client, f"{here}/{other}", ends, cancelled)
            if text is not None:
                values[other] = json.loads(text)
        missing = [process for process in range(count) if process not in values]
        answer = {"missing": missing} if missing else {"values": list(values.values())}
        client.key_value_set(f"{here}/answer", json.dumps(answer))
        # All processes have read the previous call's answer; otherwise they would not have made this call.
        client.key_value_delete(before)
    if "values" in answer:
        return list(answer["values"])
    came = [process for process in range(count) if process not in answer["missing"]]
    raise DisagreementError(
        f"{_processes(answer['missing'])} did not come to {name!r} (call {call}) within {timeout:g} s; {_processes(came)} waited "
        "there. Its log says what it was doing"
    )


def _wait_for(client: service.Client, key: str, ends: float, cancelled: threading.Event | None) -> str | None:
    """Returns the value of `key` once it is set; None if it isn't set before `time.monotonic()` reaches `ends`."""
    while True:
        left = max(_POLL_SECONDS, ends - time.monotonic())
        value = service.wait_for(client, key, left if cancelled is None else _POLL_SECONDS)
        if value is not None or time.monotonic() >= ends:
            return value
        if cancelled is not None and cancelled.is_set():
            raise Cancelled(key)


def _processes(numbers: Sequence[int]) -> str:
    return named_text(numbers, "process", "processes")


def _by_value(values: Sequence[object]) -> str:
    """Returns text such as 'process 0 has 1; processes 1, 2 have 2'. Values are in the order of their lowest process ids."""
    processes: dict[str, list[int]] = {}
    for process, value in enumerate(values):
        processes.setdefault(json.dumps(value, sort_keys=True), []).append(process)
    return "; ".join(
        f"{_processes(numbers)} ha{'ve' if len(numbers) > 1 else 's'} {shortened(text, _LONGEST_SHOWN)}"
        for text, numbers in processes.items()
    )


def _client() -> service.Client:
    """Returns JAX's client of the coordination service. Raises UserError if this process is not connected to it."""
    client = service.client()
    if client is None:
        raise UserError(
            f"{jax.process_count()} processes have not joined each other: give --distributed=auto, or call "
            "jax.distributed.initialize()"
        )
    return client


def _count() -> int:
    """Returns the number of processes. Initializes devices only if the process is not connected to the coordination service."""
    return service.joined()[0] if service.client() is not None else jax.process_count()
