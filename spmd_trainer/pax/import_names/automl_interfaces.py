"""Pax's `automl_interfaces`: searches over settings. This trainer has no tuner."""

from spmd_trainer.errors.absent_names import getter

_TUNER = "this trainer has no tuner; start each trial as a run of its own, with --fdl.set for what differs"
ABSENT = {
    "BaseAlgorithm": _TUNER,
    "BaseEarlyStoppingPolicy": _TUNER,
    "BaseReward": _TUNER,
    "CrossStepMetricAggregator": _TUNER,
    "Metric": _TUNER,
    "MetricAggregator": _TUNER,
    "MetricType": _TUNER,
    "SearchHParams": _TUNER,
    "enable_class_level_hyper_primitives": _TUNER,
}
__getattr__ = getter(__name__, ABSENT)
