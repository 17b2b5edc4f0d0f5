"""One form for what every benchmark prints and writes: figures and ratios, each a median with its quartiles.

    report = reporting.Report("decode", arguments.json)
    report.figure("floor", seconds, "ms", scale=1e3)
    report.ratio("step / floor", trainer_seconds, floor_seconds, bar=1.03)
    sys.exit(report.finish())

A machine that others use changes its speed from minute to minute: what took turns in one run can be compared (a ratio of
each round, then the median of these), times of two runs can't. Where the floor's own rounds vary by more than
`LIMIT_SPREAD` between their quartiles, the ratio is said not to stand, and the exit status is 1.
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
    """A parser with the options of every benchmark: --rounds and --json.

    Args:
      doc: the module's text, shown by --help.
      rounds: the default.
    """
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--rounds", type=int, default=rounds, help="turns that each side takes")
    made.add_argument("--json", type=pathlib.Path, help="also write the figures to this file")
    return made


def quartiles(values: Sequence[float]) -> dict[str, float]:
    """Returns {'median', 'low', 'high'}: second, first and third quartile."""
    low, median, high = np.percentile(np.asarray(values, np.float64), (25, 50, 75))
    return {"median": float(median), "low": float(low), "high": float(high)}


def spread(values: Sequence[float]) -> float:
    """The distance of the quartiles as a share of the median."""
    found = quartiles(values)
    return (found["high"] - found["low"]) / found["median"]


def growth_exponent(sizes: Sequence[float], values: Sequence[float]) -> float:
    """The slope of log(value) over log(size): 0 doesn't grow, 1 grows in proportion."""
    return float(np.polyfit(np.log(sizes), np.log(values), 1)[0])


class Report:
    """The figures of one run of a benchmark."""

    def __init__(self, name: str, json_path: pathlib.Path | None, *, limit_spread: float = LIMIT_SPREAD):
        """Nothing yet.

        Args:
          name: the benchmark's.
          json_path: where `finish` writes; None for nowhere.
          limit_spread: what the floor may vary by; pass math.inf where ratios are of counts, not times.
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
        """Prints and keeps one quantity, measured once or several times; `scale` turns it into `unit`."""
        found = quartiles(np.atleast_1d(values) * scale)
        self._record["figures"][name] = {**found, "unit": unit, "count": np.size(values)}
        between = f"  [{found['low']:,.4g}, {found['high']:,.4g}]" if np.size(values) > 1 else ""
        print(f"{name:44} {found['median']:>10,.4g} {unit}{between}", flush=True)

    def ratio(self, name: str, values: Sequence[float], floor: Sequence[float], *, bar: float | None = None) -> None:
        """Prints and keeps the ratio of what took turns: values[i] and floor[i] are of the same round.

        Args:
          name: what is compared.
          values: of the trainer, the slower form, ...
          floor: of what it is measured against.
          bar: the ratio it should not be above; None for no such limit.
        """
        found = quartiles(np.asarray(values) / np.asarray(floor))
        varies = spread(floor)
        stands = varies <= self._limit
        self._failed |= not stands
        self._record["ratios"][name] = {
            **found, "bar": bar, "rounds": len(values), "floor_spread": varies, "stands": stands
        }  # fmt: skip
        verdict = "" if bar is None else f"  bar {bar:.2f}: {'met' if found['median'] <= bar else 'MISSED'}"
        doubt = "" if stands else f"  DOES NOT STAND: the floor's own rounds vary by {varies:.0%}"
        print(
            f"{name:44} {found['median']:>9.3f}x  [{found['low']:.3f}, {found['high']:.3f}]{verdict}{doubt}", flush=True
        )

    def fails(self, why: str) -> None:
        """Prints why the run counts as failed."""
        self._failed = True
        self._record.setdefault("failures", []).append(why)
        print(f"FAILED: {why}", flush=True)

    def note(self, name: str, value: Mapping | Sequence | str) -> None:
        """Keeps something that is no figure (a table, the points of a curve) under its name. Prints texts."""
        self._record[name] = value
        if isinstance(value, str):
            print(f"{name}: {value}", flush=True)

    def finish(self) -> int:
        """Writes the JSON, and returns the exit status: 1 where a ratio doesn't stand or something failed."""
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(json.dumps(self._record, indent=1) + "\n")
        return int(self._failed)
