"""Runs trainer and baseline in fresh processes: wall and CPU time to the first loss, peak memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time

import psutil

TRAINER = [sys.executable, "-m", "spmd_trainer.main", "--noeval_on_test"]
NO_SAVES = "--noenable_checkpoint_saving"
BASELINE = [sys.executable, "-m", "benchmarks.baseline_lm"]
EXPERIMENTS = {"speed": "benchmarks.speed_lm.SpeedLm", "stdlib": "lm.stdlib.StdlibBytes"}
# Both programs print a line with the loss once a step is computed.
SIGN = re.compile(r"\bloss \d")
TIMEOUT_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Ran:
    """Measurements of one process.

    Attributes:
      wall: seconds from its start to its first line with a loss.
      cpu: CPU seconds of all its threads up to that line.
      peak_rss: peak resident memory up to its last line, in bytes. Measured on Linux only.
    """

    wall: float
    cpu: float
    peak_rss: float


def run(
    name: str,
    *,
    steps: int = 1,
    size: str = "speed",
    cache: pathlib.Path | None = None,
    resumes: pathlib.Path | None = None,
) -> Ran:
    """Runs the trainer or the baseline to its end and returns its measurements.

    Args:
      name: 'trainer' or 'baseline'.
      steps: number of training steps.
      size: model, 'speed' or 'stdlib'.
      cache: compilation cache directory; None to compile everything.
      resumes: the directory of a run of `prepare_run`, which the trainer continues; None for a new run.

    Raises:
      SystemExit: the process failed or took more than TIMEOUT_SECONDS. The message has its output.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [*BASELINE, f"--steps={steps}", f"--size={size}"]
        if name == "trainer":
            command = [*_trainer(size, 2 if resumes else steps, resumes or pathlib.Path(directory) / "run"), NO_SAVES]
        started = time.perf_counter()
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=_environment(cache)
        )
        timer = threading.Timer(TIMEOUT_SECONDS, process.kill)
        timer.start()
        first: tuple[float, float] | None = None
        log, peak = "", 0
        for line in process.stdout or ():
            log += line
            peak = max(peak, _peak_rss(process.pid))
            if first is None and SIGN.search(line):
                times = psutil.Process(process.pid).cpu_times()
                first = time.perf_counter() - started, times.user + times.system
        process.wait()
        timer.cancel()
        if process.returncode or first is None:
            raise SystemExit(f"{name} failed with {process.returncode}:\n{log}")
        return Ran(*first, peak)


def prepare_run(directory: pathlib.Path, *, size: str, cache: pathlib.Path) -> None:
    """Trains for 2 steps and removes the second checkpoint, as if the run had been killed. Keeps its compiled step in `cache`."""
    subprocess.run(_trainer(size, 2, directory), check=True, capture_output=True, env=_environment(cache))
    shutil.rmtree(directory / "checkpoints" / "2")


def _trainer(size: str, steps: int, directory: pathlib.Path) -> list[str]:
    fields = {"num_train_steps": steps, "save_interval_steps": 1}
    overrides = [f"--fdl.set=task.train.{name}={value}" for name, value in fields.items()]
    return [*TRAINER, f"--exp={EXPERIMENTS[size]}", *overrides, f"--job_log_dir={directory}"]


def _peak_rss(pid: int) -> int:
    """Returns the peak resident bytes of a running process: getrusage of an ended child would count its parent's pages too."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _environment(cache: pathlib.Path | None) -> dict[str, str]:
    """Returns this process's environment without device counts and compilation caches, then with `cache`."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key != "XLA_FLAGS" and not key.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    if cache is None:
        return kept | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return kept | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
