"""Pax's `base_metrics`: how metrics are aggregated over batches. This trainer takes weighted means."""

from spmd_trainer.errors.absent_names import getter

_MEANS = "metrics are weighted means over the batches; task.metrics may change those of a step"
ABSENT = {
    "BaseMetrics": _MEANS,
    "CompositeMetrics": _MEANS,
    "HistogramMetrics": _MEANS,
    "MaxMetrics": _MEANS,
    "MeanMetrics": _MEANS,
    "MultiLossAggregator": _MEANS,
    "LossAggregator": _MEANS,
    "WeightedScalarCluMetric": _MEANS,
}
__getattr__ = getter(__name__, ABSENT)
