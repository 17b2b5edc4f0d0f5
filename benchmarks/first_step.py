"""Time from process start to the first training step: the trainer against the hand-written floor, cold, interleaved.

    python -m benchmarks.first_step [--rounds 5]

Both run `lm.stdlib.StdlibBytes`' model on its mesh, with a fresh process, no compilation cache and the same text. Prints the
median of each and their ratio, with quartiles.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import random
import statistics
import subprocess
import sys
import tempfile
import time

TRAINER = [
    sys.executable,
    "-m",
    "spmd_trainer.main",
    "--exp=lm.stdlib.StdlibBytes",
    "--fdl.set=task.train.num_train_steps=1",
    "--noenable_checkpoint_saving",
    "--noeval_on_test",
]
FLOOR = [sys.executable, "-m", "benchmarks.floor_lm", "--steps=1"]
# Both programs print these words when their first step starts.
SIGNS = {"trainer": "training from step", "floor": "first step"}
TIMEOUT_SECONDS = 300


def seconds_to_first_step(name: str) -> float:
    """Starts the program in a fresh process and returns when its first step starts."""
    with tempfile.TemporaryDirectory() as directory:
        command = FLOOR if name == "floor" else [*TRAINER, f"--job_log_dir={pathlib.Path(directory) / 'run'}"]
        env = {key: value for key, value in os.environ.items() if key not in ("XLA_FLAGS", "JAX_COMPILATION_CACHE_DIR")}
        started = time.perf_counter()
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)
        taken, log = None, ""
        for line in process.stdout or ():
            log += line
            if taken is None and SIGNS[name] in line:
                taken = time.perf_counter() - started
        if process.wait(TIMEOUT_SECONDS) or taken is None:
            raise SystemExit(f"{name} failed:\n{log}")
        return taken


def quartiles(values: list[float]) -> str:
    """Returns 'median [first quartile, third quartile]'."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive")
    return f"{middle:6.2f} s  [{low:.2f}, {high:.2f}]"


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    times: dict[str, list[float]] = {"floor": [], "trainer": []}
    for _ in range(rounds):
        for name in random.sample(list(times), 2):
            times[name].append(seconds_to_first_step(name))
            print(f"{name:8} {times[name][-1]:6.2f} s", flush=True)
    ratios = [trainer / floor for trainer, floor in zip(times["trainer"], times["floor"], strict=True)]
    print(f"\nfloor    {quartiles(times['floor'])}\ntrainer  {quartiles(times['trainer'])}")
    print(
        f"ratio    {statistics.median(times['trainer']) / statistics.median(times['floor']):.2f}  (pairs: "
        f"{min(ratios):.2f} to {max(ratios):.2f})"
    )


if __name__ == "__main__":
    main()
