"""Balances the experts' load without an auxiliary loss: each step adjusts the routers' biases (arXiv:2408.15664)."""

from __future__ import annotations

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from praxis import base_layer

from spmd_trainer.errors import UserError
from spmd_trainer.step import masks
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.train_states import NestedJTensor


def moved_by_load(
    layout: LogicalLayout, forward_vars: NestedJTensor, summaries: Mapping[str, jax.Array]
) -> NestedJTensor:
    """Adjusts router biases, the variables marked with `masks.MOVED_BY_LOAD`, to the experts' load in the whole batch.

    Each element belongs to an expert. It increases by the variable's rate if the expert's load is below the mean load, and
    decreases by the rate if the load is above the mean.

    Args:
      layout: the layout, with the WeightHParams of all variables.
      forward_vars: the variable collections that the forward pass wrote.
      summaries: the summaries of the forward pass, including the experts' load (`masks.LOAD`).

    Returns:
      `forward_vars` with the adjusted variables.

    Raises:
      UserError: `task.train.apply_mutable_list` lacks the summaries or the non-trainable variables.
    """
    moved = _rates(layout)
    tree = forward_vars.get(base_layer.NON_TRAINABLE)
    values = dict(masks.with_paths(tree))
    for path, rate in moved.items():
        load = summaries.get(f"{path.rpartition('/')[0]}/{masks.LOAD}_histogram")
        if load is None or path not in values:
            needed = (base_layer.SUMMARIES, base_layer.NON_TRAINABLE)
            raise UserError(
                f"{path} is moved by the load of the experts: let task.train.apply_mutable_list have "
                f"{' and '.join(map(repr, needed))}, or set choice_bias_rate=0"
            )
        # Each of several repeated layers has its own mean. Loads averaged over minibatches may have lost their last bits.
        total = jnp.sum(load, axis=-1, keepdims=True)
        below = total - load.shape[-1] * load
        values[path] += jnp.where(jnp.abs(below) > 1e-6 * total, rate * jnp.sign(below), 0.0)
    if not moved:
        return forward_vars
    return {**forward_vars, base_layer.NON_TRAINABLE: jax.tree.unflatten(jax.tree.structure(tree), values.values())}


def without_moves_of_a_skipped_step(
    layout: LogicalLayout, old_vars: NestedJTensor, new_vars: NestedJTensor
) -> NestedJTensor:
    """Returns `new_vars`; but if the learner skipped the step, the biases that `moved_by_load` adjusts have their old values."""
    learner, moved = layout.task.learner, _rates(layout)
    if not (moved and learner.check_valid_step and learner.enable_skip_step_on_gradient_anomalies):
        return new_vars
    found = base_layer.all_global_summaries()
    is_valid = jnp.all(jnp.stack([value for name, value in found.items() if "is_valid_step" in name]) > 0)
    name = base_layer.NON_TRAINABLE
    kept = [
        jnp.where(is_valid, new, old) if path in moved else new
        for (path, old), (_, new) in zip(
            masks.with_paths(old_vars[name]), masks.with_paths(new_vars[name]), strict=True
        )
    ]
    return {**new_vars, name: jax.tree.unflatten(jax.tree.structure(new_vars[name]), kept)}


def _rates(layout: LogicalLayout) -> dict[str, float]:
    """Returns {path: rate} of the variables to adjust. Paths start below the collection of non-trainable variables."""
    hparams = masks.with_paths(layout.var_weight_hparams.get(base_layer.NON_TRAINABLE, {}))
    # The biases of a frozen base model don't move.
    rates = {path: masks.load_rate(p) for path, p in hparams if not masks.is_frozen(p)}
    return {path: rate for path, rate in rates.items() if rate is not None}
