"""Moves a live train state to a different mesh or layout, whose padding may differ, without a checkpoint or a full second copy.

Elastic training moves the state to different devices. Decoding moves the variables to a different layout:

    new_state = move_state(state, old.layout, new.layout)
    decode_vars = move_state(variables, train.layout.without_opt_states(), decode.layout.without_opt_states())
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp

from spmd_trainer import sharding
from spmd_trainer.sharding.specs import shard_counts
from spmd_trainer.sharding.variables import VariableSpec
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import TrainState


def move_state(state: TrainState, old: Layout, new: Layout, *, donate: bool = True) -> TrainState:
    """Moves a state from one layout to another. Logical values stay bit-identical; new padding holds zeros.

    A variable with the same padded shape in both layouts moves unchanged. A variable with different padding is padded on the
    old mesh to a shape that both meshes divide, moved, and sliced to its new shape on the new mesh. It is never gathered.

    Args:
      state: the padded state on the old mesh.
      old: the layout of `state`.
      new: the layout of the same variables on the new mesh.
      donate: delete each buffer of the old state as soon as it has moved.

    Returns:
      The padded state on the new mesh.

    Raises:
      ValueError: `old` and `new` describe different variables; the message names the first variable that differs.
    """
    check_same_variables(old, new)
    treedef = jax.tree.structure(state)
    before, after = old.records(), new.records()
    common = [_common_shape(a, b, old, new) for a, b in zip(before, after, strict=True)]
    leaves = _resized(jax.tree.leaves(state), before, common, jax.tree.leaves(old.shardings), donate=donate)
    # Resized arrays belong to this function, so they are donated even if the caller's are not.
    where = jax.tree.leaves(new.shardings)
    leaves = [
        sharding.reshard(x, to, donate=donate or x.shape != v.padded_shape)
        for x, v, to in zip(leaves, before, where, strict=True)
    ]
    targets = [v.padded_shape for v in after]
    moved: TrainState = jax.tree.unflatten(treedef, _resized(leaves, after, targets, where, donate=True))
    return moved


def check_same_variables(old: Layout, new: Layout) -> None:
    """Checks that two layouts describe the same variables.

    Raises:
      ValueError: a path, logical shape or dtype differs; the message names the first variable that differs.
    """
    before, after = ({v.path: (v.logical_shape, v.dtype) for v in m.records()} for m in (old, new))
    for path in [*before, *after]:
        if before.get(path) != after.get(path):
            raise ValueError(
                f"{path} is {before.get(path, 'absent')} in the state and {after.get(path, 'absent')} in the new layout: "
                "both must come from the same model and learner"
            )


def _common_shape(a: VariableSpec, b: VariableSpec, old: Layout, new: Layout) -> tuple[int, ...]:
    """Returns a variable's shape while it moves: the padded shape of both layouts, else the smallest that both meshes divide."""
    if a.padded_shape == b.padded_shape:
        return a.padded_shape
    rank = len(a.logical_shape)
    counts = zip(
        shard_counts(a.spec, rank, dict(old.mesh.shape)), shard_counts(b.spec, rank, dict(new.mesh.shape)), strict=True
    )
    both = [math.lcm(*pair) for pair in counts]
    return tuple(-(-size // count) * count for size, count in zip(a.logical_shape, both, strict=True))


def _resized(
    leaves: list[jax.Array],
    variables: Sequence[VariableSpec],
    shapes: Sequence[tuple[int, ...]],
    shardings: Sequence[jax.sharding.Sharding],
    *,
    donate: bool,
) -> list[jax.Array]:
    """Returns `leaves` in the given padded shapes. One jitted program resizes all leaves that have a different shape."""
    which = [i for i, x in enumerate(leaves) if x.shape != shapes[i]]
    if not which:
        return leaves

    def resize(arrays: list[jax.Array]) -> list[jax.Array]:
        return [_resize(x, variables[i].logical_shape, shapes[i]) for x, i in zip(arrays, which, strict=True)]

    # A buffer of another size can't be reused, so donation would have no effect: the old buffers are deleted instead.
    given = [leaves[i] for i in which]
    result = list(leaves)
    for i, x in zip(which, jax.jit(resize, out_shardings=[shardings[i] for i in which])(given), strict=True):
        result[i] = x
    if donate:
        for x in given:
            x.delete()
    return result


def _resize(x: jax.Array, logical: tuple[int, ...], shape: tuple[int, ...]) -> jax.Array:
    x = x[tuple(slice(size) for size in logical)]
    return jnp.pad(x, [(0, size - n) for n, size in zip(logical, shape, strict=True)])
