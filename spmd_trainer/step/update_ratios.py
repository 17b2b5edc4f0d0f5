"""Norms of gradients and variables, and how large updates are, variable by variable and layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from praxis import base_layer

from spmd_trainer.sharding.variables import path_str
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree


def norms(
    no_grad: PyTree,
    var_weight_hparams: NestedWeightHParams,
    old_vars: NestedJTensor,
    new_vars: NestedJTensor,
    grads: NestedJTensor,
) -> Iterator[tuple[str, jax.Array]]:
    """Yields the norms of every variable that has a gradient.

    A variable of repeated layers has one number for each of them: an array of the shape of its `repeat_prefix`. All others have
    a scalar. Everything is float32. Where padding is kept (a vocabulary's), it is zero and adds nothing.

    Args:
      no_grad: True for the variables without a gradient.
      var_weight_hparams: WeightHParams, same structure.
      old_vars: the variables before the step.
      new_vars: the variables after it.
      grads: the gradients before clipping; whatever is at the places of variables without one is left out.

    Yields:
      ('layers/grad_norm/PATH', L2 norm of the gradient), ('layers/var_norm/PATH', L2 norm of the variable before the step), and
      ('layers/update_ratio/PATH', L2 norm of the change / that of the variable; 0 for a variable of zeros).
    """
    treedef: Any = jax.tree.structure(no_grad)
    trees = (treedef.flatten_up_to(tree) for tree in (var_weight_hparams, old_vars, new_vars, grads))
    for (key_path, without), hparams, old, new, grad in zip(
        jax.tree_util.tree_leaves_with_path(no_grad), *trees, strict=True
    ):
        # fp8 scales are overwritten with their gradient, which is none.
        if without or base_layer.var_overwrite_with_gradient(hparams) or not jnp.issubdtype(old.dtype, jnp.floating):
            continue
        path, stacked = path_str(key_path), len(hparams.repeat_prefix or ())
        size = _norm(old, stacked)
        change = _norm(new.astype(jnp.float32) - old.astype(jnp.float32), stacked)
        yield f"layers/grad_norm/{path}", _norm(grad, stacked)
        yield f"layers/var_norm/{path}", size
        yield f"layers/update_ratio/{path}", jnp.where(size == 0, 0.0, change / jnp.where(size == 0, 1.0, size))


def _norm(x: jax.Array, stacked: int) -> jax.Array:
    """Returns the L2 norm over all dimensions but the first `stacked`."""
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis=tuple(range(stacked, x.ndim))))
