"""An `early_stopping_fn` that watches one metric."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from praxis import base_hyperparams

from spmd_trainer.errors import UserError, did_you_mean


class EarlyStopping(base_hyperparams.FiddleBaseParameterizable):
    """Ends training when a metric has not improved for some evaluations; the best checkpoint is kept in `best/`.

        task_p.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx", patience=3)

    Attributes:
      metric: 'DATASET/metric', as evaluations during training are logged.
      mode: 'min' where less is better, 'max' where more is.
      patience: after so many evaluations in a row without improvement training ends.
      min_delta: less than this is no improvement.
    """

    metric: str = ""
    mode: str = "min"
    patience: int = 3
    min_delta: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if "/" not in self.metric:
            raise ValueError(f"EarlyStopping.metric={self.metric!r}; set it to 'DATASET/metric'")
        if self.mode not in ("min", "max"):
            raise ValueError(f"EarlyStopping.mode={self.mode!r}; set it to 'min' or 'max'")
        if self.patience < 1:
            raise ValueError(f"EarlyStopping.patience={self.patience}; set it to 1 or more")
        self._best: float | None = None
        self._since_best = 0

    @property
    def improved(self) -> bool:
        """Whether the evaluation that was last told is the best so far."""
        return self._best is not None and not self._since_best

    def dataset_among(self, names: Iterable[str]) -> str | None:
        """Returns the dataset that `metric` is of, or None if it is none of `names`. Names may contain slashes."""
        return max((name for name in names if self.metric.startswith(f"{name}/")), key=len, default=None)

    def __call__(self, metrics: Mapping[str, Any], running_mode: str, step: int, is_last: bool) -> bool:
        """Takes note of an evaluation.

        Args:
          metrics: {'DATASET/metric': value}.
          running_mode: 'eval'; Pax's signature, like the following.
          step: the training step.
          is_last: whether training ends after it anyway.

        Returns:
          Whether training should end.

        Raises:
          UserError: there is no such metric.
        """
        del running_mode, step, is_last
        if self.metric not in metrics:
            raise UserError(
                f"EarlyStopping.metric is {self.metric!r}; the evaluations give {sorted(metrics)}"
                f"{did_you_mean(self.metric, metrics)}"
            )
        value = float(metrics[self.metric]) * (1 if self.mode == "min" else -1)
        # A NaN is below nothing, so it is no improvement.
        if value < (float("inf") if self._best is None else self._best - self.min_delta):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1
        return self._since_best >= self.patience
