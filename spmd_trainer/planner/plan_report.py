"""Results of a search by `--mode=plan`: each candidate's outcome, the Pareto front as text, and the cache `plan_search.json`."""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from absl import logging

from spmd_trainer.errors.installation import library_versions
from spmd_trainer.kernels import chips
from spmd_trainer.models.config_lines import without_addresses
from spmd_trainer.planner import links, plan
from spmd_trainer.planner.plan_candidates import Candidate, quoted
from spmd_trainer.sharding.messages import bytes_text, count_text, short_hash
from spmd_trainer.storage import files, json_values
from spmd_trainer.training.job import Job, make_partitioner
from spmd_trainer.training.run_config import ChipsConfig
from spmd_trainer.training.run_directory import report_directory
from spmd_trainer.training.same_settings import JAX_OPTIONS

FILE = "plan_search.json"
_SHOWN = 10
# Maximum number of candidates whose reasons an error message names.
_REASONS = 3
# Environment variables that change a compiled program.
_VARIABLES = ("XLA_FLAGS", "LIBTPU_INIT_ARGS")


@dataclasses.dataclass
class Outcome:
    """All that a search knows about a candidate.

    Attributes:
      seconds: middle of the estimated range of the step time; None if the candidate was not compiled or doesn't fit.
      shortest, longest: the estimated range of the step time in seconds; None if the candidate was not compiled.
      bytes: bytes that the compiled step needs on one chip.
      state_bytes: bytes of the train state on one chip, computed from its shapes and sharding.
      padding: bytes of the state that are padding.
      dominant: the collective that takes longest, and its mesh axes, as text.
      predicted: step time in seconds as predicted before compilation; 0 if there is no prediction.
      bound: lower limit for the seconds per step.
      reason: why the candidate was ruled out; '' if it wasn't.
      not_reached: if the search ended before it reached the candidate, the reason; else ''.
      compiled_in: compile time in seconds; 0 if the search did not try to compile the candidate.
      too_large: True if the candidate was compiled and doesn't fit.
      program: hash of the traced step and of its arguments' sharding; '' if the step was not traced. A search over meshes
        traces the step only on the job's own mesh.
      details: the compiled program's data for the page (`plan_page.plan_record`); None if the page doesn't show it.
    """

    candidate: Candidate
    seconds: float | None = None
    shortest: float | None = None
    longest: float | None = None
    bytes: int | None = None
    state_bytes: int | None = None
    padding: int | None = None
    rows: int = 1
    dominant: str = ""
    predicted: float = 0.0
    bound: float = 0.0
    reason: str = ""
    not_reached: str = ""
    compiled_in: float = 0.0
    too_large: bool = False
    program: str = ""
    details: dict[str, Any] | None = None

    @property
    def is_known(self) -> bool:
        """True if the candidate was compiled or ruled out."""
        return self.seconds is not None or bool(self.reason)

    @property
    def estimated(self) -> float | None:
        """Estimated seconds per step, even if the step doesn't fit; None if the candidate was not compiled."""
        return None if self.shortest is None or self.longest is None else (self.shortest + self.longest) / 2

    @property
    def per_row(self) -> float:
        """Estimated seconds per step and row; infinite if the candidate was not compiled or doesn't fit."""
        return math.inf if self.seconds is None else self.seconds / self.rows

    def bytes_without(self, saved: int) -> int | None:
        """Returns `bytes` minus the bytes that a change saves; None if `bytes` is unknown."""
        return None if self.bytes is None else self.bytes - saved

    def forget(self) -> None:
        for name, value in vars(Outcome(self.candidate)).items():
            setattr(self, name, value)

    def line(self) -> str:
        if self.seconds is None:
            return f"{self.candidate}: {self.reason or self.not_reached}"
        return (
            f"{self.candidate}: {self.seconds:.3g} s ({self.shortest:.3g} to {self.longest:.3g}), {bytes_text(self.bytes or 0)} "
            f"per chip, {bytes_text(self.padding or 0)} padding, {self.dominant or 'no collectives'}"
        )

    def record(self) -> dict[str, Any]:
        fields = dataclasses.asdict(self)
        return {**fields, "candidate": dataclasses.asdict(self.candidate), "name": str(self.candidate)}


@dataclasses.dataclass(frozen=True)
class Step:
    """A program that the memory ladder has compiled, or tried to compile.

    Attributes:
      rung: name of the program's last change, e.g. 'remat save_nothing'; 'as it is' for the experiment's own program.
      outcome: the candidate with all changes so far, and the result of its compilation.
      predicted: bytes per chip that were predicted before the compilation; None if there was no prediction.
    """

    rung: str
    outcome: Outcome
    predicted: int | None = None

    def line(self) -> str:
        outcome = self.outcome
        predicted = bytes_text(self.predicted) if self.predicted else ""
        compiled = bytes_text(outcome.bytes) if outcome.bytes else "unknown"
        seconds = f"{outcome.estimated:.4g} s" if outcome.estimated else ""
        mark = "*" if outcome.seconds is not None else " "
        reason = "" if outcome.bytes else f": {outcome.reason}"
        return f"{mark} {predicted:>10}  {compiled:>10}  {seconds:>9}  {self.rung}{reason}"


class Store:
    """The cache of a search's results, `plan_search.json`. If the job has no directory for reports, nothing is stored.

    Attributes:
      key: hash of everything that affects a compiled step and its estimate (settings, topology, versions etc.), except the
        program. `Outcome.program` is the program's hash.
    """

    def __init__(self, job: Job, searched: Sequence[str]):
        config = job.config.of(ChipsConfig)
        self._job = job
        self._path = report_directory(config.job_log_dir) / FILE if config.writes_reports else None
        self._searched = list(searched)
        self._earlier: dict[str, dict[str, Any]] | None = None
        self._versions = library_versions()
        partitioner = make_partitioner(config.experiment.experiment)
        kind = type(partitioner)
        settings = [
            # Plain objects print their address, which differs between processes.
            *map(without_addresses, config.experiment.lines()),
            config.topology,
            config.num_slices,
            config.num_minibatches,
            without_addresses(f"{kind.__module__}.{kind.__qualname__}: {sorted(vars(partitioner).items())}"),
            sorted(self._versions.items()),
            [os.environ.get(name) for name in _VARIABLES],
            repr((chips.CHIPS, links.MACHINES)),
            sorted(config.experiment.experiment.XLA_FLAGS.items()),
            [str(jax.config.values[name]) for name in JAX_OPTIONS],
        ]
        self.key = short_hash(json.dumps(settings))

    def read(self, outcomes: Sequence[Outcome]) -> None:
        """Fills in the results of candidates that an earlier search with the same `key` compiled.

        Only the first call reads the file.
        """
        if self._earlier is None:
            self._earlier = self._read_file()
        for outcome in outcomes:
            record = self._earlier.get(str(outcome.candidate))
            # Keep compiled candidates only. Other results are cheap, and depend on the search's progress.
            if record and record["compiled_in"]:
                for name, value in record.items():
                    setattr(outcome, name, value)

    def _read_file(self) -> dict[str, dict[str, Any]]:
        if self._path is None or not self._path.exists():
            return {}
        fields = [field.name for field in dataclasses.fields(Outcome) if field.name not in ("candidate", "not_reached")]
        try:
            earlier = json_values.parse_object(json_values.content_of(self._path), finite=False)
            if earlier["key"] != self.key:
                logging.info("%s was made with other settings or versions and will be replaced", self._path)
                return {}
            return {record["name"]: {name: record[name] for name in fields} for record in earlier["candidates"]}
        except (ValueError, LookupError, TypeError):
            logging.warning("%s is not a record of a search and will be replaced", self._path)
            return {}

    def write(self, outcomes: Sequence[Outcome]) -> None:
        if self._path is None:
            return
        front = {id(outcome) for outcome in pareto_front(outcomes)}
        record = {
            "key": self.key,
            "experiment": self._job.config.experiment.name,
            "overrides": list(self._job.config.experiment.overrides),
            "topology": self._job.config.of(ChipsConfig).topology,
            "num_slices": self._job.config.of(ChipsConfig).num_slices,
            "searched": self._searched,
            "versions": self._versions,
            "candidates": [{**outcome.record(), "front": id(outcome) in front} for outcome in outcomes],
        }
        files.write_atomically(self._path, json.dumps(record, indent=1).splitlines())


def pareto_front(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the candidates that fit and that no other candidate beats in both seconds per row and bytes, fastest first."""
    front: list[Outcome] = []
    for outcome in sorted((o for o in outcomes if o.seconds is not None), key=lambda o: (o.per_row, o.bytes)):
        if not front or (outcome.bytes or 0) < (front[-1].bytes or 0):
            front.append(outcome)
    return front


def best(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Returns the candidates that fit, fastest per row first."""
    return sorted((o for o in outcomes if o.seconds is not None), key=lambda o: o.per_row)


def report_text(job: Job, outcomes: Sequence[Outcome]) -> str:
    topology = job.config.of(ChipsConfig).topology
    ranked, front = best(outcomes), {id(outcome) for outcome in pareto_front(outcomes)}
    compiled = sum(outcome.compiled_in > 0 for outcome in outcomes)
    out = sum(bool(outcome.reason) and not outcome.compiled_in for outcome in outcomes)
    waiting = sum(bool(outcome.not_reached) for outcome in outcomes)
    lines = [
        f"{count_text(len(outcomes), 'candidate')} on {topology}: {compiled} compiled, {out} left out, {waiting} not "
        f"reached"
    ]
    if ranked:
        lines.append(f"  {'step':>9}  {'range':>20}  {'per chip':>11}  {'padding':>10}  candidate; longest collective")
    for outcome in [o for o in ranked if id(o) in front or o in ranked[:_SHOWN]]:
        mark = "*" if id(outcome) in front else " "
        span = f"{outcome.shortest:.4g} to {outcome.longest:.4g} s"
        lines.append(
            f"{mark} {outcome.seconds:8.4g} s  {span:>20}  {bytes_text(outcome.bytes or 0):>11}  "
            f"{bytes_text(outcome.padding or 0):>10}  {outcome.candidate}; {outcome.dominant or 'none'}"
        )
    if ranked:
        of = "" if compiled == len(outcomes) else f" of the {compiled} that were compiled"
        lines.append(f"* nothing else{of} is both faster per row and smaller. The best one runs with")
        lines.append(f"  {run_flags(job, ranked[0].candidate)}")
        first = job.partitioner.mesh.devices.flat[0].device_kind
        known = chips.chip(first)
        if setting := plan.memory_setting(first, ranked[0].bytes or 0, known.memory_bytes if known else None):
            lines.append(f"  {setting}")
    return "\n".join(lines) + "\n"


def run_flags(job: Job, candidate: Candidate) -> str:
    """Returns the command-line flags for training with a candidate's settings, including the overrides given to this search."""
    config = job.config.of(ChipsConfig)
    given = [f"--fdl.set={quoted(override)}" for override in config.experiment.overrides]
    if config.num_minibatches is not None and candidate.minibatches is None:
        given.append(f"--num_minibatches={config.num_minibatches}")
    return " ".join([*given, candidate.flags(config.experiment)])


def nothing_fits(job: Job, outcomes: Sequence[Outcome], memory: int) -> str:
    """Returns the message for a search in which no candidate fits. `memory`: usable bytes of a chip."""
    topology = job.config.of(ChipsConfig).topology
    waiting = [o.not_reached for o in outcomes if o.not_reached]
    if waiting and not any(o.compiled_in for o in outcomes):
        longer = "; use a longer --budget" if "budget" in waiting[0] else ""
        return f"no candidate was compiled: {waiting[0]}{longer}"
    reasons = "; ".join(f"{o.candidate}: {o.reason or o.not_reached}" for o in outcomes[:_REASONS])
    if all(o.state_bytes is None for o in outcomes):
        return f"no candidate can be built for {topology}: {reasons}"
    return (
        f"no candidate fits {topology}. {_least_chips(job, outcomes, memory)} Use more chips or a smaller batch; "
        f"--search=memory finds what makes it fit. {reasons}"
    )


def _least_chips(job: Job, outcomes: Sequence[Outcome], memory: int) -> str:
    """Returns a sentence about the minimum number of chips with `memory` bytes each. It assumes that the state is sharded evenly,
    and that each chip also holds the temporaries of the compiled step with the fewest."""
    state = sum(variable.logical_bytes() for variable in job.partitioner.metadata.records())
    rest = [o.bytes - o.state_bytes for o in outcomes if o.bytes is not None and o.state_bytes is not None]
    needs = f"The state takes {bytes_text(state)} in all"
    if rest:
        needs += f", and the smallest compiled step {bytes_text(min(rest))} more on each chip"
        if min(rest) >= memory:
            return f"{needs}, which has {bytes_text(memory)}: no number of chips is enough with this batch per chip."
    least, there = -(-state // (memory - min(rest, default=0))), job.partitioner.mesh.size
    number = f"at least {count_text(least, 'chip')}" if least > there else f"more than {count_text(there, 'chip')}"
    return f"{needs}: with the state split over all chips, {number} of {bytes_text(memory)} are needed."
