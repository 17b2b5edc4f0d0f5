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
      peak_rss: bytes, over its whole life.
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
        log = ""
        for line in process.stdout or ():
            log += line
            if first is None and SIGN.search(line):
                times = psutil.Process(process.pid).cpu_times()
                first = time.perf_counter() - started, times.user + times.system
        _, status, usage = os.wait4(process.pid, 0)
        timer.cancel()
        process.returncode = os.waitstatus_to_exitcode(status)  # it was waited for here, for its memory
        if process.returncode or first is None:
            raise SystemExit(f"{name} failed with {process.returncode}:\n{log}")
        return Ran(*first, usage.ru_maxrss * 1024)


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
