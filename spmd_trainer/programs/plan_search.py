"""`--mode=plan`: searches the meshes, rematerialisation policies, minibatches and batches of an experiment for a topology.

Nothing runs: candidates whose state doesn't fit, whose least possible step is too long, or whose program is that of another
candidate are left out; the others are compiled, most promising first, until the budget ends. Each candidate's result or reason is
in `plan_search.json`, where a later search of the same settings finds it.
"""

from __future__ import annotations

import dataclasses
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence

import jax
from absl import logging

from spmd_trainer.analysis import jaxpr_costs, links
from spmd_trainer.analysis.chips import chip
from spmd_trainer.errors import UserError, first_paragraph
from spmd_trainer.partitioning.mesh_choice import mesh_over_slices
from spmd_trainer.programs import experiment_config, plan, plan_candidates, plan_prediction, plan_report
from spmd_trainer.programs.job import BatchSettings, Job
from spmd_trainer.programs.plan_candidates import Candidate
from spmd_trainer.programs.plan_report import Outcome
from spmd_trainer.sharding.messages import bytes_text
from spmd_trainer.steps import step_fns

# A candidate is left out if it is predicted to take this many times as long per row as the best ones that were found.
_HOPELESS = 2.0
_BEST = 5
# Errors of the libraries when a candidate is traced or compiled. `UserError` is a ValueError.
_ERRORS = (ValueError, NotImplementedError, jax.errors.JaxRuntimeError)
_POLICY = re.compile(r"policy=[^\n]*|0x[0-9a-f]+")


def search(job: Job) -> None:
    """Searches, prints the best candidates, and writes `plan_search.json` if a directory was given.

    Raises:
      UserError: `config.search` has an unknown name, or no candidate fits.
    """
    config = job.config
    if config.topology is None:
        raise UserError("--mode=plan needs --topology=CHIP:SHAPE, e.g. v5e:16x16 or h100:32x8")
    searched = plan_candidates.parse_dimensions(config.search)
    found = Search(job, searched)
    store = plan_report.Store(job, searched)
    try:
        outcomes = found.run(config.budget, store)
    except KeyboardInterrupt:
        logging.info("interrupted; these are the candidates that are known")
        outcomes = found.outcomes
        for outcome in outcomes:
            if not outcome.is_known:
                outcome.not_reached = "the search was interrupted before it was compiled"
    text = plan_report.report_text(job, outcomes)
    sys.stdout.write(text)
    store.write(outcomes)
    if not any(outcome.seconds for outcome in outcomes):
        raise UserError(plan_report.nothing_fits(job, outcomes, found.memory))


class Search:
    """One search: its candidates and what is known about them."""

    def __init__(self, job: Job, searched: Sequence[str]):
        """Enumerates the candidates.

        Args:
          job: the experiment on the mesh that it has without a search.
          searched: names of `plan_candidates.DIMENSIONS`.
        """
        kind = job.partitioner.mesh.devices.flat[0].device_kind
        known, machine = chip(kind), links.machine(kind)
        if known is None or machine is None:
            raise UserError(f"--mode=plan knows no bandwidths of {kind}")
        self._job = job
        self._hardware = plan_prediction.Hardware(known, machine)
        self._devices = job.partitioner.mesh.devices.flatten().tolist()
        candidates = plan_candidates.enumerate_candidates(
            job.config.experiment,
            searched,
            mesh=job.partitioner.mesh_shape(),
            # Meshes of GPUs aren't divided over slices.
            num_slices=1 if known.gpu else job.config.num_slices,
            rows=job.num_rows,
        )
        self.outcomes = [Outcome(candidate) for candidate in candidates]
        self._jobs: dict[tuple[str | None, int | None], Job] = {}
        self._jobs_on_meshes: dict[Candidate, Job] = {}
        self._flops: dict[tuple[str | None, int | None], float] = {}

    @property
    def memory(self) -> int:
        """Bytes of memory of one chip."""
        return self._hardware.chip.memory_bytes

    def run(self, budget: float, store: plan_report.Store) -> list[Outcome]:
        """Compiles the promising candidates until the budget (seconds) ends. Returns the outcomes of all candidates."""
        ends = time.monotonic() + budget
        store.read(self.outcomes)
        logging.info("%d candidates, %d known from before", len(self.outcomes), sum(o.is_known for o in self.outcomes))
        self._leave_out_equal_programs()
        for outcome in self.outcomes:
            if not outcome.is_known:
                self._predict(outcome)
        number = 0
        while time.monotonic() < ends and (promising := self._next()) is not None:
            number += 1
            self._compile(promising)
            store.write(self.outcomes)
            left = sum(not o.is_known for o in self.outcomes)
            minutes = max(0.0, ends - time.monotonic()) / 60
            logging.info("%d: %s; %d left, %.1f min of the budget", number, promising.line(), left, minutes)
        for outcome in self.outcomes:
            if not outcome.is_known:
                outcome.not_reached = "the budget ended before it was compiled"
        return self.outcomes

    def _job_of(self, candidate: Candidate) -> Job:
        """Returns the candidate's job.

        Raises:
          UserError: the mesh can't be made, or doesn't fit the experiment.
        """
        if candidate.settings not in self._jobs:
            base = self._job
            if candidate.settings != (None, None):
                experiment = base.config.experiment
                overrides = (*experiment.overrides, *candidate.overrides(experiment))
                resolved = experiment_config.resolve(experiment.name, overrides)
                base = Job.build(dataclasses.replace(base.config, experiment=resolved, mesh=self._mesh))
            self._jobs[candidate.settings] = base
        base = self._jobs[candidate.settings]
        number = candidate.minibatches or base.partitioner.num_minibatches
        if candidate not in self._jobs_on_meshes:
            try:
                mesh = mesh_over_slices(dict(candidate.mesh), self._devices)
            except (ValueError, NotImplementedError) as error:
                raise UserError(first_paragraph(error)) from error
            settings = BatchSettings(mesh.size, base.partitioner.num_minibatches, number)
            self._jobs_on_meshes[candidate] = base.on_mesh(mesh, settings)
        return self._jobs_on_meshes[candidate]

    def _leave_out_equal_programs(self) -> None:
        """Traces each policy once: policies that save what the model doesn't have give the program of another policy."""
        seen: dict[tuple[int | None, str], str | None] = {}
        # Those that an earlier search compiled are traced too: the programs of others may be the same.
        for settings in dict.fromkeys(o.candidate.settings for o in self.outcomes):
            same = [o for o in self.outcomes if o.candidate.settings == settings]
            unknown = [o for o in same if not o.is_known]
            policy, rows = settings
            try:
                text, self._flops[settings] = _traced(
                    self._job_of(dataclasses.replace(same[0].candidate, mesh=self._mesh))
                )
            except _ERRORS as error:
                for outcome in unknown:
                    outcome.reason = first_paragraph(error)
                continue
            first = seen.setdefault((rows, text), policy)
            if first != policy:
                for outcome in unknown:
                    outcome.reason = f"the same program as with {first}"

    @property
    def _mesh(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._job.partitioner.mesh_shape().items())

    def _predict(self, outcome: Outcome) -> None:
        """Predicts a candidate's step, or gives the reason why it can't be the best."""
        candidate = outcome.candidate
        try:
            # The number of minibatches doesn't change the layout.
            job = self._job_of(dataclasses.replace(candidate, minibatches=None))
        except UserError as error:
            outcome.reason = first_paragraph(error)
            return
        whole, outcome.padding = plan_prediction.state_bytes(job)
        outcome.state_bytes, outcome.rows = whole, job.num_rows
        if whole > self.memory:
            outcome.reason = f"the state alone takes {bytes_text(whole)} of {bytes_text(self.memory)} per chip"
            return
        flops = self._flops[candidate.settings]
        outcome.bound = plan_prediction.lower_bound(job, self._hardware, flops)
        outcome.predicted = plan_prediction.predict(
            job,
            self._hardware,
            flops=flops,
            minibatches=candidate.minibatches or job.partitioner.num_minibatches,
        )

    def _next(self) -> Outcome | None:
        """Returns the most promising candidate that isn't compiled; leaves out those that can't be among the best."""
        done = [o for o in self.outcomes if o.seconds is not None]
        ratio = _calibration(done)
        best = sorted(o.per_row for o in done)
        waiting = [o for o in self.outcomes if not o.is_known]
        for outcome in waiting:
            if len(best) < _BEST:
                break
            if outcome.bound / outcome.rows > best[_BEST - 1]:
                outcome.reason = f"its products and its state alone take {outcome.bound:.3g} s"
            elif ratio(outcome) / outcome.rows > _HOPELESS * best[_BEST - 1]:
                outcome.reason = (
                    f"predicted {ratio(outcome):.3g} s, more than {_HOPELESS:.0f} times as long as the best {_BEST}"
                )
        waiting = [o for o in waiting if not o.is_known]
        return min(waiting, key=lambda o: ratio(o) / o.rows, default=None)

    def _compile(self, outcome: Outcome) -> None:
        started = time.monotonic()
        try:
            result = plan.plan(self._job_of(outcome.candidate))
        except _ERRORS as error:
            outcome.reason = first_paragraph(error)
            outcome.compiled_in = time.monotonic() - started
            return
        outcome.compiled_in = time.monotonic() - started
        outcome.bytes, outcome.padding = result.total, result.padding
        estimate = result.estimate
        assert estimate is not None  # the chip is known
        outcome.shortest, outcome.longest = estimate.shortest, estimate.longest
        if estimate.collectives:
            longest = estimate.collectives[0]
            outcome.dominant = f"{longest.kind} over {', '.join(longest.axes)}"
        if result.fits is False:
            outcome.reason = (
                f"needs {bytes_text(result.total)} of {bytes_text(result.memory or 0)} per chip, most of it "
                f"{'state' if result.arguments > result.temporaries else 'temporaries'}"
            )
            return
        outcome.seconds = estimate.middle


def _calibration(done: Sequence[Outcome]) -> Callable[[Outcome], float]:
    """Returns a function that corrects predictions by what compiled candidates of the same mesh, or all, really took."""
    ratios: dict[tuple[tuple[str, int], ...], list[float]] = {}
    for outcome in done:
        if outcome.seconds and outcome.predicted:
            ratios.setdefault(outcome.candidate.mesh, []).append(outcome.seconds / outcome.predicted)
    overall = statistics.median([r for found in ratios.values() for r in found]) if ratios else 1.0

    def corrected(outcome: Outcome) -> float:
        found = ratios.get(outcome.candidate.mesh)
        return outcome.predicted * (statistics.median(found) if found else overall)

    return corrected


def _traced(job: Job) -> tuple[str, float]:
    """Returns the traced train step as text, without what differs between equal programs, and its FLOPs on all devices."""
    partitioner = job.partitioner
    step = partitioner.partition(step_fns.train_step, job.inputs_shape_dtype, is_eval=False)
    inputs = partitioner.abstract_inputs(step)
    jaxpr = step.fn.trace(partitioner.abstract_state(), job.abstract_prng_key, inputs).jaxpr
    return _POLICY.sub("", str(jaxpr)), jaxpr_costs.dot_flops(jaxpr.jaxpr)
