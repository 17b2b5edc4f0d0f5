"""Putting arrays where a sharding says, shard by shard: no device is ever given a whole array that it should share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from spmd_trainer.sharding.messages import count_text
from spmd_trainer.sharding.path_rules import Strategy, plan_sharding
from spmd_trainer.sharding.specs import check_divides, mesh_shape_of
from spmd_trainer.sharding.variables import VariableSpec, leaf_shape_dtype, named_leaves, path_str

_FS_AXIS = "devices"


def place_like_target(tree: Any, target: Any) -> Any:
    """Puts every leaf of `tree` where its counterpart in `target` lies.

    Args:
      tree: arrays of any kind. Dtypes are kept, but for 64-bit ones on a device where JAX has those disabled.
      target: a tree of the same structure: jax.Arrays, ShapeDtypeStructs with or without a sharding, or NumPy arrays.
        Where a counterpart has no sharding, the leaf comes to the host as a NumPy array.

    Returns:
      A tree like `tree`. A leaf that lies there already comes back as the same object.

    Raises:
      ValueError: another structure, a leaf of another shape than its counterpart, a dimension that does not divide, or
        a leaf on other processes' devices that is to come to the host.
    """
    leaves, targets = named_leaves(tree), named_leaves(target)
    paths, target_paths = [path for path, _ in leaves], [path for path, _ in targets]
    if paths != target_paths:
        only = sorted(set(paths) - set(target_paths))[:3], sorted(set(target_paths) - set(paths))[:3]
        raise ValueError(
            f"The tree ({count_text(len(paths), 'leaf', 'leaves')}) and its target ({len(target_paths)}) differ: only "
            f"the tree has {only[0]}, only the target has {only[1]}. Give a target of the tree's structure."
        )
    placed = []
    for (path, leaf), (_, like) in zip(leaves, targets, strict=True):
        if np.shape(leaf) != np.shape(like):
            raise ValueError(
                f"{path}: shape {np.shape(leaf)} cannot be placed like its target of shape {np.shape(like)}. The "
                "shapes must agree; padding goes on with pad_uneven."
            )
        sharding = getattr(like, "sharding", None)
        placed.append(_to_host(path, leaf) if sharding is None else _place(path, leaf, np.shape(leaf), sharding))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def update_model_sharding(state: Any, mesh: Mesh, strategy: Strategy) -> Any:
    """Puts a loaded state (parameters, optimizer, EMA) onto a mesh, by the rules of `path_rules`.

    It goes leaf by leaf, and each device is handed only its own shard, cut from the host's copy of the leaf: at no time
    does a device hold a whole array that is to be split. The old state keeps what memory it occupies until the caller
    drops it; one that was loaded into NumPy arrays occupies none on devices.

    Args:
      state: any pytree of NumPy or JAX arrays, on any mesh or none, without padding.
      mesh: where to put it.
      strategy: (regex, tactic) rules; see `path_rules`.

    Returns:
      A tree like `state` of arrays on `mesh`. Leaves that a rule splits unevenly (`allow_uneven`) have their padded
      shape, with zeros in the padding.

    Raises:
      ValueError: see `plan_sharding`.
    """
    abstract = jax.tree_util.tree_map_with_path(_without_sharding, state)
    variables: list[VariableSpec] = jax.tree.leaves(plan_sharding(abstract, strategy, mesh))
    placed = []
    for leaf, variable in zip(jax.tree.leaves(state), variables, strict=True):
        sharding = NamedSharding(mesh, variable.spec)
        placed.append(_place(variable.path, leaf, variable.padded_shape, sharding))
    return jax.tree.unflatten(jax.tree.structure(state), placed)


def make_fsarray_from_local_slice(local_slice: Any, global_devices: Sequence[Any]) -> jax.Array:
    """One global array, split on dimension 0 over all devices, from the slice that each process has read.

    Every process calls it with as many rows per device of its own. The rows of a process go to its devices in the order
    they have in `global_devices`; with processes holding consecutive devices the global array is the slices one after
    the other.

    Args:
      local_slice: this process's rows, (local rows, ...): anything NumPy takes for an array.
      global_devices: the devices of all processes, in the same order everywhere.

    Returns:
      An array of shape (rows per device x number of devices, ...), split on dimension 0.

    Raises:
      ValueError: a scalar, no local device, or rows that this process's devices don't divide.
    """
    local = np.asarray(local_slice)
    mesh = Mesh(np.asarray(global_devices), (_FS_AXIS,))
    mine = [device for device in global_devices if device.process_index == jax.process_index()]
    if local.ndim == 0:
        raise ValueError("A scalar cannot be split over devices: give local_slice a leading dimension of rows.")
    if not mine:
        raise ValueError(
            f"None of the {count_text(len(global_devices), 'device')} belongs to this process ({jax.process_index()}). "
            "Pass the devices of all processes, e.g. jax.devices()."
        )
    if local.shape[0] % len(mine):
        below = local.shape[0] - local.shape[0] % len(mine)
        fits = f"{below} or {below + len(mine)}" if below else f"{len(mine)}"
        raise ValueError(
            f"local_slice has shape {local.shape}: its {local.shape[0]} rows do not divide by this process's "
            f"{count_text(len(mine), 'device')}. Numbers of rows that do: {fits}."
        )
    sharding = NamedSharding(mesh, PartitionSpec(_FS_AXIS))
    rows = local.shape[0] // len(mine)
    pieces = [jax.device_put(local[i * rows : (i + 1) * rows], device) for i, device in enumerate(mine)]
    return jax.make_array_from_single_device_arrays((rows * len(global_devices), *local.shape[1:]), sharding, pieces)


def get_local_slice_from_fsarray(x: jax.Array) -> np.ndarray:
    """This process's rows of an array split on dimension 0: the inverse of `make_fsarray_from_local_slice`.

    Args:
      x: an array of which every device holds its own rows, whole in all other dimensions.

    Returns:
      The rows on this process's devices, in the order of the devices in the array's mesh.

    Raises:
      ValueError: the array is split on another dimension, or several devices hold the same rows.
    """
    shards = x.addressable_shards
    rows_of = x.sharding.devices_indices_map(x.shape)
    for shard in shards:
        if any((i.start or 0, i.stop or n) != (0, n) for i, n in zip(shard.index[1:], x.shape[1:], strict=True)):
            raise ValueError(
                f"An array of shape {x.shape} with sharding {x.sharding} is split on other dimensions than the first: "
                "only arrays split on dimension 0 alone have a local slice. Reshard it first."
            )
    starts = [(index[0].start or 0) if index else None for index in rows_of.values()]
    if len(set(starts)) < len(starts) or None in starts:
        raise ValueError(
            f"An array of shape {x.shape} with sharding {x.sharding} has the same rows on several devices: a local "
            "slice is defined where each of its devices holds rows of its own. Reshard it over all devices first."
        )
    data = {shard.device: shard.data for shard in shards}
    mesh_order = x.sharding.mesh.devices.flat if isinstance(x.sharding, NamedSharding) else list(data)
    return np.concatenate([np.asarray(data[device]) for device in mesh_order if device in data], axis=0)


def _place(path: str, leaf: Any, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """`leaf` with zeros behind it up to `shape`, on `sharding`."""
    if isinstance(sharding, NamedSharding):
        check_divides(path, shape, sharding.spec, mesh_shape_of(sharding.mesh))
    if isinstance(leaf, jax.Array):
        if leaf.shape == shape and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.extended):  # PRNG keys are small and have no host form
            return jax.device_put(leaf, sharding)
        if not leaf.is_fully_addressable:
            return _place_global(path, leaf, shape, sharding)
    host = np.asarray(leaf)
    if host.dtype != jax.dtypes.canonicalize_dtype(host.dtype):
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
    return jax.make_array_from_callback(shape, sharding, lambda index: _padded_piece(host, shape, index))


def _place_global(path: str, leaf: jax.Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """`_place` for an array of which other processes hold parts: it moves by collectives, among the same devices."""
    if leaf.sharding.device_set != sharding.device_set:
        raise ValueError(
            f"{path}: an array of shape {leaf.shape} that several processes hold can only move among its own "
            f"{len(leaf.sharding.device_set)} devices, and the target has {len(sharding.device_set)}, not all the "
            "same. Hand it over as host arrays, e.g. from a checkpoint."
        )
    if leaf.shape != shape and isinstance(leaf.sharding, NamedSharding) and isinstance(sharding, NamedSharding):
        # One program keeps one order of devices, so that the padding goes on in the order the leaf has now.
        devices = leaf.sharding.mesh.devices.reshape(sharding.mesh.devices.shape)
        here = NamedSharding(Mesh(devices, sharding.mesh.axis_names), sharding.spec)
        leaf = jax.jit(lambda x: _pad_to(x, shape), out_shardings=here)(leaf)
    return jax.device_put(leaf, sharding)


def _pad_to(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return lax.pad(x, np.zeros((), x.dtype), [(0, n - size, 0) for size, n in zip(x.shape, shape, strict=True)])


def _padded_piece(host: np.ndarray, shape: tuple[int, ...], index: Any) -> np.ndarray:
    """`index` of `host` as if it had `shape`, with zeros beyond its end."""
    piece = host[index]
    lengths = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True)]
    missing = [length - have for length, have in zip(lengths, piece.shape, strict=True)]
    return np.pad(piece, [(0, n) for n in missing]) if any(missing) else piece


def _to_host(path: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{path}: its target has no sharding, so it should come to the host, and part of it (shape {leaf.shape}, "
            f"sharding {leaf.sharding}) lies on other processes' devices. Give the target a sharding."
        )
    return np.asarray(leaf)


def _without_sharding(key_path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
    """The leaf's shape and dtype alone: it moves to a new mesh, where its old layout says nothing."""
    shape, dtype = leaf_shape_dtype(path_str(key_path), leaf)
    return jax.ShapeDtypeStruct(shape, dtype)
