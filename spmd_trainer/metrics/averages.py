"""Averages of a step's scalars over several training steps, for summaries that are not of one step alone."""

from __future__ import annotations

from spmd_trainer.errors import UserError
from spmd_trainer.metrics.packing import Scalars


class StepAverages:
    """`task.train.summary_accumulate_interval_steps`: averages the scalars of the steps since the last summary.

    Every `every` steps one step's scalars are taken into the average. Weighted scalars are averaged by their weights, in
    float64; the loss and the layers' summaries are plain means over the steps taken. Invalid steps (NaN or Inf, or skipped by
    the learner) are left out: one of them would turn the whole average into NaN. `invalid_steps` counts them.
    """

    def __init__(self, every: int | None, summary_interval: int):
        """Starts an empty average.

        Args:
          every: take the steps whose numbers are multiples of this; None averages nothing.
          summary_interval: steps between two summaries.

        Raises:
          UserError: `every` is below 1, or some summaries would have no step to average.
        """
        if every is not None and not 1 <= every <= summary_interval:
            raise UserError(
                f"task.train.summary_accumulate_interval_steps={every}: it must be between 1 and "
                f"task.train.summary_interval_steps ({summary_interval}), so that each summary has a step to average; None "
                "writes the step's own values"
            )
        self._every = every
        self._clear()

    def add(self, step: int, scalars: Scalars) -> None:
        """Takes in a valid step, when it is one of those that count."""
        if self._every is None or step % self._every:
            return
        if scalars.loss is not None:
            self._losses.append(scalars.loss)
        for name, value in scalars.values.items():
            self._values.setdefault(name, []).append((value, scalars.weights[name]))
        for name, value in scalars.summaries.items():
            self._summaries.setdefault(name, []).append(value)

    def take(self, scalars: Scalars) -> dict[str, float]:
        """Returns what a summary writes at a step: {'loss': ..., metric: ..., summary: ...}. The next average is empty.

        Args:
          scalars: the step's own, which are given back where nothing is averaged, and where no valid step since the last
            summary (or since the run was started) was one that counts.
        """
        result = {name: sum(values) / len(values) for name, values in self._summaries.items()}
        for name, pairs in self._values.items():
            total = sum(weight for _, weight in pairs)
            # A step in which nothing had any weight has no value to average.
            result[name] = sum(v * w for v, w in pairs if w) / total if total else pairs[-1][0]
        if self._losses:
            result["loss"] = sum(self._losses) / len(self._losses)
        self._clear()
        return result or scalars_of(scalars)

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._summaries: dict[str, list[float]] = {}


def scalars_of(scalars: Scalars) -> dict[str, float]:
    """Returns the loss, the weighted scalars and the summaries of one step by name."""
    loss = {} if scalars.loss is None else {"loss": scalars.loss}
    return {**loss, **scalars.values, **scalars.summaries}
