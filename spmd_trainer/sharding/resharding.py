"""Moving live arrays from mesh to mesh: other shapes, other axis names, more devices, fewer, or other ones.

    state = reshard(state, new_shardings, donate=True)          # a run that loses half of its devices
    decode_vars = reshard(state.mdl_vars, decode_shardings)     # training layout to decode layout, on the same devices

No device ever holds an array whole that it should share: what a device holds at any time is its source shard, its
target shard, and at most one shard on the way (`transfer`).
"""

from __future__ import annotations

import collections
from typing import Any

import jax
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from spmd_trainer.sharding.intermediate_sharding import (
    Intermediate,
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    find_intermediate_sharding,
    plan_intermediate,
)
from spmd_trainer.sharding.mesh_split import split_by_mesh_axis
from spmd_trainer.sharding.specs import check_divides, check_spec, mesh_shape_of
from spmd_trainer.sharding.transfer import Plans, move, move_here, on_pathways
from spmd_trainer.sharding.variables import broadcast_prefix, leaf_shape_dtype, named_leaves

__all__ = [
    "NoIntermediateShardingError",
    "NoIntermediateShardingNeededError",
    "find_intermediate_sharding",
    "reshard",
    "reshard_with_intermediate_sharding",
    "split_by_mesh_axis",
]

_KEPT_PLANS = Plans(kept=True)


def reshard(
    x: Any,
    sharding: Any,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
) -> Any:
    """Moves every array of a tree to its sharding, whatever mesh and devices it lies on.

    Published as `pathwaysutils.experimental.reshard.reshard`.

    Args:
      x: any pytree of jax.Arrays (PRNG keys too), NumPy arrays and Python numbers. Shapes stay: variables that the
        target does not divide are padded first (`pad_uneven`).
      sharding: a prefix tree of `x` of jax Shardings: one stands for all the leaves below it.
      donate: the arrays of `x` are used up: all their buffers are deleted, leaf by leaf as they have moved.
      may_alias: False: no result shares buffers with `x`. None and True: it may where nothing needs to move.
      cache_resharding_plans: keeps what was decided and compiled, by shape, dtype, source and target, for the next
        call. For moves that repeat; each compiled program stays loaded.

    Returns:
      A tree like `x` of jax.Arrays, committed to their shardings; dtypes stay.

    Raises:
      ValueError: a prefix that does not fit, an entry that is no Sharding on devices, a spec that does not fit or
        divide its leaf, a leaf that is no array or is deleted already, or one that several processes hold and that is
        to go to other devices.
    """
    paths_leaves = named_leaves(x)
    targets = broadcast_prefix("sharding", sharding, x, is_leaf=_is_sharding)
    for (path, leaf), target in zip(paths_leaves, targets, strict=True):
        _check(path or "x", leaf, target)
    plans = _KEPT_PLANS if cache_resharding_plans else Plans()
    moved = _move_all([leaf for _, leaf in paths_leaves], targets, on_pathways(), donate, may_alias, plans)
    return jax.tree.unflatten(jax.tree.structure(x), moved)


def reshard_with_intermediate_sharding(
    x: Any, in_sharding: Any, out_sharding: Any, *, donate: bool = False, may_alias: bool | None = None
) -> Any:
    """`reshard` by way of `find_intermediate_sharding`, where there is one; directly where there is none.

    The first hop is one compiled program on the source's devices, which merges the shards of neighbours; one of the
    copies that it leaves then moves to the target.

    Published as `pathwaysutils.experimental.reshard.reshard_with_intermediate_sharding`.

    Args:
      x: as for `reshard`.
      in_sharding: where the arrays of `x` lie: one sharding, or a prefix tree of them.
      out_sharding: where they are to go, likewise.
      donate: as for `reshard`.
      may_alias: as for `reshard`.

    Returns:
      A tree like `x` on `out_sharding`.

    Raises:
      ValueError: what `reshard` raises, and a jax.Array that does not lie on its `in_sharding`.
    """
    paths_leaves = named_leaves(x)
    sources = broadcast_prefix("in_sharding", in_sharding, x, is_leaf=_is_sharding)
    targets = broadcast_prefix("out_sharding", out_sharding, x, is_leaf=_is_sharding)
    for (path, leaf), source, target in zip(paths_leaves, sources, targets, strict=True):
        _check(path or "x", leaf, target)
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(source, leaf.ndim):
            raise ValueError(
                f"{path or 'x'}: in_sharding is {source}, and the array (shape {leaf.shape}) lies on {leaf.sharding}. "
                "Pass its own sharding, or use `reshard`, which reads it from the array."
            )
    moved = _move_all([leaf for _, leaf in paths_leaves], targets, True, donate, may_alias, Plans())
    return jax.tree.unflatten(jax.tree.structure(x), moved)


def _move_all(
    leaves: list[Any],
    targets: list[Sharding],
    with_intermediate: bool,
    donate: bool,
    may_alias: bool | None,
    plans: Plans,
) -> list[jax.Array]:
    """Moves every leaf to its target, by way of an intermediate sharding where one is asked for and there is one."""
    uses = collections.Counter(id(leaf) for leaf in leaves)
    shared = {id(leaf): leaf for leaf in leaves if donate and isinstance(leaf, jax.Array) and uses[id(leaf)] > 1}
    may_alias = False if shared else may_alias
    results: dict[int, jax.Array] = {}
    direct = []
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if not isinstance(leaf, jax.Array):
            results[i] = jax.device_put(leaf, target)
            continue
        # Several processes have nothing but compiled programs to move by, and a single one for both hops would gather.
        between = with_intermediate or not leaf.is_fully_addressable
        if between and (found := _intermediate(leaf, target, plans)) is not None:
            copy = _one_copy(leaf, found, donate and id(leaf) not in shared, plans)
            results[i] = move([copy], [target], [True], may_alias, plans)[0]
        else:
            direct.append(i)
    donated = [donate and id(leaves[i]) not in shared for i in direct]
    moved = move([leaves[i] for i in direct], [targets[i] for i in direct], donated, may_alias, plans)
    results.update(zip(direct, moved, strict=True))
    for leaf in shared.values():  # an array that stands in the tree twice goes when both have moved
        leaf.delete()
    return [results[i] for i in range(len(leaves))]


def _one_copy(x: jax.Array, found: Intermediate, donate: bool, plans: Plans) -> jax.Array:
    """The first hop: merges shards on the source's devices, and keeps one copy of each.

    Where other processes hold a part, all copies stay: among several processes, arrays move on the same devices only.
    """
    [copy] = move_here([x], [found.in_order], [donate], False, plans)
    for axis in found.replica_axes if copy.is_fully_addressable else ():
        copy = split_by_mesh_axis(copy, axis)[0]
    return copy


def _intermediate(x: jax.Array, target: Sharding, plans: Plans) -> Intermediate | None:
    """What `plan_intermediate` finds; nothing for PRNG keys, which are small."""
    if jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    key = (x.sharding, target)
    if key not in plans.intermediates:
        try:
            plans.intermediates[key] = plan_intermediate(*key)
        except NoIntermediateShardingError:
            plans.intermediates[key] = None
    return plans.intermediates[key]


def _is_sharding(node: Any) -> bool:
    return isinstance(node, Sharding)


def _check(path: str, leaf: Any, target: Any) -> None:
    """Refuses what could not be moved, before anything has been."""
    if not isinstance(target, Sharding) or (
        isinstance(target, NamedSharding) and isinstance(target.mesh, AbstractMesh)
    ):
        raise ValueError(
            f"{path}: {target!r} is no sharding on devices. Give a jax Sharding, e.g. NamedSharding(mesh, spec) on a "
            "mesh of devices."
        )
    shape, _ = leaf_shape_dtype(path, leaf)
    if isinstance(leaf, jax.ShapeDtypeStruct):
        raise ValueError(f"{path}: a ShapeDtypeStruct of shape {shape} holds no values to move. Pass arrays.")
    if isinstance(target, NamedSharding):
        check_spec(path, shape, target.spec, mesh_shape_of(target.mesh))
        check_divides(path, shape, target.spec, mesh_shape_of(target.mesh))
    if not isinstance(leaf, jax.Array):
        return
    if leaf.is_deleted():
        raise ValueError(f"{path}: the array (shape {shape}) is deleted: donated or resharded with donate=True before.")
    if not leaf.is_fully_addressable and leaf.sharding.device_set != target.device_set:
        raise ValueError(
            f"{path}: an array of shape {shape} that several processes hold can only move among its own "
            f"{len(leaf.sharding.device_set)} devices, and the target's {len(target.device_set)} are not the same. "
            "Save a checkpoint and restore it on the target."
        )
