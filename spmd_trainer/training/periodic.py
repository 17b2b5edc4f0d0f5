"""Evaluates and decodes between training steps: at the task's intervals, and when training is complete."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax

from spmd_trainer.callbacks import Run
from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.train_states import PyTree
from spmd_trainer.training import averages, decode, evaluate
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.dataset_batches import no_op
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.training.signals import Interrupted, SaveRequest


class Due(NamedTuple):
    """Which periodic work is due after a training step."""

    save: bool
    evaluate: bool
    decode: bool


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A run's save, evaluation and decode intervals as plain numbers, because reading a config at every step is slow.

    Attributes:
      save_interval: steps between two saves; 0 for none.
      eval_interval: steps between two evaluations; 0 for none.
      evaluates_at_end: whether training ends with an evaluation. It does if evaluations have an interval, and there is a dataset
        or a training batch to evaluate.
      decode_interval: steps between two decodes; 0 for none.
      decode_start: no decode before this step.
    """

    num_steps: int
    saves: bool
    save_interval: int
    eval_interval: int
    evaluates_at_end: bool
    decode_interval: int
    decodes_at_end: bool
    decode_start: int

    @classmethod
    def of_run(cls, config: TrainConfig) -> Schedule:
        experiment = config.experiment.config
        train_p = experiment.task.train
        eval_interval = int(train_p.eval_interval_steps or 0) if config.eval_on_test else 0
        decode_interval = int(train_p.decode_interval_steps or 0) if config.decode_during_train else 0
        return cls(
            num_steps=int(train_p.num_train_steps),
            saves=config.enable_checkpoint_saving,
            save_interval=int(train_p.save_interval_steps or 0) if config.enable_checkpoint_saving else 0,
            eval_interval=eval_interval,
            evaluates_at_end=bool(eval_interval and (experiment.eval_datasets or not train_p.eval_skip_train)),
            decode_interval=decode_interval,
            decodes_at_end=bool(decode_interval and experiment.decode_datasets),
            decode_start=train_p.decode_start_after_n_steps,
        )

    def saves_at_start(self, checkpoints: Checkpointer, step: int) -> bool:
        """Returns True if the run should save its initial state at step 0, as Pax does. Called by every process.

        With this save, a run that is killed in its first save interval has a checkpoint to evaluate and to continue from.
        """
        return self.saves and step == 0 and checkpoints.should_save(step)

    def due(self, checkpoints: Checkpointer, step: int, *, asked: bool, leaves: bool) -> Due:
        """Returns the work that is due after `step`. After the last training step, this is only a save; see `due_at_end`.

        Args:
          checkpoints: the run's checkpoints, whose `should_save` decides which steps are saved.
          asked: True if a signal requested a checkpoint.
          leaves: True if the run stops early after this step. Then nothing is due; the run saves its state when the loop ends.
        """
        if leaves:
            return Due(save=False, evaluate=False, decode=False)
        if step >= self.num_steps:
            return Due(save=self.saves, evaluate=False, decode=False)
        return Due(
            save=self.saves and (asked or checkpoints.should_save(step)),
            evaluate=bool(self.eval_interval) and step % self.eval_interval == 0,
            decode=bool(self.decode_interval) and step >= self.decode_start and step % self.decode_interval == 0,
        )

    def upcoming(self, step: int) -> dict[str, int]:
        """Returns {'save', 'eval' or 'decode': the next step after `step` at which it is due}, without disabled ones."""
        found = {}
        for what, interval, first in (
            ("save", self.save_interval, 0),
            ("eval", self.eval_interval, 0),
            ("decode", self.decode_interval, self.decode_start),
        ):
            if interval:
                found[what] = min(-(-max(step + 1, first) // interval) * interval, self.num_steps)
        return found

    def due_at_end(self, step: int, *, evaluated: int | None, decoded: int | None) -> Due:
        """Returns the evaluation and the decode to do after the last step, `step`, unless done at this step already.

        Args:
          evaluated: the step of the last evaluation; None if there was none.
          decoded: the step of the last decode; None if there was none.
        """
        return Due(
            save=False,
            evaluate=self.evaluates_at_end and evaluated != step,
            decode=self.decodes_at_end and step >= self.decode_start and decoded != step,
        )


class PeriodicWork:
    """Evaluates and decodes during training.

    Attributes:
      results: the metrics of the last evaluation, as 'DATASET/metric'.
      evaluated: the step of the last evaluation of this run; None before the first.
      interrupted: which part of the final work a signal interrupted, 'evaluation' or 'decode'; '' if none.
    """

    def __init__(self, job: Job, run: Run, callbacks: CallbackList):
        self.results: dict[str, float] = {}
        self.evaluated: int | None = None
        self.interrupted = ""
        self._decoded: int | None = None
        self._run = run
        self._callbacks = callbacks
        self.use(job)

    def use(self, job: Job) -> None:
        """Switches to a job on a new mesh. The evaluation and decode steps are compiled again."""
        self._job = job
        self._evaluations = evaluate.Evaluations(job, self._run.summaries)
        self._decodes = decode.Decodes(job, self._run.summaries)

    def use_batch(self, job: Job) -> None:
        """Switches to the training batches of `job`, whose shape differs from the current one."""
        self._job = job
        self._evaluations.use_batch(job)

    def do(
        self, due: Due, batches: Prefetcher, batch: PyTree | None, between_batches: Callable[[], None] = no_op
    ) -> None:
        """Evaluates the run's state if `due.evaluate` is True, and decodes with it if `due.decode` is True.

        Args:
          batch: the batch of the last training step; None if the batch isn't on the devices.
          between_batches: called before each batch of a dataset.
        """
        run, task = self._run, self._job.task
        if due.evaluate:
            run.begin(f"evaluation at step {run.step}", "evaluation")
            skips = task.train.eval_skip_train
            self.results = self._evaluations.run(
                averages.evaluated(run.state, averages.of(self._job)),
                run.step,
                None if skips else batch,
                next_batch=None if skips else lambda: getattr(batches.peek(), "batch", None),  # the next step takes it
                between_batches=between_batches,
            )
            self.evaluated = run.step
            self._callbacks.call("after_eval", run, run.step, self.results)
        if due.decode:
            run.begin(f"decoding at step {run.step}", "decode")
            eval_state = averages.evaluated(run.state, averages.of(self._job, decodes=True))
            self._decodes.run(eval_state, run.step, between_batches)
            self._decoded = run.step
            if jax.process_index() == 0:
                for dataset, samples in self._decodes.samples(run.step).items():
                    self._callbacks.call("after_decode", run, run.step, dataset, samples)

    def complete(self, schedule: Schedule, request: SaveRequest, batches: Prefetcher, batch: PyTree | None) -> None:
        """Evaluates and decodes after the last step, unless this was done before. Meanwhile the last checkpoint is written.

        A signal interrupts this work between two batches. Restarting the run completes it.
        """
        step = self._run.step
        due = schedule.due_at_end(step, evaluated=self.evaluated, decoded=self._decoded)
        if not any(due):
            return
        request.training = False
        try:
            request.leave_if_asked()
            self.do(due, batches, batch, request.leave_if_asked)
        except Interrupted:
            self.interrupted = "evaluation" if due.evaluate and self.evaluated != step else "decode"
