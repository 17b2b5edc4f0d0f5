"""Trains many tiny steps with saves, evaluations and decodes, and shows that memory, threads and open files don't grow.

    python -m benchmarks.long_run [--steps 20000] [--plot FILE] [--json FILE]

A fresh `spmd-trainer` process trains `lm.stdlib.StdlibBytesTiny`; its resident memory, threads and file descriptors are read from
/proc, with the step that it has logged last. The first third of the steps is warm-up. A line is fitted to the rest: growth is
what the line gains from its first to its last step. It is noise if it is below the spread of the samples around the line, or
below one file, thread or MiB. The exit status is 1 if one of the three has grown.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence

import numpy as np

from benchmarks import reporting

_EXPERIMENT = "lm.stdlib.StdlibBytesTiny"
_FIELDS = {
    "save_interval_steps": 200,
    "save_max_to_keep": 3,
    "eval_interval_steps": 250,
    "decode_interval_steps": 500,
    "summary_interval_steps": 10,
    "log_train_output_interval_steps": 50,
}
_STEP = re.compile(rb"step (\d+)/")
_SECONDS_BETWEEN_SAMPLES = 1.0
_WARM_UP = 1 / 3
# Percentiles of the samples around the line: their distance is its spread.
_SPREAD = (5, 95)
QUANTITIES = {"rss_mib": "resident memory, MiB", "threads": "threads", "files": "open files"}


@dataclasses.dataclass(frozen=True)
class Sample:
    """A look at the process.

    Attributes:
      step: the last step that it has logged.
      rss_mib: resident memory in MiB.
      threads: number of its threads.
      files: number of its open file descriptors.
    """

    step: int
    rss_mib: float
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int, step: int) -> Sample:
        """Looks at a process; raises OSError if it has ended."""
        proc = pathlib.Path("/proc") / str(pid)
        status = dict(line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line)
        if "VmRSS" not in status:
            raise ProcessLookupError(pid)
        return cls(step, int(status["VmRSS"].split()[0]) / 1024, int(status["Threads"]), len(os.listdir(proc / "fd")))


def watched(command: Sequence[str], log: pathlib.Path) -> list[Sample]:
    """Runs a command that must succeed; returns a sample a second from its first logged step on."""
    samples = []
    with log.open("wb") as out, subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=out) as process:
        while process.poll() is None:
            time.sleep(_SECONDS_BETWEEN_SAMPLES)
            steps = _STEP.findall(log.read_bytes()[-20_000:])
            if steps:
                try:
                    samples.append(Sample.of(process.pid, int(steps[-1])))
                except OSError:
                    break
    if process.returncode:
        raise SystemExit(f"the run ended with status {process.returncode}:\n{log.read_text()[-3000:]}")
    return samples


def growth(steps: np.ndarray, values: np.ndarray) -> tuple[float, float]:
    """Returns what a fitted line gains from the first to the last step, and the spread of the values around it."""
    slope, start = np.polyfit(steps, values, 1)
    low, high = np.percentile(values - (slope * steps + start), _SPREAD)
    return float(slope * (steps[-1] - steps[0])), float(high - low)


def draw(samples: Sequence[Sample], warm_up: float, path: pathlib.Path) -> None:
    """Draws the three quantities over the steps."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(len(QUANTITIES), 1, sharex=True, figsize=(8, 7))
    for axis, (name, label) in zip(axes, QUANTITIES.items(), strict=True):
        axis.plot([s.step for s in samples], [getattr(s, name) for s in samples], ".", markersize=3)
        axis.axvspan(0, warm_up, color="0.92")
        axis.set_ylim(bottom=0)
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_title("One process; the grey part is warm-up")
    axes[-1].set_xlabel("training step")
    figure.tight_layout()
    figure.savefig(path, dpi=110)


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20_000)
    parser.add_argument("--plot", type=pathlib.Path, help="file for the plot, e.g. long_run.png")
    parser.add_argument("--json", type=pathlib.Path)
    args = parser.parse_args()
    report = reporting.Report("long_run", args.json)
    with tempfile.TemporaryDirectory() as directory:
        fields = {"num_train_steps": args.steps} | _FIELDS
        command = [sys.executable, "-m", "spmd_trainer.main", f"--exp={_EXPERIMENT}", f"--job_log_dir={directory}/run"]
        command += [
            "--decode_during_train",
            *(f"--fdl.set=task.train.{name}={value}" for name, value in fields.items()),
        ]
        began = time.monotonic()
        samples = watched(command, pathlib.Path(directory) / "log")
        report.figure("minutes", (time.monotonic() - began) / 60)
    warm_up = args.steps * _WARM_UP
    rest = [sample for sample in samples if sample.step >= warm_up]
    report.figure("steps", args.steps)
    report.figure("samples after the warm-up", len(rest))
    steps = np.array([sample.step for sample in rest])
    for name, label in QUANTITIES.items():
        values = np.array([getattr(sample, name) for sample in rest], float)
        gained, spread = growth(steps, values)
        report.figure(label, values.tolist())
        report.figure(f"{label}: growth", gained)
        report.figure(f"{label}: spread", spread)
        if gained > max(spread, 1.0):
            report.fails(
                f"{label} grew by {gained:.3g} from step {steps[0]} to {steps[-1]}; the samples spread over {spread:.3g}"
            )
    if args.plot is not None:
        draw(samples, warm_up, args.plot)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
