"""Holds the plan's search against brute force: both must find the same best five, and the search compiles at most a third.

    python -m benchmarks.plan_grid --topology h100:8x8 [--json FILE]
    python -m benchmarks.plan_grid --topology v5p:4x4x4 [--json FILE]

It searches the candidates of a small model of two layers as `--mode=plan` does, then compiles all others too. The exit status is
1 if the best five differ, if the search compiled more than a third of the candidates that can be compiled, or if these are fewer
than 40.

Two candidates whose steps have the same first four digits count as the same: the compiler may give equal programs for both.
`--json` keeps what was compiled, so that an interrupted run goes on where it ended, and another rule for the search can be tried
without compiling again: what the search asks for counts as compiled in any case. Each candidate takes 10 to 60 s on one core.
TPU topologies need the `tpu` extra, and those of GPUs `cuda12` or `cuda13`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import pathlib
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

# Programs are compiled for the topology's chips, so no accelerator is needed here.
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.planner import plan, plan_mode, plan_report, plan_search, roofline
from spmd_trainer.planner.plan_candidates import Candidate
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

BEST = 5
LEAST = 40
_EXPERIMENT = "lm.llama.TinyLlama"
# 512 rows of 1,024 tokens (the experiment declares 8 devices), and sizes that most meshes divide.
_OVERRIDES = (
    "PERCORE_BATCH_SIZE=64.0",
    "NUM_LAYERS=2",
    "MODEL_DIMS=1024",
    "HIDDEN_DIMS=4096",
    "NUM_HEADS=16",
    "NUM_KV_HEADS=8",
    "HEAD_DIMS=64",
    "VOCAB_SIZE=4096",
    "MAX_SEQ_LEN=1024",
    "FPROP_DTYPE='bfloat16'",
)
# On v5p:4x4x4 only 10 meshes can be built, so policies multiply them too.
_GRIDS = {"v5p:4x4x4": ("mesh", "remat", "minibatches"), "h100:8x8": ("mesh", "minibatches")}
# Policies and numbers of minibatches that keep a grid at 56 to 80 candidates.
_POLICIES = ("save_nothing", "save_everything", "save_context", "save_dot_only")
_MINIBATCHES = (1, 2)


def in_grid(candidate: Candidate) -> bool:
    """Returns whether a candidate of the search is one of the grid's."""
    return candidate.remat in (None, *_POLICIES) and candidate.minibatches in (None, *_MINIBATCHES)


class KeptSearch(plan_search.Search):
    """A search that keeps the plans of what it compiles in a file.

    Attributes:
      order: names of the candidates in the order in which they were compiled.
    """

    def __init__(self, job: Job, searched: Sequence[str], path: pathlib.Path | None, key: str):
        """Enumerates the grid's candidates, and reads the file.

        Args:
          job, searched: as for `Search`.
          path: the file; None keeps plans in memory only.
          key: of the versions and settings that the plans depend on. Plans with another key are not used, nor are those of a
            program that has changed; see `Outcome.program`.
        """
        super().__init__(job, searched)
        self.outcomes = [outcome for outcome in self.outcomes if in_grid(outcome.candidate)]
        self.order: list[str] = []
        self._path, self._key = path, key
        self._plans: dict[tuple[str, str], plan.Plan | str] = {}
        if path is not None and path.exists():
            kept = json.loads(path.read_text())
            if kept["key"] == key:
                self._plans = {(row["name"], row["program"]): _plan_of(row["plan"]) for row in kept["plans"]}

    def plan_of(self, candidate: Candidate) -> plan.Plan:
        """See `Search.plan_of`."""
        name = str(candidate)
        key = name, next(outcome.program for outcome in self.outcomes if outcome.candidate == candidate)
        self.order.append(name)
        if key not in self._plans:
            try:
                self._plans[key] = super().plan_of(candidate)
            except UserError as error:
                self._plans[key] = f"{error}\n\n{error.__cause__ or ''}".strip()
            self._write()
        found = self._plans[key]
        if isinstance(found, str):
            raise UserError(found)
        return found

    def _write(self) -> None:
        if self._path is not None:
            plans = [
                {"name": name, "program": program, "plan": _record_of(found) if isinstance(found, plan.Plan) else found}
                for (name, program), found in self._plans.items()
            ]
            self._path.write_text(json.dumps({"key": self._key, "plans": plans}) + "\n")


def _record_of(found: plan.Plan) -> dict[str, Any]:
    """Returns a plan for a JSON file, without its memory over time, which is large and of no use here."""
    return dataclasses.asdict(dataclasses.replace(found, memory_over_time=None))


def _plan_of(record: Any) -> plan.Plan | str:
    """Returns the plan of a JSON record, or the error that was kept instead of a plan."""
    if isinstance(record, str):
        return record
    estimate = dict(record["estimate"])
    rows = [roofline.CollectiveTime(**{**row, "axes": tuple(row["axes"])}) for row in estimate["collectives"]]
    return plan.Plan(**{**record, "estimate": roofline.Estimate(**{**estimate, "collectives": rows})})


def compile_all(search: plan_search.Search, searched: Sequence[Outcome]) -> list[Outcome]:
    """Compiles what the search left out; returns the outcomes of all candidates."""
    outcomes = [o if o.compiled_in else dataclasses.replace(o, reason="", not_reached="") for o in searched]
    waiting = [outcome for outcome in outcomes if not outcome.compiled_in]
    for number, outcome in enumerate(waiting):
        search.compile(outcome)
        print(f"{number + 1} of {len(waiting)}: {outcome.line()}", flush=True)
    return outcomes


@dataclasses.dataclass(frozen=True)
class Comparison:
    """A search beside brute force.

    Attributes:
      found: outcomes of the search.
      all: outcomes of brute force.
    """

    found: Sequence[Outcome]
    all: Sequence[Outcome]

    @property
    def compiled(self) -> int:
        """Candidates that the search compiled."""
        return sum(outcome.compiled_in > 0 for outcome in self.found)

    @property
    def possible(self) -> int:
        """Candidates that can be compiled."""
        return sum(outcome.estimated is not None for outcome in self.all)

    @property
    def is_same(self) -> bool:
        """True if the best five are the same, apart from equal steps."""
        mine, theirs = (plan_report.best(outcomes)[:BEST] for outcomes in (self.found, self.all))
        return [f"{outcome.per_row:.3e}" for outcome in mine] == [f"{outcome.per_row:.3e}" for outcome in theirs]

    @property
    def is_met(self) -> bool:
        """True if the search meets the bar."""
        return self.is_same and self.possible >= LEAST and 3 * self.compiled <= self.possible

    def __str__(self) -> str:
        lines = []
        for title, outcomes in (("search", self.found), ("brute force", self.all)):
            lines.append(f"best {BEST} of the {title}")
            lines += [f"  {outcome.line()}" for outcome in plan_report.best(outcomes)[:BEST]]
        verdict = "SAME" if self.is_same else "DIFFERENT"
        share = self.compiled / max(1, self.possible)
        lines.append(f"{verdict}; the search compiled {self.compiled} of {self.possible} candidates ({share:.0%})")
        return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints both best fives; returns 1 if the bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--topology", choices=_GRIDS, required=True, help="the chips to compile for")
    parser.add_argument("--json", type=pathlib.Path, help="keep what was compiled in this file, and use it")
    options = parser.parse_args(arguments)
    logging.set_verbosity(logging.WARNING)
    with tempfile.TemporaryDirectory() as directory:
        config = make_run_config(_EXPERIMENT, directory, mode="plan", topology=options.topology, overrides=_OVERRIDES)
        job, searched = plan_mode.build_job(config), _GRIDS[options.topology]
        store = plan_report.Store(job, searched)
        search = KeptSearch(job, searched, options.json, store.key)
        found = [dataclasses.replace(outcome) for outcome in search.run(math.inf, store)]
        result = Comparison(found, compile_all(search, found))
    print(result)
    places = [search.order.index(str(outcome.candidate)) for outcome in plan_report.best(result.all)[:BEST]]
    print(f"the last of brute force's best {BEST} was number {max(places) + 1} to be compiled")
    return int(not result.is_met)


if __name__ == "__main__":
    sys.exit(main())
