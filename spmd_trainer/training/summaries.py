"""Writes training summaries to TensorBoard and `metrics.jsonl`: scalars of one step, or averages over several steps."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import CluMetrics, Scalars, computed_clu, merged_clu
from spmd_trainer.training.invalid_steps import is_valid


class Summaries(Callback):
    """Writes a step's scalars, and those that other callbacks logged, to `summaries/train` every `summary_interval_steps`.

    Step 1 has a summary too, so that curves begin where training begins. The last step of a run has a summary if callbacks have
    logged scalars since the previous summary.
    """

    turn = Turn.WRITES

    def on_open(self, run: Run) -> None:
        """Reads the summary intervals from `task.train`.

        Raises:
          UserError: `task.train.summary_accumulate_interval_steps` doesn't fit `summary_interval_steps`.
        """
        train_p = run.task.train
        # Reading a field of a config costs as much as waking a thread, so it isn't done at every step.
        self._interval = train_p.summary_interval_steps
        self._averages = StepAverages(train_p.summary_accumulate_interval_steps, self._interval)
        self._last_step = 0
        self._last: Mapping[str, float] = {}  # the last step's summary, or its scalars if it had no summary
        self._unwritten: dict[str, float] = {}

    def on_start(self, run: Run) -> None:
        """Makes TensorBoard discard the values of steps after the restored checkpoint, because the run repeats these steps."""
        run.summaries.replace_from("train", run.first_step + 1)

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        """Adds a valid step to the averages, and writes a summary if one is due."""
        logged = run.take_logged()
        if is_valid(scalars):
            self._averages.add(step, scalars)
        self._last_step, self._last = step, scalars
        if step % self._interval == 0:
            self._write(run, {**self._averages.take(scalars), **logged})
        elif step == 1:
            self._write(run, {**scalars, **logged})
        else:
            self._unwritten |= logged

    def before_save(self, run: Run, step: int) -> None:
        """Flushes all scalars, so that a checkpoint never exists without the scalars of the steps before it."""
        del step
        run.summaries.flush()

    def on_end(self, run: Run) -> None:
        """Writes a summary of the last step if some logged scalars are in no summary yet, and flushes all scalars."""
        self._unwritten |= run.take_logged()
        if self._unwritten and self._last_step:
            self._write(run, {**self._averages.take(self._last), **self._unwritten})
        run.summaries.flush()

    def _write(self, run: Run, scalars: Mapping[str, float]) -> None:
        skipped = {} if run.input is None else run.input.skipped
        counts = {f"input/skipped/{name}": float(count) for name, count in skipped.items() if count}
        self._last, self._unwritten = {**scalars, **counts}, {}
        run.summaries.write("train", self._last_step, self._last)


class StepAverages:
    """Averages the scalars since the last summary (`task.train.summary_accumulate_interval_steps`).

    Only steps whose number is a multiple of `every` are included. Scalars with weights are averaged by their weights, in
    float64; the loss and the layers' summaries are plain means; clu metrics are merged. The caller leaves out invalid steps (NaN
    or Inf, or skipped by the learner), because one of them would make the average NaN. The summary `invalid_steps` counts them.
    """

    def __init__(self, every: int | None, summary_interval: int):
        """Starts an empty average.

        Args:
          every: include the steps whose numbers are multiples of this; None disables averaging.
          summary_interval: steps between two summaries.

        Raises:
          UserError: `every` is below 1, or above `summary_interval`, so that a summary could be empty.
        """
        if every is not None and not 1 <= every <= summary_interval:
            raise UserError(
                f"task.train.summary_accumulate_interval_steps={every}: it must be between 1 and "
                f"task.train.summary_interval_steps ({summary_interval}), so that each summary has a step to average; None "
                "writes the step's own values"
            )
        self._every = every
        self._clu: CluMetrics = {}
        self._clear()

    def add(self, step: int, scalars: Scalars) -> None:
        """Adds the scalars of a valid step, if the average includes the step."""
        if self._every is None or step % self._every:
            return
        if scalars.loss is not None:
            self._losses.append(scalars.loss)
        for name, value in scalars.means.items():
            self._values.setdefault(name, []).append((value, scalars.weights[name]))
        for name, value in scalars.summaries.items():
            self._summaries.setdefault(name, []).append(value)
        self._clu = merged_clu(self._clu, scalars.clu)

    def take(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Returns the averages {'loss': ..., metric: ..., summary: ...} and starts an empty average.

        If no step was added, returns `scalars`, the current step's own values.
        """
        result = {name: sum(values) / len(values) for name, values in self._summaries.items()}
        for name, pairs in self._values.items():
            total = sum(weight for _, weight in pairs)
            # If all weights are 0, use the last value.
            result[name] = sum(v * w for v, w in pairs if w) / total if total else pairs[-1][0]
        if self._losses:
            result["loss"] = sum(self._losses) / len(self._losses)
        result |= computed_clu(self._clu)
        self._clear()
        return result or dict(scalars)

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._summaries: dict[str, list[float]] = {}
        self._clu = {}
