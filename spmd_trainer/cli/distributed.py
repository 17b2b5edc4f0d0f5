"""Runs several processes as one job: they join before any device is touched, and they exit together.

    with distributed.Processes(distributed.cluster_from_flags(flag_values)) as processes:
        processes.join(mode)
        ...

Processes that don't form one job are refused with a message (`rendezvous`). If a process fails inside the block, it tells the
others why and exits at once. If a process dies, the others exit with a message that names it (`peer_watch`). JAX's own barrier
at exit would make the others wait for minutes.
"""

from __future__ import annotations

import dataclasses
import logging as std_logging
import os
import signal
import sys
import threading
import time
import types
from collections.abc import Sequence
from typing import Any, NoReturn

from absl import logging

from spmd_trainer import multihost
from spmd_trainer.cli import log_lines, peer_watch, rendezvous, rendezvous_wire
from spmd_trainer.errors import UserError
from spmd_trainer.watch.link import job

_EXPLICIT = ("coordinator_address", "num_processes", "process_id")
# How long a process waits for the others to join: a scheduler may start them minutes apart.
_JOIN_SECONDS = 300.0
# How long it takes JAX at most to connect processes that have met: none of them waits for a scheduler any more.
_CONNECT_SECONDS = 60.0
_MAX_PORT = 65535
# How long a failing process waits to hear whether the loss of another process caused its error.
_NEWS_SECONDS = 5.0
# How much of an error the other processes are told.
_LONGEST_ERROR = 2000


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which processes form the job.

    Attributes:
      coordinator_address: 'host:port' of process 0. It and the next two are None if JAX is to detect them.
      num_processes: number of processes in the job.
      process_id: id of this process, from 0.
      heartbeat_seconds: a process that sends no heartbeat for this many seconds is treated as lost.
      local_device_ids: the accelerators of this process, as JAX has detected them; None for all.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 30
    local_device_ids: Sequence[int] | None = None


def cluster_from_flags(flag_values: Any) -> Cluster | None:
    """Returns the cluster that the flags describe; None for a job of one process.

    Raises:
      UserError: some of the flags are missing, or contradict each other.
    """
    given = {name: getattr(flag_values, name) for name in _EXPLICIT if getattr(flag_values, name) is not None}
    if flag_values.distributed == "auto":
        if given:
            raise UserError(f"--distributed=auto detects --{next(iter(given))} itself; give only one of the two")
        return Cluster(heartbeat_seconds=flag_values.heartbeat_seconds)
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
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdecimal()):
        raise UserError(f"--coordinator_address={address} is not of the form host:port, e.g. 10.0.0.1:8476")
    if not 1 <= int(port) <= _MAX_PORT:
        raise UserError(f"--coordinator_address={address}: port {port} is not between 1 and {_MAX_PORT}")
    return Cluster(address, count, index, flag_values.heartbeat_seconds) if count > 1 else None


class Processes:
    """Context manager of a job's processes: joins them, watches them, and makes them exit together.

    For a job of one process (`cluster` is None) it does nothing.
    """

    def __init__(self, cluster: Cluster | None):
        self._cluster = cluster
        self._watch: peer_watch.PeerWatch | None = None
        self._is_joining = False

    def join(self, mode: str) -> int:
        """Waits until all processes have joined. Call it before any device is touched.

        Args:
          mode: the job's mode. Only in training does JAX's preemption service take the SIGTERM, to find a step to save.

        Returns:
          The number of processes.

        Raises:
          UserError: no cluster was found, or the processes don't form one job.
          SystemExit: with status 3; a process did not join in time.
        """
        if self._cluster is None or self._watch is not None:
            return 1 if self._watch is None else self._watch.count
        self._is_joining = True
        import jax

        # The service intercepts SIGTERM, so SIGTERM could not end a mode that never polls the service.
        jax.config.update("jax_enable_preemption_service", mode == "train")
        address, count, index, local_device_ids = _located(self._cluster)
        heartbeat = self._cluster.heartbeat_seconds
        peers = _meet(address, count, index, heartbeat)
        if index:
            logging.set_verbosity(logging.WARNING)
        logging.get_absl_handler().addFilter(_with_process(index))
        self._watch = peer_watch.PeerWatch(peers, count, index, heartbeat)
        self._watch.attach(job)
        self._watch.start()
        _connect(Cluster(address, count, index, heartbeat, local_device_ids), self._watch)
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
            self._watch.say_goodbye()
        else:
            self._fail(exc)

    def _fail_early(self, error: Exception) -> None:
        """Tells the other processes that this one fails before it joins them; they would wait for it for minutes."""
        if self._cluster is None:
            return
        try:
            address, count, index, _ = _located(self._cluster)
        except UserError:  # nobody can be told
            return
        if isinstance(error, UserError):
            sys.stderr.write(f"spmd-trainer: {error}\n")
        if count > 1:
            failed = " ".join(_described(error).split())[:_LONGEST_ERROR]
            rendezvous.say_failed(address, rendezvous_wire.Member(index, count, failed=failed))
        if isinstance(error, UserError):
            raise SystemExit(error.exit_status) from error

    def _fail(self, error: BaseException) -> NoReturn:
        watch = self._watch
        if watch is None:
            raise error
        how = "failed"
        if isinstance(error, KeyboardInterrupt):
            if threading.current_thread() is threading.main_thread():
                signal.signal(
                    signal.SIGINT, signal.SIG_IGN
                )  # one more Ctrl-C must not cut off what the others are told
            log_lines.say_interrupted()
            status, how = log_lines.STATUS_INTERRUPTED, "was interrupted"
        elif isinstance(error, UserError):
            status = error.exit_status  # the same as in a job of one process
            sys.stderr.write(f"spmd-trainer: {error}\n")
            if error.leaves_in_order:
                watch.say_goodbye()
                raise SystemExit(status) from error
        else:
            # A lost process makes every collective of the others fail, with an error that doesn't name it.
            watch.wait_for_news(_NEWS_SECONDS)
            status = 1
            logging.error("this process failed", exc_info=error)
        watch.say_failed(_described(error), how)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _described(error: BaseException) -> str:
    """Returns what the other processes are told of an error."""
    if isinstance(error, KeyboardInterrupt):
        return "Ctrl-C"
    return str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"


def _located(cluster: Cluster) -> tuple[str, int, int, Sequence[int] | None]:
    """Returns the coordinator's address, the number of processes, this process's id and its accelerators.

    Raises:
      UserError: JAX is to detect them, and finds no cluster.
    """
    if cluster.coordinator_address and cluster.num_processes and cluster.process_id is not None:
        return cluster.coordinator_address, cluster.num_processes, cluster.process_id, cluster.local_device_ids
    try:
        address, count, index, local_device_ids = multihost.detected_cluster(_JOIN_SECONDS)
        if address is None or count is None or index is None:
            raise ValueError("no known environment")
    except Exception as error:
        raise UserError(
            f"--distributed=auto found no cluster ({error}); it detects Slurm, Open MPI, Kubernetes and Cloud TPU. "
            "Elsewhere give --coordinator_address, --num_processes and --process_id"
        ) from error
    return address, count, index, local_device_ids


def _meet(address: str, count: int, index: int, heartbeat_seconds: int) -> rendezvous_wire.Peers:
    """Waits until all processes are here; ends this process with a message if they don't come."""
    if count == 1:
        return rendezvous_wire.Peers()
    try:
        return rendezvous.meet(
            address, rendezvous_wire.Member(index, count), seconds=_JOIN_SECONDS, heartbeat_seconds=heartbeat_seconds
        )
    except rendezvous_wire.AbsentError as error:
        sys.stderr.write(f"spmd-trainer: process {index} exits: {error}\n")
        raise SystemExit(peer_watch.STATUS_LOST_PROCESS) from error


def _connect(cluster: Cluster, watch: peer_watch.PeerWatch) -> None:
    """Runs `jax.distributed.initialize` for processes that have met.

    JAX aborts with a C++ stack trace if they can't connect. So this process exits with a clear message shortly before that.
    """
    import jax

    if cluster.process_id:
        # A connection that comes before the service listens is tried again only after a second.
        watch.wait_until_serving(_CONNECT_SECONDS)
    else:
        threading.Thread(target=_say_serving, args=(watch,), daemon=True).start()
    limit = threading.Timer(_CONNECT_SECONDS, _end_alone, (cluster,))
    limit.daemon = True
    limit.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator_address,
            cluster.num_processes,
            cluster.process_id,
            cluster.local_device_ids,
            cluster_detection_method="deactivate",
            # JAX then aborts surely later than `peer_watch` exits with a message: it sends a heartbeat twice in its timeout, so
            # that a process that is lost just before it sends one is noticed after half of it.
            heartbeat_timeout_seconds=4 * cluster.heartbeat_seconds + 10,
            initialization_timeout=int(_CONNECT_SECONDS) + 30,
        )
    except Exception as error:
        raise UserError(
            f"process {cluster.process_id} could not join {cluster.num_processes} processes at "
            f"{cluster.coordinator_address}: {error}"
        ) from error
    finally:
        limit.cancel()


def _say_serving(watch: peer_watch.PeerWatch) -> None:
    """Tells the other processes once JAX's service runs here; `jax.distributed.initialize` returns only after they connect."""
    while not multihost.is_serving():
        time.sleep(0.002)
    watch.say_serving()


def _end_alone(cluster: Cluster) -> None:
    sys.stderr.write(
        f"spmd-trainer: process {cluster.process_id} exits: JAX could not connect the {cluster.num_processes} processes at "
        f"{cluster.coordinator_address} within {_CONNECT_SECONDS:.0f} s, although they had met there. Start the job again\n"
    )
    sys.stderr.flush()
    os._exit(peer_watch.STATUS_LOST_PROCESS)


def _with_process(index: int) -> Any:
    """Returns a log filter that prefixes the lines of every process except process 0 with its id."""

    def add(record: std_logging.LogRecord) -> bool:
        if index and not hasattr(record, "process_index"):
            record.process_index = index
            record.msg = f"process {index}: {record.msg}"
        return True

    return add
