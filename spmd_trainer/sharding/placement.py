"""Puts arrays on a mesh shard by shard: no device ever receives a whole array that is to be sharded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from spmd_trainer.sharding.even_values import put_back
from spmd_trainer.sharding.host_devices import finish_on_host_devices
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.sharding.path_rules import Strategy, plan_sharding
from spmd_trainer.sharding.specs import PyTree, check_divides, mesh_shape_of
from spmd_trainer.sharding.variables import VariableSpec, leaf_shape_dtype, named_leaves, path_str

_FS_AXIS = "devices"


def place_like_target(tree: PyTree, target: PyTree) -> PyTree:
    """Returns `tree` with the shardings of `target`: each leaf gets the sharding of its counterpart there.

    Args:
      tree: NumPy or JAX arrays, or Python numbers. Dtypes stay, except that JAX narrows 64-bit types on devices unless they
        are enabled (`jax_enable_x64`).
      target: a tree of the same structure: jax.Arrays, ShapeDtypeStructs with or without a sharding, or NumPy arrays. If a
        counterpart has no sharding, the leaf becomes a NumPy array on the host.

    Returns:
      A tree like `tree`. A leaf that already has the sharding of its counterpart is returned as the same object.

    Raises:
      ValueError: the structures differ, a leaf and its counterpart differ in shape, a dimension is not divisible by its number
        of shards, or a leaf that should become a NumPy array is partly on other processes' devices.
    """
    leaves, targets = named_leaves(tree), named_leaves(target)
    paths, target_paths = [path for path, _ in leaves], [path for path, _ in targets]
    if paths != target_paths:
        only = sorted(set(paths) - set(target_paths))[:3], sorted(set(target_paths) - set(paths))[:3]
        raise ValueError(
            f"The tree ({count_text(len(paths), 'leaf', 'leaves')}) and its target ({len(target_paths)}) differ: only "
            f"the tree has {only[0]}, only the target has {only[1]}. Pass a target with the tree's structure."
        )
    placed = []
    for (path, leaf), (_, like) in zip(leaves, targets, strict=True):
        if np.shape(leaf) != np.shape(like):
            raise ValueError(
                f"{path}: shape {np.shape(leaf)} cannot be placed like its target of shape {np.shape(like)}. The "
                "shapes must be equal; pad_uneven adds padding."
            )
        sharding = getattr(like, "sharding", None)
        placed.append(_to_host(path, leaf) if sharding is None else _place(path, leaf, np.shape(leaf), sharding))
    return jax.tree.unflatten(jax.tree.structure(tree), placed)


def update_model_sharding(state: PyTree, mesh: Mesh, strategy: Strategy) -> PyTree:
    """Puts a loaded state (parameters, optimizer, EMA) onto a mesh, by the rules of `path_rules`.

    Each device receives only its own shard of each leaf, sliced from the host's copy, so no device ever holds a whole array
    that is to be sharded. The old state keeps its memory until the caller deletes it; if it consists of NumPy arrays, it
    occupies no device memory.

    Args:
      state: any pytree of NumPy or JAX arrays without padding, on any mesh or none.
      mesh: the mesh to put the state on.
      strategy: [(regex, tactic), ...], matched with `re.search`; see the module `path_rules`.

    Returns:
      A tree like `state` of arrays on `mesh`. Leaves that a rule shards unevenly (`allow_uneven`) have their padded shape,
      with zeros in the padding.

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


def make_fsarray_from_local_slice(local_slice: npt.ArrayLike, global_devices: Sequence[jax.Device]) -> jax.Array:
    """Builds a global array, sharded on dimension 0 over all devices, from the rows that each process has read.

    Every process calls this with the same number of rows per local device. The rows of a process go to its devices in their
    order in `global_devices`. If each process has consecutive devices, the global array concatenates the processes' slices.

    Args:
      local_slice: this process's rows, [local rows, ...]; NumPy must be able to convert it to an array.
      global_devices: the devices of all processes, in the same order on every process.

    Returns:
      An array of shape (rows per device x number of devices, ...), sharded on dimension 0.

    Raises:
      ValueError: `local_slice` is a scalar, this process has no device, or its number of devices does not divide the rows.
    """
    local = np.asarray(local_slice)
    mesh = Mesh(np.asarray(global_devices), (_FS_AXIS,))
    mine = [device for device in global_devices if device.process_index == jax.process_index()]
    if local.ndim == 0:
        raise ValueError("local_slice is a scalar, which cannot be split over devices: give it a dimension of rows.")
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
    """Returns this process's rows of an array: the inverse of `make_fsarray_from_local_slice`.

    Args:
      x: an array sharded only on dimension 0, where every device holds different rows.

    Returns:
      The rows on this process's devices, in the order of the devices in the array's mesh.

    Raises:
      ValueError: the array is sharded on a different dimension, or several devices hold the same rows.
    """
    shards = x.addressable_shards
    rows_of = x.sharding.devices_indices_map(x.shape)
    for shard in shards:
        if any((i.start or 0, i.stop or n) != (0, n) for i, n in zip(shard.index[1:], x.shape[1:], strict=True)):
            raise ValueError(
                f"An array of shape {x.shape} with sharding {x.sharding} is split on a dimension other than the "
                "first: only an array split on dimension 0 alone has a local slice. Reshard it first."
            )
    starts = [(index[0].start or 0) if index else None for index in rows_of.values()]
    if len(set(starts)) < len(starts) or None in starts:
        raise ValueError(
            f"An array of shape {x.shape} with sharding {x.sharding} has the same rows on several devices, so "
            "its local slice is undefined. Reshard it over all devices first."
        )
    data = {shard.device: shard.data for shard in shards}
    mesh_order = x.sharding.mesh.devices.flat if isinstance(x.sharding, NamedSharding) else list(data)
    return np.concatenate([np.asarray(data[device]) for device in mesh_order if device in data], axis=0)


def _place(path: str, leaf: Any, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """Pads `leaf` with zeros at the end to `shape`, and returns it as a JAX array with this sharding."""
    if isinstance(sharding, NamedSharding):
        check_divides(path, shape, sharding.spec, mesh_shape_of(sharding.mesh))
    if isinstance(leaf, jax.Array):
        if leaf.shape == shape and leaf.sharding.is_equivalent_to(sharding, leaf.ndim):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):  # PRNG keys are small and can't become NumPy arrays
            key: jax.Array = jax.device_put(_padded_keys(leaf, shape), sharding)
            return key
        if not leaf.is_fully_addressable:
            return _place_global(path, leaf, shape, sharding)
    host = np.asarray(leaf)
    if host.dtype != jax.dtypes.canonicalize_dtype(host.dtype):
        host = host.astype(jax.dtypes.canonicalize_dtype(host.dtype))
    return jax.make_array_from_callback(shape, sharding, lambda index: _padded_piece(host, shape, index))


def _place_global(path: str, leaf: jax.Array, shape: tuple[int, ...], sharding: Sharding) -> jax.Array:
    """Does the same as `_place` for an array on the devices of several processes, which can only move among these devices."""
    if leaf.sharding.device_set != sharding.device_set:
        raise ValueError(
            f"{path}: an array of shape {leaf.shape} on the devices of several processes can only move among its own "
            f"{len(leaf.sharding.device_set)} devices, but the target's {len(sharding.device_set)} devices differ. Pass "
            "host arrays, e.g. from a checkpoint."
        )
    if leaf.shape != shape and isinstance(leaf.sharding, NamedSharding) and isinstance(sharding, NamedSharding):
        # A compiled program has one device order: add the padding in the leaf's order, then move it.
        devices = leaf.sharding.mesh.devices.reshape(sharding.mesh.devices.shape)
        here = NamedSharding(Mesh(devices, sharding.mesh.axis_names), sharding.spec)
        leaf = finish_on_host_devices(jax.jit(lambda x: put_back(x, shape), out_shardings=here)(leaf))
    moved: jax.Array = finish_on_host_devices(jax.device_put(leaf, sharding))
    return moved


def _padded_keys(keys: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if keys.shape == shape:
        return keys
    data = jax.random.key_data(keys)
    padded = put_back(data, shape + data.shape[keys.ndim :])
    wrapped: jax.Array = jax.random.wrap_key_data(padded, impl=jax.random.key_impl(keys))
    return wrapped


def _padded_piece(host: np.ndarray, shape: tuple[int, ...], index: Any) -> np.ndarray:
    """Returns `padded[index]`, where `padded` is `host` padded with zeros at the end to `shape`."""
    piece = host[index]
    lengths = [len(range(*part.indices(n))) for part, n in zip(index, shape, strict=True)]
    missing = [length - have for length, have in zip(lengths, piece.shape, strict=True)]
    return np.pad(piece, [(0, n) for n in missing]) if any(missing) else piece


def _to_host(path: str, leaf: Any) -> np.ndarray:
    if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
        raise ValueError(
            f"{path}: its target has no sharding, so it should become a NumPy array on the host, but part of it (shape "
            f"{leaf.shape}, sharding {leaf.sharding}) is on other processes' devices. Give the target a sharding."
        )
    return np.asarray(leaf)


def _without_sharding(key_path: Sequence[object], leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = leaf_shape_dtype(path_str(key_path), leaf)
    return jax.ShapeDtypeStruct(shape, dtype)
