"""What the processes of a job tell each other: process 0's value, everybody's values, being at one point.

Values travel through the key-value store of JAX's coordination service, not through the devices: that needs no compiled
program, works before a device is touched, cannot be mixed up with the collectives of a training step, and has a deadline. With
one process all of it is free.

All processes of the job must make the same calls. Calls of one name must come in the same order on every process; calls of
different names may come from different threads.
"""

from __future__ import annotations

import collections
import json
import os
import threading
from collections.abc import Sequence
from typing import Any, TypeVar

import jax

# No public names: they are how JAX itself and Orbax reach the coordination service.
from jax._src.distributed import global_state

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import named_text, shortened

_Value = TypeVar("_Value")

# Processes read checkpoints of terabytes at different speeds. A process that died is found by its heartbeats, much sooner.
TIMEOUT_SECONDS = 1800.0
_PREFIX = "spmd_trainer/multihost"
_LONGEST_SHOWN = 200

_lock = threading.Lock()
_calls: collections.Counter[str] = collections.Counter()


class DisagreementError(UserError):
    """Processes have different values, or one of them did not come; the message names processes and values."""


def joined() -> tuple[int, int]:
    """Returns the number of processes in the job and the id of this one; (1, 0) before joining. Touches no device."""
    # `jax.process_count()` would initialise the devices.
    return (global_state.num_processes or 1, global_state.process_id or 0)


def is_serving() -> bool:
    """Returns whether JAX's coordination service runs in this process."""
    return global_state.service is not None


def detected_cluster(seconds: float) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Returns the coordinator's address, the number of processes, this process's id and its accelerators, as JAX detects them.

    Args:
      seconds: how long a detection that asks a server may take.

    Raises:
      RuntimeError, ValueError: JAX knows no such cluster.
    """
    # JAX detects a cluster only inside `jax.distributed.initialize`, and the processes must meet before that.
    from jax._src.clusters import ClusterEnv

    local_ids = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    found: tuple[str | None, int | None, int | None, Sequence[int] | None]
    found = ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        None,
        None,
        [int(number) for number in local_ids.split(",")] if local_ids else None,
        None,
        int(seconds),
    )
    return found


def client() -> Any:
    """Returns JAX's client of the job's coordination service; None before joining. Touches no device."""
    return global_state.client


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
    values: list[_Value] = _exchange(name, value if _index() == 0 else None, timeout, only_first=True)
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


def _exchange(name: str, value: object, timeout: float, *, only_first: bool = False) -> list[Any]:
    """Returns the values of all processes, or with `only_first` a list of process 0's value alone."""
    with _lock:
        _calls[name] += 1
        call = _calls[name]
    service, index = client(), _index()
    before, here = (f"{_PREFIX}/{name}/{number}" for number in (call - 1, call))
    service.key_value_set(f"{here}/{index}", json.dumps(value))
    try:
        service.wait_at_barrier(here, int(timeout * 1000))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" not in str(error):
            raise
        came = _numbers(service.key_value_dir_get(f"{here}/"))
        missing = [process for process in range(_count()) if process not in came]
        raise DisagreementError(
            f"{_processes(missing) or 'a process'} did not come to {name!r} (call {call}) within {timeout:g} s; "
            f"{_processes(sorted(came))} waited there. Its log says what it was doing"
        ) from error
    if index == 0 and call > 1:
        # All processes are here, so all of them have read the values of the call before.
        service.key_value_delete(before)
    if only_first:
        return [json.loads(service.blocking_key_value_get(f"{here}/0", int(timeout * 1000)))]
    texts = {int(key.rsplit("/", 1)[1]): text for key, text in service.key_value_dir_get(f"{here}/")}
    return [json.loads(texts[process]) for process in range(_count())]


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


def _count() -> int:
    """Returns the number of processes that JAX has joined. Touches a device only if it has joined none."""
    if global_state.client is not None:
        return int(global_state.num_processes or 1)
    count = jax.process_count()
    if count > 1:
        raise UserError(
            f"{count} processes have not joined each other: give --distributed=auto, or call jax.distributed.initialize()"
        )
    return count


def _index() -> int:
    return int(global_state.process_id or 0)
