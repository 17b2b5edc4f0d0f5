"""Two programs of the same work that take turns in one process, in several processes one after another.

The same two compiled programs can differ by some hundredths in one process and not in the next, so the ratio is over the turns
of all processes. A benchmark gives `main` a function that makes the two programs:

    sys.exit(turns.main("nnx_step", __doc__, make_programs, bar=1.03))
"""

from __future__ import annotations

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks import reporting

TRAINER, HAND_WRITTEN = "trainer", "hand-written"


@dataclasses.dataclass(frozen=True)
class Program:
    """A program that takes steps.

    Attributes:
      step: takes a step; may return before the step is computed.
      loss: waits for the steps taken so far, and returns the loss (or another number that both programs must agree on).
    """

    step: Callable[[], None]
    loss: Callable[[], float]


def main(
    name: str,
    doc: str | None,
    make_programs: Callable[[], Mapping[str, Program]],
    *,
    bar: float,
    rounds: int = 9,
    steps: int = 4,
    tolerance: float = 1e-2,
) -> int:
    """Parses the command line, measures and reports.

    Args:
      name: the benchmark's name: its module in `benchmarks`.
      doc: its docstring, shown by --help.
      make_programs: returns {TRAINER: program, HAND_WRITTEN: program}.
      bar: the largest acceptable ratio of their times.
      rounds: default of --rounds: turns of each program in a process.
      steps: default of --steps: steps of a turn.
      tolerance: relative difference allowed between the losses.

    Returns:
      The exit status.
    """
    parser = reporting.parser(doc, rounds=rounds)
    parser.add_argument("--steps", type=int, default=steps, help="steps per turn")
    parser.add_argument(
        "--processes", type=int, default=7, help="measuring processes; 0: measure in this one, for --json"
    )
    args = parser.parse_args()
    if not args.processes:
        if not args.json:
            parser.error("--processes=0 needs --json=FILE, the file for this process's numbers")
        args.json.write_text(json.dumps(take_turns(make_programs(), args.rounds, args.steps)))
        return 0
    report = reporting.Report(name, args.json)
    options = [f"--rounds={args.rounds}", f"--steps={args.steps}"]
    parts = [measure_in_process(name, options) for _ in range(args.processes)]
    seconds = {
        program: [value for part in parts for value in part["seconds"][program]] for program in parts[0]["seconds"]
    }
    for program, values in seconds.items():
        report.figure(f"step, {program}", values, "ms", scale=1e3)
        report.figure(f"loss, {program}", parts[0]["losses"][program])
    report.ratio(f"step, {TRAINER} / {HAND_WRITTEN}", seconds[TRAINER], seconds[HAND_WRITTEN], bar=bar)
    ratios = [statistics.median(np.divide(part["seconds"][TRAINER], part["seconds"][HAND_WRITTEN])) for part in parts]
    report.note("ratio of each process", ", ".join(f"{ratio:.3f}" for ratio in ratios))
    losses = parts[0]["losses"]
    if not np.isclose(losses[TRAINER], losses[HAND_WRITTEN], rtol=tolerance):
        report.fails(f"the programs don't do the same work: losses {losses}")
    return report.finish()


def take_turns(programs: Mapping[str, Program], rounds: int, steps: int) -> dict[str, Any]:
    """Lets programs take turns; returns {'seconds': {name: seconds per step of each turn}, 'losses': {name: the last loss}}."""
    seconds: dict[str, list[float]] = {name: [] for name in programs}
    losses = {}
    for number in range(rounds + 1):  # the first round compiles, and is not counted
        for name in sorted(programs, reverse=bool(number % 2)):
            began = time.perf_counter()
            for _ in range(steps):
                programs[name].step()
            losses[name] = float(programs[name].loss())
            if number:
                seconds[name].append((time.perf_counter() - began) / steps)
    return {"seconds": seconds, "losses": losses}


def measure_in_process(name: str, options: Sequence[str]) -> dict[str, Any]:
    """Runs a benchmark with --processes=0 in a process of its own; returns the numbers that it writes.

    Raises:
      SystemExit: the process failed.
    """
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        command = [sys.executable, "-m", f"benchmarks.{name}", "--processes=0", *options, f"--json={file.name}"]
        done = subprocess.run(command, stdout=sys.stderr)
        if done.returncode:
            raise SystemExit(f"a measuring process exited with status {done.returncode}; its output is above")
        return json.load(file)
