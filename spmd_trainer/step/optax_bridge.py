"""Gives optimizers of praxis and of optax, and optax optimizers wrapped by praxis' `OptaxOptimizer`, the same interface.

The interface is `init`, `update` and `init_partition_spec`. `init_partition_spec(hparams)` returns WeightHParams with the
sharding of each array of the optimizer state: a tree with the structure of the state, inside an `optax.MaskedState`, as praxis'
`sharded_chain` returns it. `masked` wraps the state itself in a MaskedState, so both then have the same structure.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Container, Mapping
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
import optax
from praxis import base_layer, optimizers, pax_fiddle

from spmd_trainer.errors import not_a_config
from spmd_trainer.sharding.variables import path_str


@dataclasses.dataclass(frozen=True)
class OptaxTransformation:
    """A plain optax transformation as a praxis optimizer. It includes the learning rate, and any clipping and weight decay.

    For praxis' clipping, weight decay or EMA around an optax transformation, use `praxis.optimizers.OptaxOptimizer`.
    """

    grad_tx: optax.GradientTransformation
    clip_gradient_norm_to_value: float = 0.0
    clip_gradient_single_norm_to_value: float = 0.0
    ema_decay: float = 0.0

    def get_grad_transformation(self, var_weight_hparams: Any = None, include_ema: bool = True) -> Any:
        """Returns the transformation. The arguments belong to praxis' interface and are unused."""
        return self.grad_tx

    def get_learning_rate(self, step_count: jax.Array) -> None:
        """Returns None: an optax transformation hides its learning rate."""


def require_schedule(optimizer_p: Any) -> None:
    """Checks that the config of a praxis optimizer has a learning-rate schedule; praxis' own error does not explain this mistake.

    Raises:
      ValueError: `lr_schedule` is None.
    """
    if not isinstance(optimizer_p, fdl.Buildable) or "lr_schedule" not in optimizer_p.__signature_info__.parameters:
        return
    if optimizer_p.lr_schedule is None:
        name = fdl.get_callable(optimizer_p).__name__
        raise ValueError(
            f"task.train.learner.optimizer ({name}) has no lr_schedule; give e.g. "
            "pax_fiddle.Config(schedules.Constant, value=1.0), which multiplies its learning_rate"
        )


def as_optimizer(optimizer: Any) -> Any:
    """Returns a praxis optimizer for a praxis optimizer, an optax transformation, or a config of either.

    Raises:
      ValueError: `optimizer` is none of these, or its fields contradict each other.
    """
    if isinstance(optimizer, fdl.Buildable):
        optimizer = pax_fiddle.build(optimizer)
    if isinstance(optimizer, optax.GradientTransformation):
        return OptaxTransformation(optimizer)
    name = type(optimizer).__name__
    if isinstance(optimizer, type):
        raise not_a_config("task.train.learner.optimizer", optimizer)
    if not isinstance(optimizer, optimizers.Optimizer):
        raise ValueError(
            f"task.train.learner.optimizer is {optimizer!r:.80}; give a praxis optimizer such as "
            "pax_fiddle.Config(optimizers.Adam, ...), or an optax GradientTransformation such as optax.adamw(1e-3)"
        )
    if optimizer.clip_gradient_norm_to_value and optimizer.clip_gradient_single_norm_to_value:
        raise ValueError(f"{name} has both clip_gradient_norm_to_value and clip_gradient_single_norm_to_value; set one")
    if isinstance(optimizer, optimizers.OptaxOptimizer) and optimizer.grad_tx is None:
        raise ValueError(f"{name}.grad_tx is not set; give an optax transformation such as optax.scale_by_adam()")
    if isinstance(optimizer, optimizers.BaseOptimizer) and not sees_stacks(optimizer):
        return _with_raw_specs(optimizer)
    return optimizer


def sees_stacks(optimizer: Any) -> bool:
    """Returns True for an optimizer that gets the stacked variables of repeated layers as they are.

    All other optimizers see one layer at a time, because praxis maps them over the layers.
    """
    return bool(getattr(optimizer, "sees_stacks", False))


def grad_transformation(
    optimizer: Any, var_weight_hparams: Any, *, include_ema: bool = True
) -> optimizers.ShardedGradientTransformation:
    """Returns the gradient transformation of an optimizer, with `init_partition_spec`.

    Args:
      optimizer: an optimizer from `as_optimizer`.
      var_weight_hparams: WeightHParams of the variables; praxis reads per-variable settings from them, such as no weight decay.
      include_ema: True to include the moving averages of a praxis optimizer with `ema_decay`.
    """
    grad_tx = optimizer.get_grad_transformation(var_weight_hparams, include_ema=include_ema)
    # praxis' own specs, e.g. of moving averages, are those of a single layer.
    declared = None if sees_stacks(optimizer) else getattr(grad_tx, "init_partition_spec", None)

    def init_partition_spec(hparams: Any) -> optax.MaskedState:
        # Some praxis functions read the first variable, and a group of repeated layers may have none.
        if declared is None or not jax.tree.leaves(hparams):
            others = optimizer.part_hparams(hparams) if sees_stacks(optimizer) else {}
            return optax.MaskedState(derived_specs(grad_tx, hparams, others))
        specs = declared(hparams)
        return specs if isinstance(specs, optax.MaskedState) else optax.MaskedState(specs)

    return optimizers.ShardedGradientTransformation(
        init=grad_tx.init, update=grad_tx.update, init_partition_spec=init_partition_spec
    )


def masked(grad_tx: optimizers.ShardedGradientTransformation, mask: Any) -> optimizers.ShardedGradientTransformation:
    """Restricts `grad_tx` to the variables where `mask` is True; updates of other variables pass through.

    The specs and the state omit the other variables. (praxis' `sharded_masked` keeps them in the specs.)

    Args:
      grad_tx: from `grad_transformation`.
      mask: a tree of bools in the variables' structure.
    """
    tx = optimizers.sharded_masked(grad_tx, mask)

    def init_partition_spec(hparams: Any) -> optax.MaskedState:
        return grad_tx.init_partition_spec(jax.tree.map(lambda m, p: p if m else optax.MaskedNode(), mask, hparams))

    return dataclasses.replace(tx, init_partition_spec=init_partition_spec)


def derived_specs(
    grad_tx: Any, var_weight_hparams: Any, declared: Mapping[str, base_layer.WeightHParams] | None = None
) -> Any:
    """Derives the sharding of the optimizer state of a transformation that has no `init_partition_spec`.

    Args:
      grad_tx: a transformation with optax' `init`.
      var_weight_hparams: WeightHParams of the variables.
      declared: {'name of the array/path of the variable': WeightHParams} of arrays that are not sharded like their variable.

    Returns:
      WeightHParams in the structure of `grad_tx.init(vars)`. A state array is sharded like a variable if its path contains the
      variable's path and it has the variable's shape. Arrays in `declared` have the WeightHParams given there. All others are
      replicated: counters, and arrays whose shape differs from their variable's, such as factored moments.
    """
    shapes = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(tuple(p.full_shape), p.dtype or jnp.float32), var_weight_hparams
    )
    variables = dict(jax.tree_util.tree_leaves_with_path(var_weight_hparams))

    def spec(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> base_layer.WeightHParams:
        own = variable_of(path, variables)
        hparams = None if own is None else variables[own]
        if declared and own is not None and (part := path_str(path[-len(own) - 1 :])) in declared:
            return declared[part]
        if hparams is not None and tuple(hparams.full_shape) == tuple(leaf.shape):
            return dataclasses.replace(hparams, dtype=leaf.dtype, init=None, collections=None)
        return base_layer.WeightHParams(shape=tuple(leaf.shape), dtype=leaf.dtype)

    return jax.tree_util.tree_map_with_path(spec, jax.eval_shape(grad_tx.init, shapes))


def variable_of(path: tuple[Any, ...], variables: Container[tuple[Any, ...]]) -> tuple[Any, ...] | None:
    """Returns the path of the variable to which an array of an optimizer state belongs.

    Args:
      path: the path of the array, as keys of `jax.tree_util`. In an optax state with one array per variable, the variable's
        path is at the end (`mu/params/w`); with several arrays per variable, it is earlier (`stats/params/w/0`).
      variables: the paths of the variables.

    Returns:
      The path in `variables` that is part of `path`; None if there is none. Of several, the one that ends last is returned, and
      of several that end there, the longest.
    """
    parts = ((start, end) for end in range(len(path), -1, -1) for start in range(end + 1))
    return next((path[start:end] for start, end in parts if path[start:end] in variables), None)


def extract_ema(opt_states: Any, mdl_vars: Any) -> Any:
    """Returns the moving averages that praxis' optimizers keep, as model variables.

    Args:
      opt_states: a train state's `opt_states`, logical or padded, with or without repeated layers.
      mdl_vars: the current variables. Those without an average (excluded from training) are returned unchanged.

    Returns:
      A tree in the structure of `mdl_vars`.

    Raises:
      ValueError: the optimizer state holds no averages of these variables.
    """
    averages = {
        path: leaf
        for node in jax.tree.leaves(opt_states, is_leaf=_is_ema_state)
        if _is_ema_state(node)
        for path, leaf in jax.tree_util.tree_leaves_with_path(node["ema"])
    }
    leaves, treedef = jax.tree_util.tree_flatten_with_path(mdl_vars)
    if not any(path in averages for path, _ in leaves):
        raise ValueError("the optimizer state holds no EMA of the variables; set ema_decay on the learner's optimizer")
    return jax.tree.unflatten(treedef, [averages.get(path, leaf) for path, leaf in leaves])


def keeps_schedule_free(opt_states: Any) -> bool:
    """Returns True if an optimizer state, or a tree with its structure, contains a state of optax' `schedule_free`."""
    return any(map(_is_schedule_free, jax.tree.leaves(opt_states, is_leaf=_is_schedule_free)))


def extract_schedule_free(opt_states: Any, mdl_vars: Any) -> Any:
    """Returns the averaged variables x of optax' `schedule_free`, for evaluation. (Training uses the variables y.)

    Args:
      opt_states: a train state's `opt_states`, logical or padded, with or without repeated layers.
      mdl_vars: the current variables, y. Variables without a schedule-free state are returned unchanged.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(mdl_vars)
    found = dict(leaves)
    for state in filter(_is_schedule_free, jax.tree.leaves(opt_states, is_leaf=_is_schedule_free)):
        for path, z in jax.tree_util.tree_leaves_with_path(state.z):
            found[path] = _x_of_schedule_free(found[path], z, state.b1)
    return jax.tree.unflatten(treedef, [found[path] for path, _ in leaves])


def reset_ema(opt_states: Any, mdl_vars: Any) -> Any:
    """Returns `opt_states` with every moving average reset to its variable's value; everything else is unchanged.

    Args:
      opt_states: a train state's `opt_states`.
      mdl_vars: the variables, in the shapes of their averages.
    """
    variables = dict(jax.tree_util.tree_leaves_with_path(mdl_vars))

    def reset(node: Any) -> Any:
        if not _is_ema_state(node):
            return node
        ema = jax.tree_util.tree_map_with_path(lambda path, old: variables[path].astype(old.dtype), node["ema"])
        return type(node)(count=node["count"], ema=ema)

    return jax.tree.map(reset, opt_states, is_leaf=_is_ema_state)


def _x_of_schedule_free(y: jax.Array, z: jax.Array, b1: jax.Array) -> jax.Array:
    """Returns the averaged variable x for a variable y. `b1` has one dimension for each dimension of repeated layers."""

    def evaluated(b1: jax.Array, y: jax.Array, z: jax.Array) -> jax.Array:
        state = optax.contrib.ScheduleFreeState(b1, None, None, None, None, z)
        # b1 is above 0; it is 0 in the padding of repeated layers, as y and z are.
        return jnp.where(b1 == 0, y, optax.contrib.schedule_free_eval_params(state, y)).astype(y.dtype)

    for _ in range(b1.ndim):
        evaluated = jax.vmap(evaluated)
    # z may be in host memory.
    x = jax.jit(evaluated)(b1, y, jax.device_put(z, y.sharding))
    split: jax.Array = jax.device_put(x, y.sharding)
    return split


def _is_schedule_free(node: Any) -> bool:
    return isinstance(node, optax.contrib.ScheduleFreeState)


def _is_ema_state(node: Any) -> bool:
    return isinstance(node, Mapping) and set(node) == {"count", "ema"}


def _with_raw_specs(optimizer: optimizers.BaseOptimizer) -> optimizers.BaseOptimizer:
    """Returns a copy of an optimizer whose inner transformation has `init_partition_spec`.

    praxis' Sgd, Lamb, Lars, Adafactor, Adagrad and Adam(sharded_adam=False) return plain optax transformations, for which
    praxis' own chain can't make specs.
    """
    optimizer = copy.copy(optimizer)
    if isinstance(optimizer, optimizers.ShardedStaticAccumulator):
        optimizer.base_optimizer = _with_raw_specs(optimizer.base_optimizer)
    raw = functools.partial(type(optimizer)._get_raw_grad_transformation, optimizer)

    def with_specs(lr: optax.Schedule) -> Any:
        grad_tx = raw(lr)
        if hasattr(grad_tx, "init_partition_spec"):
            return grad_tx
        return optimizers.ShardedGradientTransformation(
            init=grad_tx.init,
            update=grad_tx.update,
            init_partition_spec=functools.partial(derived_specs, grad_tx),
        )

    optimizer._get_raw_grad_transformation = with_specs
    return optimizer
