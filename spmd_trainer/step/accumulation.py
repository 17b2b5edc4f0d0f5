"""Gradients and outputs added up over minibatches, one after the other: for any model, JAX only.

`minibatches.py` uses it for a step that the compiler splits over the mesh, `step/shard_map_passes.py` for the rows of one
device. Sums and weights are carried separately and divided at the very end (`weighted_sum`, `weighted_mean`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias, TypeVar

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.train_states import PyTree

Carry = TypeVar("Carry")
# (loss, (carry, sums, outputs with the rows in dimension 0))
LossAndAux: TypeAlias = tuple[jax.Array, tuple[PyTree, PyTree, PyTree]]
# (params, carry, rows, key, number of the minibatch) -> loss and the rest
MinibatchLoss: TypeAlias = Callable[[PyTree, PyTree, PyTree, jax.Array, jax.Array], LossAndAux]


def accumulate_gradients(
    loss_fn: MinibatchLoss, params: PyTree, carry: PyTree, batch: PyTree, key: jax.Array, num_minibatches: int = 1
) -> tuple[PyTree, PyTree, PyTree, PyTree]:
    """Adds up gradients over the minibatches of a device's rows, one after the other. It does no communication.

    Reduce the result once (`sync_gradients`). If `loss_fn` gathers parameters itself, there is one reduction for each
    minibatch instead; gather them before the call to have one reduction in all.

    Args:
      loss_fn: differentiated with respect to `params`. It must return sums, not means, because its results are added up.
      params: the parameters.
      carry: passed from minibatch to minibatch.
      batch: arrays [rows of this device, ...].
      key: folded with the minibatch's number.
      num_minibatches: divides the rows.

    Returns:
      (gradients, carry after the last minibatch, total sums, outputs of all rows in the order of the batch).

    Raises:
      ValueError: `num_minibatches` doesn't divide the rows.
    """

    def one(carry: PyTree, minibatch: PyTree, index: jax.Array) -> tuple[PyTree, PyTree, PyTree]:
        grad_fn = jax.grad(loss_fn, has_aux=True)
        grads, (carry, sums, rows) = grad_fn(params, carry, minibatch, jax.random.fold_in(key, index), index)
        return carry, (grads, sums), rows

    carry, (grads, sums), rows = over_minibatches(one, carry, batch, num_minibatches)
    return grads, carry, sums, rows


def over_minibatches(
    fn: Callable[[Carry, PyTree, jax.Array], tuple[Carry, PyTree, PyTree]],
    carry: Carry,
    batch: PyTree,
    num_minibatches: int,
) -> tuple[Carry, PyTree, PyTree]:
    """Calls a function on one minibatch after the other and adds up its results.

    Args:
      fn: (carry, minibatch, number of the minibatch) -> (carry, sums, rows). `sums` are arrays to add up, `rows` arrays with
        the minibatch's rows in dimension 0.
      carry: the carry of the first call.
      batch: arrays [rows, ...].
      num_minibatches: divides the rows.

    Returns:
      The carry of the last call, the total sums, and the rows of all minibatches in the order of the batch.

    Raises:
      ValueError: `num_minibatches` doesn't divide the rows.
    """
    for path, leaf in named_leaves(batch):
        if leaf.shape[0] % num_minibatches:
            raise ValueError(
                f"{path}: {leaf.shape[0]} rows on a device don't make {num_minibatches} minibatches of equal size; "
                f"choose a num_minibatches that divides {leaf.shape[0]}"
            )
    if num_minibatches == 1:
        return fn(carry, batch, jnp.zeros((), jnp.int32))
    split = jax.tree.map(lambda x: x.reshape(num_minibatches, -1, *x.shape[1:]), batch)
    numbers = jnp.arange(num_minibatches, dtype=jnp.int32)
    _, sums, _ = jax.eval_shape(fn, carry, jax.tree.map(lambda x: x[0], split), numbers[0])
    zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), sums)

    def body(state: tuple[Carry, PyTree], x: tuple[PyTree, jax.Array]) -> tuple[tuple[Carry, PyTree], PyTree]:
        carry, totals = state
        carry, sums, rows = fn(carry, *x)
        return (carry, jax.tree.map(jnp.add, totals, sums)), rows

    (carry, sums), rows = lax.scan(body, (carry, zeros), (split, numbers))
    return carry, sums, jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), rows)


def weighted_sum(value: jax.typing.ArrayLike, weight: jax.typing.ArrayLike) -> tuple[jax.Array, jax.Array]:
    """Returns (value * weight, weight) in float32; (0, 0) where the weight is 0, even if the value is NaN."""
    value, weight = jnp.asarray(value, jnp.float32), jnp.asarray(weight, jnp.float32)
    return jnp.where(weight == 0, 0.0, value * weight), weight


def weighted_mean(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Returns total / weight; 0 where the weight is 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
