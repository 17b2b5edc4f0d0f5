"""The data of a plan's page: one compiled plan, or the candidates of a search, as records for JSON."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_trainer.planner import plan_report
from spmd_trainer.planner.plan import Plan, usable_memory
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_memory import MemoryOverTime
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.sharding.messages import mesh_text

# A JSON object.
Record = dict[str, Any]
# The most candidates and compiled programs that a page shows, so that it stays below 500 KB. plan_search.json has all candidates.
MOST_CANDIDATES = 800
MOST_PLANS = 8


def plan_record(plan: Plan, memory: MemoryOverTime | None) -> Record:
    """Returns what the page shows of a compiled plan.

    Args:
      plan: the plan.
      memory: its memory over the schedule; see `plan_memory.memory_over_time`.
    """
    estimate = plan.estimate
    return {
        "mesh": mesh_text(plan.mesh),
        "arguments": plan.arguments,
        "temporaries": plan.temporaries,
        "outputs": plan.outputs,
        "total": plan.total,
        "padding": plan.padding,
        "chip_memory": plan.memory,
        "usable_memory": None if plan.memory is None else usable_memory(plan.kind, plan.memory),
        "fits": plan.fits,
        "seconds": estimate and {"shortest": estimate.shortest, "longest": estimate.longest},
        "collectives": _collectives(plan),
        "memory": None if memory is None else _memory(memory),
    }


def _memory(memory: MemoryOverTime) -> Record:
    """Returns the chart with each group's bytes as runs, [points, bytes]: a tenth of the size."""
    groups = [
        {
            "kind": group.kind,
            "name": group.name,
            "runs": [[len(list(points)), num_bytes] for num_bytes, points in itertools.groupby(group.num_bytes)],
        }
        for group in memory.groups
    ]
    return {**dataclasses.asdict(memory), "groups": groups}


def _collectives(plan: Plan) -> list[Record]:
    """Returns the collectives by kind and axes with bytes and seconds, longest first; seconds are None without an estimate."""
    times = {(time.kind, tuple(time.axes)): time for time in (plan.estimate.collectives if plan.estimate else ())}
    rows = []
    for row in plan.collectives:
        time = times.get((row["kind"], tuple(row["axes"])))
        rows.append({**row, "seconds": time.seconds if time else None, "links": time.links if time else ""})
    return sorted(rows, key=lambda row: (-(row["seconds"] or 0), -row["bytes"]))


def worth_showing(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the candidates whose compiled program a page shows, at most `MOST_PLANS`."""
    return _table(outcomes)[:MOST_PLANS]


def _table(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the Pareto front, fastest first; if nothing fits, the smallest compiled candidate."""
    compiled = [outcome for outcome in outcomes if outcome.bytes is not None]
    return plan_report.pareto_front(outcomes) or sorted(compiled, key=lambda outcome: outcome.bytes or 0)[:1]


def search_record(
    outcomes: Sequence[Outcome],
    plans: Mapping[Candidate, Record],
    *,
    chip_memory: int | None,
    flags: Callable[[Candidate], str],
) -> Record:
    """Returns what the page shows of a search.

    Args:
      outcomes: all candidates.
      plans: `plan_record`s of those that `worth_showing` names; others may be missing.
      chip_memory: bytes that JAX can take of the memory of one chip; None if unknown.
      flags: returns the command line's flags that run a candidate.
    """
    front = {id(outcome) for outcome in plan_report.pareto_front(outcomes)}
    points = [_point(outcome, id(outcome) in front) for outcome in outcomes]
    points.sort(key=lambda point: (point["status"] not in ("fits", "too large"), _order(point)))
    # Many candidates share a long reason.
    reasons: dict[str, int] = {}
    kept = [
        {**point, "reason": reasons.setdefault(point["reason"], len(reasons))} for point in points[:MOST_CANDIDATES]
    ]
    return {
        "points": kept,
        "reasons": list(reasons),
        "left_out": max(0, len(points) - MOST_CANDIDATES),
        # The rows of a candidate that can't be built are unknown.
        "per_row": len({point["rows"] for point in points if point["seconds"] is not None}) > 1,
        "chip_memory": chip_memory,
        "counts": {
            status: sum(p["status"] == status for p in points)
            for status in ("fits", "too large", "failed", "out", "waiting")
        },
        "shown": [
            {
                "name": str(outcome.candidate),
                "rows": outcome.rows,
                "seconds": outcome.seconds,
                "shortest": outcome.shortest,
                "longest": outcome.longest,
                "bytes": outcome.bytes,
                "padding": outcome.padding,
                "dominant": outcome.dominant,
                "reason": outcome.reason,
                "flags": flags(outcome.candidate),
                "plan": plans.get(outcome.candidate),
            }
            for outcome in _table(outcomes)
        ],
    }


def _point(outcome: Outcome, is_front: bool) -> Record:
    """Returns a candidate for the scatter: seconds and bytes are those of the compiled program, else predictions, or None."""
    compiled = outcome.bytes is not None
    if outcome.seconds is not None:
        status = "fits"
    elif compiled:
        status = "too large"
    elif outcome.compiled_in:
        status = "failed"
    else:
        status = "out" if outcome.reason else "waiting"
    return {
        "name": str(outcome.candidate),
        "status": status,
        "front": is_front,
        "rows": outcome.rows,
        "seconds": _rounded(outcome.estimated if compiled else outcome.predicted or None),
        "bytes": outcome.bytes if compiled else outcome.state_bytes,
        "reason": outcome.reason or outcome.not_reached,
    }


def _order(point: Record) -> float:
    """Returns seconds per row; candidates without a prediction come last."""
    return float("inf") if point["seconds"] is None else point["seconds"] / point["rows"]


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else float(f"{seconds:.4g}")
