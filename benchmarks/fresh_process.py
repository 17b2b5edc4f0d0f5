"""Runs of trainer and floor in processes of their own: time and CPU time to the first loss, peak memory."""

from __future__ import annotations

import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import threading
import time

import psutil

TRAINER = [sys.executable, "-m", "spmd_trainer.main", "--noenable_checkpoint_saving", "--noeval_on_test"]
FLOOR = [sys.executable, "-m", "benchmarks.floor_lm"]
EXPERIMENTS = {"speed": "benchmarks.speed_lm.SpeedLm", "stdlib": "lm.stdlib.StdlibBytes"}
# Both programs print the loss of a step once they know it; of one step, that is of the first.
SIGN = re.compile(r"\bloss \d")
TIMEOUT_SECONDS = 300


@dataclasses.dataclass(frozen=True)
class Ran:
    """What one process took.

    Attributes:
      wall: seconds from its start to its first line with a loss.
      cpu: CPU seconds, of all its threads, until then.
      peak_rss: bytes, until its last line. Linux alone tells.
    """

    wall: float
    cpu: float
    peak_rss: float


def run(name: str, *, steps: int = 1, size: str = "speed", cache: pathlib.Path | None = None) -> Ran:
    """Runs 'trainer' or 'floor' to its end.

    Args:
      name: which.
      steps: of training.
      size: 'speed' or 'stdlib', the model.
      cache: where compiled programs are kept; None compiles everything.

    Raises:
      SystemExit: it failed or took more than TIMEOUT_SECONDS; its output is told.
    """
    with tempfile.TemporaryDirectory() as directory:
        command = [*FLOOR, f"--steps={steps}", f"--size={size}"]
        if name == "trainer":
            command = [*TRAINER, f"--exp={EXPERIMENTS[size]}", f"--fdl.set=task.train.num_train_steps={steps}"]
            command += [f"--job_log_dir={pathlib.Path(directory) / 'run'}"]
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


def _peak_rss(pid: int) -> int:
    """Bytes, of the program itself: what the system says of a process that has ended counts the one that started it too."""
    try:
        status = pathlib.Path(f"/proc/{pid}/status").read_text()
    except ProcessLookupError:
        return 0
    found = re.search(r"VmHWM:\s+(\d+) kB", status)
    return int(found[1]) * 1024 if found else 0


def _environment(cache: pathlib.Path | None) -> dict[str, str]:
    """This process's, but for device counts and caches; the same for both programs."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key != "XLA_FLAGS" and not key.startswith(("JAX_COMPILATION_CACHE", "JAX_PERSISTENT_CACHE"))
    }
    if cache is None:
        return kept | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    return kept | {"JAX_COMPILATION_CACHE_DIR": str(cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
