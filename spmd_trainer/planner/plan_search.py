"""Searches for the fastest mesh, rematerialization policy, number of minibatches and batch size on a topology (`--mode=plan`).

No candidate is run. A candidate is ruled out if its state doesn't fit, if even its fastest possible step is too slow, or if
another candidate has the same program. The others are compiled, most promising first, until the budget runs out or no
remaining candidate is likely to be among the fastest five. `plan_search.json` has each candidate's result or the reason
why it was ruled out; a later search with the same settings reuses the results of compiled candidates.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Callable, Sequence

import jax
from absl import logging

from spmd_trainer.errors import UserError, first_line, first_paragraph
from spmd_trainer.planner import links, plan, plan_candidates, plan_page, plan_prediction, plan_report
from spmd_trainer.planner.plan_candidates import Candidate, Settings
from spmd_trainer.planner.plan_report import Outcome
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.step.mesh_choice import mesh_over_slices
from spmd_trainer.training import experiment_config
from spmd_trainer.training.job import BatchSettings, Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import ChipsConfig, PlanConfig

# The search ends when no other candidate is likely to be among this many fastest.
_BEST = 5
# Errors that libraries raise when a candidate is traced or compiled. `UserError` is a ValueError.
ERRORS = (ValueError, TypeError, AssertionError, NotImplementedError, jax.errors.JaxRuntimeError)


class Search:
    """A search over candidates, and its results.

    Attributes:
      machine: bandwidths and other rates of the chips.
      outcomes: the candidates, each with its results so far.
    """

    def __init__(self, job: Job, searched: Sequence[str]):
        kind = job.partitioner.mesh.devices.flat[0].device_kind
        machine = links.machine(kind)
        if machine is None:
            raise UserError(f"--mode=plan has no bandwidths for {kind}")
        self._job = job
        self.machine = machine
        # Meshes of GPUs aren't divided over slices.
        self.num_slices = 1 if machine.chip.gpu else job.config.of(ChipsConfig).num_slices
        self._devices = job.partitioner.mesh.devices.flatten().tolist()
        candidates = plan_candidates.enumerate_candidates(
            job.config.experiment,
            searched,
            mesh=job.partitioner.mesh_shape(),
            num_slices=self.num_slices,
            rows=job.num_rows,
        )
        self.outcomes = [Outcome(candidate) for candidate in candidates]
        self._jobs: dict[Settings, Job] = {}
        self._jobs_on_meshes: dict[Candidate, Job] = {}
        self._work: dict[Settings, plan_prediction.Work] = {}

    @property
    def memory(self) -> int:
        """Bytes of a chip's memory that JAX can use."""
        return plan.usable_memory(self._devices[0].device_kind, self.machine.chip.memory_bytes)

    def run(self, budget: float, store: plan_report.Store) -> list[Outcome]:
        """Compiles promising candidates until no other is likely to be among the fastest five, or the budget runs out.

        Returns the outcomes of all candidates.

        Args:
          budget: time for the search in seconds. At most half of it is for tracing and predicting.
          store: cache of results. It is read first, and written after each compilation.
        """
        started = time.monotonic()
        store.read(self.outcomes)
        self._predict_all(started + budget / 2)
        number, ends = 0, started + budget
        while time.monotonic() < ends and (promising := self._next()) is not None:
            number += 1
            self.compile(promising)
            _drop_details(self.outcomes)
            store.write(self.outcomes)
            left = sum(not o.is_known for o in self.outcomes)
            minutes = max(0.0, ends - time.monotonic()) / 60
            logging.info("%d: %s; %d left, %.1f min of the budget", number, promising.line(), left, minutes)
        for outcome in self.outcomes:
            if not outcome.is_known:
                what = "compiled" if outcome.predicted else "predicted"
                outcome.not_reached = f"the budget ran out before it was {what}"
        return self.outcomes

    def job_of(self, candidate: Candidate) -> Job:
        if candidate.settings not in self._jobs:
            base = self._job
            if any(candidate.settings):
                experiment = base.config.experiment
                overrides = (*experiment.overrides, *candidate.overrides(experiment))
                resolved = experiment_config.resolve(experiment.name, overrides)
                # The experiment's number of minibatches may not divide other rows.
                planned = base.config.of(PlanConfig)
                config = dataclasses.replace(planned, experiment=resolved, mesh=self._mesh, num_minibatches=1)
                base = Job.build(config)
            self._jobs[candidate.settings] = base
        base = self._jobs[candidate.settings]
        default = self._job.partitioner.num_minibatches
        if candidate not in self._jobs_on_meshes:
            try:
                mesh = mesh_over_slices(dict(candidate.mesh), self._devices)
            except (ValueError, NotImplementedError) as error:
                raise UserError(first_paragraph(error)) from error
            settings = BatchSettings(mesh.size, default, candidate.minibatches or default)
            self._jobs_on_meshes[candidate] = base.on_mesh(mesh, settings)
        return self._jobs_on_meshes[candidate]

    @property
    def _mesh(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._job.partitioner.mesh_shape().items())

    def _predict_all(self, ends: float) -> None:
        """Traces the step for each policy and batch size, and predicts step times, until `time.monotonic()` reaches `ends`."""
        with Phase(f"tracing and predicting {count_text(len(self.outcomes), 'candidate')}") as phase:
            self._trace_all(ends)
            from_before = [outcome for outcome in self.outcomes if outcome.compiled_in]
            logging.info("%d candidates, %d compiled before", len(self.outcomes), len(from_before))
            for outcome in from_before:
                if outcome.too_large:
                    self._leave_out_larger(outcome)
            for outcome in self.outcomes:
                if time.monotonic() > ends:
                    break
                if outcome.candidate.settings in self._work:
                    self._predict(outcome)
            predicted = sum(o.predicted > 0 or o.is_known for o in self.outcomes)
            phase.done = f"predicted {predicted} of {count_text(len(self.outcomes), 'candidate')}"

    def _trace_all(self, ends: float) -> None:
        """Traces the step once for each policy and batch size. Rules out policies that give the same program as an earlier one.

        Two policies give the same program if the model doesn't have the values that only one of them saves. Candidates that an
        earlier search compiled are traced even after `ends`, because their results are valid only if the program is unchanged.
        """
        seen: dict[tuple[int | None, str], str | None] = {}
        all_settings = dict.fromkeys(o.candidate.settings for o in self.outcomes)
        for number, settings in enumerate(all_settings):
            policy, rows, _ = settings
            same = [o for o in self.outcomes if o.candidate.settings == settings]
            if time.monotonic() > ends and not any(outcome.compiled_in for outcome in same):
                continue
            if len(all_settings) > 1:
                what = (policy or "the experiment's policy") + (f", {rows} rows" if rows else "")
                logging.info("tracing %s: %d of %d", what, number + 1, len(all_settings))
            try:
                job = self.job_of(dataclasses.replace(same[0].candidate, mesh=self._mesh))
                text, work = plan_prediction.traced(job)
            except ERRORS as error:
                of_program(same, "")
                _leave_out(same, first_line(error))
                continue
            of_program(same, plan_prediction.program(job, text))
            first = seen.setdefault((rows, text), policy)
            if first != policy:
                _leave_out(same, f"the same program as {first}")
            self._work[settings] = work

    def _predict(self, outcome: Outcome) -> None:
        """Predicts a candidate's step time, or rules the candidate out with a reason."""
        candidate = outcome.candidate
        try:
            # Policy and number of minibatches don't change the layout, and 1 divides every batch.
            job = self.job_of(Candidate(candidate.mesh, minibatches=1, rows=candidate.rows))
        except UserError as error:
            _leave_out([outcome], first_line(error))
            return
        whole, padding = plan_prediction.state_bytes(job)
        outcome.state_bytes, outcome.rows = whole, job.num_rows
        outcome.padding = padding if outcome.padding is None else outcome.padding
        if whole > self.memory:
            _leave_out([outcome], f"the state alone takes {bytes_text(whole)} of {bytes_text(self.memory)} per chip")
            return
        work = self._work[candidate.settings]
        number = candidate.minibatches or self._job.partitioner.num_minibatches
        outcome.bound = plan_prediction.lower_bound(job, self.machine, work.step.flops)
        outcome.predicted = plan_prediction.predict(job, self.machine, work, minibatches=number).seconds

    def _next(self) -> Outcome | None:
        """Returns the most promising candidate that hasn't been compiled yet.

        If none is likely to be among the fastest five, rules out all remaining candidates and returns None.
        """
        fastest = sorted(o.per_row for o in self.outcomes if o.seconds is not None)
        limit = fastest[_BEST - 1] if len(fastest) >= _BEST else math.inf
        _leave_out(
            [o for o in self.outcomes if o.bound / o.rows > limit],
            lambda o: (
                f"its matrix products or its state alone take {o.bound:.3g} s, longer than the {_BEST} fastest steps"
            ),
        )
        seconds = plan_prediction.optimistic([o for o in self.outcomes if o.predicted])
        waiting = [o for o in self.outcomes if o.predicted and not o.is_known]
        promising = min(waiting, key=lambda o: seconds[id(o)] / o.rows, default=None)
        if promising is not None and seconds[id(promising)] / promising.rows <= limit:
            return promising
        _leave_out(
            waiting,
            lambda o: (
                f"judging by those that were compiled, it takes at least {seconds[id(o)]:.3g} s, longer than the {_BEST} "
                "fastest steps"
            ),
        )
        return None

    def plan_of(self, candidate: Candidate) -> plan.Plan:
        """Compiles a candidate's step and returns the plan.

        Raises:
          UserError: see `plan.plan`; or the candidate's mesh can't be made, or doesn't fit the experiment.
        """
        return plan.plan(self.job_of(candidate))

    def compile(self, outcome: Outcome) -> None:
        """Compiles a candidate's step. Stores its bytes and estimated time in `outcome`, or the reason if compilation fails."""
        started = time.monotonic()
        try:
            result = self.plan_of(outcome.candidate)
        except ERRORS as error:
            outcome.reason = first_line(error)
            outcome.compiled_in = time.monotonic() - started
            outcome.too_large = "RESOURCE_EXHAUSTED" in f"{error} {error.__cause__}"
            if outcome.too_large:
                outcome.bytes = plan.refused_bytes(str(error), outcome.state_bytes or 0)
                self._leave_out_larger(outcome)
            return
        outcome.compiled_in = time.monotonic() - started
        outcome.bytes, outcome.padding = result.total, result.padding
        outcome.details = plan_page.plan_record(result)
        estimate = result.estimate
        assert estimate is not None  # the chip is known
        outcome.shortest, outcome.longest = estimate.shortest, estimate.longest
        longest = next((row for row in estimate.collectives if row.seconds), None)
        if longest is not None:
            outcome.dominant = f"{longest.kind} over {', '.join(longest.axes) or 'one device'}"
        if result.fits is False:
            outcome.reason = (
                f"needs {bytes_text(result.total)} of {bytes_text(self.memory)} per chip, most of it "
                f"{'state' if result.arguments > result.temporaries else 'temporaries'}"
            )
            outcome.too_large = True
            self._leave_out_larger(outcome)
            return
        outcome.seconds = estimate.middle

    def _leave_out_larger(self, too_large: Outcome) -> None:
        """Rules out candidates that have at least as many rows per minibatch as `too_large`, and otherwise the same settings.

        If `too_large` has several minibatches, candidates with a single minibatch are not ruled out, because they need no memory
        for accumulated gradients.
        """
        known, default = too_large.candidate, self._job.partitioner.num_minibatches
        number, larger = known.minibatches or default, []
        for outcome in self.outcomes:
            own = outcome.candidate.minibatches or default
            same = dataclasses.replace(outcome.candidate, rows=known.rows, minibatches=known.minibatches) == known
            if same and (outcome.candidate.rows or 0) >= (known.rows or 0) and (own == number or 1 < own < number):
                larger.append(outcome)
        _leave_out(larger, f"{known} doesn't fit, and this one has at least as many rows in a minibatch")


def _leave_out(outcomes: Sequence[Outcome], reason: str | Callable[[Outcome], str]) -> None:
    """Rules out those candidates that are neither compiled nor ruled out yet, and stores `reason` in their outcomes."""
    for outcome in outcomes:
        if not outcome.is_known:
            outcome.reason = reason if isinstance(reason, str) else reason(outcome)


def _drop_details(outcomes: Sequence[Outcome]) -> None:
    """Drops the page data (`details`) of candidates that the page doesn't show in full, to keep `plan_search.json` small."""
    shown = {id(outcome) for outcome in plan_page.worth_showing(outcomes)[: plan_page.MOST_PLANS]}
    for outcome in outcomes:
        if id(outcome) not in shown:
            outcome.details = None


def of_program(outcomes: Sequence[Outcome], program: str) -> None:
    """Stores a program's hash in the candidates' outcomes. Clears results that an earlier search got for a different program."""
    for outcome in outcomes:
        if outcome.compiled_in and outcome.program != program:
            outcome.forget()
        outcome.program = program
