"""The common output format of all benchmarks: figures and ratios, each a median with its quartiles.

    report = reporting.Report("decode", arguments.json)
    report.figure("baseline", seconds, "ms", scale=1e3)
    report.ratio("step / baseline", trainer_seconds, baseline_seconds, bar=1.03)
    sys.exit(report.finish())

The baseline of a ratio is the program that the trainer is measured against, usually hand-written JAX. The speed of a shared
machine changes from minute to minute, so times of two runs can't be compared; programs that took turns in one run can (the
ratio in each round, then the median of these ratios). If the quartiles of the baseline's own rounds are more than
`LIMIT_SPREAD` apart, the ratio is reported as unreliable and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

LIMIT_SPREAD = 0.15


def parser(doc: str | None, *, rounds: int) -> argparse.ArgumentParser:
    """Returns a parser with the options of every benchmark: --rounds and --json.

    Args:
      doc: the module's docstring, shown by --help.
      rounds: default of --rounds.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="measurements of each program")
    made.add_argument("--json", type=pathlib.Path, help="also write the results to this file")
    return made


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Returns {'median', 'low', 'high'}: the second, first and third quartile."""
    low, median, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return {"median": float(median), "low": float(low), "high": float(high)}


def spread(values: Sequence[float]) -> float:
    """Returns the interquartile range divided by the median."""
    found = quartiles(values)
    return (found["high"] - found["low"]) / found["median"]


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """Returns the slope of log(value) over log(size): 0 is constant, 1 is proportional."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


def collectives_text(hlo: str) -> str:
    """Returns the collectives of a compiled program in one line: '8 all-reduce 12.50 MiB, ...'."""
    from spmd_trainer.planner.hlo_collectives import find_collectives

    found = list(find_collectives(hlo))
    of_kind = {kind: [c for c in found if c.kind == kind] for kind in sorted({c.kind for c in found})}
    return ", ".join(
        f"{sum(c.times for c in those)} {kind} {sum(c.times * c.num_bytes for c in those) / 2**20:.2f} MiB"
        for kind, those in of_kind.items()
    )


class Report:
    """The results of one run of a benchmark."""

    def __init__(self, name: str, json_path: pathlib.Path | None, *, limit_spread: float = LIMIT_SPREAD):
        """Makes an empty report.

        Args:
          name: name of the benchmark.
          json_path: file that `finish` writes; None to write none.
          limit_spread: largest `spread` of the baseline for a reliable ratio; math.inf for no limit.
        """
        self._path = json_path
        self._limit = limit_spread
        self._failed = False
        self._record: dict[str, Any] = {
            "benchmark": name,
            "machine": {"cores": os.cpu_count(), "load": os.getloadavg()[0], "python": platform.python_version()},
            "figures": {},
            "ratios": {},
        }

    def figure(self, name: str, values: float | Sequence[float], unit: str = "", *, scale: float = 1.0) -> None:
        """Prints and records one quantity, measured once or several times; `values * scale` is in `unit`."""
        found = quartiles(np.atleast_1d(values) * scale)
        self._record["figures"][name] = {**found, "unit": unit, "count": np.size(values)}
        between = f"  [{found['low']:,.4g}, {found['high']:,.4g}]" if np.size(values) > 1 else ""
        print(f"{name:44} {found['median']:>10,.4g} {unit}{between}", flush=True)

    def ratio(self, name: str, values: Sequence[float], baseline: Sequence[float], *, bar: float | None = None) -> None:
        """Prints and records the ratio of two programs that took turns.

        Args:
          name: name of the ratio, e.g. 'step, trainer / baseline'.
          values: measurements of the program in question, one per round.
          baseline: measurements of the baseline in the same rounds.
          bar: largest ratio that is acceptable; None for no limit. Only printed: a missed bar doesn't change the exit status.
        """
        found = quartiles(np.asarray(values) / np.asarray(baseline))
        varies = spread(baseline)
        reliable = varies <= self._limit
        self._failed |= not reliable
        self._record["ratios"][name] = {
            **found, "bar": bar, "rounds": len(values), "baseline_spread": varies, "reliable": reliable
        }  # fmt: skip
        verdict = "" if bar is None else f"  bar {bar:.2f}: {'met' if found['median'] <= bar else 'MISSED'}"
        doubt = "" if reliable else f"  UNRELIABLE: the baseline's own rounds vary by {varies:.0%}"
        print(
            f"{name:44} {found['median']:>9.3f}x  [{found['low']:.3f}, {found['high']:.3f}]{verdict}{doubt}", flush=True
        )

    def fails(self, why: str) -> None:
        """Marks the run as failed and prints the reason."""
        self._failed = True
        self._record.setdefault("failures", []).append(why)
        print(f"FAILED: {why}", flush=True)

    def note(self, name: str, value: Mapping | Sequence | str) -> None:
        """Records a value that is not a figure (a table, the points of a curve), and prints it if it is text."""
        self._record[name] = value
        if isinstance(value, str):
            print(f"{name}: {value}", flush=True)

    def finish(self) -> int:
        """Writes the JSON and returns the exit status: 1 if a ratio is unreliable or `fails` was called."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._record, indent=1) + "\n")
        return int(self._failed)
