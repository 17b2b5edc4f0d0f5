"""Moves live arrays between meshes of different shapes, axis names or devices.

    state = reshard(state, new_shardings, donate=True)          # a run that loses half of its devices
    decode_vars = reshard(state.mdl_vars, decode_shardings)     # from the training to the decode layout, on the same devices

No device ever holds a whole array that is sharded. At any time, a device holds its source shard, its target shard, and at
most one shard in transit (`transfer`).
"""

from __future__ import annotations

import collections
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, NamedSharding, Sharding

from spmd_trainer.sharding.intermediate_sharding import Intermediate, NoIntermediateShardingError, plan_intermediate
from spmd_trainer.sharding.mesh_split import split_by_mesh_axis
from spmd_trainer.sharding.specs import PyTree, check_divides, check_spec, mesh_shape_of
from spmd_trainer.sharding.transfer import Plans, move, move_here, on_pathways
from spmd_trainer.sharding.variables import broadcast_prefix, leaf_shape_dtype, named_leaves

_KEPT_PLANS = Plans(kept=True)


def reshard(
    x: PyTree,
    sharding: PyTree,
    *,
    donate: bool = False,
    may_alias: bool | None = None,
    cache_resharding_plans: bool = False,
) -> PyTree:
    """Moves every array of a tree to a new sharding, from any mesh and devices to any others.

    Published as `pathwaysutils.experimental.reshard.reshard`.

    Args:
      x: any pytree of jax.Arrays (also PRNG keys), NumPy arrays and Python numbers. Shapes stay the same: first pad variables
        that the target can't shard evenly (`pad_uneven`).
      sharding: a prefix tree of `x` of jax Shardings: an entry applies to all leaves below it.
      donate: True deletes the buffers of `x`; those of a leaf are deleted as soon as the leaf has moved.
      may_alias: False keeps results from sharing buffers with `x`. With None or True, leaves that need not move may share them.
      cache_resharding_plans: True keeps transfer plans and compiled programs, by shape, dtype, source and target, for the
        next call. Use it for repeated moves; the compiled programs stay in memory.

    Returns:
      A tree like `x` of jax.Arrays, committed to their shardings; dtypes stay.

    Raises:
      ValueError: a prefix tree does not fit, an entry is not a Sharding on devices, a spec does not fit its leaf or shard it
        evenly, a leaf is not an array or was deleted, or an array on several processes' devices has a target on other devices.
    """
    paths_leaves = named_leaves(x)
    targets = broadcast_prefix("sharding", sharding, x, is_leaf=_is_sharding)
    for (path, leaf), target in zip(paths_leaves, targets, strict=True):
        _check(path or "x", leaf, target)
    plans = _KEPT_PLANS if cache_resharding_plans else Plans()
    moved = _move_all([leaf for _, leaf in paths_leaves], targets, on_pathways(), donate, may_alias, plans)
    return jax.tree.unflatten(jax.tree.structure(x), moved)


def reshard_with_intermediate_sharding(
    x: PyTree, in_sharding: PyTree, out_sharding: PyTree, *, donate: bool = False, may_alias: bool | None = None
) -> PyTree:
    """Reshards through an intermediate sharding (`find_intermediate_sharding`), or directly if there is none.

    First, one compiled program merges the shards of neighboring source devices. Then one of the copies moves to the target.

    Published as `pathwaysutils.experimental.reshard.reshard_with_intermediate_sharding`.

    Args:
      x: as for `reshard`.
      in_sharding: the current sharding of the arrays of `x`, or a prefix tree of shardings.
      out_sharding: the sharding to move to, or a prefix tree of shardings.
      donate: as for `reshard`.
      may_alias: as for `reshard`.

    Returns:
      A tree like `x` with `out_sharding`.

    Raises:
      ValueError: as for `reshard`; also if a jax.Array's sharding differs from `in_sharding`.
    """
    paths_leaves = named_leaves(x)
    sources = broadcast_prefix("in_sharding", in_sharding, x, is_leaf=_is_sharding)
    targets = broadcast_prefix("out_sharding", out_sharding, x, is_leaf=_is_sharding)
    for (path, leaf), source, target in zip(paths_leaves, sources, targets, strict=True):
        _check(path or "x", leaf, target)
        if isinstance(leaf, jax.Array) and not leaf.sharding.is_equivalent_to(source, leaf.ndim):
            raise ValueError(
                f"{path or 'x'}: in_sharding is {source}, but the array (shape {leaf.shape}) has {leaf.sharding}. "
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
    """Moves every leaf to its target; if `with_intermediate`, through an intermediate sharding where there is one."""
    uses = collections.Counter(id(leaf) for leaf in leaves)
    shared = {id(leaf): leaf for leaf in leaves if donate and isinstance(leaf, jax.Array) and uses[id(leaf)] > 1}
    may_alias = False if shared else may_alias
    results: dict[int, jax.Array] = {}
    direct = []
    for i, (leaf, target) in enumerate(zip(leaves, targets, strict=True)):
        if not isinstance(leaf, jax.Array):
            results[i] = jax.device_put(leaf, target)
            continue
        # Between processes, only compiled programs move arrays; a single program for both moves would gather the array.
        between = with_intermediate or not leaf.is_fully_addressable
        if between and (found := _intermediate(leaf, target, plans)) is not None:
            copy = _one_copy(leaf, found, donate and id(leaf) not in shared, plans)
            results[i] = move([copy], [target], [True], may_alias, plans)[0]
        else:
            direct.append(i)
    donated = [donate and id(leaves[i]) not in shared for i in direct]
    moved = move([leaves[i] for i in direct], [targets[i] for i in direct], donated, may_alias, plans)
    results.update(zip(direct, moved, strict=True))
    for leaf in shared.values():  # an array that is in the tree twice is deleted after both have moved
        leaf.delete()
    return [results[i] for i in range(len(leaves))]


def _one_copy(x: jax.Array, found: Intermediate, donate: bool, plans: Plans) -> jax.Array:
    """Returns `x` after the move to the intermediate sharding, with one copy of each merged shard.

    All copies are kept if `x` is on the devices of several processes: such an array can't move to only a part of its devices.
    """
    [copy] = move_here([x], [found.in_order], [donate], False, plans)
    for axis in found.replica_axes if copy.is_fully_addressable else ():
        copy = split_by_mesh_axis(copy, axis)[0]
    return copy


def _intermediate(x: jax.Array, target: Sharding, plans: Plans) -> Intermediate | None:
    """Returns the cached result of `plan_intermediate`; None if there is none, and for PRNG keys, which are small."""
    if jnp.issubdtype(x.dtype, jax.dtypes.extended):
        return None
    key = (x.sharding, target)
    if key not in plans.intermediates:
        try:
            plans.intermediates[key] = plan_intermediate(*key)
        except NoIntermediateShardingError:
            plans.intermediates[key] = None
    return plans.intermediates[key]


def _is_sharding(node: object) -> bool:
    return isinstance(node, Sharding)


def _check(path: str, leaf: Any, target: object) -> None:
    """Raises a ValueError for a leaf that cannot move to its target. Called for all leaves before any of them is moved."""
    if not isinstance(target, Sharding) or (
        isinstance(target, NamedSharding) and isinstance(target.mesh, AbstractMesh)
    ):
        raise ValueError(
            f"{path}: {target!r} is not a sharding on devices. Give a jax Sharding, e.g. NamedSharding(mesh, spec) on a "
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
        raise ValueError(f"{path}: the array (shape {shape}) is deleted: it was donated, e.g. by donate=True.")
    if not leaf.is_fully_addressable and leaf.sharding.device_set != target.device_set:
        raise ValueError(
            f"{path}: an array of shape {shape} on the devices of several processes can only move among its own "
            f"{len(leaf.sharding.device_set)} devices, but the target's {len(target.device_set)} devices differ. "
            "Save a checkpoint and restore it on the target."
        )
