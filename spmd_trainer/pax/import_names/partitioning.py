"""Pax's `partitioning`: partitioners, and partitioned train, eval and decode steps as plain functions for custom loops.

`partition_spmd_model` returns the state, the train step and the eval step; `get_partitioned_spmd_model_decode_fn` returns the
decode step. Names and signatures are Pax's, except those of `Partitioner`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from praxis import pax_fiddle

from spmd_trainer.pax.absent_names import getter
from spmd_trainer.step import step_fns
from spmd_trainer.step.compiled_step import CompiledStep, StepFn
from spmd_trainer.step.partitioner import Partitioner
from spmd_trainer.step.pjit import PjitPartitioner, create_partitioner
from spmd_trainer.step.step_fns import StepFnOutput, WeightedScalars
from spmd_trainer.tasks_lib import SingleTask, build_task
from spmd_trainer.train_states import NestedJTensor, NestedPartitionSpec, NestedShapeDtypeStruct, TrainState

__all__ = [
    "Partitioner",
    "PjitPartitioner",
    "create_partitioner",
    "get_partitioned_spmd_model_decode_fn",
    "partition_spmd_model",
]

ABSENT = {
    "PmapPartitioner": "PjitPartitioner runs models without a mesh data-parallel; trainer_lib has steps for your own jax.pmap",
    "AutoShardingPjitPartitioner": "give rules instead: task.train.sharding_strategy",
    "get_step_fn": "PjitPartitioner().partition(step_fns.train_step, shapes, is_eval=False) partitions a step of "
    "step/step_fns.py",
    "create_experiment_or_default_partitioner": "experiment.partitioner() or create_partitioner(task)",
}
__getattr__ = getter(__name__, ABSENT)

# The results of a step: weighted_loss (None in decode), mean_metrics, per_example_out, summary_tensors.
Outputs: TypeAlias = tuple[jax.Array | None, WeightedScalars, NestedJTensor, dict[str, Any]]
# The new state, then the results as in `Outputs`.
TrainOutputs: TypeAlias = tuple[TrainState, jax.Array | None, WeightedScalars, NestedJTensor, dict[str, Any]]
# (state, prng_key, inputs) -> (state, weighted_loss, mean_metrics, per_example_out, summary_tensors)
TrainFn: TypeAlias = Callable[[TrainState, jax.Array, Any], TrainOutputs]
# (mdl_vars, prng_key, step, inputs) -> (weighted_loss, mean_metrics, per_example_out, summary_tensors)
InferenceFn: TypeAlias = Callable[[NestedJTensor, jax.Array, jax.typing.ArrayLike, Any], Outputs]


def partition_spmd_model(
    task_p: pax_fiddle.Config[SingleTask] | SingleTask, init_key: jax.Array, inputs_shape: NestedShapeDtypeStruct
) -> tuple[TrainState, TrainState, NestedPartitionSpec, TrainFn, InferenceFn, int]:
    """Returns the initial state, train step and eval step for a custom training loop, on the mesh that the model declares.

        state, state_specs, input_specs, train_step, eval_step, num_params = partition_spmd_model(task_p, key, shapes)
        for batch in batches:  # numpy arrays with this process's rows, or global arrays sharded as in input_specs
            state, loss, metrics, per_example_out, summaries = train_step(state, key, batch)

    Args:
      task_p: a SingleTask or its config.
      init_key: PRNG key for the initial variables.
      inputs_shape: ShapeDtypeStructs of the global batch.

    Returns:
      partitioned_train_state: the initial TrainState, padded and sharded.
      train_state_partition_specs: the PartitionSpecs of that state, in a tree with the same structure.
      inputs_partition_spec: PartitionSpecs of the inputs.
      train_step: (state, prng_key, inputs) -> (state, weighted_loss, mean_metrics, per_example_out, summary_tensors). `state`
        is donated. weighted_loss is the mean loss, a float32 scalar; mean_metrics is {name: (mean, weight)}; summary_tensors
        also holds the model's clu metrics, which can be merged over batches.
      eval_step: (mdl_vars, prng_key, step, inputs) -> the results of `train_step` without the state.
      total_num_params: number of elements of the trainable variables, without padding.

    Raises:
      ValueError: the model's mesh doesn't fit the devices, or its split mappings don't fit its mesh or variables.
    """
    partitioner = PjitPartitioner()
    partitioner.setup(build_task(task_p), inputs_shape)
    train = partitioner.partition(step_fns.train_step, inputs_shape, is_eval=False)

    def train_step(state: TrainState, prng_key: jax.Array, inputs: Any) -> TrainOutputs:
        state, output = train(state, prng_key, _placed(train, inputs))
        return state, output.loss, output.weighted_scalars, output.per_example_out, _summaries(output)

    return (
        partitioner.initialize_train_state(init_key),
        partitioner.layout.partition_specs,
        train.inputs_partition_spec,
        train_step,
        _inference_fn(partitioner, step_fns.eval_step, inputs_shape)[0],
        partitioner.layout.num_params(),
    )


def get_partitioned_spmd_model_decode_fn(
    jax_task: SingleTask,
    init_key: jax.Array,
    partitioned_train_state: TrainState,
    train_state_partition_specs: TrainState,
    inputs_shape: NestedShapeDtypeStruct,
) -> tuple[InferenceFn, NestedPartitionSpec]:
    """Returns the decode step for a custom loop that uses the state of `partition_spmd_model`.

    Args:
      jax_task: the built task.
      init_key: not used, because nothing is initialized; kept so that callers written for Pax need no change.
      partitioned_train_state: the state returned by `partition_spmd_model`.
      train_state_partition_specs: the PartitionSpecs of that state.
      inputs_shape: ShapeDtypeStructs of the global batch, with every input that the model's `__call__` reads.

    Returns:
      decode_step_fn: (mdl_vars, prng_key, step, inputs) -> (None, mean_metrics, per_example_out, summary_tensors).
      inputs_partition_spec: PartitionSpecs of the inputs.

    Raises:
      ValueError: the state is not laid out as the model declares it. The message names the first variable that differs.
    """
    del init_key
    partitioner = PjitPartitioner()
    partitioner.setup(jax_task, inputs_shape)
    partitioner.layout.check_state(partitioned_train_state, train_state_partition_specs)
    return _inference_fn(partitioner, step_fns.decode_step, inputs_shape)


def _inference_fn(
    partitioner: Partitioner, step_fn: StepFn, inputs_shape: NestedShapeDtypeStruct
) -> tuple[InferenceFn, NestedPartitionSpec]:
    compiled = partitioner.partition(step_fn, inputs_shape, is_eval=True)

    def step(mdl_vars: NestedJTensor, prng_key: jax.Array, step: jax.typing.ArrayLike, inputs: Any) -> Outputs:
        state = TrainState(step=jnp.asarray(step, jnp.uint32), mdl_vars=mdl_vars, opt_states=[], extra_state=())
        _, output = compiled(state, prng_key, _placed(compiled, inputs))
        return output.loss, output.weighted_scalars, output.per_example_out, _summaries(output)

    return step, compiled.inputs_partition_spec


def _summaries(output: StepFnOutput) -> dict[str, Any]:
    return {**output.summary_tensors, **(output.clu_metrics or {})}


def _placed(step: CompiledStep, inputs: Any) -> NestedJTensor:
    """Puts numpy inputs on the devices; leaves jax.Arrays where they are."""
    if all(isinstance(x, jax.Array) for x in jax.tree.leaves(inputs)):
        return inputs
    return step.layout.put(inputs)
