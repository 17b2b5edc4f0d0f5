"""Lists modules that can be imported but have no file of their own: modules of Pax, and former modules of this trainer.

The tables say where each name is now. Using a name without a counterpart raises an error that says what to use instead.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import types
from collections.abc import Sequence

import lazy_loader

_WRITE = "spmd_trainer.checkpointing.Checkpointer(directory).save(...) writes checkpoints"
_READ = (
    "read Pax's checkpoints with spmd_trainer.pax.read_checkpoint(directory, step), and this trainer's with "
    "spmd_trainer.checkpointing.Checkpointer(directory).restore(...)"
)
_LOOP = "this trainer has one loop for each mode; use callbacks (task.train.callbacks)"
_MEANS = "metrics are weighted means over the batches; task.metrics may change the metrics of a step"
_GRADIENT = "gradients are those of the mean loss over the batch; step.step_fns.train_step takes your own grad_fn"


def _each(instead: str, names: str) -> dict[str, str]:
    return dict.fromkeys(names.split(), instead)


# {module: {the module here that has the names: names}}
STANDING: dict[str, dict[str, str]] = {
    "base_task": {"tasks_lib": "BaseTask"},
    "checkpoint_managers": {"checkpoint_paths": "INPUT_ITEM_NAME STATE_ITEM_NAME CheckpointType"},
    "checkpoint_types": {"checkpoint_paths": "CheckpointType retrieve_checkpoint_type"},
    "checkpoints": {
        "checkpoint_paths": "CHECKPOINT_PREFIX CheckpointType get_step_from_checkpoint_asset is_checkpoint_asset "
        "latest_checkpoint latest_checkpoint_if_exists make_checkpoint_step_dir retrieve_checkpoint_type "
        "retrieve_latest_checkpoint_step retrieve_latest_checkpoint_step_if_exists"
    },
    "decode_programs": {"base_experiment": "SingleTaskDecodeProgram"},
    "interop": {"": "hf pax"},  # the former parent package of `hf` and `pax`
    "learners": {
        "step.learner": "Learner MultiOptimizerLearner global_norm has_ema",
        "step.masks": "get_excluded_var_mask_for_grad get_excluded_var_mask_for_opt",
        "step.optax_bridge": "extract_ema reset_ema",
    },
    "programs": {
        "base_experiment": "BaseEvalProgram BaseTrainProgram Program SingleTaskEvalProgram SingleTaskTrainProgram"
    },
    "shard_map_partitioning": {  # not a module of Pax, but one that users import
        "step.collectives": "fold_rng_over_axis gather_params shard_params sync_gradients",
        "step.minibatches": "accumulate_gradients",
        "step.shard_map": "ShardMapPartitioner",
    },
    # Former modules of this trainer, which experiments import.
    "metrics": {},
    "metrics.early_stopping": {"training.early_stopping": "EarlyStopping"},
    "metrics.writers": {"training.summary_writers": "METRICS_FILE SummaryError SummaryWriters read_metrics"},
    "tracking": {},
    "tracking.base": {"watch.tracking.base": "Histogram RunFacts StepScalars Tracker"},
    "tracking.tracking": {"watch.tracking.tracking": "Tracking VariableHistograms"},
    "tasks.lm.task_defaults": {
        "task_defaults": "DATA_AXIS MDL_AXIS MESH_AXIS_NAMES REPLICA_AXIS STAGE_AXIS UnsupportedError batch_split_mapping "
        "check_mesh_shape maybe_setup_moe_params set_adam_with_cosine_decay set_default_adafactor set_default_adam "
        "set_mesh set_sharding_annotations_v1 shard_lm_v1"
    },
}
# {module: {name: what to use instead}}
ABSENT: dict[str, dict[str, str]] = {
    "checkpoint_managers": {
        "OrbaxCheckpointManager": "use spmd_trainer.checkpointing.Checkpointer(directory, save_max_to_keep=..., ...)",
        "CheckpointManagerOptions": "give task.train.save_interval_steps, save_max_to_keep and "
        "save_keep_interval_duration, or the arguments of spmd_trainer.checkpointing.Checkpointer",
    },
    "checkpoints": {
        **_each(_READ, "FlaxCheckpointHandler FlaxCheckpointer PaxCheckpointHandler restore_checkpoint"),
        **_each(_WRITE, "AsyncCheckpointer Checkpointer TrainingCheckpointer get_checkpointer save_checkpoint"),
        "reregister_type_handlers": "nothing needs to be registered",
        "BaseInputCheckpointHandler": "the position of the input is saved with every checkpoint",
    },
    "decode_programs": {"DecodeProgramOutput": "decodes are written to decode_out/DATASET/step_N.jsonl"},
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
    "tuning_lib": {"tune": "use --mode=sweep", "EarlyStoppingFn": "give task.early_stopping_fn"},
}
# Modules, and packages of modules, that are read from an installed paxml; see `published.py`.
MODULES = ("automl", "automl_interfaces", "host_callback")
PACKAGES = (
    *("tasks.lm.params", "tasks.vision.params", "tasks.test"),
    *("contrib", "contrib.gpu", "contrib.gpu.scripts_gpu", "experimental"),
)


class PaxModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import hook that creates the modules listed in this file's tables, under the names `spmd_trainer.NAME`."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        del path, target
        package, _, name = fullname.partition(".")
        if package != "spmd_trainer" or name not in (*STANDING, *ABSENT, *PACKAGES, *MODULES):
            return None
        if name in MODULES:
            from spmd_trainer.pax import published

            return published.spec_of(fullname)
        is_package = name in PACKAGES or any(other.startswith(f"{name}.") for other in STANDING)
        return importlib.machinery.ModuleSpec(fullname, self, is_package=is_package)

    def exec_module(self, module: types.ModuleType) -> None:
        """Gives a module a `__getattr__` that uses the tables. For a package of `PACKAGES`, calls `published.install`."""
        name = module.__name__.partition(".")[2]
        if name in PACKAGES:
            from spmd_trainer.pax import published

            published.install()
            return
        from spmd_trainer.pax.absent_names import getter

        names = {home: names.split() for home, names in STANDING.get(name, {}).items()}
        rooms = names.pop("", [])
        find, module.__dir__, own = lazy_loader.attach("spmd_trainer", rooms, names)  # type: ignore[method-assign]
        refuse = getter(module.__name__, ABSENT.get(name, {}))
        module.__getattr__ = lambda name: find(name) if name in own else refuse(name)  # type: ignore[method-assign]
        vars(module)["__all__"] = own
