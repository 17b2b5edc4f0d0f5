"""Jobs of several real processes on loopback: started, watched by their logs, signalled, and waited for."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import pathlib
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
# Every step's loss is written; a checkpoint every fourth step; evaluation in the middle and at the end.
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "save_max_to_keep": 3,
    "summary_interval_steps": 1,
    "eval_interval_steps": 6,
    "log_train_output_interval_steps": 1,
}
# Much more than any of these jobs takes on a loaded machine; a job that hangs is a failure.
TIMEOUT_SECONDS = 240
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

    def command(self, index: int, port: int) -> list[str]:
        fields = {f"task.train.{name}": value for name, value in self.fields.items()}
        fields["train_datasets[0].batch_size"] = self.rows // self.processes
        flags = [f"--exp={TINY}", f"--job_log_dir={self.directory}", f"--mesh={self.mesh or MESH}"]
        flags += [f"--fdl.set={name}={value}" for name, value in fields.items()]
        if self.processes > 1:
            flags += [f"--coordinator_address=localhost:{port}", f"--num_processes={self.processes}"]
            flags += [f"--process_id={index}", "--heartbeat_seconds=10"]
        return [sys.executable, "-m", "spmd_trainer.main", *flags, *self.flags]


class RunningJob:
    """The processes of a started job, with all that they have logged so far."""

    def __init__(self, settings: Settings):
        self.settings = settings
        # The machine's devices are the job's to set; so is how the compiler works.
        env = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
        env |= {"JAX_COMPILATION_CACHE_DIR": settings.cache, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        env |= {"XLA_FLAGS": "--xla_backend_optimization_level=0"}
        port = free_port()
        self.logs = [""] * settings.processes
        self.processes = [
            subprocess.Popen(
                settings.command(index, port), stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True, env=env
            )
            for index in range(settings.processes)
        ]
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(i,)) for i in range(settings.processes)]
        for reader in self._readers:
            reader.start()

    def _read(self, index: int) -> None:
        for line in self.processes[index].stderr:
            with self._changed:
                self.logs[index] += line
                self._changed.notify_all()
        with self._changed:
            self._changed.notify_all()

    def wait_for_line(self, text: str, index: int = 0) -> None:
        """Returns as soon as a process has logged the text, or is gone."""
        with self._changed:
            assert self._changed.wait_for(
                lambda: text in self.logs[index] or self.processes[index].poll() is not None, TIMEOUT_SECONDS
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
            process.kill()
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
