"""`--mode=plan`: searches the meshes, rematerialisation policies, minibatches and batches of an experiment for a topology.

Nothing runs: candidates whose state doesn't fit, whose least possible step is too long, or whose program is that of another
candidate are left out; the others are compiled, most promising first, until the budget ends or no other can be among the fastest
five. Each candidate's result or reason is in `plan_search.json`, where a later search of the same settings finds it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
import sys
import time
from collections.abc import Callable, Sequence

import jax
from absl import logging
from jax.extend import core

from spmd_trainer import tasks_lib
from spmd_trainer.analysis import jaxpr_costs, links
from spmd_trainer.analysis.chips import chip
from spmd_trainer.analysis.topologies import topology_devices
from spmd_trainer.errors import UserError, first_paragraph
from spmd_trainer.partitioning import model_mesh
from spmd_trainer.partitioning.mesh_choice import mesh_over_slices
from spmd_trainer.partitioning.partitioner import StepFn
from spmd_trainer.programs import (
    experiment_config,
    plan,
    plan_calibration,
    plan_candidates,
    plan_page,
    plan_page_data,
    plan_prediction,
    plan_report,
)
from spmd_trainer.programs.job import BatchSettings, Job
from spmd_trainer.programs.phases import Phase
from spmd_trainer.programs.plan_candidates import Candidate
from spmd_trainer.programs.plan_report import Outcome
from spmd_trainer.programs.run_config import RunConfig
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.steps import step_fns

# The search ends when no other candidate can be among so many fastest ones.
_BEST = 5
_STEPS: tuple[tuple[StepFn, bool], ...] = ((step_fns.train_step, False), (step_fns.eval_step, True))
# Errors of the libraries when a candidate is traced or compiled. `UserError` is a ValueError.
_ERRORS = (ValueError, TypeError, AssertionError, NotImplementedError, jax.errors.JaxRuntimeError)
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
    store.write(outcomes)
    plan_page.write_search_page(
        job,
        outcomes,
        {outcome.candidate: outcome.details for outcome in outcomes if outcome.details},
        chip_memory=found.memory,
        flags=functools.partial(plan_report.run_flags, job),
    )
    if not any(outcome.seconds for outcome in outcomes):
        raise UserError(plan_report.nothing_fits(job, outcomes, found.memory))
    sys.stdout.write(plan_report.report_text(job, outcomes))


def build_job(config: RunConfig) -> Job:
    """Builds the job of a search: on the mesh that it has without a search, or on another one if the topology doesn't allow it.

    Raises:
      UserError: see `Job.build`.
    """
    try:
        return Job.build(config)
    except UserError:
        task = tasks_lib.build_task(config.experiment.task_p)
        declared = model_mesh.declared_mesh(task.model)
        if config.mesh or config.topology is None or "mesh" not in config.search or declared is None:
            raise
        devices = topology_devices(config.topology, config.num_slices)
        # From large outer axes to large inner ones: these split the batch, which every model allows.
        for mesh in reversed(list(plan_candidates.meshes(tuple(declared.shape), len(devices), config.num_slices))):
            try:
                mesh_over_slices(dict(mesh), devices)
            except (ValueError, NotImplementedError):
                continue
            return Job.build(dataclasses.replace(config, mesh=mesh))
        raise


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
        self._work: dict[tuple[str | None, int | None], plan_prediction.Work] = {}

    @property
    def memory(self) -> int:
        """Bytes that JAX can take of a chip's memory."""
        return plan.usable_memory(self._devices[0].device_kind, self._hardware.chip.memory_bytes)

    def run(self, budget: float, store: plan_report.Store) -> list[Outcome]:
        """Compiles the promising candidates until no other can be among the best, or the budget ends.

        Args:
          budget: seconds. At most half of them go to tracing and predicting.
          store: read first, and written after each compilation.

        Returns:
          The outcomes of all candidates.
        """
        started = time.monotonic()
        store.read(self.outcomes)
        for outcome in self.outcomes:
            if outcome.too_large:
                self._leave_out_larger(outcome)
        logging.info("%d candidates, %d known from before", len(self.outcomes), sum(o.is_known for o in self.outcomes))
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
                outcome.not_reached = f"the budget ended before it was {what}"
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

    @property
    def _mesh(self) -> tuple[tuple[str, int], ...]:
        return tuple(self._job.partitioner.mesh_shape().items())

    def _predict_all(self, ends: float) -> None:
        """Traces each policy and batch, and predicts the candidates, until `ends` (`time.monotonic()`)."""
        with Phase(f"tracing and predicting {count_text(len(self.outcomes), 'candidate')}") as phase:
            self._trace_all(ends)
            for outcome in self.outcomes:
                if time.monotonic() > ends:
                    break
                if outcome.candidate.settings in self._work:
                    self._predict(outcome)
            predicted = sum(o.predicted > 0 or o.is_known for o in self.outcomes)
            phase.done = f"predicted {predicted} of {count_text(len(self.outcomes), 'candidate')}"

    def _trace_all(self, ends: float) -> None:
        """Traces each policy and batch once: policies that save what the model doesn't have give the program of another one."""
        seen: dict[tuple[int | None, str], str | None] = {}
        # What an earlier search compiled is traced too: the programs of others may be the same.
        all_settings = dict.fromkeys(o.candidate.settings for o in self.outcomes)
        for number, settings in enumerate(all_settings):
            if time.monotonic() > ends:
                return
            policy, rows = settings
            if len(all_settings) > 1:
                logging.info("tracing %s: %d of %d", _settings_text(settings), number + 1, len(all_settings))
            same = [o for o in self.outcomes if o.candidate.settings == settings]
            try:
                text, work = _traced(self._job_of(dataclasses.replace(same[0].candidate, mesh=self._mesh)))
            except _ERRORS as error:
                _leave_out(same, _reason(error))
                continue
            first = seen.setdefault((rows, text), policy)
            if first != policy:
                _leave_out(same, f"the same program as with {first}")
            self._work[settings] = work

    def _predict(self, outcome: Outcome) -> None:
        """Predicts a candidate's step, or gives the reason why it can't be the best."""
        candidate = outcome.candidate
        try:
            # Policy and number of minibatches don't change the layout.
            job = self._job_of(Candidate(candidate.mesh, rows=candidate.rows))
        except UserError as error:
            _leave_out([outcome], _reason(error))
            return
        whole, padding = plan_prediction.state_bytes(job)
        outcome.state_bytes, outcome.rows = whole, job.num_rows
        outcome.padding = padding if outcome.padding is None else outcome.padding
        if whole > self.memory:
            _leave_out([outcome], f"the state alone takes {bytes_text(whole)} of {bytes_text(self.memory)} per chip")
            return
        work = self._work[candidate.settings]
        number = candidate.minibatches or job.partitioner.num_minibatches
        outcome.bound = plan_prediction.lower_bound(job, self._hardware, work.step.flops)
        outcome.predicted = plan_prediction.predict(job, self._hardware, work, minibatches=number).seconds

    def _next(self) -> Outcome | None:
        """Returns the most promising candidate that isn't compiled; None if no other can be among the best.

        Then all others get the reason.
        """
        fastest = sorted(o.per_row for o in self.outcomes if o.seconds is not None)
        limit = fastest[_BEST - 1] if len(fastest) >= _BEST else math.inf
        _leave_out(
            [o for o in self.outcomes if o.bound / o.rows > limit],
            lambda o: f"its products and its state alone take {o.bound:.3g} s, longer than the {_BEST} fastest",
        )
        seconds = plan_calibration.optimistic([o for o in self.outcomes if o.predicted])
        waiting = [o for o in self.outcomes if o.predicted and not o.is_known]
        promising = min(waiting, key=lambda o: seconds[id(o)] / o.rows, default=None)
        if promising is not None and seconds[id(promising)] / promising.rows <= limit:
            return promising
        _leave_out(
            waiting,
            lambda o: (
                f"predicted from those that were compiled to take at least {seconds[id(o)]:.3g} s, longer than the "
                f"{_BEST} fastest"
            ),
        )
        return None

    def plan_of(self, candidate: Candidate) -> plan.Plan:
        """Compiles a candidate's step.

        Raises:
          UserError: see `plan.plan`; or the mesh can't be made, or doesn't fit the experiment.
        """
        return plan.plan(self._job_of(candidate))

    def compile(self, outcome: Outcome) -> None:
        """Compiles a candidate's step, and fills in what it needs or the reason why it can't be compiled."""
        started = time.monotonic()
        try:
            result = self.plan_of(outcome.candidate)
        except _ERRORS as error:
            outcome.reason = _reason(error)
            outcome.compiled_in = time.monotonic() - started
            outcome.too_large = "RESOURCE_EXHAUSTED" in f"{error} {error.__cause__}"
            if outcome.too_large:
                self._leave_out_larger(outcome)
            return
        outcome.compiled_in = time.monotonic() - started
        outcome.bytes, outcome.padding = result.total, result.padding
        outcome.details = plan_page_data.plan_record(result, result.memory_over_time)
        estimate = result.estimate
        assert estimate is not None  # the chip is known
        outcome.shortest, outcome.longest = estimate.shortest, estimate.longest
        if estimate.collectives:
            longest = estimate.collectives[0]
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
        """Leaves out the candidates that have more rows at a time on the same mesh than one that doesn't fit.

        One minibatch is never left out for several: these hold the accumulated gradients besides their own.
        """
        known, default = too_large.candidate, self._job.partitioner.num_minibatches
        number = known.minibatches or default
        same = [o for o in self.outcomes if (o.candidate.mesh, o.candidate.remat) == (known.mesh, known.remat)]
        larger = [
            o
            for o in same
            if (o.candidate.rows or 0) >= (known.rows or 0)
            and ((o.candidate.minibatches or default) == number or 1 < (o.candidate.minibatches or default) < number)
        ]
        _leave_out(larger, f"{known} doesn't fit, and this one has no fewer rows in a minibatch")


def _reason(error: Exception) -> str:
    """Returns the first line of an error; its kind if it has no text."""
    return first_paragraph(error).partition("\n")[0] or type(error).__name__


def _settings_text(settings: tuple[str | None, int | None]) -> str:
    policy, rows = settings
    return ", ".join([policy or "the experiment's policy", *([f"{rows} rows"] if rows else [])])


def _leave_out(outcomes: Sequence[Outcome], reason: str | Callable[[Outcome], str]) -> None:
    """Gives each candidate that isn't known a reason to be left out."""
    for outcome in outcomes:
        if not outcome.is_known:
            outcome.reason = reason if isinstance(reason, str) else reason(outcome)


def _drop_details(outcomes: Sequence[Outcome]) -> None:
    """Keeps only the details that a page shows, so that `plan_search.json` stays small."""
    shown = {id(outcome) for outcome in plan_page_data.worth_showing(outcomes)}
    for outcome in outcomes:
        if id(outcome) not in shown:
            outcome.details = None


def _traced(job: Job) -> tuple[str, plan_prediction.Work]:
    """Returns the traced train step as text, without what differs between equal programs, and what it computes."""
    step, forward = (_jaxpr(job, fn, is_eval=is_eval) for fn, is_eval in _STEPS)
    work = plan_prediction.Work(jaxpr_costs.dot_costs(step.jaxpr), jaxpr_costs.dot_costs(forward.jaxpr))
    return _POLICY.sub("", str(step)), work


def _jaxpr(job: Job, fn: StepFn, *, is_eval: bool) -> core.ClosedJaxpr:
    """Traces a step on the job's mesh."""
    partitioner = job.partitioner
    step = partitioner.partition(fn, job.inputs_shape_dtype, is_eval=is_eval)
    state = partitioner.abstract_state(with_opt_states=not is_eval)
    return step.fn.trace(state, job.abstract_prng_key, partitioner.abstract_inputs(step)).jaxpr
