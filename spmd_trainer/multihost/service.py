"""Access to JAX's coordination service. Only this module uses its private names (see `tests/test_private_names.py`).

JAX has no public names for the service. `jax.distributed.initialize` is not used, because if it fails, the process ends without a
clear message: it connects with the process id alone, waits for all others, and aborts with a C++ stack trace if two processes
have the same id, an id is too high, or process 0 dies. The service itself can do better:

- It is *recoverable*: a task that disappears is not an error for the others, and a task may connect again. So process 0, when
  it starts the service, connects once as every task. After that, a process that starts is connected at once, even if others
  are missing, and can use the key-value store to find out whether it belongs to this job (`join`).
- A client aborts its process when its *error poll* fails, which happens as soon as process 0 is gone. A newer poll of the same
  task replaces the older one without an error. So `connect` lets a second client poll once, and then drops this client. Instead
  of the poll, `loss.Peers` makes the process exit, with a message.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import jax
from absl import logging
from jax._src.distributed import global_state
from jax._src.lib import _jax

from spmd_trainer.errors import UserError

# How long a port may stay busy, because the previous job that used it may be about to end.
BUSY_SECONDS = 5.0
_RETRY_SECONDS = 0.2
# JAX's own heartbeats never end a process: `loss.Peers` does, much sooner.
_NEVER_SECONDS = 10**7
# How long a client may take to connect to a service that listens.
_CONNECT_SECONDS = 5
# How long process 0 may take to connect as all tasks.
_ALL_SECONDS = 60
_PROBE_SECONDS = 2.0
# How long the service may take to accept an error poll, after it has answered a request that was sent later than the poll.
_POLL_SECONDS = 0.02
_ANY_ADDRESS = ("0.0.0.0", "::")  # compared with, not listened on


class Client(Protocol):
    """jaxlib's connection to the coordination service. A failed call raises `jax.errors.JaxRuntimeError`."""

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        """Sets the value of a key; without `allow_overwrite`, it is an error if the key has a value."""

    def key_value_try_get(self, key: str) -> str:
        """Returns the value of a key; raises an error with the text 'NOT_FOUND' if the key has no value."""

    def blocking_key_value_get(self, key: str, timeout_in_ms: int) -> str:
        """Waits for the value of a key and returns it; raises an error with the text 'DEADLINE_EXCEEDED' after the timeout."""

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        """Returns the keys and values below a key."""

    def key_value_delete(self, key: str) -> None:
        """Deletes a key and all keys below it."""


def joined() -> tuple[int, int]:
    """Returns (number of processes in the job, id of this process); (1, 0) before processes connect. Initializes no device."""
    # `jax.process_count()` would initialize the devices.
    return (global_state.num_processes or 1, global_state.process_id or 0)


def client() -> Client | None:
    """Returns JAX's client of the job's coordination service; None before processes connect. Initializes no device."""
    found: Client | None = global_state.client
    return found


def wait_for(client: Client, key: str, seconds: float) -> str | None:
    """Returns the value of a key once it is set, or None if it is not set within `seconds`."""
    try:
        return client.blocking_key_value_get(key, max(1, int(seconds * 1000)))
    except jax.errors.JaxRuntimeError as error:
        if "DEADLINE_EXCEEDED" in str(error):
            return None
        raise


def look(client: Client, key: str) -> str | None:
    """Returns the value of a key, or None if it is not set."""
    try:
        return client.key_value_try_get(key)
    except jax.errors.JaxRuntimeError as error:
        if "NOT_FOUND" in str(error):
            return None
        raise


def briefly(call: Callable[[], object], seconds: float) -> bool:
    """Runs a call of the coordination service in a thread. Returns False if the call isn't done within `seconds`.

    Without this, most calls would never return if the process that runs the service is suspended.

    Raises:
      jax.errors.JaxRuntimeError: the call failed.
    """
    failures: list[Exception] = []

    def work() -> None:
        try:
            call()
        except jax.errors.JaxRuntimeError as error:
            failures.append(error)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(seconds)
    if failures:
        raise failures[0]
    return not thread.is_alive()


def serve(address: str, bind_address: str | None, count: int) -> Client:
    """Starts the coordination service on process 0, and connects to it as every task of the job.

    Args:
      address: 'host:port' by which the other processes reach the service.
      bind_address: 'host:port' to listen on; None for `address`.
      count: number of processes.

    Returns:
      A client for process 0.

    Raises:
      UserError: the service can't listen on that address.
    """
    bound = bind_address or _default_bind_address(address)
    _check_is_free(bound, bind_address is not None)
    level = jax.config.jax_logging_level  # type: ignore[attr-defined]  # made at run time
    jax.config.update("jax_logging_level", "ERROR")  # it warns that tasks which may connect again are an experiment
    global_state.service = _jax.get_distributed_runtime_service(
        bound, count, heartbeat_timeout=_NEVER_SECONDS, recoverable=True
    )
    jax.config.update("jax_logging_level", level)
    host, port = host_and_port(bound)
    near = f"{'localhost' if host in _ANY_ADDRESS else _bracketed(host)}:{port}"
    # `connect` of each client returns only once all clients are connected.
    clients = [_new_client(near, task, _ALL_SECONDS) for task in range(count)]
    threads = [threading.Thread(target=_connect_for_another, args=(each,)) for each in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return connect(near, 0)


def _connect_for_another(client: _jax.DistributedRuntimeClient) -> None:
    """Connects as a task whose process hasn't started. Ignores failures, e.g. on a busy machine: the process connects later."""
    with contextlib.suppress(RuntimeError, jax.errors.JaxRuntimeError):
        client.connect()


def connect(address: str, task: int) -> Client:
    """Returns a client that is connected as a task, and that does not abort this process when process 0 is gone.

    Args:
      address: 'host:port' of the service.
      task: id of the task. A task may have several clients.

    Raises:
      ConnectionError: no coordination service answers at `address`, or it has no such task.
    """
    made = _new_client(address, task)
    newer = _new_client(address, task)
    for each in (made, newer):
        try:
            each.connect()
            # The service has the poll that `connect` sent once it has answered a later request.
            look(each, "spmd_trainer")
        except (RuntimeError, jax.errors.JaxRuntimeError) as error:  # RuntimeError: its own error can't reach Python
            raise ConnectionError(f"no coordination service of JAX answers at {address}") from error
        time.sleep(_POLL_SECONDS)
    return made


def _new_client(address: str, task: int, seconds: int = _CONNECT_SECONDS) -> _jax.DistributedRuntimeClient:
    return _jax.get_distributed_runtime_client(
        address,
        task,
        init_timeout=seconds,
        heartbeat_timeout=_NEVER_SECONDS,
        shutdown_on_destruction=False,
        use_compression=True,
        # With one, a refused connection raises RuntimeError; without one, it aborts.
        missed_heartbeat_callback=lambda *status: None,
    )


def given_devices() -> Sequence[int] | None:
    """Returns the ids of the accelerators in the environment variable JAX_LOCAL_DEVICE_IDS; None if it is not set."""
    given = os.environ.get("JAX_LOCAL_DEVICE_IDS")
    return [int(number) for number in given.split(",")] if given else None


def use_devices(local_ids: Sequence[int] | None) -> None:
    """Makes only the host's accelerators with these ids visible to this process; None for all accelerators."""
    if local_ids:
        for platform in ("cuda", "rocm"):
            jax.config.update(f"jax_{platform}_visible_devices", ",".join(map(str, local_ids)))


def adopt(client: Client, address: str, index: int, count: int) -> None:
    """Makes JAX use this client: does what `jax.distributed.initialize` does after it has connected.

    Args:
      client: from `connect`.
      address: 'host:port' of the service.
      index: id of this process.
      count: number of processes.
    """
    global_state.coordinator_address = address
    global_state.process_id = index
    global_state.num_processes = count
    global_state.client = client
    global_state.initialize_preemption_sync_manager()
    partition = os.environ.get("JAX_PARTITION_INDEX", os.environ.get("JAX_SLICE_INDEX"))  # JAX's older name
    global_state.partition_index = None if partition is None else int(partition)


def let_go() -> None:
    """Disconnects JAX from the service at the end of this process, without a message to other processes."""
    if global_state.preemption_sync_manager is not None:
        global_state.preemption_sync_manager.shutdown()
        global_state.preemption_sync_manager = None
    global_state.client = None


def detected_cluster(seconds: float) -> tuple[str | None, int | None, int | None, Sequence[int] | None]:
    """Returns the coordinator's address, the number of processes, this process's id and its accelerators, as JAX detects them.

    Args:
      seconds: timeout for kinds of clusters that JAX detects by a request to a server.

    Raises:
      RuntimeError, ValueError: JAX detects no cluster of a kind that it knows.
    """
    from jax._src.clusters import ClusterEnv

    found: tuple[str | None, int | None, int | None, Sequence[int] | None]
    found = ClusterEnv.auto_detect_unset_distributed_params(
        os.environ.get("JAX_COORDINATOR_ADDRESS"),
        None,
        None,
        given_devices(),
        None,
        int(seconds),
    )
    return found


def host_and_port(address: str) -> tuple[str, int]:
    """Returns (host, port) for 'host:port'; an IPv6 address as host may be in brackets."""
    host, _, port = address.rpartition(":")
    return host.strip("[]"), int(port)


def answers(address: str) -> str:
    """Returns '' if something accepts connections at 'host:port', else the reason for the failure.

    JAX's client can't report this, because it waits for a service, and retries at growing intervals.
    """
    try:
        socket.create_connection(host_and_port(address), timeout=_PROBE_SECONDS).close()
    except (OSError, UnicodeError) as error:  # UnicodeError: no name of a host
        return getattr(error, "strerror", None) or str(error)
    return ""


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _default_bind_address(address: str) -> str:
    """Returns the coordinator's address, or '[::]:port' (all addresses) if its host name is a loopback address on this host.

    For example, Debian's /etc/hosts gives a host's own name the loopback address 127.0.1.1.
    """
    host, port = host_and_port(address)
    with contextlib.suppress(OSError, UnicodeError):
        found = {str(entry[4][0]) for entry in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)}
        is_loopback = all(each.startswith("127.") or each == "::1" for each in found)
        if is_loopback and host != "localhost" and host not in found:
            logging.info(
                "%s is a loopback address here, so process 0 listens on all addresses: see --coordinator_bind_address",
                host,
            )
            return f"[::]:{port}"
    return address


def _check_is_free(address: str, given: bool) -> None:
    """Waits up to `BUSY_SECONDS` until a port is free.

    jaxlib doesn't check this well: it may share a port with a different job's service, and the process exits if it can't listen.

    Raises:
      UserError: something else listens on the port, or the address is not one of this host's.
    """
    host, port = host_and_port(address)
    ends = time.monotonic() + BUSY_SECONDS
    while True:
        try:
            family, *_, place = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
            socket.create_server((str(place[0]), port), family=family).close()
            return
        except (OSError, UnicodeError) as error:
            if time.monotonic() > ends or isinstance(error, UnicodeError):
                flag = "coordinator_bind_address" if given else "coordinator_address"
                raise UserError(
                    f"process 0 can't listen on port {port} of {host} ({error}). Is another program or job "
                    f"using it, do two processes have --process_id=0, or is {host} another host? Give --{flag} a free port of "
                    "the host of process 0, and each process an id of its own. If the others reach process 0 by an address "
                    "that is not its own, give --coordinator_bind_address as well"
                ) from error
        time.sleep(_RETRY_SECONDS)
