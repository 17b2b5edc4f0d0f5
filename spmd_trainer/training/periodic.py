"""What a training run does between steps: evaluations and decodes, at their intervals and when training is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from spmd_trainer.callbacks.base import CallbackList, Run
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.optim.learner import extract_ema, has_ema
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import decode, evaluate
from spmd_trainer.training.dataset_batches import no_op
from spmd_trainer.training.job import Job
from spmd_trainer.training.schedule import Due, Schedule
from spmd_trainer.training.signals import Interrupted, SaveRequest


class PeriodicWork:
    """Evaluates and decodes during training.

    Attributes:
      results: the metrics of the last evaluation, as 'DATASET/metric'.
      evaluated: the step of the last evaluation of this run; None before the first.
      interrupted: which final work a signal has interrupted, 'evaluation' or 'decode'; else empty.
    """

    def __init__(self, job: Job, run: Run, callbacks: CallbackList):
        """Compiles nothing before the first evaluation or decode."""
        self.results: dict[str, float] = {}
        self.evaluated: int | None = None
        self.interrupted = ""
        self._decoded: int | None = None
        self._run = run
        self._callbacks = callbacks
        self.use(job)

    def use(self, job: Job) -> None:
        """Continues on another mesh: the steps are compiled anew."""
        self._job = job
        self._evaluations = evaluate.Evaluations(job, self._run.summaries)
        self._decodes = decode.Decodes(job, self._run.summaries)

    def do(
        self,
        due: Due,
        batches: Prefetcher,
        batch: PyTree | None,
        between_batches: Callable[[], None] = no_op,
    ) -> None:
        """Evaluates and decodes `run.state`, as far as that is due.

        Args:
          due: what is due.
          batches: the training input after this step.
          batch: the batch that the step took; None if it isn't on the devices.
          between_batches: called between two batches of evaluation and decode.
        """
        run, task = self._run, self._job.task
        if due.evaluate:
            run.begin(f"evaluation at step {run.step}", "evaluation")
            skips = task.train.eval_skip_train
            self.results = self._evaluations.run(
                _eval_state(task, run.state, ema=task.train.eval_use_ema_states),
                run.step,
                None if skips else batch,
                next_batch=None if skips else lambda: peek(batches),
                between_batches=between_batches,
            )
            self.evaluated = run.step
            self._callbacks.call("after_eval", run, run.step, self.results)
        if due.decode:
            run.begin(f"decoding at step {run.step}", "decode")
            eval_state = _eval_state(task, run.state, ema=task.train.decode_use_ema_states)
            self._decodes.run(eval_state, run.step, between_batches)
            self._decoded = run.step
            if jax.process_index() == 0:
                for dataset, samples in self._decodes.samples(run.step).items():
                    self._callbacks.call("after_decode", run, run.step, dataset, samples)

    def complete(self, schedule: Schedule, request: SaveRequest, batches: Prefetcher, batch: PyTree | None) -> None:
        """Evaluates and decodes the last step if that isn't done yet, while its checkpoint is written.

        A signal interrupts it between two batches; started again, the run makes up for what is missing.

        Args:
          schedule: says what is due.
          request: what signals ask for.
          batches, batch: see `do`.
        """
        step = self._run.step
        due = schedule.due_at_end(step, evaluated=self.evaluated, decoded=self._decoded)
        if not due.any:
            return
        request.training = False
        try:
            request.leave_if_asked()
            self.do(due, batches, batch, request.leave_if_asked)
        except Interrupted:
            self.interrupted = "evaluation" if due.evaluate and self.evaluated != step else "decode"


def peek(batches: Prefetcher) -> Any:
    """Returns the batch of the next step and leaves it to that step, or None if the input has ended."""
    prefetched = batches.peek()
    return None if prefetched is None else prefetched.batch


def _eval_state(task: SingleTask, state: TrainState, *, ema: bool) -> TrainState:
    """Returns the part of the training state that evaluation reads, with averaged variables if asked."""
    if not ema:
        return state.to_eval_state()
    if not has_ema(task.learner):
        raise UserError(
            "task.train.eval_use_ema_states or decode_use_ema_states is set, but the learner's optimizer has no ema_decay"
        )
    averages = extract_ema(state.opt_states, state.mdl_vars)
    return dataclasses.replace(state.to_eval_state(), mdl_vars=averages)
