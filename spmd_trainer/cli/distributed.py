"""Several processes as one job: joined before a device is touched, and left together, by all of them or by none.

    with distributed.Processes(distributed.cluster_from_flags(flag_values)) as processes:
        processes.join(mode)
        ...

Inside the block, a process that fails tells the others why and ends at once, and a process that dies ends the others with a
message that names it (`peer_watch`). Waiting at JAX's own barrier at exit would take minutes: the others wait for this one.
"""

from __future__ import annotations

import dataclasses
import logging as std_logging
import os
import sys
import threading
import types
from typing import Any, NoReturn

from absl import logging

from spmd_trainer.cli import peer_watch
from spmd_trainer.errors import UserError

_EXPLICIT = ("coordinator_address", "num_processes", "process_id")
# How long processes that have come wait for the others: a scheduler may start them minutes apart.
_JOIN_SECONDS = 300
# How long an error waits for the news that another process, lost at the same moment, was its cause.
_NEWS_SECONDS = 5.0
# The status of a job of one process that the user can mend.
_STATUS_USER_ERROR = 2


@dataclasses.dataclass(frozen=True)
class Cluster:
    """Which processes form the job.

    Attributes:
      coordinator_address: 'host:port' of process 0; None, as the next two, where JAX is to find it out.
      num_processes: how many there are.
      process_id: which of them this is.
      heartbeat_seconds: a process that isn't heard of for so long counts as lost.
    """

    coordinator_address: str | None = None
    num_processes: int | None = None
    process_id: int | None = None
    heartbeat_seconds: int = 30


def cluster_from_flags(flag_values: Any) -> Cluster | None:
    """Returns the cluster that the flags describe; None for a job of one process.

    Raises:
      UserError: some of the flags are missing, or contradict each other.
    """
    given = {name: getattr(flag_values, name) for name in _EXPLICIT if getattr(flag_values, name) is not None}
    if flag_values.distributed == "auto":
        if given:
            raise UserError(f"--distributed=auto finds out --{next(iter(given))} itself; give one of the two")
        return Cluster(heartbeat_seconds=flag_values.heartbeat_seconds)
    if not given:
        return None
    missing = [f"--{name}" for name in _EXPLICIT if name not in given]
    if missing:
        raise UserError(f"{', '.join(missing)} must be given too, or --distributed=auto instead of all of them")
    address, count, index = given.values()
    if not 0 <= index < count:
        raise UserError(f"--process_id={index} with --num_processes={count}; ids go from 0 to {count - 1}")
    host, colon, port = address.rpartition(":")
    if not (host and colon and port.isdigit()):
        raise UserError(f"--coordinator_address={address} is not of the form host:port, e.g. 10.0.0.1:8476")
    return Cluster(address, count, index, flag_values.heartbeat_seconds) if count > 1 else None


def joined() -> tuple[int, int]:
    """Returns how many processes JAX has joined and which of them this is. Touches no device; (1, 0) before joining."""
    # `jax.process_count()` would touch the devices.
    from jax._src.distributed import global_state

    return (global_state.num_processes or 1, global_state.process_id or 0)


class Processes:
    """The processes of this job, from joining them to leaving them."""

    def __init__(self, cluster: Cluster | None):
        """Touches nothing yet; None is a job of one process, to which nothing here happens."""
        self._cluster = cluster
        self._watch: peer_watch.PeerWatch | None = None

    def join(self, mode: str) -> int:
        """Waits until all processes are there. Before any device is touched.

        Args:
          mode: the job's mode. Only training answers a SIGTERM by agreeing on a step.

        Returns:
          How many processes there are.

        Raises:
          UserError: no cluster was found, or the processes didn't come together.
        """
        if self._cluster is None or self._watch is not None:
            return 1 if self._watch is None else self._watch.count
        import jax

        # JAX's service takes SIGTERM for itself; a mode that doesn't ask it could not be ended.
        jax.config.update("jax_enable_preemption_service", mode == "train")
        client, address, count, index = _initialize(self._cluster)
        if index:
            logging.set_verbosity(logging.WARNING)
        logging.get_absl_handler().addFilter(_with_process(index))
        self._watch = peer_watch.PeerWatch(client, address, count, index, self._cluster.heartbeat_seconds)
        self._watch.start()
        logging.info("%d processes, coordinated at %s", count, address)
        return count

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: types.TracebackType | None
    ) -> None:
        if self._watch is None:
            return
        if exc is None:
            self._watch.say_goodbye()
        else:
            self._fail(exc)

    def _fail(self, error: BaseException) -> NoReturn:
        watch = self._watch
        if watch is None:
            raise error
        if isinstance(error, UserError):
            text, status = str(error), _STATUS_USER_ERROR
            sys.stderr.write(f"spmd-trainer: {text}\n")
        else:
            # A lost process makes every collective of the others fail, with an error that doesn't name it.
            watch.wait_for_news(_NEWS_SECONDS)
            text, status = f"{type(error).__name__}: {error}", 1
            logging.error("this process failed", exc_info=error)
        watch.say_failed(text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _initialize(cluster: Cluster) -> tuple[Any, str, int, int]:
    """Runs `jax.distributed.initialize`; returns the service's client, its address, process count and id.

    Where processes don't come, JAX would abort with a stack trace of C++: this process ends a little earlier, in good order.
    """
    import jax

    limit = threading.Timer(_JOIN_SECONDS, _end_alone, (cluster,))
    limit.daemon = True
    limit.start()
    try:
        jax.distributed.initialize(
            cluster.coordinator_address,
            cluster.num_processes,
            cluster.process_id,
            # Without it JAX would ask the cluster for what the flags already say.
            cluster_detection_method=None if cluster.coordinator_address is None else "deactivate",
            heartbeat_timeout_seconds=cluster.heartbeat_seconds,
            initialization_timeout=_JOIN_SECONDS + 30,
        )
    except Exception as error:
        if cluster.coordinator_address is None:
            raise UserError(
                f"--distributed=auto found no cluster ({error}); it knows Slurm, Open MPI, Kubernetes and Cloud TPU. "
                "Give --coordinator_address, --num_processes and --process_id"
            ) from error
        raise UserError(
            f"process {cluster.process_id} could not join {cluster.num_processes} processes at "
            f"{cluster.coordinator_address}: {error}"
        ) from error
    finally:
        limit.cancel()
    # What automatic detection found stands nowhere public, and `jax.process_count()` would touch the devices.
    from jax._src.distributed import global_state

    return (
        global_state.client,
        global_state.coordinator_address or "",
        global_state.num_processes,
        global_state.process_id,
    )


def _end_alone(cluster: Cluster) -> None:
    who, count = (
        ("", "all") if cluster.process_id is None else (f"process {cluster.process_id} ", cluster.num_processes)
    )
    where = f" at {cluster.coordinator_address}" if cluster.coordinator_address else ""
    sys.stderr.write(
        f"spmd-trainer: {who}leaves: {count} processes did not come together{where} within {_JOIN_SECONDS} s. One of them "
        "was not started, died before it came, or can't reach that address: see their logs, then start the job again.\n"
    )
    sys.stderr.flush()
    os._exit(peer_watch.STATUS_LOST_PROCESS)


def _with_process(index: int) -> Any:
    """A log filter that begins every line of a process but the first with its number."""

    def add(record: std_logging.LogRecord) -> bool:
        if index and not hasattr(record, "process_index"):
            record.process_index = index
            record.msg = f"process {index}: {record.msg}"
        return True

    return add
