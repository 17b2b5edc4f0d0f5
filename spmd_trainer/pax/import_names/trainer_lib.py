"""Pax's `trainer_lib`: the step functions for a custom training loop, on one device or under `jax.pmap`.

    state, _ = trainer_lib.initialize_model_state(task, key, batch)
    step = jax.pmap(lambda state, key, rows: trainer_lib.train_step_single_learner(task, state, key, rows), axis_name="batch")
    state, output = step(trainer_lib.replicate_model_state(state), jax.random.split(key, n), rows)

For a loop on a mesh, see `partitioning.partition_spmd_model`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from praxis import base_layer

from spmd_trainer.checkpoint_paths import CheckpointType
from spmd_trainer.errors import UserError
from spmd_trainer.pax.absent_names import getter
from spmd_trainer.sharding import reshard_input_based_on_rank_fn, shard_on_batch_dim_partition_spec
from spmd_trainer.step import minibatches, state_layout, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.step_fns import StepFnOutput
from spmd_trainer.tasks_lib import EarlyStoppingFn, RunningMode, SingleTask
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree, TrainState

__all__ = [
    "PMAP_PARALLEL_AXIS_NAME",
    "BaseStepFnStaticArgs",
    "CheckpointType",
    "EarlyStoppingFn",
    "RunningMode",
    "StepFnOutput",
    "TrainState",
    "decode_step",
    "eval_step_single_learner",
    "initialize_model_state",
    "initialize_replicate_model_state",
    "replicate_model_state",
    "reshard_input_based_on_rank_fn",
    "shard_on_batch_dim_partition_spec",
    "train_step_single_learner",
]

PMAP_PARALLEL_AXIS_NAME = base_layer.PMAP_PARALLEL_AXIS_NAME

_ON_A_MESH = "partitioning.partition_spmd_model returns the state, its specs and the steps on a mesh"
_INPUT = "spmd_trainer.inputs.dataset_input_specs returns the shapes and dtypes of a dataset's batches"
ABSENT = {
    "TrainStateMetadata": "PjitPartitioner().setup(task, shapes) makes its `metadata`",
    "create_train_state_metadata": "PjitPartitioner().setup(task, shapes) makes its `metadata`",
    "initialize_partitioned_model_states": _ON_A_MESH,
    "get_inputs_shape_dtype": _INPUT,
    "get_input_partition_specs": _ON_A_MESH,
    "get_train_input_specs_for_model_init": _INPUT,
    "adjust_input_params_for_small_batch": "a batch that the devices do not divide is padded with rows of weight 0",
    "write_post_init_model_hparams_file": "each run writes its config to job_log_dir/config.txt",
    "write_train_provenance_file": "the log of a run says what a warm start did with every variable",
    "bind_mesh": "use jax.set_mesh",
    "get_excluded_var_masks": "use learners.get_excluded_var_mask_for_grad and get_excluded_var_mask_for_opt",
}
__getattr__ = getter(__name__, ABSENT)


@struct.dataclass
class BaseStepFnStaticArgs:
    """Static arguments of Pax's step functions. This module's step functions accept such an object, and ignore it.

    Attributes:
      unpadded_global_batch_size: number of rows of the global batch, without padding.
    """

    unpadded_global_batch_size: int | None


def initialize_model_state(
    jax_task: SingleTask,
    prng_key: jax.Array,
    inputs_shape_dtype: PyTree,
    discard_opt_states: bool = False,
    do_init_checkpoint_rules: bool = True,
    is_eval: bool = False,
    checkpoint_type: CheckpointType = CheckpointType.UNSPECIFIED,
    var_weight_hparams: NestedWeightHParams | None = None,
) -> tuple[TrainState, None]:
    """Returns the state before the first training step, on the default device and without padding.

    Args:
      jax_task: the built task.
      prng_key: PRNG key for the initial values.
      inputs_shape_dtype: a batch, or the ShapeDtypeStructs of a batch.
      discard_opt_states: True to leave the optimizer states out.
      do_init_checkpoint_rules: False accepts a task with `init_from_checkpoint_rules`, without applying them.
      is_eval: not used, because `task.train.always_use_train_for_model_init` decides.
      checkpoint_type: not used, because no checkpoint is read.
      var_weight_hparams: not used, because the model declares the WeightHParams of its variables.

    Returns:
      (state, None). In place of None, Pax returns the origin of each variable.

    Raises:
      UserError: the task has `init_from_checkpoint_rules`, which only a training run applies.
    """
    del is_eval, checkpoint_type, var_weight_hparams
    if do_init_checkpoint_rules and jax_task.train.init_from_checkpoint_rules:
        raise UserError(
            "initialize_model_state does not apply task.train.init_from_checkpoint_rules, which a run of the trainer does; "
            "give do_init_checkpoint_rules=False, and read variables with spmd_trainer.checkpointing or spmd_trainer.pax"
        )
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), x.dtype), inputs_shape_dtype)
    boxed = state_layout.variables_initialiser(jax_task, shapes)(prng_key)
    mdl_vars = base_layer.maybe_unbox_value(boxed)
    layout = LogicalLayout(jax_task, base_layer.unbox_meta(boxed))
    state = state_layout.create_train_state(layout, mdl_vars, with_opt_states=not discard_opt_states)
    return state, None


def replicate_model_state(model_states: TrainState) -> TrainState:
    """Returns the state with a copy of each array on each local device, in the form that `jax.pmap` takes: [devices, ...]."""
    devices = jax.local_devices()
    sharding = NamedSharding(Mesh(np.array(devices), ("batch",)), PartitionSpec("batch"))

    def replicate(x: jax.Array) -> jax.Array:
        copies = [jax.device_put(jnp.asarray(x)[None], device) for device in devices]
        return jax.make_array_from_single_device_arrays((len(devices), *np.shape(x)), sharding, copies)

    replicated: TrainState = jax.tree.map(replicate, model_states)
    return replicated


def initialize_replicate_model_state(
    jax_task: SingleTask, prng_key: jax.Array, inputs_shape_dtype: PyTree, discard_opt_states: bool = False
) -> TrainState:
    """Returns the initial state, replicated for `jax.pmap`. The arguments are those of `initialize_model_state`."""
    return replicate_model_state(initialize_model_state(jax_task, prng_key, inputs_shape_dtype, discard_opt_states)[0])


def train_step_single_learner(
    jax_task: SingleTask,
    states: TrainState,
    prng_key: jax.Array,
    inputs: NestedJTensor,
    fprop_dtype: Any = jnp.float32,
    var_weight_hparams: NestedWeightHParams | None = None,
    static_args: BaseStepFnStaticArgs | None = None,
    *,
    grad_fn: Any = None,
    apply_fn: Any = None,
    expose_updated_nontrainables_to_learner: bool = True,
) -> tuple[TrainState, StepFnOutput]:
    """Runs one training step. Returns the state after this step, and the step's outputs.

    Under `jax.pmap` with the axis name 'batch', gradients and metrics are reduced over the devices.

    Args:
      jax_task: the built task.
      states: the state before this step.
      prng_key: the run's PRNG key, into which the step number is folded. Under pmap, each device has its own key.
      inputs: the batch; under pmap, this device's rows.
      fprop_dtype: not used, because the model's `fprop_dtype` decides.
      var_weight_hparams: WeightHParams of the variables. If None, they are obtained by tracing the model.
      static_args: not used.
      grad_fn: must be None.
      apply_fn: must be None.
      expose_updated_nontrainables_to_learner: must be True.

    Raises:
      UserError: an argument has a value that is not supported.
    """
    del fprop_dtype, static_args
    if grad_fn is not None or apply_fn is not None or not expose_updated_nontrainables_to_learner:
        raise UserError(
            "train_step_single_learner takes no grad_fn, no apply_fn and no expose_updated_nontrainables_to_learner=False; "
            "pass a grad_fn to step.step_fns.train_step"
        )
    layout = _layout(jax_task, inputs, var_weight_hparams)
    return step_fns.train_step(layout, states, prng_key, inputs, _under_pmap(_pmap_gradients, layout))


def eval_step_single_learner(
    jax_task: SingleTask,
    states: TrainState,
    prng_key: jax.Array,
    inputs: NestedJTensor,
    fprop_dtype: Any = jnp.float32,
    var_weight_hparams: NestedWeightHParams | None = None,
    static_args: BaseStepFnStaticArgs | None = None,
) -> tuple[None, StepFnOutput]:
    """Evaluates one batch. Returns (None, outputs). The arguments are those of `train_step_single_learner`."""
    del fprop_dtype, static_args
    layout = _layout(jax_task, inputs, var_weight_hparams)
    return step_fns.eval_step(layout, states, prng_key, inputs, _under_pmap(_pmap_evaluate, layout))


def decode_step(
    jax_task: SingleTask,
    states: TrainState,
    prng_key: jax.Array,
    var_weight_hparams: NestedWeightHParams | None,
    inputs: NestedJTensor,
    fprop_dtype: Any = jnp.float32,
    prng_key_fold_with_global_step: bool = True,
) -> tuple[None, StepFnOutput]:
    """Decodes a batch with `model.decode`. Returns (None, outputs). See `train_step_single_learner` for the arguments."""
    del fprop_dtype
    if not prng_key_fold_with_global_step:
        raise UserError("decode_step always folds the step into the key; give another key for other random numbers")
    return step_fns.decode_step(_layout(jax_task, inputs, var_weight_hparams), states, prng_key, inputs)


def _layout(task: SingleTask, inputs: NestedJTensor, given: NestedWeightHParams | None) -> LogicalLayout:
    if given is None:
        shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), inputs)
        given = state_layout.abstract_hparams(state_layout.variables_initialiser(task, shapes))
    return LogicalLayout(task, given)


def _under_pmap(fn: Callable[..., Any], layout: LogicalLayout) -> Callable[..., Any] | None:
    return functools.partial(fn, layout) if base_layer.is_running_under_pmap() else None


def _pmap_gradients(
    layout: LogicalLayout, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> tuple[StepFnOutput, NestedJTensor, NestedJTensor]:
    """Runs the forward and backward pass on one device's rows, and reduces the results over all devices."""
    output, written, grads = step_fns.gradients(layout, mdl_vars, prng_key, inputs)
    weight = jnp.asarray(output.weighted_scalars[str(layout.task.learner.loss_name)][1], jnp.float32)
    # The loss is a mean over this device's rows; `share` is their part of the weight of all rows.
    share = minibatches.weighted_mean(weight, jax.lax.psum(weight, PMAP_PARALLEL_AXIS_NAME))
    grads = jax.tree.map(lambda g: (g * share).astype(g.dtype), grads)
    written = jax.tree.map(
        lambda x: x if minibatches.is_integer(x) else jax.lax.pmean(x, PMAP_PARALLEL_AXIS_NAME), written
    )
    return _over_devices(layout.task, output, inputs), written, jax.lax.psum(grads, PMAP_PARALLEL_AXIS_NAME)


def _pmap_evaluate(
    layout: LogicalLayout, mdl_vars: NestedJTensor, prng_key: jax.Array, inputs: NestedJTensor
) -> StepFnOutput:
    return _over_devices(layout.task, step_fns.forward(layout, mdl_vars, prng_key, inputs, do_eval=True)[0], inputs)


def _over_devices(task: SingleTask, output: StepFnOutput, inputs: NestedJTensor) -> StepFnOutput:
    """Returns a step's outputs, with means over all devices, and with the per-example outputs of all devices' rows."""
    outputs, rows = minibatches.Outputs(str(task.learner.loss_name)), jax.tree.leaves(inputs)[0].shape[0]
    sums, by_row = outputs.take(output, jnp.ones(()), rows)
    by_row = jax.lax.all_gather(by_row, PMAP_PARALLEL_AXIS_NAME, tiled=True)
    num_rows = rows * jax.lax.axis_size(PMAP_PARALLEL_AXIS_NAME)
    return outputs.put_back(jax.lax.psum(sums, PMAP_PARALLEL_AXIS_NAME), by_row, 1, num_rows)
