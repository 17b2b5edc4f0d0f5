"""Integer variables that the forward pass writes (counters, flags), when the batch is processed in parts.

Floats that a model writes are means over rows, so the parts' values can be averaged. Integers can't: a counter of steps grows by
1 in each part and by 1 for the whole batch, a counter of rows by the rows of each part. So they are not taken from the parts,
but from a forward pass over the whole batch. The compiler removes all of that pass but what the integers depend on: for a counter
of steps or rows, nothing remains but an addition. Integers that depend on activations cost a second forward pass.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmd_trainer.step import step_fns
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import NestedJTensor, NestedWeightHParams, PyTree


def is_integer(x: jax.Array) -> bool:
    """Returns True for integers and booleans."""
    return not jnp.issubdtype(x.dtype, jnp.inexact)


def keep_integers(new: PyTree, old: PyTree) -> PyTree:
    """Returns the floats of `new` and the integers of `old`, in the dtypes of `old`; both have the same structure."""
    return jax.tree.map(lambda n, o: o if is_integer(o) else n.astype(o.dtype), new, old)


def advance_integers(
    written: NestedJTensor,
    task: SingleTask,
    mdl_vars: NestedJTensor,
    prng_key: jax.Array,
    inputs: NestedJTensor,
    var_weight_hparams: NestedWeightHParams,
) -> NestedJTensor:
    """Sets the integers among the written variables to what a forward pass over the whole batch writes.

    Args:
      written: the collections that the parts of the batch wrote, by name.
      task, mdl_vars, prng_key, inputs, var_weight_hparams: as in `step_fns.gradients`.

    Returns:
      A tree like `written`; `written` itself if it has no integers.
    """
    if not any(is_integer(x) for x in jax.tree.leaves(written)):
        return written
    _, whole = step_fns.forward(task, mdl_vars, prng_key, inputs, var_weight_hparams, do_eval=False)
    return {
        name: jax.tree.map(lambda w, o: w.astype(o.dtype) if is_integer(o) else o, whole.get(name, tree), tree)
        for name, tree in written.items()
    }
