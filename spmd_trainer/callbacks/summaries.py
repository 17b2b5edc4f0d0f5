"""The training summaries: TensorBoard events and `metrics.jsonl`."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_trainer.callbacks.base import Callback, Run, Turn
from spmd_trainer.callbacks.invalid_steps import is_valid
from spmd_trainer.metrics.averages import StepAverages
from spmd_trainer.metrics.packing import Scalars


class Summaries(Callback):
    """Writes a step's scalars to `summaries/train` every `summary_interval_steps`, with what other callbacks logged.

    If something was logged after the last of these, the step at which the run ends has a summary too.
    """

    turn = Turn.WRITES

    def on_open(self, run: Run) -> None:
        """Reads the intervals.

        Raises:
          UserError: `task.train.summary_accumulate_interval_steps` doesn't fit `summary_interval_steps`.
        """
        train_p = run.task.train
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = train_p.summary_interval_steps
        self._averages = StepAverages(train_p.summary_accumulate_interval_steps, self._interval)
        self._last_step = 0
        self._last: Mapping[str, float] = {}  # what is written of the last step, or its own scalars
        self._unwritten: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        """Makes TensorBoard forget steps that an earlier start has taken after the checkpoint: they are taken again."""
        run.summaries.replace_from("train", run.first_step + 1)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Adds the step to the averages, and writes them where a summary is due."""
        logged = run.take_logged()
        if is_valid(scalars):
            self._averages.add(step, scalars)
        self._last_step, self._last = step, scalars
        if step % self._interval == 0:
            self._write(run, {**self._averages.take(scalars), **logged})
        else:
            self._unwritten |= logged

    def before_save(self, run: Run, step: int) -> None:
        """Writes out all scalars: a checkpoint must never outlive the scalars of the steps before it."""
        del step
        run.summaries.flush()

    def on_end(self, run: Run) -> None:
        """Writes the last step's summary if something was logged that is in none, and writes out all scalars."""
        self._unwritten |= run.take_logged()
        if self._unwritten and self._last_step:
            self._write(run, {**self._averages.take(self._last), **self._unwritten})
        run.summaries.flush()

    def _write(self, run: Run, scalars: Mapping[str, float]) -> None:
        skipped = {} if run.input is None else run.input.skipped
        counts = {f"input/skipped/{name}": float(count) for name, count in skipped.items() if count}
        self._last, self._unwritten = {**scalars, **counts}, {}
        run.summaries.write("train", self._last_step, self._last)
