"""The training summaries: TensorBoard events and `metrics.jsonl`."""

from __future__ import annotations

from spmd_trainer.callbacks.base import Callback, Run
from spmd_trainer.callbacks.invalid_steps import is_valid
from spmd_trainer.metrics.averages import StepAverages
from spmd_trainer.metrics.packing import Scalars


class Summaries(Callback):
    """Writes a step's scalars to `summaries/train` every `summary_interval_steps`, with what other callbacks logged."""

    def on_open(self, run: Run) -> None:
        """Reads the intervals.

        Raises:
          UserError: `task.train.summary_accumulate_interval_steps` doesn't fit `summary_interval_steps`.
        """
        train_p = run.task.train
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = train_p.summary_interval_steps
        self._averages = StepAverages(train_p.summary_accumulate_interval_steps, self._interval)

    def on_start(self, run: Run) -> None:
        """Makes TensorBoard forget steps that an earlier start has taken after the checkpoint: they are taken again."""
        run.summaries.replace_from("train", run.first_step + 1)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Adds the step to the averages, and writes them where a summary is due."""
        logged = run.take_logged()
        if is_valid(scalars):
            self._averages.add(step, scalars)
        if step % self._interval == 0:
            skipped = {} if run.input is None else run.input.skipped
            counts = {f"input/skipped/{name}": float(count) for name, count in skipped.items() if count}
            run.summaries.write("train", step, {**self._averages.take(scalars), **logged, **counts})

    def before_save(self, run: Run, step: int) -> None:
        """Writes out all scalars: a checkpoint must never outlive the scalars of the steps before it."""
        del step
        run.summaries.flush()

    def on_end(self, run: Run) -> None:
        """Writes out all scalars."""
        run.summaries.flush()
