"""Averages of scalars over several training steps, for summaries."""

from __future__ import annotations

from collections.abc import Mapping

from spmd_trainer.errors import UserError
from spmd_trainer.metrics import clu_metrics
from spmd_trainer.metrics.clu_metrics import CluMetrics
from spmd_trainer.metrics.packing import Scalars


class StepAverages:
    """Averages the scalars since the last summary (`task.train.summary_accumulate_interval_steps`).

    One step in every `every` steps is included. Weighted scalars are averaged by their weights, in float64; the loss
    and the layers' summaries are plain means; clu metrics are merged. The caller leaves out invalid steps (NaN or Inf,
    or skipped by the learner), because one of them would make the average NaN; the summary `invalid_steps` counts
    them.
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
        self._clu = clu_metrics.merged(self._clu, scalars.clu)

    def take(self, scalars: Mapping[str, float]) -> dict[str, float]:
        """Returns the averages {'loss': ..., metric: ..., summary: ...} and starts an empty average.

        Returns `scalars`, the step's own, if no step was added.
        """
        result = {name: sum(values) / len(values) for name, values in self._summaries.items()}
        for name, pairs in self._values.items():
            total = sum(weight for _, weight in pairs)
            # If all weights are 0, use the last value.
            result[name] = sum(v * w for v, w in pairs if w) / total if total else pairs[-1][0]
        if self._losses:
            result["loss"] = sum(self._losses) / len(self._losses)
        result |= clu_metrics.computed(self._clu)
        self._clear()
        return result or dict(scalars)

    def _clear(self) -> None:
        self._losses: list[float] = []
        self._values: dict[str, list[tuple[float, float]]] = {}
        self._summaries: dict[str, list[float]] = {}
        self._clu = {}
