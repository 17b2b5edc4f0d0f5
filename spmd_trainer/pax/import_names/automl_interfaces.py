"""Pax's `automl_interfaces`: the `SearchHParams` that an experiment's `search()` returns, and base classes of its parts."""

from __future__ import annotations

import abc
import dataclasses
import enum
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from praxis import base_hyperparams, pax_fiddle

Metrics = dict[str, float]


class MetricAggregator(enum.StrEnum):
    """How to combine several matching metrics into one value."""

    MAX = "max"
    MIN = "min"
    AVERAGE = "average"
    SUM = "sum"


_AGGREGATES: Mapping[str, Callable[[Sequence[float]], float]] = {
    MetricAggregator.MAX: max,
    MetricAggregator.MIN: min,
    MetricAggregator.AVERAGE: lambda values: sum(values) / len(values),
    MetricAggregator.SUM: sum,
}


class MetricType(enum.Enum):
    """Source of a metric. The enum's value is the prefix of the metric's name; DATASET in it stands for the dataset's name."""

    CUSTOM = ""
    TRAIN_METRICS = "train/"
    EVAL_TRAIN_METRICS = "eval_train/metrics/"
    EVAL_METRICS = "eval_test_DATASET/metrics/"
    EVAL_SCORING_METRICS = "eval_test_DATASET/scoring_eval/"
    DECODE_METRICS = "decode_test_DATASET/"


@dataclasses.dataclass
class Metric:
    """A metric of a trial, selected by the name that Pax gives to it.

    Attributes:
      metric_name: regex of its name, without the prefix of `metric_type`.
      metric_type: the source of the metric.
      dataset_name: name of the dataset; None for any.
      sub_experiment_id: ignored, because this trainer has no sub-experiments.
      aggregator: combines several matching metrics into one value; None: several matching metrics are an error.
    """

    metric_name: str
    metric_type: MetricType = MetricType.CUSTOM
    dataset_name: str | None = None
    sub_experiment_id: str | None = None
    aggregator: MetricAggregator | Callable[[Sequence[float]], float] | None = None

    @property
    def pattern(self) -> str:
        """The regex of the metric's full name, prefix included."""
        prefix = self.metric_type.value.replace("DATASET", self.dataset_name or "[^/]+")
        return f"^{prefix}{self.metric_name}$"

    def get_values(self, metrics: Mapping[str, float]) -> list[float]:
        """Returns the values of all metrics that match."""
        return [value for name, value in metrics.items() if re.match(self.pattern, name, re.IGNORECASE)]

    def get_value(self, metrics: Mapping[str, float]) -> float:
        """Returns the value of the metric.

        Raises:
          KeyError: no metric matches.
          ValueError: several metrics match, and there is no aggregator.
        """
        values = self.get_values(metrics)
        if not values:
            raise KeyError(f"no metric matches {self.pattern!r}; there are {sorted(metrics)}")
        if len(values) == 1:
            return values[0]
        if self.aggregator is None:
            raise ValueError(f"{len(values)} metrics match {self.pattern!r}; name the dataset, or give an aggregator")
        aggregate = _AGGREGATES.get(str(self.aggregator)) if isinstance(self.aggregator, str) else self.aggregator
        assert callable(aggregate)
        return float(aggregate(values))

    @classmethod
    def train(cls, metric_name: str, **about: Any) -> Metric:
        """Returns a metric of training steps."""
        return cls(metric_name, MetricType.TRAIN_METRICS, **about)

    @classmethod
    def eval_train(cls, metric_name: str, **about: Any) -> Metric:
        """Returns a metric of evaluations on a training batch."""
        return cls(metric_name, MetricType.EVAL_TRAIN_METRICS, **about)

    @classmethod
    def eval(cls, metric_name: str, dataset_name: str | None = None, **about: Any) -> Metric:
        """Returns a metric of evaluations on a dataset; None for any dataset."""
        return cls(metric_name, MetricType.EVAL_METRICS, dataset_name, **about)


class BaseAlgorithm(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """A search algorithm."""

    @abc.abstractmethod
    def __call__(self) -> Any:
        """Returns a `pg.DNAGenerator`."""


class BaseReward(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """The reward of a trial: higher is better."""

    @abc.abstractmethod
    def __call__(self, metrics_dict: Metrics, global_step: int) -> float:
        """Returns the reward for metrics at a step."""

    @property
    @abc.abstractmethod
    def used_metrics(self) -> Sequence[Metric]:
        """The metrics that the reward reads."""


class BaseEarlyStoppingPolicy(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """A policy that decides which trials stop early."""

    @abc.abstractmethod
    def __call__(self) -> Any:
        """Returns a `pg.tuning.EarlyStoppingPolicy`."""


class CrossStepMetricAggregator(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """Base of aggregators that combine the metrics of a trial's steps into the metrics of the trial."""

    @abc.abstractmethod
    def __call__(self, metrics_across_steps: Sequence[tuple[int, Metrics]]) -> Metrics:
        """Returns the trial's metrics. `metrics_across_steps`: (step, metrics), in order; at least one."""


@dataclasses.dataclass
class SearchHParams:
    """Settings of a hyperparameter search, as an experiment's `search()` returns them.

    Attributes:
      search_algorithm: config of the algorithm.
      search_reward: config of the reward; None for the loss of the first evaluation dataset, where lower is better.
      early_stopping: config of a policy that stops trials.
      cross_step_metric_aggregator: config of the aggregator of a trial's metrics over its steps; None takes the last step's.
      max_num_trials: maximum number of trials.
      enable_dataset_tuning: also search over choices in the datasets' configs.
      errors_to_skip: ignored: every failed trial is recognised and left out, whatever its error.
      prior_study_ids, add_prior_trials, add_experiment_config_to_metadata, vizier_service_endpoint: ignored: Vizier is not
        supported.
      treats_early_stopped_trials_as_done: True if the algorithm learns from trials that were stopped early.
      train_to_end: ignored: a trial trains to its end, or is stopped early.
      enable_partitioner_tuning, enable_train_programs_tuning: ignored.
    """

    search_algorithm: pax_fiddle.Config[BaseAlgorithm] | None = None
    search_reward: pax_fiddle.Config[BaseReward] | None = None
    early_stopping: pax_fiddle.Config[BaseEarlyStoppingPolicy] | None = None
    cross_step_metric_aggregator: pax_fiddle.Config[CrossStepMetricAggregator] | None = None
    max_num_trials: int = 1000000
    errors_to_skip: Sequence[type[Exception] | tuple[type[Exception], str]] | None = None
    prior_study_ids: Sequence[int] | None = None
    add_prior_trials: bool = False
    add_experiment_config_to_metadata: bool = True
    treats_early_stopped_trials_as_done: bool = False
    train_to_end: bool = False
    enable_dataset_tuning: bool = False
    enable_partitioner_tuning: bool = False
    enable_train_programs_tuning: bool = False
    vizier_service_endpoint: str | None = None
