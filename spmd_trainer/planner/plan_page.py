"""Writes the self-contained page `plan.html`, which shows one compiled plan or the result of a search.

Its parts are plan_page.html, plan_page.css, plan_page_charts.js, plan_page.js, and page.css and page.js of `watch.pages`.
"""

from __future__ import annotations

import dataclasses
import functools
import html
import itertools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from absl import logging

from spmd_trainer.errors.installation import library_versions
from spmd_trainer.planner import plan_report
from spmd_trainer.planner.plan import Plan, usable_memory
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_memory import MemoryOverTime
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.sharding import page
from spmd_trainer.sharding.messages import bytes_text, count_text, mesh_text
from spmd_trainer.storage import files
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import ChipsConfig, PlanConfig
from spmd_trainer.training.run_directory import report_directory
from spmd_trainer.watch.pages import fact, shared

FILE = "plan.html"
# A JSON object.
Record = dict[str, Any]
# Maximum numbers of candidates and of compiled programs on a page, which keep it below 500 KB. plan_search.json has them all.
MOST_CANDIDATES = 800
MOST_PLANS = 8
# Text of each status of a candidate.
_STATUS = {
    "fits": "fit",
    "too large": "don't fit",
    "failed": "failed to compile",
    "out": "left out",
    "waiting": "not reached",
}


def write_plan_page(job: Job, plan: Plan) -> None:
    """Writes `plan.html` for the plan of a job, if the job has a directory for reports."""
    flags = ", ".join(f"{name}={value}" for name, value in plan.xla_flags.items())
    about = {
        **_about(job, plan.mesh),
        **({"attention": "; ".join(plan.attention)} if plan.attention else {}),
        **({"XLA flags": flags} if flags else {}),
    }
    _write(job, plan_page(about, plan_record(plan)))


def write_search_page(job: Job, outcomes: Sequence[Outcome], *, chip_memory: int | None) -> None:
    """Writes `plan.html` for a search, if the job has a directory for reports. Arguments as for `search_record`."""
    flags = functools.partial(plan_report.run_flags, job)
    record = search_record(outcomes, chip_memory=chip_memory, flags=flags)
    _write(job, search_page({**_about(job), "searched": ", ".join(job.config.of(PlanConfig).search)}, record))


def plan_page(about: Mapping[str, str], plan: Record) -> str:
    """Returns the HTML page of a plan (see `plan_record`). `about`: {name: text} for the head; 'experiment' is the title."""
    facts = [_fits_fact(plan)]
    if plan["seconds"]:
        note = "from everything overlapping to nothing overlapping"
        facts.append(("Estimated step", _range_text(plan["seconds"]), note, ""))
    facts.append(("Padding of the state", bytes_text(plan["padding"]), "per chip", ""))
    return _page("Plan", about, facts, {"plan": plan, "search": None}, "")


def search_page(about: Mapping[str, str], search: Record) -> str:
    """Returns the HTML page of a search. `about`: as for `plan_page`. `search`: the result of `search_record`."""
    counts = search["counts"]
    total = count_text(sum(counts.values()), "candidate")
    facts = [("Candidates", total, ", ".join(f"{counts[s]} {text}" for s, text in _STATUS.items() if counts[s]), "")]
    best = next((shown for shown in search["shown"] if shown["seconds"] is not None), None)
    if best is None:
        facts.insert(0, ("Result", "nothing fits", "the reasons are below", "bad"))
    else:
        name, rows = ("Fastest per row", f" for {best['rows']} rows") if search["per_row"] else ("Fastest step", "")
        note = f"{best['name']}: {_range_text(best)}"
        facts.insert(0, (name, _seconds_text(best["seconds"]) + rows, note, "good"))
    return _page("Search for a plan", about, facts, {"plan": None, "search": search}, _front_table(search))


def _write(job: Job, text: str) -> None:
    if not job.config.writes_reports:
        return
    path = report_directory(job.config.job_log_dir) / FILE
    files.write_atomically(path, text.split("\n"))
    logging.info("wrote %s", path)


def _about(job: Job, mesh: Mapping[str, int] | None = None) -> dict[str, str]:
    """Returns {name: text} for the page's head. `mesh`: the mesh of a plan; None for a search, which has several meshes."""
    config, devices = job.config.of(ChipsConfig), job.partitioner.mesh.devices
    chips = f"{count_text(devices.size, 'chip')} ({devices.flat[0].device_kind})"
    slices = f", {config.num_slices} slices" if config.num_slices > 1 else ""
    return {
        "experiment": config.experiment.name,
        "overrides": " ".join(config.experiment.overrides) or "none",
        "topology": f"{config.topology}: {chips}{slices}" if config.topology else chips,
        **({"mesh": mesh_text(mesh)} if mesh else {}),
        "parameters": f"{job.partitioner.metadata.num_params() + job.partitioner.metadata.num_frozen_params():,}",
        "versions": ", ".join(map(" ".join, library_versions().items())),
    }


def _page(
    kicker: str, about: Mapping[str, str], facts: Iterable[tuple[str, str, str, str]], data: Record, table: str
) -> str:
    title = about["experiment"]
    parts = {
        "KICKER": html.escape(kicker),
        "EXPERIMENT": html.escape(title).replace(".", ".<wbr>"),
        "ABOUT": "".join(
            f"<dt>{html.escape(name)}</dt><dd>{html.escape(value)}</dd>"
            for name, value in about.items()
            if name != "experiment"
        ),
        "FACTS": "".join(fact(*one) for one in facts),
        "FRONT": table,
    }
    return page.document(
        f"{title}: {kicker.lower()}",
        page.fill(_asset("plan_page.html"), parts),
        styles=(shared("page.css"), _asset("plan_page.css")),
        data=data,
        scripts=(shared("page.js"), _asset("plan_page_charts.js"), _asset("plan_page.js")),
    )


def _fits_fact(plan: Record) -> tuple[str, str, str, str]:
    total, memory = plan["total"], plan["chip_memory"]
    if memory is None:
        return "Memory of a chip", bytes_text(total), "on host devices; the numbers differ on an accelerator", ""
    usable = plan["usable_memory"]
    limit = "" if usable == memory else f"; JAX can take {usable / memory:.0%}"
    note = f"{'fits' if plan['fits'] else 'does not fit'}: {total / memory:.0%} of {bytes_text(memory)}{limit}"
    return "Memory of a chip", bytes_text(total), note, "good" if plan["fits"] else "bad"


def _range_text(seconds: Mapping[str, float]) -> str:
    scale, unit = _unit(seconds["longest"])
    return f"{seconds['shortest'] / scale:.3g} to {seconds['longest'] / scale:.3g} {unit}"


def _seconds_text(seconds: float) -> str:
    scale, unit = _unit(seconds)
    return f"{seconds / scale:.3g} {unit}"


def _unit(seconds: float) -> tuple[float, str]:
    return next(((s, u) for s, u in ((1, "s"), (1e-3, "ms")) if seconds >= s), (1e-6, "µs"))


# Columns of the table of candidates after the name, and their classes.
_COLUMNS = {"Step": "num", "Range": "num", "Bytes per chip": "num", "Padding": "num", "Longest collective": ""}


def _front_table(search: Record) -> str:
    if not search["shown"]:
        return ""
    header = "".join(f'<th scope="col"{" class=num" if kind else ""}>{name}</th>' for name, kind in _COLUMNS.items())
    rows = "".join(_front_row(number, one, search["per_row"]) for number, one in enumerate(search["shown"], start=1))
    return f'<table class=front><thead><tr><th scope="col">Candidate</th>{header}</tr></thead><tbody>{rows}</tbody></table>'


def _front_row(number: int, shown: Record, per_row: bool) -> str:
    seconds = "does not fit" if shown["seconds"] is None else _seconds_text(shown["seconds"])
    rows = f" <small>for {shown['rows']} rows</small>" if per_row else ""
    texts = [_range_text(shown), bytes_text(shown["bytes"]), bytes_text(shown["padding"]), shown["dominant"] or "none"]
    cells = zip(_COLUMNS.items(), [html.escape(seconds) + rows, *map(html.escape, texts)], strict=True)
    # A line breaks between flags, and inside of one only if it is longer than the line.
    flags = " ".join(f"<span>{html.escape(flag)}</span>" for flag in re.split(r" (?=--)", shown["flags"]))
    return (
        f'<tr><th scope="row"><b>{number}</b> {html.escape(shown["name"])}</th>'
        + "".join(f'<td class="{kind}" data-name="{name}">{text}</td>' for (name, kind), text in cells)
        + f'</tr><tr class="run"><td colspan="6"><div><code tabindex="0">{flags}</code>'
        '<button type="button" class="copy">Copy flags</button></div></td></tr>'
    )


def _asset(name: str) -> str:
    return page.asset(__package__, name)


def plan_record(plan: Plan) -> Record:
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
        "memory": None if plan.memory_over_time is None else _memory(plan.memory_over_time),
    }


def _memory(memory: MemoryOverTime) -> Record:
    """Returns the memory chart as JSON. Each group's bytes become runs [number of points, bytes], which take less space."""
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
    """Returns the plan's collectives by kind and mesh axes, longest first. Without an estimate, their 'seconds' are None."""
    times = {(time.kind, tuple(time.axes)): time for time in (plan.estimate.collectives if plan.estimate else ())}
    rows = []
    for row in plan.collectives:
        time = times.get((row["kind"], tuple(row["axes"])))
        rows.append({**row, "seconds": time.seconds if time else None, "links": time.links if time else ""})
    return sorted(rows, key=lambda row: (-(row["seconds"] or 0), -row["bytes"]))


def worth_showing(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the candidates that the page shows in full: the Pareto front, fastest first. If nothing fits, returns the compiled
    candidate that needs the fewest bytes. For the first `MOST_PLANS` of these, the page also shows the compiled program.
    """
    compiled = [outcome for outcome in outcomes if outcome.bytes is not None]
    return plan_report.pareto_front(outcomes) or sorted(compiled, key=lambda outcome: outcome.bytes or 0)[:1]


def search_record(outcomes: Sequence[Outcome], *, chip_memory: int | None, flags: Callable[[Candidate], str]) -> Record:
    """Returns the data of a search for its page.

    Args:
      outcomes: all candidates.
      chip_memory: bytes of a chip's memory that JAX can use; None if unknown.
      flags: given a candidate, returns the command-line flags that run it.
    """
    front = {id(outcome) for outcome in plan_report.pareto_front(outcomes)}
    points = [_point(outcome, id(outcome) in front) for outcome in outcomes]
    points.sort(
        key=lambda point: (
            point["status"] not in ("fits", "too large"),
            math.inf if point["seconds"] is None else point["seconds"] / point["rows"],
        )
    )
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
        "counts": {status: sum(p["status"] == status for p in points) for status in _STATUS},
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
                "plan": outcome.details,
            }
            for outcome in worth_showing(outcomes)
        ],
    }


def _point(outcome: Outcome, is_front: bool) -> Record:
    """Returns a candidate's point for the scatter plot, with predicted seconds and the state's bytes if it wasn't compiled."""
    compiled = outcome.bytes is not None
    seconds = outcome.estimated if compiled else outcome.predicted or None
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
        "seconds": None if seconds is None else float(f"{seconds:.4g}"),
        "bytes": outcome.bytes if compiled else outcome.state_bytes,
        "reason": outcome.reason or outcome.not_reached,
    }
