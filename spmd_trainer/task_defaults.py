"""Settings that experiments share: mesh and sharding, default optimizers, mixtures of experts.

The functions that `spmd_trainer.tasks.lm.model_params` exports have the signatures and values of paxml 1.4.0
(`paxml/tasks/lm/model_params.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import fiddle as fdl
from praxis import base_layer, layers, optimizers, schedules
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError

REPLICA_AXIS, DATA_AXIS, MDL_AXIS, STAGE_AXIS = "replica", "data", "mdl", "stage"
MESH_AXIS_NAMES = (REPLICA_AXIS, DATA_AXIS, MDL_AXIS)

# Fields that the experts copy from the feed-forward layer they replace. Not `use_gated_activation`: an expert has one input
# projection.
_SHARED_WITH_EXPERTS = (
    "name",
    "input_dims",
    "ln_tpl",
    "activation_tpl",
    "relu_dropout_tpl",
    "relu_dropout_prob",
    "residual_dropout_tpl",
    "residual_dropout_prob",
    "add_skip_connection",
    "norm_policy",
)


class UnsupportedError(UserError, NotImplementedError):
    """An experiment uses an unsupported feature of Pax; the message says what to set instead."""


def set_sharding_annotations_v1(
    task_p: Config[tasks_lib.SingleTask],
    training_optimized: bool,
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int] | None = None,
) -> None:
    """Sets a task's mesh ('replica', 'data', 'mdl') and the sharding of its inputs, variables and activations.

    The batch dimension of the inputs is sharded over replica and data. `TransformerLm.set_sharding_params_v1` shards the
    weights over data and mdl. A model without `lm_tpl` gets only the mesh and the sharding of the inputs.

    Args:
      task_p: the task's config, with its model set. Changed in place.
      training_optimized: True also shards saved activations over mdl. This saves memory between the forward and the
        backward pass, and costs communication.
      ici_mesh_shape: the 3 sizes of the mesh within a slice.
      dcn_mesh_shape: the 3 sizes of the mesh across slices; None for one slice.

    Raises:
      UserError: a mesh shape does not have 3 sizes.
    """
    set_mesh(task_p, MESH_AXIS_NAMES, ici_mesh_shape, dcn_mesh_shape)
    if hasattr(task_p.model, "lm_tpl"):
        shard_lm_v1(task_p.model, training_optimized)


def set_mesh(
    task_p: Config[tasks_lib.SingleTask],
    axes: Sequence[str],
    ici_mesh_shape: Sequence[int],
    dcn_mesh_shape: Sequence[int] | None,
) -> None:
    """Sets a task's mesh, and shards the batch dimension of its inputs over all axes except the last, which is 'mdl'.

    Raises:
      UserError: a mesh shape does not have one size per axis.
    """
    model_p = task_p.model
    check_mesh_shape("ICI_MESH_SHAPE", ici_mesh_shape, axes)
    model_p.ici_mesh_shape, model_p.mesh_axis_names = list(ici_mesh_shape), list(axes)
    if dcn_mesh_shape is not None:
        check_mesh_shape("DCN_MESH_SHAPE", dcn_mesh_shape, axes)
        model_p.dcn_mesh_shape = list(dcn_mesh_shape)
    task_p.train.inputs_split_mapping = batch_split_mapping(tuple(axes[:-1]))


def shard_lm_v1(model_p: Any, training_optimized: bool) -> None:
    """Sets the sharding of a model's variables, in place, by calling `set_sharding_params_v1` of its `lm_tpl`'s class."""
    model_p.lm_tpl = fdl.get_callable(model_p.lm_tpl).set_sharding_params_v1(
        model_p.lm_tpl,
        replica_axis=REPLICA_AXIS,
        data_axis=DATA_AXIS,
        mdl_axis=MDL_AXIS,
        ici_mesh_shape=model_p.ici_mesh_shape,
        dcn_mesh_shape=model_p.dcn_mesh_shape,
        mesh_axis_names=model_p.mesh_axis_names,
        training_optimized=training_optimized,
    )


def batch_split_mapping(batch_axes: tuple[str, ...]) -> NestedMap:
    """Returns an `inputs_split_mapping` that shards the batch dimension of inputs of rank 1 and 2 over these axes."""
    return NestedMap(map_1d=(batch_axes,), map_2d=(batch_axes, None))


def check_mesh_shape(name: str, shape: Sequence[int] | None, axes: Sequence[str]) -> None:
    """Checks that a mesh shape has one size per axis.

    Raises:
      UserError: `shape` is None or has a different number of sizes. The message says to set the class attribute `name`.
    """
    if shape is None or len(shape) != len(axes):
        given = None if shape is None else list(shape)
        raise UserError(
            f"{name} is {given}; give {len(axes)} sizes, for the axes {', '.join(axes)}, e.g. {[1] * len(axes)}"
        )


def set_default_adam(
    task_p: Config[tasks_lib.SingleTask],
    learning_rate: float,
    weight_decay: float,
    *,
    warmup_steps: int = 4000,
    decay_start: int = 4001,
    decay_end: int = 300000,
) -> None:
    """Sets the learner to Adam (betas 0.9, 0.99) on `total_loss`, clipped to gradient norm 5, with Pax's default schedule.

    Args:
      task_p: the task's config; changed in place.
      learning_rate: peak learning rate.
      weight_decay: decoupled weight decay.
      warmup_steps: steps of linear warm-up.
      decay_start: step at which the exponential decay begins.
      decay_end: step from which the learning rate is a tenth of the peak.
    """
    adam = Config(optimizers.Adam, beta1=0.9, beta2=0.99, weight_decay=weight_decay, clip_gradient_norm_to_value=5.0)
    _set_learner(task_p, adam, learning_rate, (warmup_steps, decay_start, decay_end))


def set_default_adafactor(
    task_p: Config[tasks_lib.SingleTask],
    learning_rate: float,
    weight_decay: float,
    *,
    warmup_steps: int = 4000,
    decay_start: int = 4001,
    decay_end: int = 100000,
    clip_gradient_norm_to_value: float = 5.0,
) -> None:
    """Sets the learner to Adafactor with momentum (kept in int8) on `total_loss`, with Pax's default schedule.

    Args:
      task_p, learning_rate, weight_decay, warmup_steps, decay_start, decay_end: see `set_default_adam`.
      clip_gradient_norm_to_value: gradients with a larger global norm are scaled down to this norm.
    """
    adafactor = Config(
        optimizers.ShardedAdafactor,
        decay_method="adam",
        beta1=0.9,
        decay_adam=0.99,
        weight_decay=weight_decay,
        clip_gradient_norm_to_value=clip_gradient_norm_to_value,
    )
    _set_learner(task_p, adafactor, learning_rate, (warmup_steps, decay_start, decay_end))


def set_adam_with_cosine_decay(
    learner_p: Any,
    loss_name: str,
    *,
    learning_rate: float,
    warmup_steps: int,
    num_train_steps: int,
    min_ratio: float = 0.1,
) -> None:
    """Sets a learner to Adam (betas 0.9, 0.98), clipped to gradient norm 1, with linear warm-up and then cosine decay.

    Args:
      learner_p: the learner's config; changed in place.
      loss_name: the model output to minimize.
      learning_rate: peak learning rate, reached after the warm-up.
      warmup_steps: steps of linear warm-up.
      num_train_steps: step at which the decay ends.
      min_ratio: final learning rate / peak learning rate.
    """
    learner_p.loss_name = loss_name
    learner_p.optimizer = Config(
        optimizers.Adam,
        beta1=0.9,
        beta2=0.98,
        clip_gradient_norm_to_value=1.0,
        learning_rate=learning_rate,
        lr_schedule=Config(
            schedules.LinearRampupCosineDecay,
            warmup_steps=warmup_steps,
            decay_start=warmup_steps,
            decay_end=num_train_steps,
            min_ratio=min_ratio,
            max=1.0,
        ),
    )


def _set_learner(task_p: Any, optimizer_p: Any, learning_rate: float, steps: tuple[int, int, int]) -> None:
    """Sets the optimizer, with Pax's default schedule. `steps`: (warmup_steps, decay_start, decay_end)."""
    schedule = Config(schedules.LinearRampupExponentialDecay, min_ratio=0.1, max=1.0)
    schedule.warmup_steps, schedule.decay_start, schedule.decay_end = steps
    optimizer_p.learning_rate, optimizer_p.lr_schedule = learning_rate, schedule
    task_p.train.learner.loss_name = "total_loss"
    task_p.train.learner.optimizer = optimizer_p


def maybe_setup_moe_params(model_p: Config[base_layer.BaseLayer]) -> None:
    """Copies the settings of a layer stack's feed-forward layer to the experts that replace it.

    Does nothing if the stack has no experts. Copies `hidden_dims` only if it is not set for the experts.

    Args:
      model_p: config of a StackedTransformer, or of a StackedTransformerRepeated around one. Changed in place.

    Raises:
      UserError: the stack's feed-forward layer is not a `layers.TransformerFeedForward`.
    """
    stack_p: Any = model_p
    if fdl.get_callable(stack_p) == layers.StackedTransformerRepeated:
        stack_p = stack_p.block
    if stack_p.num_experts == 0:
        return
    dense_p, experts_p = stack_p.transformer_layer_params_tpl.tr_fflayer_tpl, stack_p.moe_layer_tpl
    dense_cls = fdl.get_callable(dense_p)
    if not issubclass(dense_cls, layers.TransformerFeedForward):
        raise UserError(
            f"the stack has num_experts={stack_p.num_experts} and its tr_fflayer_tpl is a {dense_cls.__name__}; experts "
            "take their settings from a layers.TransformerFeedForward"
        )
    base_layer.BaseLayerApi.copy_base_hparams(dense_p, experts_p)
    for field in _SHARED_WITH_EXPERTS:
        value = getattr(dense_p, field)
        setattr(experts_p, field, value.clone() if isinstance(value, fdl.Buildable) else value)
    if not experts_p.hidden_dims:
        experts_p.hidden_dims = dense_p.hidden_dims
