"""Modules of Pax without a counterpart here. They can be imported; using a name raises an error that says what to use instead."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence

_LOOP = "this trainer has one loop for each mode; use callbacks (task.train.callbacks)"
_TUNER = "this trainer has no tuner; start each trial as a separate run, and set its values with --fdl.set"
_MEANS = "metrics are weighted means over the batches; task.metrics may change the metrics of a step"
_GRADIENT = "gradients are those of the mean loss over the batch; step.step_fns.train_step takes your own grad_fn"


def _each(instead: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


# {module: {name: what to use instead}}
MODULES: dict[str, dict[str, str]] = {
    "automl": _each(
        _TUNER,
        "BaseAlgorithm BaseReward EarlyStoppingByRank EarlyStoppingByValue Metric MetricAggregator MetricType "
        "MultiObjective RandomSearch RegularizedEvolution SearchHParams SingleObjective Sweeping "
        "TwoObjectiveAggregator WeightedSumAggregator hyperparameter_tuning neural_architecture_search "
        "parameter_sweep weighted_sum_reward",
    ),
    "automl_interfaces": _each(
        _TUNER,
        "BaseAlgorithm BaseEarlyStoppingPolicy BaseReward CrossStepMetricAggregator Metric MetricAggregator "
        "MetricType SearchHParams enable_class_level_hyper_primitives",
    ),
    "base_executor": {"BaseExecutor": _LOOP},
    "base_inference_runner": {
        "BaseInferenceRunner": "--mode=infer decodes like decode_once; override model.decode and process_decode_out"
    },
    "base_metrics": _each(
        _MEANS,
        "BaseMetrics CompositeMetrics HistogramMetrics LossAggregator MaxMetrics MeanMetrics MultiLossAggregator "
        "WeightedScalarCluMetric",
    ),
    "eval_lib": {
        "evaluate": "use spmd_trainer.evaluate(experiment, job_log_dir), or --mode=eval",
        "decode": "use spmd_trainer.decode(experiment, job_log_dir), or --mode=decode",
        "infer_and_write": "use --mode=infer",
    },
    "executors": {"DefaultExecutor": _LOOP},
    "sgf": _each(
        _GRADIENT,
        "AugMulDpSgdStochasticGradient BaseStochasticGradient DPGradAuxInfo DpSgdStochasticGradient "
        "GhostClippingDpSgdStochasticGradient GradAuxInfo MicrobatchDpSgdStochasticGradient "
        "PerLayerDpSgdStochasticGradient PercoreClippedDpSgdGradient StandardGradient",
    ),
    "tuning_lib": {"tune": _TUNER, "EarlyStoppingFn": "give task.early_stopping_fn"},
}


class AbsentModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds and makes the modules of `MODULES`, as `spmd_trainer.NAME`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        package, _, name = fullname.rpartition(".")
        return importlib.machinery.ModuleSpec(fullname, self) if package == "spmd_trainer" and name in MODULES else None

    def exec_module(self, module: types.ModuleType) -> None:
        """Gives the module a `__getattr__` for its absent names."""
        from spmd_trainer.errors.absent_names import getter

        names = MODULES[module.__name__.rpartition(".")[2]]
        module.__getattr__ = getter(module.__name__, names)  # type: ignore[method-assign]
