"""`--mode=plan --search=memory`: searches for changes that make an experiment fit its chips, cheapest first.

The search is called a ladder. Each rung is a change that saves memory: rematerialization, the optimizer state in fewer bits or in
host memory, minibatches, accumulating the minibatches' gradients in bfloat16, or a different mesh. The ladder compiles one rung
after another, each on top of the earlier ones, until a program fits. A rung that saves nothing is undone at once. In the end,
rungs that turn out not to be needed are undone too. If no program fits, the ladder tries fewer rows (examples in the global
batch), and names chips with enough memory.

Most rungs need only one compilation, because a rung's policy or dtype is chosen by predicted bytes: a policy changes the bytes of
the activations that loops stack, a dtype changes the bytes of the state. Numbers of minibatches or rows are predicted from two
that were compiled. The printed table has predicted and compiled bytes.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Iterator, Sequence

from absl import logging
from praxis.layers import AutodiffCheckpointType

from spmd_trainer.errors import UserError, first_line, terminal
from spmd_trainer.kernels.chips import BY_TOPOLOGY
from spmd_trainer.planner import plan, plan_candidates, plan_page, plan_prediction, plan_report
from spmd_trainer.planner.plan_candidates import Candidate, Try, setting
from spmd_trainer.planner.plan_report import Outcome, Step
from spmd_trainer.planner.plan_search import ERRORS, Search, of_program
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.step import host_states, opt_state_dtypes
from spmd_trainer.step.mesh_choice import mesh_flag
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import ChipsConfig, PlanConfig

# Config fields that rungs change.
_OPT_STATE_DTYPE = "task.train.learner.opt_state_dtype"
_OPT_STATE_MEMORY = "task.train.learner.opt_state_memory_kind"
_ACCUMULATION = "task.train.gradient_accumulation_dtype"
# Minibatches are doubled fewer times than this.
_MOST_DOUBLINGS = 7
# Maximum number of meshes that are compiled.
_MOST_MESHES = 3
# A rung that saves a smaller share of the bytes than this is undone.
_LEAST_SAVING = 0.005
# Bytes by which the arrays in loops may miss the line of a prediction, as a share of it. Few of them are in memory together.
_MOST_OFF_LINE = 0.05


def search(job: Job) -> None:
    """Searches for changes that make the job's train step fit, and prints them with the flags to use.

    Also writes `plan_search.json` and `plan.html` if the job has a directory for reports.

    Raises:
      UserError: no fit was found with the experiment's number of rows. The message says whether the step fits with fewer rows.
    """
    found = Search(job, ())
    ladder = MemoryLadder(job, found, plan_report.Store(job, ("memory",)))
    try:
        ladder.climb(job.config.of(PlanConfig).budget)
    except KeyboardInterrupt:
        logging.info("interrupted; this is the ladder so far")
        ladder.ended_early = (
            "the search was interrupted before the last rung; with --job_log_dir=DIR the same command goes on"
        )
    ladder.write()
    if ladder.has_fewer_rows:
        raise UserError(ladder.text())
    terminal.write(ladder.text())


class MemoryLadder:
    """One search of the memory ladder: the programs that were compiled, and the one that fits.

    Attributes:
      steps: the compiled programs, in the order in which they were compiled.
      fitting: the outcome of the program that fits, without changes that it doesn't need; None if no program fits.
      ended_early: a sentence that says why the search ended before the last rung; '' if it did not.
    """

    def __init__(self, job: Job, found: Search, store: plan_report.Store):
        self._job, self._search, self._store = job, found, store
        self._ends = 0.0
        self._traced: dict[Candidate, tuple[str, plan_prediction.Work]] = {}
        # The changes that save memory, with the bytes before each.
        self._climbed: list[tuple[Try, int]] = []
        self.steps: list[Step] = []
        self.fitting: Outcome | None = None
        self.ended_early = ""

    def climb(self, budget: float) -> None:
        """Compiles the experiment's program, then adds rungs (changes) until a program fits or `budget` seconds have passed."""
        self._ends = time.monotonic() + budget
        first = self._search.outcomes[0].candidate
        at = self._compile("as it is", first)
        rungs = (self._remat, self._moments, self._host_memory, self._minibatches, self._accumulation, self._meshes)
        for rung in (*rungs, self._rows):
            if at.seconds is not None or time.monotonic() > self._ends:
                break
            for tried in rung(at):
                if time.monotonic() > self._ends:
                    break
                after = self._compile(tried.rung, tried.change(at.candidate), tried.predicted)
                most = (1 - _LEAST_SAVING) * (at.bytes or math.inf)
                if after.seconds is not None or (after.bytes or math.inf) < most:
                    self._climbed.append((tried, at.bytes or 0))
                    at = after
                if at.seconds is not None:
                    break
        if at.seconds is not None:
            self.fitting = at
            self._drop_needless(first, at)
        elif time.monotonic() > self._ends:
            self.ended_early = (
                "the budget ran out before the last rung; with --job_log_dir=DIR a longer --budget goes on"
            )

    def write(self) -> None:
        """Writes the results of all programs, if the job has a directory for reports."""
        outcomes = [step.outcome for step in self.steps]
        self._store.write(outcomes)
        plan_page.write_search_page(self._job, outcomes, chip_memory=self._search.memory)

    @property
    def has_fewer_rows(self) -> bool:
        """True if no program was found that fits with the experiment's number of rows."""
        return self.fitting is None or self.fitting.candidate.rows is not None

    def text(self) -> str:
        """Returns the ladder as a table, and the flags of the program that fits."""
        chips = self._job.config.of(ChipsConfig).topology
        lines = [
            f"the memory ladder on {chips}: JAX can use {bytes_text(self._search.memory)} of a chip",
            f"  {'predicted':>10}  {'compiled':>10}  {'step':>9}  change, on top of those before it that save memory",
            *(step.line() for step in self.steps),
            "* fits",
        ]
        if self.fitting is None and self.ended_early:
            lines.append(self.ended_early)
        elif self.has_fewer_rows:
            lines.append(f"nothing fits {chips} with {count_text(self._job.num_rows, 'row')}. {self._larger_chips()}")
        if self.fitting is not None:
            rows = self.fitting.candidate.rows
            lines.append(
                "run with" if rows is None else f"the nearest that fits has {count_text(rows, 'row')}; run it with"
            )
            lines.append(f"  {plan_report.run_flags(self._job, self.fitting.candidate)}")
            kind, needed = self._job.partitioner.mesh.devices.flat[0].device_kind, self.fitting.bytes or 0
            if flag := plan.memory_setting(kind, needed, self._search.machine.chip.memory_bytes):
                lines.append(f"  {flag}")
        return "\n".join(lines) + "\n"

    # --- rungs -------------------------------------------------------------------------------------------------------

    def _remat(self, at: Outcome) -> Iterator[Try]:
        """Yields changes to rematerialization policies that save fewer activations, in ascending order of FLOPs.

        If several policies give the same program, yields only one of them.
        """
        if all("save_nothing" in p for p in plan_candidates.policy_fields(self._job.config.experiment).values()):
            return  # nothing to change, or nothing left to save
        kept, devices, state = self._trace(at.candidate)[1], self._job.partitioner.mesh.size, self._state(at.candidate)
        found: dict[str, tuple[float, Try]] = {}
        with Phase("tracing rematerialisation policies", announce_after=2.0):
            for policy in AutodiffCheckpointType:
                change = functools.partial(dataclasses.replace, remat=policy.value)
                try:
                    text, work = self._trace(change(at.candidate))
                except ERRORS as error:
                    logging.info("%s: %s", policy.value, first_line(error))
                    continue
                if (saved := int((kept.saved_bytes - work.saved_bytes) / devices)) > 0:
                    tried = Try(f"remat {policy.value}", change, at.bytes and max(state, at.bytes - saved))
                    found.setdefault(text, (work.step.flops, tried))
        yield from self._first_that_fits([tried for _, tried in sorted(found.values(), key=lambda one: one[0])])

    def _moments(self, at: Outcome) -> Iterator[Try]:
        """Yields changes of the optimizer state's dtype: to bfloat16 if predicted to fit, to 8 bits if bfloat16 doesn't fit."""
        dtypes, tries = opt_state_dtypes.DTYPES, []
        for dtype in dtypes[dtypes.index(self._job.task.train.learner.opt_state_dtype) + 1 :]:
            change = setting(_OPT_STATE_DTYPE, dtype)
            saved = self._state(at.candidate) - self._state(change(at.candidate))
            tries.append(Try(f"optimizer state in {dtype}", change, at.bytes_without(saved)))
        yield from self._first_that_fits(tries)

    def _host_memory(self, at: Outcome) -> Iterator[Try]:
        """Yields the change that puts the optimizer state into host memory, unless the optimizer needs all of it at once."""
        learner = self._job.task.learner
        if learner.opt_state_memory_kind != host_states.DEVICE:
            return
        if learner.sees_stacks:
            why = host_states.why_at_once(learner, self._job.partitioner.layout.var_weight_hparams)
            logging.info("host memory for the optimizer state is not tried, because %s", why)
        else:
            yield Try("optimizer state in host memory", setting(_OPT_STATE_MEMORY, host_states.PINNED_HOST))

    def _accumulation(self, at: Outcome) -> Iterator[Try]:
        """Yields the change that accumulates the minibatches' gradients in bfloat16, if they are accumulated in float32."""
        if at.candidate.minibatches is not None and self._job.task.train.gradient_accumulation_dtype == "float32":
            saved = plan_prediction.trained_bytes(self._search.job_of(at.candidate)) // 2  # half of the sums
            yield Try("gradients added up in bfloat16", setting(_ACCUMULATION, "bfloat16"), at.bytes_without(saved))

    def _minibatches(self, at: Outcome) -> Iterator[Try]:
        """Yields changes to 2, 4, 8, ... times as many minibatches, as long as this gives a device fewer rows per minibatch."""
        now, rows = self._job.partitioner.num_minibatches, self._job.num_rows
        numbers = [number for number in (now * 2**n for n in range(1, _MOST_DOUBLINGS)) if rows % number == 0]
        tries = [
            Try(count_text(n, "minibatch", "minibatches"), functools.partial(dataclasses.replace, minibatches=n))
            for n in numbers
        ]
        yield from self._with_fewer_rows(at.candidate, at.bytes if now > 1 else None, tries)

    def _meshes(self, at: Outcome) -> Iterator[Try]:
        """Yields changes to meshes with the same axes, but less train state on each device, fastest predicted step first.

        Total bytes are not predicted, because the mesh also changes a device's share of weights, gradients and activations.
        """
        mesh = self._job.partitioner.mesh_shape()
        own, work, found = self._state(at.candidate), self._trace(at.candidate)[1], []
        for shape in plan_candidates.meshes(tuple(mesh), math.prod(mesh.values()), self._search.num_slices):
            change = functools.partial(dataclasses.replace, mesh=shape)
            candidate = change(at.candidate)
            try:
                job = self._search.job_of(candidate)
            except ERRORS:  # the mesh doesn't fit the chips or the experiment
                continue
            if self._state(candidate) < own:
                number = job.partitioner.num_minibatches
                seconds = plan_prediction.predict(job, self._search.machine, work, minibatches=number).seconds
                found.append((seconds, Try(f"mesh {mesh_flag(shape)}", change)))
        yield from [tried for _, tried in sorted(found, key=lambda one: one[0])][:_MOST_MESHES]

    def _rows(self, at: Outcome) -> Iterator[Try]:
        """Yields changes to 1/2, 1/4, 1/8, ... of the rows, as long as this gives a device fewer rows.

        The number of minibatches is the experiment's own. Yields nothing if the batch size can't be overridden.
        """
        try:
            plan_candidates.batch_field(self._job.config.experiment)
        except UserError:
            logging.info("fewer rows are not tried: train_datasets[0].batch_size is no number in the config")
            return
        start = dataclasses.replace(at.candidate, minibatches=self._search.outcomes[0].candidate.minibatches)
        numbers = [self._job.num_rows >> n for n in range(1, self._job.num_rows.bit_length())]
        change = functools.partial(dataclasses.replace, minibatches=start.minibatches)
        tries = [Try(count_text(n, "row"), functools.partial(change, rows=n)) for n in numbers]
        yield from self._with_fewer_rows(start, at.bytes if start == at.candidate else None, tries)

    # --- how they are tried ------------------------------------------------------------------------------------------

    def _with_fewer_rows(self, start: Candidate, of_start: int | None, tries: Sequence[Try]) -> Iterator[Try]:
        """Yields the tries that give a device fewer rows per minibatch than all before them, with predictions by `_at_rows`.

        Skips tries that are predicted not to fit, except for the last one. `of_start`: bytes of the candidate `start`; None if
        they are unknown, or if it lacks the loop over minibatches that the tries have.
        """
        job, own = self._search.job_of(start), self._job.partitioner.num_minibatches
        rows, last = plan_prediction.rows_of_device(job, start.minibatches or own), None
        known = [(rows, of_start, start)] if of_start else []
        for tried in tries:
            candidate = tried.change(start)
            few = plan_prediction.rows_of_device(job, candidate.minibatches or own, candidate.rows)
            if few >= rows:
                continue
            if time.monotonic() > self._ends:
                return
            predicted = self._at_rows(known, few, candidate)
            last = dataclasses.replace(tried, predicted=predicted)
            if predicted is None or predicted <= self._search.memory:
                yield last
                last = None
                if not (num_bytes := self.steps[-1].outcome.bytes):
                    continue  # e.g. the minibatches don't divide the rows
                known.append((few, num_bytes, candidate))
            rows = few
        if last:
            yield last

    def _at_rows(self, known: Sequence[tuple[int, int, Candidate]], rows: int, candidate: Candidate) -> int | None:
        """Predicts a candidate's bytes from a line through the last two of `known`; None if it has fewer.

        Also returns None if the traced steps show that there is no such line. E.g. a block of the loss has the same number of
        tokens in all programs whose minibatches are larger, and fewer in the others.

        Args:
          known: (a device's rows per minibatch, bytes, candidate) of compiled programs.
          rows, candidate: the same for the program to predict.
        """
        if len(known) < 2:
            return None
        (many, most, larger), (few, least, smaller) = known[-2:]
        share = (rows - few) / (many - few)
        predicted = least + share * (most - least)
        try:
            of_larger, of_smaller, own = (self._trace(one)[1].bytes_in_loops for one in (larger, smaller, candidate))
        except ERRORS:  # `_compile` says why
            return None
        off_line = abs(of_smaller + share * (of_larger - of_smaller) - own) / self._job.partitioner.mesh.size
        return int(predicted) if off_line <= _MOST_OFF_LINE * predicted else None

    def _first_that_fits(self, tries: Sequence[Try]) -> Iterator[Try]:
        """Yields the changes that are predicted to fit, in order, and last the change with the fewest predicted bytes.

        The caller stops when a change fits. After each compilation, predictions are corrected; see `Corrections`. After one with
        unknown bytes, only the change with the fewest is left. If a change has no prediction, yields all changes.
        """
        if any(tried.predicted is None for tried in tries):
            yield from tries
            return
        waiting, corrections = list(tries), Corrections()
        while waiting:
            now = list(map(corrections.of, waiting))
            smallest = min(now, key=lambda tried: tried.predicted or 0)
            chosen = next((tried for tried in now if (tried.predicted or 0) <= self._search.memory), smallest)
            yield chosen
            if chosen is smallest:
                return
            index, num_bytes = now.index(chosen), self.steps[-1].outcome.bytes
            corrections.add(waiting[index], num_bytes)
            waiting = waiting[index + 1 :] if num_bytes else [waiting[now.index(smallest)]]

    def _compile(self, rung: str, candidate: Candidate, predicted: int | None = None) -> Outcome:
        """Compiles a candidate, adds it to `steps` and returns its outcome. If compilation fails, `outcome.reason` says why."""
        outcome = Outcome(candidate)
        self._store.read([outcome])
        try:
            job = self._search.job_of(candidate)
            of_program([outcome], plan_prediction.program(job, self._trace(candidate)[0]))
            outcome.state_bytes, outcome.rows = self._state(candidate), job.num_rows
            if not outcome.compiled_in:
                self._search.compile(outcome)
        except ERRORS as error:
            outcome.reason = first_line(error)
        self.steps.append(Step(rung, outcome, predicted))
        logging.info("%s", self.steps[-1].line().strip())
        self._store.write([step.outcome for step in self.steps])
        return outcome

    def _drop_needless(self, first: Candidate, fitting: Outcome) -> None:
        """Undoes each change that the program doesn't need to fit, earliest first. Compiles only what is predicted to fit."""
        kept = [tried for tried, _ in self._climbed]
        for index, (tried, before) in enumerate(self._climbed[:-1]):
            rest = [one for one in kept if one is not tried]
            candidate = functools.reduce(lambda at, one: one.change(at), rest, first)
            saved = before - self._climbed[index + 1][1]
            if candidate.more != fitting.candidate.more:  # host memory makes bits of the state free
                saved = self._state(candidate) - self._state(fitting.candidate)
            predicted = (fitting.bytes or 0) + saved
            if candidate == fitting.candidate:
                kept = rest
            elif predicted <= self._search.memory and time.monotonic() < self._ends:
                outcome = self._compile(f"without {tried.rung}", candidate, predicted)
                if outcome.seconds is not None:
                    kept = rest
                    self.fitting = fitting = outcome

    def _trace(self, candidate: Candidate) -> tuple[str, plan_prediction.Work]:
        if candidate not in self._traced:
            self._traced[candidate] = plan_prediction.traced(self._search.job_of(candidate))
        return self._traced[candidate]

    def _state(self, candidate: Candidate) -> int:
        return plan_prediction.state_bytes(self._search.job_of(candidate))[0]

    def _larger_chips(self) -> str:
        """Returns a sentence that names the chips with enough memory for the smallest compiled program that has all rows."""
        whole = [s.outcome.bytes for s in self.steps if s.outcome.bytes and s.outcome.candidate.rows is None]
        if not whole:
            return "The compiler doesn't say how many bytes it needs"
        names = [n for n, chip in BY_TOPOLOGY.items() if plan.usable_memory(chip.kind, chip.memory_bytes) >= min(whole)]
        have = f"which {', '.join(names)} have" if names else "which no chip has: use more chips"
        return f"The smallest program needs {bytes_text(min(whole))} per chip, {have}"


class Corrections:
    """Corrects predictions of a rung's changes by the error of the compiled program whose prediction was nearest.

    Programs that save similar numbers of bytes have similar errors, e.g. because they recompute the same activations.
    """

    def __init__(self) -> None:
        self._errors: dict[int, int] = {}  # {predicted bytes: compiled bytes - predicted bytes}

    def add(self, tried: Try, num_bytes: int | None) -> None:
        """Records the compiled bytes of a change (None: unknown). `tried` has its own prediction, without corrections."""
        if tried.predicted is not None and num_bytes is not None:
            self._errors[tried.predicted] = num_bytes - tried.predicted

    def of(self, tried: Try) -> Try:
        """Returns a change with its prediction corrected."""
        predicted = tried.predicted
        if predicted is None or not self._errors:
            return tried
        nearest = min(self._errors, key=lambda known: abs(known - predicted))
        return dataclasses.replace(tried, predicted=predicted + self._errors[nearest])
