"""Pax's `automl`: searches over settings. This trainer has no tuner."""

from spmd_trainer.errors.absent_names import getter

_TUNER = "this trainer has no tuner; start each trial as a run of its own, with --fdl.set for what differs"
ABSENT = {
    "BaseAlgorithm": _TUNER,
    "BaseReward": _TUNER,
    "EarlyStoppingByRank": _TUNER,
    "EarlyStoppingByValue": _TUNER,
    "Metric": _TUNER,
    "MetricAggregator": _TUNER,
    "MetricType": _TUNER,
    "MultiObjective": _TUNER,
    "RandomSearch": _TUNER,
    "RegularizedEvolution": _TUNER,
    "SearchHParams": _TUNER,
    "SingleObjective": _TUNER,
    "Sweeping": _TUNER,
    "TwoObjectiveAggregator": _TUNER,
    "WeightedSumAggregator": _TUNER,
    "hyperparameter_tuning": _TUNER,
    "neural_architecture_search": _TUNER,
    "parameter_sweep": _TUNER,
    "weighted_sum_reward": _TUNER,
}
__getattr__ = getter(__name__, ABSENT)
