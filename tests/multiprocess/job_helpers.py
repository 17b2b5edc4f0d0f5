"""Jobs of several real processes on loopback: started, watched by their logs, signalled, and waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

TINY = "lm.stdlib.StdlibBytesTiny"
# Rows of the global batch, however many processes feed it, and devices, however many processes hold them.
GLOBAL_BATCH = 8
MESH = "replica:1,data:4,mdl:2"
STEPS = 12
# Every step's loss is written; a checkpoint every fourth step; evaluations at intervals, of which none ends at the last step.
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": 5,
    "log_train_output_interval_steps": 1,
}
# Much more than any of these jobs takes on a loaded machine; a job that hangs is a failure.
TIMEOUT_SECONDS = 400
# The statuses of `spmd_trainer.cli`.
STATUS_USER_ERROR, STATUS_LOST_PROCESS = 2, 3


@dataclasses.dataclass(frozen=True)
class Settings:
    """A training job.

    Attributes:
      directory: its `job_log_dir`.
      processes: how many.
      fields: of `task.train`.
      flags: further ones.
      cache: directory of JAX's compilation cache.
      mesh: of all processes together; None for the usual one.
      rows: of the global batch.
    """

    directory: pathlib.Path
    processes: int
    cache: str
    fields: dict[str, object] = dataclasses.field(default_factory=dict)
    flags: tuple[str, ...] = ()
    mesh: str | None = None
    rows: int = GLOBAL_BATCH

    def trainer_flags(self) -> list[str]:
        """What each process gets alike."""
        flags = [f"--exp={TINY}", f"--job_log_dir={self.directory}", f"--mesh={self.mesh or MESH}"]
        flags += [f"--fdl.set=task.train.{name}={value}" for name, value in self.fields.items()]
        return [*flags, *self.flags]

    def commands(self) -> list[list[str]]:
        """One command per process."""
        port = free_port()
        flags = [*self.trainer_flags(), f"--fdl.set=train_datasets[0].batch_size={self.rows // self.processes}"]
        if self.processes > 1:
            flags += [f"--coordinator_address=localhost:{port}", f"--num_processes={self.processes}"]
            flags += ["--heartbeat_seconds=10"]
        ids = [[f"--process_id={index}"] for index in range(self.processes)] if self.processes > 1 else [[]]
        return [[sys.executable, "-m", "spmd_trainer.main", *flags, *own] for own in ids]


@dataclasses.dataclass(frozen=True)
class Supervised(Settings):
    """The same job under `tools.launch.supervise`, the one process that is started here."""

    def commands(self) -> list[list[str]]:
        """The supervisor's command."""
        options = [f"--processes={self.processes}", f"--global_batch={self.rows}", "--wait_seconds=0", "--"]
        return [[sys.executable, "-m", "tools.launch.supervise", *options, *self.trainer_flags()]]


class RunningJob:
    """The processes of a started job, with all that they have logged so far."""

    def __init__(self, settings: Settings):
        self.settings = settings
        # The tests' own, with their cheap compilation, less the eight devices: making them is the job's.
        flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
        env = os.environ | {"XLA_FLAGS": " ".join(flags)}
        env |= {"JAX_COMPILATION_CACHE_DIR": settings.cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        # Each in a session of its own, so that what it has started itself ends with it.
        self.processes = [
            subprocess.Popen(
                command,
                stderr=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                text=True,
                env=env,
                start_new_session=True,
            )
            for command in settings.commands()
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
        with self._changed:
            self._changed.notify_all()

    def wait_for_line(self, pattern: str, index: int = 0) -> None:
        """Returns as soon as a process has logged what matches the pattern, or is gone."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: re.search(pattern, self.logs[index]) or self.processes[index].poll() is not None,
                TIMEOUT_SECONDS,
            ), self.log()

    def send(self, number: signal.Signals, index: int) -> None:
        """Sends a signal to one process."""
        self.processes[index].send_signal(number)

    def finish(self, seconds: float = TIMEOUT_SECONDS) -> list[int]:
        """Waits for all processes; returns their statuses."""
        deadline = time.monotonic() + seconds
        for process in self.processes:
            process.wait(max(0.1, deadline - time.monotonic()))
        for reader in self._readers:
            reader.join()
        return [process.returncode for process in self.processes]

    def end(self) -> None:
        """Ends what is left of it."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        for reader in self._readers:
            reader.join()

    def log(self) -> str:
        """Everything that the processes have logged."""
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
    """Runs a job that must do all its work."""
    with started(settings) as job:
        assert job.finish() == [0] * settings.processes, job.log()
    return job


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as s:
        s.bind(("localhost", 0))
        return s.getsockname()[1]


def records(directory: pathlib.Path, name: str = "train") -> dict[int, dict[str, float]]:
    """The last record of each step: a run that goes on from a checkpoint writes the steps since then again."""
    path = directory / "summaries" / name / "metrics.jsonl"
    # A process killed while writing leaves half a line, at the end or (when the run went on) in the middle.
    lines = [line for line in path.read_text().splitlines() if line.startswith("{") and line.endswith("}")]
    return {record["step"]: record for record in map(json.loads, lines)}


def losses(directory: pathlib.Path) -> dict[int, float]:
    """The training loss by step."""
    return {step: record["loss"] for step, record in sorted(records(directory).items())}


def steps_on_disk(directory: pathlib.Path) -> list[int]:
    """The checkpoints that are seen."""
    return sorted(int(p.name) for p in (directory / "checkpoints").glob("[0-9]*") if p.name.isdigit())
