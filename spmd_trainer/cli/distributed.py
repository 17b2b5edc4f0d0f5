"""Runs several processes as one job: they connect before any device is used, and they exit together.

    with distributed.Processes(distributed.cluster_from_flags(flag_values)) as processes:
        processes.join(mode)
        ...

If the processes don't form one job, they exit with a message (`multihost.join`). If a process fails inside the block, it tells
the others why and exits at once. If a process dies, the others exit with a message that names it (`multihost.loss`).
"""

from __future__ import annotations

import dataclasses
import functools
import logging as std_logging
import os
import signal
import threading
import types
from collections.abc import Sequence
from typing import Any, NoReturn

import jax
from absl import logging

from spmd_trainer.cli import log_lines
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.multihost import join, loss, service
from spmd_trainer.watch.link import job

_EXPLICIT = ("coordinator_address", "num_processes", "process_id")
# Seconds that a process waits for the others to connect: a scheduler may start them minutes apart.
_JOIN_SECONDS = 300.0
_MAX_PORT = 65535
# Status codes of runtime errors that are caused by this process's own program (wrong or too large), not by another process.
_OWN_FAULTS = ("RESOURCE_EXHAUSTED", "INVALID_ARGUMENT")
# If a run hangs: seconds that process 0 waits for the others to exit. They have more to write than after other failures.
_HANG_SECONDS = 100.0


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The processes of a job, as this process knows them.

    Attributes:
      coordinator_address: 'host:port' of process 0. It, `num_processes` and `process_id` are None if JAX is to detect them.
      heartbeat_seconds: a process that sends no heartbeat for this many seconds is treated as lost.
      bind_address: 'host:port' where process 0 listens; None: `coordinator_address`.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 20
    bind_address: str | None = None


def cluster_from_flags(flag_values: Any) -> Cluster | None:
    """Returns the cluster that the flags describe; None for a job of one process.

    Raises:
      UserError: flags for several processes are missing or wrong, or contradict each other.
    """
    given = {name: getattr(flag_values, name) for name in _EXPLICIT if getattr(flag_values, name) is not None}
    bind_address = flag_values.coordinator_bind_address or os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
    if bind_address is not None:
        _check_address("coordinator_bind_address", bind_address)
    if flag_values.distributed == "auto":
        if given:
            raise UserError(f"--distributed=auto detects --{next(iter(given))} itself; give only one of the two")
        return Cluster(heartbeat_seconds=flag_values.heartbeat_seconds, bind_address=bind_address)
    if not given:
        return None
    missing = [f"--{name}" for name in _EXPLICIT if name not in given]
    if missing:
        raise UserError(
            f"{', '.join(missing)} must be given too; or give --distributed=auto instead of all three flags"
        )
    address, count, index = given.values()
    if not 0 <= index < count:
        raise UserError(f"--process_id={index} with --num_processes={count}; ids go from 0 to {count - 1}")
    _check_address("coordinator_address", address)
    return Cluster(address, count, index, flag_values.heartbeat_seconds, bind_address) if count > 1 else None


def _check_address(flag: str, address: str) -> None:
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise UserError(f"--{flag}={address} is not of the form host:port, e.g. 10.0.0.1:8476")
    if not 1 <= int(port) <= _MAX_PORT:
        raise UserError(f"--{flag}={address}: port {port} is not between 1 and {_MAX_PORT}")


class Processes:
    """Context manager for the processes of a job: connects them, watches them, and makes them exit together.

    For a job of one process (`cluster` is None) it does nothing.
    """

    def __init__(self, cluster: Cluster | None):
        self._cluster = cluster
        self._watch: loss.Peers | None = None
        self._is_joining = False

    def join(self, mode: str) -> int:
        """Waits until all processes are connected, and returns the number of processes. Call it before any device is used.

        If a process does not connect in time, this process exits at once with status 3 (`os._exit`).

        Args:
          mode: the job's mode. 'train' and 'sweep' enable JAX's preemption service, which makes the processes agree on a step
            to save after SIGTERM.

        Raises:
          UserError: no cluster was found, or the processes don't form one job.
        """
        if self._cluster is None or self._watch is not None:
            return 1 if self._watch is None else self._watch.count
        self._is_joining = True
        # The service intercepts SIGTERM, so SIGTERM could not end a mode that never polls the service.
        jax.config.update("jax_enable_preemption_service", mode in ("train", "sweep"))
        address, count, index, local_device_ids = _located(self._cluster)
        service.use_devices(local_device_ids)
        if count == 1:
            return 1
        try:
            own, bind_address = join.Member(index, count), self._cluster.bind_address
            names = join.meet(address, own, bind_address=bind_address, seconds=_JOIN_SECONDS)
        except join.AbsentError as error:
            terminal.write_last(f"process {index} exits: {error}")
            os._exit(loss.STATUS_LOST_PROCESS)
        if index:
            logging.set_verbosity(logging.WARNING)
        logging.get_absl_handler().addFilter(_with_process(index))
        self._watch = watch = loss.Peers(
            names, index, self._cluster.heartbeat_seconds, lambda process: job.last_beat(process)
        )
        job.before_leaving = watch.begin_to_leave
        job.say_why = functools.partial(watch.say_failed, seconds=_HANG_SECONDS)
        job.status_of_others = loss.STATUS_LOST_PROCESS
        watch.start()
        logging.info("%d processes, coordinated at %s", count, address)
        return count

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        if self._watch is None:
            # `join` itself fails on all processes, for the same reason.
            if isinstance(exc, Exception) and not self._is_joining:
                self._fail_early(exc)
        elif exc is None:
            try:
                self._watch.say_goodbye()
            except KeyboardInterrupt as error:
                self._fail(error)
        else:
            self._fail(exc)

    def _fail_early(self, error: Exception) -> None:
        """Tells the other processes that this one failed before it connected, so that they don't wait for it for minutes."""
        if self._cluster is None:
            return
        try:
            address, count, index, _ = _located(self._cluster)
        except UserError:  # nobody can be told
            return
        if isinstance(error, UserError):
            terminal.write_last(str(error))
        if count > 1:
            own = join.Member(index, count, failed=join.one_line(_described(error)))
            join.say_failed(address, own, self._cluster.bind_address)
        if isinstance(error, UserError):
            raise SystemExit(error.exit_status) from error

    def _fail(self, error: BaseException) -> NoReturn:
        watch = self._watch
        if watch is None:
            raise error
        how = "failed"
        if _is_broken_collective(error):
            # A lost process makes every collective of the others fail, with an error that doesn't name it.
            watch.wait_for_news()
        if isinstance(error, KeyboardInterrupt):
            # Another Ctrl-C must not interrupt the message to the other processes.
            if threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            log_lines.say_interrupted()
            status, how = log_lines.STATUS_INTERRUPTED, "was interrupted"
        elif isinstance(error, UserError):
            status = error.exit_status  # the same as in a job of one process
            terminal.write_last(str(error))
            if error.leaves_in_order:
                watch.say_goodbye()
                raise SystemExit(status) from error
        elif "Gloo" in str(error) and "DEADLINE_EXCEEDED" in str(error):
            status = loss.STATUS_LOST_PROCESS
            logging.debug("this process failed", exc_info=error)
            terminal.write_last(
                "the collectives of this process's host devices could not connect to those of the other processes "
                "within 30 s: a process is much slower than the others, or the machine is overloaded. Start the job again"
            )
        else:
            status = 1
            logging.error("this process failed", exc_info=error)
        watch.say_failed(_described(error), how)
        terminal.flush()
        os._exit(status)


def _described(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _is_broken_collective(error: BaseException | None) -> bool:
    """Returns True if an error is, or comes from, a JAX runtime error that another process may have caused."""
    while error is not None:
        if isinstance(error, jax.errors.JaxRuntimeError):
            return not any(code in str(error) for code in _OWN_FAULTS)
        error = error.__cause__ or error.__context__
    return False


def _located(cluster: Cluster) -> tuple[str, int, int, Sequence[int] | None]:
    """Returns the data for connecting this process to the job, from the cluster's fields or from what JAX detects.

    Returns:
      (coordinator's address, number of processes, id of this process, local ids of its accelerators or None for all).

    Raises:
      UserError: JAX is to detect the cluster, but finds none.
    """
    if cluster.coordinator_address and cluster.num_processes and cluster.process_id is not None:
        return cluster.coordinator_address, cluster.num_processes, cluster.process_id, service.given_devices()
    try:
        address, count, index, local_device_ids = service.detected_cluster(_JOIN_SECONDS)
        if address is None or count is None or index is None:
            raise ValueError("no known environment")
    except Exception as error:
        raise UserError(
            f"--distributed=auto found no cluster ({error}); it detects Slurm, Open MPI, Kubernetes and Cloud TPU. "
            "Elsewhere give --coordinator_address, --num_processes and --process_id"
        ) from error
    return address, count, index, local_device_ids


def _with_process(index: int) -> Any:
    """Returns a log filter that prefixes the lines of every process except process 0 with its id."""

    def add(record: std_logging.LogRecord) -> bool:
        if index and not hasattr(record, "process_index"):
            record.process_index = index
            record.msg = f"process {index}: {record.msg}"
        return True

    return add
