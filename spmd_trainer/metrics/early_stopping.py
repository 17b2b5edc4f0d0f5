"""Early stopping by one metric, for `early_stopping_fn`."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from praxis import base_hyperparams

from spmd_trainer.errors import UserError, did_you_mean


class EarlyStopping(base_hyperparams.FiddleBaseParameterizable):
    """Ends training when a metric has not improved for several evaluations; `best/` keeps the best checkpoint.

        task_p.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric="heldout/log_pplx", patience=3)

    Attributes:
      metric: 'DATASET/metric', as logged by evaluations during training.
      mode: 'min' if lower is better, 'max' if higher is better.
      patience: number of evaluations in a row without improvement after which training ends.
      min_delta: smallest change that counts as an improvement.
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
        """True if the latest evaluation is the best so far."""
        return self._best is not None and not self._since_best

    def dataset_among(self, names: Iterable[str]) -> str | None:
        """Returns the dataset of `metric`, or None if it is not one of `names`. Names may contain slashes."""
        return max((name for name in names if self.metric.startswith(f"{name}/")), key=len, default=None)

    def __call__(self, metrics: Mapping[str, Any], running_mode: str, step: int, is_last: bool) -> bool:
        """Records an evaluation. Returns True if training should end.

        Args:
          metrics: {'DATASET/metric': value}.
          running_mode, step, is_last: unused; part of Pax's signature.

        Raises:
          UserError: `metrics` lacks the metric.
        """
        del running_mode, step, is_last
        if self.metric not in metrics:
            raise UserError(
                f"EarlyStopping.metric is {self.metric!r}; the evaluations give {sorted(metrics)}"
                f"{did_you_mean(self.metric, metrics)}"
            )
        value = float(metrics[self.metric]) * (1 if self.mode == "min" else -1)
        # NaN is never an improvement: comparisons with NaN are false.
        if value < (float("inf") if self._best is None else self._best - self.min_delta):
            self._best, self._since_best = value, 0
        else:
            self._since_best += 1
        return self._since_best >= self.patience
