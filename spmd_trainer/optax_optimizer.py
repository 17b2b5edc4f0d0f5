"""Plain optax transformations where praxis expects optimizers: specs for their state, derived from the variables'."""

from __future__ import annotations

import dataclasses
from typing import Any

import fiddle as fdl
import jax
import optax
from praxis import base_layer, optimizers, pax_fiddle


@dataclasses.dataclass
class OptaxTransformation:
    """A praxis optimizer around an optax GradientTransformation, which brings its own learning rate and clipping."""

    grad_tx: optax.GradientTransformation
    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0
    ema_decay: float = 0.0

    def get_grad_transformation(self, var_weight_hparams: Any = None, include_ema: bool = True) -> Any:
        """Returns the transformation itself."""
        return self.grad_tx

    def get_learning_rate(self, step_count: jax.Array) -> None:
        """Returns None: optax keeps the learning rate to itself."""


def as_optimizer(optimizer: Any) -> Any:
    """Returns a praxis optimizer for a praxis optimizer, an optax transformation, or a config of either.

    Raises:
      ValueError: it is none of these.
    """
    if isinstance(optimizer, fdl.Buildable):
        optimizer = pax_fiddle.build(optimizer)
    if isinstance(optimizer, optax.GradientTransformation):
        return OptaxTransformation(optimizer)
    if not hasattr(optimizer, "get_grad_transformation"):
        raise ValueError(
            f"task.train.learner.optimizer is a {type(optimizer).__name__}; give a praxis optimizer such as optimizers.Adam, "
            "or an optax GradientTransformation such as optax.adamw(1e-3)"
        )
    return optimizer


def with_partition_spec(grad_tx: Any) -> Any:
    """Returns a gradient transformation that can tell where its state lives, as praxis' sharded ones do.

    A part of the state that optax marks as mirroring the parameters and that has its parameter's shape is split like the
    parameter; everything else is replicated.
    """
    if hasattr(grad_tx, "init_partition_spec"):
        return grad_tx

    def init_partition_spec(var_weight_hparams: Any) -> Any:
        shapes = jax.tree.map(lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype), var_weight_hparams)
        state = jax.eval_shape(grad_tx.init, shapes)

        def like_param(leaf: Any, hparams: Any) -> Any:
            if tuple(leaf.shape) == tuple(hparams.full_shape):
                return dataclasses.replace(hparams, dtype=leaf.dtype)
            return replicated(leaf)

        def replicated(leaf: Any) -> Any:
            return base_layer.WeightHParams(shape=tuple(leaf.shape), dtype=leaf.dtype)

        return optax.tree_map_params(grad_tx, like_param, state, var_weight_hparams, transform_non_params=replicated)

    return optimizers.ShardedGradientTransformation(
        init=grad_tx.init, update=grad_tx.update, init_partition_spec=init_partition_spec
    )
