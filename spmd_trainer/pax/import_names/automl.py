"""Pax's `automl`: algorithms, rewards and early-stopping policies of a search, and the decorator `parameter_sweep`.

`--mode=sweep` runs a search.

The algorithms and policies are PyGlove's (extra `pyglove`), which is imported when they are used.
"""

from __future__ import annotations

import abc
import collections
import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.automl_interfaces import (
    BaseAlgorithm,
    BaseEarlyStoppingPolicy,
    BaseReward,
    CrossStepMetricAggregator,
    Metric,
    MetricAggregator,
    Metrics,
    MetricType,
    SearchHParams,
)
from spmd_trainer.pax.absent_names import getter

if TYPE_CHECKING:
    from spmd_trainer.base_experiment import BaseExperiment

__all__ = [
    "BaseAlgorithm",
    "BaseEarlyStoppingPolicy",
    "BaseReward",
    "CrossStepMetricAggregator",
    "Metric",
    "MetricAggregator",
    "MetricType",
    "SearchHParams",
]

_MULTI = "make one reward of several metrics with automl.MultiObjective"
__getattr__ = getter(
    __name__,
    dict.fromkeys(
        ["neural_architecture_search", "TwoObjectiveAggregator", "TunasAbsolute", "MnasHard", "MnasSoft"], _MULTI
    )
    | {"EarlyStoppingError": "give search() an early_stopping policy"},
)

# The class attribute that holds one of the rows of `parameter_sweep`, and the one that holds their names.
COMBINED_DECISION_ATTR = "PARAMETER_SWEEP_COMBINATION"
COMBINED_DECISION_POINT_NAMES = "COMBINED_DECISION_POINT_NAMES"


class RandomSearch(BaseAlgorithm):
    """Search that draws random values.

    Attributes:
      seed: seed of the random search; None for a different seed in each run.
    """

    seed: int | None = None

    def __call__(self) -> Any:
        """Returns PyGlove's random search."""
        import pyglove as pg

        return pg.geno.Random(seed=self.seed)


class Sweeping(BaseAlgorithm):
    """Search that tries all combinations, in order."""

    def __call__(self) -> Any:
        import pyglove as pg

        return pg.geno.Sweeping()


class RegularizedEvolution(BaseAlgorithm):
    """Regularised evolution (Real et al. 2018, arXiv:1802.01548).

    Attributes:
      mutator: a `pg.evolution.Mutator`; None for uniform mutations.
      population_size, tournament_size, seed: see `pg.evolution.regularized_evolution`.
    """

    mutator: Any = None
    population_size: int = 100
    tournament_size: int = 10
    seed: int | None = None

    def __call__(self) -> Any:
        import pyglove as pg

        return pg.evolution.regularized_evolution(
            self.mutator or pg.evolution.mutators.Uniform(),
            population_size=self.population_size,
            tournament_size=self.tournament_size,
            seed=self.seed,
        )


class SingleObjective(BaseReward):
    """Reward that is one metric, negated if the goal is 'minimize'.

    Attributes:
      metric: the metric.
      goal: 'maximize' or 'minimize'.
      reward_for_nan: the reward of a trial whose metric is NaN; None keeps NaN, the worst reward.
    """

    metric: Metric | None = None
    goal: str = "maximize"
    reward_for_nan: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.metric is None:
            raise ValueError("SingleObjective.metric is not set; give e.g. automl.Metric.eval('log_pplx')")
        _check_goal(self.goal)

    def __call__(self, metrics_dict: Metrics, global_step: int) -> float:
        del global_step
        reward = self.used_metrics[0].get_value(metrics_dict) * (1 if self.goal == "maximize" else -1)
        return self.reward_for_nan if self.reward_for_nan is not None and math.isnan(reward) else reward

    @property
    def used_metrics(self) -> Sequence[Metric]:
        """The metric, as a list."""
        assert self.metric is not None  # checked above
        return [self.metric]


class MultiObjectiveAggregator(base_hyperparams.FiddleBaseParameterizable, metaclass=abc.ABCMeta):
    """Base of aggregators that combine the values of several metrics into one reward."""

    @abc.abstractmethod
    def __call__(self, values: Sequence[float]) -> float:
        """Returns the reward for the values of the metrics."""


class WeightedSumAggregator(MultiObjectiveAggregator):
    """Aggregator that returns the weighted sum of the values, divided by the sum of the weights.

    Attributes:
      weights: one weight per metric.
    """

    weights: Sequence[float] | None = None

    def __call__(self, values: Sequence[float]) -> float:
        weights = list(self.weights or ())
        if len(weights) != len(values) or not sum(weights):
            raise ValueError(f"WeightedSumAggregator.weights={weights}; give {len(values)} weights whose sum is not 0")
        return sum(w * v for w, v in zip(weights, values, strict=True)) / sum(weights)


class MultiObjective(BaseReward):
    """Reward that combines several metrics.

    Attributes:
      metrics: the metrics.
      aggregator_tpl: config of the aggregator that combines their values; may be None with one metric.
      goal, reward_for_nan: as in `SingleObjective`.
    """

    metrics: Sequence[Metric] | None = None
    aggregator_tpl: pax_fiddle.Config[MultiObjectiveAggregator] | None = None
    goal: str = "maximize"
    reward_for_nan: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.metrics or (len(self.metrics) > 1 and self.aggregator_tpl is None):
            raise ValueError("MultiObjective needs metrics, and with several of them an aggregator_tpl")
        _check_goal(self.goal)

    def __call__(self, metrics_dict: Metrics, global_step: int) -> float:
        del global_step
        values = [metric.get_value(metrics_dict) for metric in self.used_metrics]
        if self.reward_for_nan is not None and any(map(math.isnan, values)):
            return self.reward_for_nan
        reward = values[0] if self.aggregator_tpl is None else pax_fiddle.build(self.aggregator_tpl)(values)
        return float(reward) * (1 if self.goal == "maximize" else -1)

    @property
    def used_metrics(self) -> Sequence[Metric]:
        """The metrics."""
        return list(self.metrics or ())


def _check_goal(goal: str) -> None:
    if goal not in ("maximize", "minimize"):
        raise ValueError(f"goal is {goal!r}; give 'maximize' or 'minimize'")


def weighted_sum_reward(
    metrics_and_weights: Sequence[tuple[Metric, float]], goal: str = "maximize", reward_for_nan: float | None = None
) -> pax_fiddle.Config[MultiObjective]:
    """Returns the config of a reward that is the weighted mean of metrics."""
    metrics, weights = zip(*metrics_and_weights, strict=True)
    aggregator = pax_fiddle.Config(WeightedSumAggregator, weights=list(weights))
    return pax_fiddle.Config(
        MultiObjective, metrics=list(metrics), goal=goal, aggregator_tpl=aggregator, reward_for_nan=reward_for_nan
    )


class LastReportedMetricValues(CrossStepMetricAggregator):
    """Aggregator that takes the metrics of the last step."""

    def __call__(self, metrics_across_steps: Sequence[tuple[int, Metrics]]) -> Metrics:
        return metrics_across_steps[-1][1]


class AverageMetricValues(CrossStepMetricAggregator):
    """Aggregator that takes the mean of each metric over the steps.

    Attributes:
      last_n: how many of a metric's last values to average; None for all.
    """

    last_n: int | None = None

    def __call__(self, metrics_across_steps: Sequence[tuple[int, Metrics]]) -> Metrics:
        values: dict[str, list[float]] = collections.defaultdict(list)
        for _, metrics in metrics_across_steps:
            for name, value in metrics.items():
                values[name].append(value)
        last = {name: known[-self.last_n :] if self.last_n else known for name, known in values.items()}
        return {name: sum(known) / len(known) for name, known in last.items()}


class _MetricsWithExtremeValue(CrossStepMetricAggregator):
    """Aggregator that takes the metrics of the step at which one metric is extreme; of several such steps, the last.

    Attributes:
      metric: the metric to compare; None for the reward.
    """

    metric: Metric | None = None
    _sign = 1

    def __call__(self, metrics_across_steps: Sequence[tuple[int, Metrics]]) -> Metrics:
        """Returns the metrics of the step with the extreme value."""
        metric = self.metric or Metric("reward")
        keyed = [(self._sign * metric.get_value(found), at) for at, (_, found) in enumerate(metrics_across_steps)]
        return metrics_across_steps[max(keyed)[1]][1]


class MetricsWithMaxValue(_MetricsWithExtremeValue):
    """Aggregator that takes the metrics of the step at which one metric is highest."""


class MetricsWithMinValue(_MetricsWithExtremeValue):
    """Aggregator that takes the metrics of the step at which one metric is lowest."""

    _sign = -1


class _AtSteps(BaseEarlyStoppingPolicy):
    """Base of the policies that check a trial at given steps.

    Attributes:
      metric: the metric to check; None for the reward.
      maximize: True if higher values are better.
    """

    metric: Metric | None = None
    maximize: bool = True

    def _watched(self) -> Callable[[Any], float]:
        metric = self.metric
        return lambda measured: measured.reward if metric is None else metric.get_value(measured.metrics)


class EarlyStoppingByValue(_AtSteps):
    """Stops a trial whose metric is worse than a threshold at a step.

    Attributes:
      step_values: (step, threshold) pairs.
    """

    step_values: Sequence[tuple[int, float]] | None = None

    def __call__(self) -> Any:
        import pyglove as pg

        return pg.early_stopping.early_stop_by_value(
            step_values=list(self.step_values or ()), metric=self._watched(), maximize=self.maximize
        )()


class EarlyStoppingByRank(_AtSteps):
    """Stops a trial that is not among the best ones at a step.

    Attributes:
      step_ranks: (step, threshold, minimum number of other trials) triples. The threshold is a rank or a share of the trials.
    """

    step_ranks: Sequence[tuple[int, int | float, int]] | None = None

    def __call__(self) -> Any:
        import pyglove as pg

        return pg.early_stopping.early_stop_by_rank(
            step_ranks=list(self.step_ranks or ()), metric=self._watched(), maximize=self.maximize
        )()


def hyperparameter_tuning(
    metric: Metric,
    max_num_trials: int = 100,
    goal: str = "maximize",
    *,
    reward_for_nan: float | None = None,
    **about: Any,
) -> SearchHParams:
    """Returns a search over all combinations, with one metric as the reward. `about`: further fields of `SearchHParams`."""
    reward = pax_fiddle.Config(SingleObjective, metric=metric, goal=goal, reward_for_nan=reward_for_nan)
    return _sweeping(reward, max_num_trials=max_num_trials, **about)


def _sweeping(reward: Any, **about: Any) -> SearchHParams:
    return SearchHParams(pax_fiddle.Config(Sweeping), reward, treats_early_stopped_trials_as_done=True, **about)


def parameter_sweep(
    combinations: Sequence[tuple[Any, ...]] | None = None,
    *,
    metric: Metric | None = None,
    goal: str = "maximize",
    **about: Any,
) -> Callable[[type[BaseExperiment]], type[BaseExperiment]]:
    """Returns a decorator that gives an experiment a `search()` over its class attributes.

        @automl.parameter_sweep([("LEARNING_RATE", "HIDDEN_DIMS"), (0.1, 32), (0.01, 64)])
        class Mine(Base): ...

    Args:
      combinations: a row with names of class attributes, then one row of their values per trial. None: all combinations of the
        attributes that are `pg.oneof(...)`.
      metric: the metric to compare trials by; None for the loss.
      goal: 'maximize' or 'minimize'.
      **about: further fields of `SearchHParams`.

    Raises:
      ValueError: the rows differ in length, or name an attribute that the experiment lacks.
    """
    rows = list(combinations or ())
    if combinations is not None and (len(rows) < 2 or not rows[0] or len({len(row) for row in rows}) != 1):
        raise ValueError(
            f"combinations={rows!r:.200}: give a tuple of names, and tuples of as many values, at least one"
        )
    reward = None if metric is None else pax_fiddle.Config(SingleObjective, metric=metric, goal=goal)
    search = _sweeping(reward, train_to_end=True, **about)

    def decorate(cls: type[BaseExperiment]) -> type[BaseExperiment]:
        body: dict[str, Any] = {
            "search": lambda self: search,
            "__module__": cls.__module__,
            "__qualname__": cls.__qualname__,
        }
        if rows:
            import pyglove as pg

            for name in rows[0]:
                if not hasattr(cls, name):
                    raise ValueError(f"parameter_sweep: {cls.__name__} has no attribute {name!r}")
            body |= {COMBINED_DECISION_ATTR: pg.oneof(rows[1:]), COMBINED_DECISION_POINT_NAMES: rows[0]}
        return type(cls.__name__, (cls,), body)

    return decorate
