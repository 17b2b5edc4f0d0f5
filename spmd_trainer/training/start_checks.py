"""Finds errors at the start that would otherwise end a run at its first evaluation, decode or save.

`check_settings` needs only the resolved config, and `check_directories` also storage; neither touches a device. `check_training`
needs the built job: it traces an evaluation step and reads the metadata of checkpoints, but lowers and compiles nothing, and
reads no arrays.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import fiddle as fdl
import jax
import numpy as np
from absl import logging
from praxis import pax_fiddle

from spmd_trainer import experiment_registry, multihost
from spmd_trainer.checkpointing import loading_rules
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError, did_you_mean, first_paragraph
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.step import step_fns
from spmd_trainer.step.learner import MultiOptimizerLearner, has_ema
from spmd_trainer.storage import access
from spmd_trainer.training import averages, checkpoint_sources, checkpoints, elastic, rooms, run_directory
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.ending import TIMING
from spmd_trainer.training.mode_configs import ExportConfig
from spmd_trainer.training.run_config import TrainConfig

if TYPE_CHECKING:
    from spmd_trainer.training.experiment_config import ResolvedExperiment
    from spmd_trainer.training.job import Job
    from spmd_trainer.training.run_config import RunConfig

_DECODE_MODES = ("decode", "decode_once", "infer")
# Error messages about missing datasets.
_NO_DATASETS = {
    "train": "{asked}: experiment {name} has no training dataset; return one with is_training=True from datasets()",
    "eval": "{asked}: experiment {name} has no evaluation datasets; return some with is_training=False from datasets()",
    "decode": "{asked}: experiment {name} has no decode datasets; return some from decode_datasets()",
}


@dataclasses.dataclass(frozen=True)
class _Range:
    """The valid range of a numeric setting.

    Attributes:
      lowest: the lowest valid value; -inf for no lower limit.
      below: valid values are less than this.
      whole: True if only whole numbers are valid.
      none: what the value None means for the setting, for messages; None if the setting can't be None.
    """

    lowest: float
    below: float = math.inf
    whole: bool = True
    none: str | None = None

    def holds(self, value: Any) -> bool:
        if value is None:
            return self.none is not None
        number = _number(value)
        if number is None:
            return False
        return self.lowest <= number < self.below and math.isfinite(number) and (not self.whole or number.is_integer())

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        limits = [f"of {self.lowest:g} or more"] if math.isfinite(self.lowest) else []
        limits += [f"less than {self.below:g}"] if math.isfinite(self.below) else []
        return f"{kind} {' and '.join(limits)}" + (f" ({self.none})" if self.none else "")


def _number(value: Any) -> float | None:
    """Returns a number, or an array without dimensions, as a float. Returns None for anything else."""
    if isinstance(value, bool | np.bool_ | str | bytes | bytearray):
        return None
    if isinstance(value, np.ndarray | jax.Array) and (value.ndim or value.dtype == np.bool_):
        return None  # NumPy would also convert an array of one element
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None


_TRAIN_RANGES = {
    "num_train_steps": _Range(1),
    "save_interval_steps": _Range(1),
    "save_max_to_keep": _Range(1, none="None keeps all"),
    "max_inflight_steps": _Range(1),
    "summary_interval_steps": _Range(1),
    "log_train_output_interval_steps": _Range(1, none="None: summary_interval_steps"),
    "summary_accumulate_interval_steps": _Range(1, none="None averages nothing"),
    "eval_interval_steps": _Range(0, none="0 or None: never"),
    "decode_interval_steps": _Range(0, none="0 or None: never"),
    "decode_start_after_n_steps": _Range(0),
    "profiler_capture_step": _Range(1, none="None: never"),
    "profiler_num_steps": _Range(1),
    "profiler_min_duration_sec": _Range(0, whole=False),
}
_LEARNER_RANGES = {"skip_step_gradient_norm_value": _Range(0, whole=False)}
_OPTIMIZER_RANGES = {
    # praxis keeps averages if this is above 0; a negative number is one of the ways to have none.
    "ema_decay": _Range(-math.inf, below=1, whole=False),
    "clip_gradient_norm_to_value": _Range(0, whole=False, none="0 or None: no clipping"),
    "clip_gradient_single_norm_to_value": _Range(0, whole=False, none="0 or None: no clipping"),
}


def check_settings(config: RunConfig) -> None:
    """Checks that the experiment has valid numbers, and the datasets that its mode needs. Touches no device or storage.

    Raises:
      UserError: a number is outside its valid range, or the mode, the flags and the experiment contradict each other.
    """
    resolved, mode = config.experiment, config.mode
    task_p = resolved.task_p
    _check_numbers(task_p)
    _check_averages(config)
    if mode in ("train", "eval", *_DECODE_MODES):
        _require_datasets(resolved, "decode" if mode in _DECODE_MODES else mode, f"--mode={mode}")
    if isinstance(config, TrainConfig):
        if config.track:
            rooms.need("watch.tracking.base").check(config.track, "--track")
        if config.decode_during_train:
            if not (interval := task_p.train.decode_interval_steps):
                raise UserError(
                    f"--decode_during_train: task.train.decode_interval_steps is {interval!r}, so nothing would be decoded; set "
                    "e.g. --fdl.set='task.train.decode_interval_steps=1000', or leave it out"
                )
            _require_datasets(resolved, "decode", "--decode_during_train")
        _check_early_stopping(resolved, evaluates=config.eval_on_test)
        if config.restore_checkpoint_step is not None and config.restore_checkpoint_dir is None:
            raise UserError(
                f"--restore_checkpoint_step={config.restore_checkpoint_step} needs --restore_checkpoint_dir=DIR in training: "
                "a run goes on from the newest checkpoint of its own directory"
            )


def check_directories(config: RunConfig) -> None:
    """Checks directories and checkpoints before any device is touched.

    Raises:
      UserError: a directory can't be read or written, or belongs to a different experiment; or there is no checkpoint to read.
    """
    trains = config.mode == "train"
    if config.restore_checkpoint_dir is not None:
        access.check_readable("--restore_checkpoint_dir", config.restore_checkpoint_dir)
    access.check_readable("--job_log_dir", config.job_log_dir)
    access.check_writable("--job_log_dir", config.job_log_dir)
    if isinstance(config, ExportConfig):
        # Only process 0 writes to this directory.
        if multihost.joined()[1] == 0:
            rooms.need("hf").check_directory("--export_dir", config.directory)
        if checkpoints.prefers_own(config):
            config = dataclasses.replace(config, restore_checkpoint_dir=None)
    there = checkpoints.present_in_source(config)
    if there is not None:
        _check_source(config, there)
    run_directory.check_directory(config.job_log_dir, config.experiment.name, trains=trains)


def _check_source(config: RunConfig, there: Sequence[int]) -> None:
    """Checks the directory that checkpoints are read from. `there`: the checkpoint steps in this directory."""
    directory, step = config.checkpoint_dir, config.restore_checkpoint_step
    if config.mode not in ("eval", "decode") and not there:
        raise checkpoints.no_checkpoint_in(directory)
    if config.mode != "train":
        checkpoints.require_run(directory)
    if step is not None and there and step not in there:
        raise UserError(f"no step {step} in {directory}; there are {', '.join(map(str, there))}")
    task_p = config.experiment.task_p
    # A run with adapters loads its frozen base by these rules.
    uses_rules = task_p.lora is not None and not checkpoint_sources.is_hf_folder(directory)
    if config.mode == "train" and task_p.train.init_from_checkpoint_rules and not uses_rules:
        logging.warning(
            "task.train.init_from_checkpoint_rules is not used: the run begins with the whole checkpoint of "
            "--restore_checkpoint_dir=%s",
            directory,
        )


def check_training(job: Job) -> None:
    """Checks settings that training uses only later: averages, the early-stopping metric and `init_from_checkpoint_rules`.

    Called by every process, before the run writes anything.

    Raises:
      UserError: `EarlyStopping.metric` is not among the metrics of its dataset's evaluation; the run doesn't keep the averages of
        `--eval_averages`; or an elastic job has several processes.
      CheckpointError: the rules match nothing, or don't fit the checkpoint.
    """
    elastic.check_processes(job)
    averages.of(job)
    _check_early_stopping_metric(job)
    rules = job.task.train.init_from_checkpoint_rules
    # Reading a checkpoint's metadata involves all processes, so all of them follow what process 0 sees.
    own = decided_by_process_0(lambda: checkpoints.has_own(job.config))
    if not own and rules and job.config.restore_checkpoint_dir is None:
        # The contents of the files are checked only once, later, before the arrays are loaded.
        variables = job.partitioner.metadata.variables
        opener = functools.partial(checkpoint_sources.open_source, task=job.task)
        loading_rules.resolve_rules(variables, rules, check_contents=False, open_foreign=opener)


def _check_numbers(task_p: Any) -> None:
    """Refuses numbers outside their valid range. The message names each such field, its value and the range."""
    learner_p = task_p.train.learner
    faults = [
        *_out_of_range(task_p.train, "task.train", _TRAIN_RANGES),
        *_out_of_range(learner_p, "task.train.learner", _LEARNER_RANGES),
        *_out_of_range(getattr(learner_p, "optimizer", None), "task.train.learner.optimizer", _OPTIMIZER_RANGES),
    ]
    if faults:
        raise UserError("\n".join(faults))


def _out_of_range(config: Any, path: str, ranges: Mapping[str, _Range]) -> Iterator[str]:
    for field, valid in ranges.items():
        if not hasattr(config, field):
            continue  # an optimizer needn't have every field
        value = getattr(config, field)
        # A config may compute the number later.
        if not isinstance(value, fdl.Buildable) and not valid.holds(value):
            yield f"{path}.{field} is {value!r}; give {valid}"


def _check_averages(config: RunConfig) -> None:
    """Refuses `last:K` in training, and moving averages that the task requests for this mode but the learner doesn't keep."""
    task_p, mode, given = config.experiment.task_p, config.mode, config.eval_averages
    if mode == "train" and given and averages.last_count(given):
        raise UserError(
            f"--eval_averages={given} reads checkpoints, which training doesn't: give it to --mode=eval, decode or export. "
            "Training has ema, schedule_free and none"
        )
    fields = ["eval_use_ema_states"] if mode in ("train", "eval") else []
    fields += ["decode_use_ema_states"] if mode in ("train", *_DECODE_MODES) else []
    asked = [field for field in fields if getattr(task_p.train, field) and given is None]
    # A list of learners is refused later, when the task is built.
    if not asked or not isinstance(task_p.train.learner, fdl.Buildable):
        return
    try:
        learner = pax_fiddle.build(task_p.train.learner.clone().set(name="learner"))
    except ValueError as error:
        raise UserError(first_paragraph(error)) from error
    if has_ema(learner):
        return
    optimizer_p, name = task_p.train.learner.optimizer, type(learner.optimizer).__name__
    if isinstance(optimizer_p, fdl.Buildable) and "ema_decay" in optimizer_p.__signature_info__.parameters:
        main = "main " if isinstance(learner, MultiOptimizerLearner) else ""
        why = f"its {main}optimizer {name} has ema_decay={optimizer_p.ema_decay!r}"
        fix = "task_p.train.learner.optimizer.ema_decay = 0.999"
    else:
        why = "an optax transformation has no ema_decay"
        fix = (
            "task_p.train.learner.optimizer = pax_fiddle.Config(optimizers.OptaxOptimizer, grad_tx=..., ema_decay=0.999, "
            "learning_rate=1.0, lr_schedule=pax_fiddle.Config(schedules.Constant, value=1.0))"
        )
    raise UserError(
        f"{' and '.join(f'task.train.{field}' for field in asked)} asks for moving averages of the variables, but "
        f"task.train.learner keeps none: {why}. Add e.g. {fix}, or set {' and '.join(asked)} to False"
    )


def _require_datasets(resolved: ResolvedExperiment, kind: str, asked: str) -> None:
    if not getattr(resolved.config, f"{kind}_datasets"):
        raise UserError(_NO_DATASETS[kind].format(asked=asked, name=experiment_registry.short_name(resolved.name)))


def _check_early_stopping(resolved: ResolvedExperiment, *, evaluates: bool) -> None:
    """Checks that a run with an `early_stopping_fn` evaluates during training, and has the dataset watched by the function."""
    task_p = resolved.task_p
    fn, interval = task_p.early_stopping_fn, task_p.train.eval_interval_steps
    if fn is None:
        return
    if not (interval and evaluates):
        off = "--eval_on_test is off" if interval else f"task.train.eval_interval_steps is {interval!r}"
        raise UserError(
            f"task.early_stopping_fn is asked after each evaluation, and {off}, so it would never end the run; switch "
            "evaluation on, or set task.early_stopping_fn to None"
        )
    if isinstance(fn, fdl.Buildable):
        try:
            fn = pax_fiddle.build(fn)
        except ValueError as error:
            raise UserError(f"task.early_stopping_fn: {first_paragraph(error)}") from error
    if not isinstance(fn, EarlyStopping):
        return
    names = [str(dataset.name) for dataset in resolved.config.eval_datasets]
    names += [] if task_p.train.eval_skip_train else ["train"]
    if fn.dataset_among(names) is None:
        dataset = fn.metric.partition("/")[0]
        hint = "; set task.train.eval_skip_train=False" if dataset == "train" else did_you_mean(dataset, names)
        raise UserError(
            f"task.early_stopping_fn watches {fn.metric!r}, and no evaluation dataset is named {dataset!r}"
            + (hint or "; the experiment has none: return one with is_training=False from datasets()")
        )


def _check_early_stopping_metric(job: Job) -> None:
    fn = job.task.early_stopping_fn
    if not isinstance(fn, EarlyStopping):
        return
    datasets = {str(dataset.name): dataset for dataset in job.config.experiment.config.eval_datasets}
    name = fn.dataset_among([*datasets, "train"])
    if name in datasets:
        metrics = [*evaluation_metrics(job, dataset_input_specs(datasets[name])), *TIMING]
    else:
        metrics = evaluation_metrics(job, job.process_inputs_shape_dtype)
    known = [f"{name}/{metric}" for metric in metrics]
    if fn.metric not in known and not any(fn.metric.startswith(name) for name in known if name.endswith("/")):
        raise UserError(
            f"task.early_stopping_fn watches {fn.metric!r}, and evaluating {name!r} gives no such metric"
            f"{did_you_mean(fn.metric, known)}"
        )


def evaluation_metrics(job: Job, process_shapes: Any) -> list[str]:
    """Returns the names of an evaluation step's metrics. Traces the step, but lowers, compiles and runs nothing.

    Includes 'NAME/' for each clu metric NAME, which may compute a dict of metrics 'NAME/key' with keys not known in advance.
    """
    layout = job.partitioner.layout.without_opt_states()

    def metrics(state: Any, prng_key: Any, inputs: Any) -> Any:
        _, output = step_fns.eval_step(layout, state, prng_key, inputs)
        # A clu metric may compute a dict, whose keys are known only once it is computed on the host.
        clu = output.clu_metrics or {}
        return {**output.weighted_scalars, **clu, **{f"{name}/": metric for name, metric in clu.items()}}

    state = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.logical_shape, v.dtype), layout.variables)
    with jax.set_mesh(layout.mesh):
        found = jax.eval_shape(metrics, state, job.prng_key, job.global_shape_dtype(process_shapes))
    return sorted(found)
