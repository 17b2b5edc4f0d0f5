"""Time from process start to the loss of the first training step: trainer against baseline, cold and warm.

    python -m benchmarks.first_step [--rounds 5] [--size speed] [--json FILE]

Both train the same model on the same mesh and text, in fresh processes that take turns: cold without a compilation cache,
warm with a cache that an earlier run filled, and, for the trainer, restarted: a run that goes on from its checkpoint. Wall
time is what a user waits for; CPU time is less disturbed by other users of the machine. Bar: 1.2 times the baseline cold.
Warm and restarted have none, because a trainer of praxis layers imports and traces more than the baseline.

The time of the imports alone is reported too: a trainer of praxis layers can't start faster than the baseline plus importing
praxis.
"""

from __future__ import annotations

import pathlib
import random
import subprocess
import sys
import tempfile
import time

from benchmarks import fresh_process, reporting

BARS = {"cold": 1.2, "warm": None, "restarted": None}
NAMES = ("trainer", "baseline")
# Import statements to time. The garbage collector is off, as it is while the trainer starts.
IMPORTS = {
    "JAX": "",
    "JAX, praxis and fiddle": "import spmd_trainer, fiddle; from praxis import layers, optimizers",
}


def measure(
    report: reporting.Report,
    temperature: str,
    rounds: int,
    size: str,
    caches: dict[str, pathlib.Path],
    resumes: pathlib.Path | None = None,
) -> None:
    """Runs both programs `rounds` times and reports.

    Args:
      report: gets the figures.
      temperature: names them.
      rounds: runs of each program.
      size: model.
      caches: compilation caches by program; empty for none.
      resumes: the run that the trainer continues; None for new ones.
    """
    runs: dict[str, list[fresh_process.Ran]] = {name: [] for name in NAMES}
    for _ in range(rounds):
        for name in random.sample(NAMES, len(NAMES)):
            continued = resumes if name == "trainer" else None
            runs[name].append(fresh_process.run(name, size=size, cache=caches.get(name), resumes=continued))
    wall = {name: [run.wall for run in runs[name]] for name in NAMES}
    cpu = {name: [run.cpu for run in runs[name]] for name in NAMES}
    for name in NAMES:
        report.figure(f"first step {temperature}, {name}", wall[name], "s")
        report.figure(f"first step {temperature}, CPU of {name}", cpu[name], "s")
    report.ratio(
        f"first step {temperature}, trainer / baseline", wall["trainer"], wall["baseline"], bar=BARS[temperature]
    )
    report.ratio(f"first step {temperature}, CPU, trainer / baseline", cpu["trainer"], cpu["baseline"])


def measure_imports(report: reporting.Report, rounds: int) -> None:
    """Reports the seconds of processes that only import."""
    for name, line in IMPORTS.items():
        walls = []
        for _ in range(rounds):
            started = time.perf_counter()
            subprocess.run([sys.executable, "-c", f"import gc; gc.disable(); import jax.numpy; {line}"], check=True)
            walls.append(time.perf_counter() - started)
        report.figure(f"importing {name}", walls, "s")


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=5)
    parser.add_argument("--size", choices=tuple(fresh_process.EXPERIMENTS), default="speed")
    args = parser.parse_args()
    report = reporting.Report("first_step", args.json)
    measure(report, "cold", args.rounds, args.size, {})
    with tempfile.TemporaryDirectory() as directory:
        caches = {name: pathlib.Path(directory) / name for name in NAMES}
        for name in NAMES:
            fresh_process.run(name, size=args.size, cache=caches[name])
        measure(report, "warm", args.rounds, args.size, caches)
        fresh_process.prepare_run(run := pathlib.Path(directory) / "run", size=args.size, cache=caches["trainer"])
        measure(report, "restarted", args.rounds, args.size, caches, run)
    measure_imports(report, args.rounds)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
