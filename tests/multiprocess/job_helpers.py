"""Runs jobs of several real processes on loopback: starts them, reads their logs, sends signals, and waits for the end."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

from etils import epath

from spmd_trainer.checkpointing import steps
from spmd_trainer.storage import is_remote
from spmd_trainer.training.summary_writers import read_metrics

TINY = "lm.stdlib.StdlibBytesTiny"
# Global batch size and mesh, the same for any number of processes.
GLOBAL_BATCH = 8
MESH = "replica:1,data:4,mdl:2"
STEPS = 12
# Loss of every step; a checkpoint every fourth step; an evaluation interval that doesn't divide the number of steps.
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": 5,
    "log_train_output_interval_steps": 1,
}
# Far more than any of these jobs takes on a loaded machine: a job that takes longer hangs.
TIMEOUT_SECONDS = 400
# Exit statuses of `spmd_trainer.cli`.
STATUS_USER_ERROR, STATUS_LOST_PROCESS, STATUS_INTERRUPTED = 2, 3, 130


@dataclasses.dataclass(frozen=True)
class Settings:
    """A training job.

    Attributes:
      directory: the job's `job_log_dir`, on disk or in an object store.
      processes: number of processes.
      cache: directory of JAX's compilation cache.
      fields: overrides of `task.train`.
      flags: more command line flags.
      mesh: mesh over the devices of all processes; None for MESH.
      rows: global batch size.
      env: more environment variables.
    """

    directory: epath.PathLike
    processes: int
    cache: str
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    mesh: str | None = None
    rows: int = GLOBAL_BATCH
    env: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def trainer_flags(self) -> list[str]:
        """Returns the flags that are the same for every process."""
        flags = [f"--exp={TINY}", f"--job_log_dir={self.directory}", f"--mesh={self.mesh or MESH}"]
        flags += [f"--fdl.set=task.train.{name}={value}" for name, value in self.fields.items()]
        return [*flags, *self.flags]

    def commands(self) -> list[list[str]]:
        """Returns one command per process."""
        port = free_port()
        flags = [*self.trainer_flags(), f"--fdl.set=train_datasets[0].batch_size={self.rows // self.processes}"]
        if self.processes > 1:
            flags += [f"--coordinator_address=localhost:{port}", f"--num_processes={self.processes}"]
            flags += ["--heartbeat_seconds=10"]
        ids = [[f"--process_id={index}"] for index in range(self.processes)] if self.processes > 1 else [[]]
        return [[sys.executable, "-m", "spmd_trainer.main", *flags, *own] for own in ids]


@dataclasses.dataclass(frozen=True)
class Supervised(Settings):
    """The same job under `tools.launch.supervise`: only the supervisor is started here."""

    def commands(self) -> list[list[str]]:
        """Returns the supervisor's command."""
        options = [
            f"--processes={self.processes}",
            f"--global_batch={self.rows}",
            "--wait_seconds=0",
            "--grace_seconds=30",
            "--",
        ]
        return [[sys.executable, "-m", "tools.launch.supervise", *options, *self.trainer_flags()]]


@dataclasses.dataclass(frozen=True)
class Uneven(Settings):
    """A job whose processes are not started alike, perhaps of an experiment in `uneven_inputs`.

    Attributes:
      exp: name of the experiment; '' for the usual one.
      own: by process id, further flags of that process.
      prefixes: by process id, a command that starts that process, e.g. ('env', 'NAME=value').
    """

    exp: str = ""
    own: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)
    prefixes: Mapping[int, tuple[str, ...]] = dataclasses.field(default_factory=dict)

    def trainer_flags(self) -> list[str]:
        """Returns the flags that are the same for every process."""
        flags = super().trainer_flags()
        return [f"--exp={self.exp}", "--exp_module=uneven_inputs", *flags[1:]] if self.exp else flags

    def commands(self) -> list[list[str]]:
        """Returns one command per process."""
        return [
            [*self.prefixes.get(index, ()), *command, *self.own.get(index, ())]
            for index, command in enumerate(super().commands())
        ]


class RunningJob:
    """The processes of a started job, and their logs so far."""

    def __init__(self, settings: Settings):
        self.settings = settings
        # XLA_FLAGS of the tests without the number of devices, because the job makes its own devices.
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        env = os.environ | {"XLA_FLAGS": " ".join(flags)}
        env |= {"JAX_COMPILATION_CACHE_DIR": settings.cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        env |= settings.env
        commands = settings.commands()
        self._outputs = [tempfile.TemporaryFile("w+") for _ in commands]  # noqa: SIM115
        # Each in a session of its own, so that `end` can kill the processes that it has started.
        self.processes = [
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                stdout=output,
                text=True,
                env=env,
                start_new_session=True,
            )
            for command, output in zip(commands, self._outputs, strict=True)
        ]
        self.logs = [""] * len(self.processes)
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(len(self.processes))]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int) -> None:
        for line in self.processes[index].stderr:
            with self._changed:
                self.logs[index] += line
                self._changed.notify_all()
        self.processes[index].wait()  # a process closes its stderr before it has ended
        with self._changed:
            self._changed.notify_all()

    def wait_for_line(self, pattern: str, index: int = 0) -> None:
        """Waits until a process has logged a line that matches the pattern, or has ended."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: re.search(pattern, self.logs[index]) or self.processes[index].poll() is not None,
                TIMEOUT_SECONDS,
            ), self.log()

    def send(self, number: signal.Signals, index: int) -> None:
        """Sends a signal to one process."""
        self.processes[index].send_signal(number)

    def finish(self, seconds: float = TIMEOUT_SECONDS) -> list[int]:
        """Waits for all processes; returns their exit statuses."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join()
        return [process.returncode for process in self.processes]

    def finish_but(self, victim: int, seconds: float = TIMEOUT_SECONDS) -> list[int | None]:
        """Waits for all processes but one, which may be stopped for ever; returns their exit statuses."""
        deadline = time.monotonic() + seconds
        for index, process in enumerate(self.processes):
            if index != victim:
                process.wait(max(0.1, deadline - time.monotonic()))
                self._readers[index].join()
        return [process.poll() for process in self.processes]

    def end(self) -> None:
        """Kills the processes that are still running, and waits for them."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in self._readers:
            reader.join()

    def output(self, index: int = 0) -> str:
        """Returns what a process has printed on its standard output."""
        self._outputs[index].seek(0)
        return self._outputs[index].read()

    def log(self) -> str:
        """Returns the end of every process's log."""
        return "\n".join(f"--- process {index}\n{log[-6000:]}" for index, log in enumerate(self.logs))


@contextlib.contextmanager
def started(settings: Settings) -> Iterator[RunningJob]:
    """Starts a job; nothing of it outlives the block."""
    job = RunningJob(settings)
    try:
        yield job
    finally:
        job.end()


def run(settings: Settings) -> RunningJob:
    """Runs a job that must succeed; returns it after its end."""
    with started(settings) as job:
        assert job.finish() == [0] * settings.processes, job.log()
    return job


def free_port() -> int:
    """Returns a free port of this machine."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def records(directory: epath.PathLike, name: str = "train") -> dict[int, dict[str, Any]]:
    """Returns the last record of each step: a resumed run writes the steps after its checkpoint again."""
    return read_metrics(directory, name)


def losses(directory: epath.PathLike) -> dict[int, float]:
    """Returns the training loss by step."""
    return {step: record["loss"] for step, record in sorted(records(directory).items())}


def steps_on_disk(directory: epath.PathLike) -> list[int]:
    """Returns the steps of the complete checkpoints, in order."""
    checkpoints = epath.Path(directory) / "checkpoints"
    if is_remote(checkpoints):
        return steps.whole(checkpoints)
    return sorted(int(path.name) for path in checkpoints.glob("[0-9]*") if path.name.isdigit())
