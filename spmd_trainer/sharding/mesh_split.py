"""Splits a mesh and its arrays along an axis without copying: the new arrays share the buffers of the old ones."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from spmd_trainer.sharding.messages import did_you_mean, mesh_text
from spmd_trainer.sharding.specs import PyTree, axes_by_dim, mesh_shape_of
from spmd_trainer.sharding.variables import named_leaves


def split_by_mesh_axis(tree: PyTree, axis: str, sections: int | Sequence[int] | None = None) -> list[PyTree]:
    """Splits the mesh of a tree's arrays along `axis`, and each array with it, without copying any data.

    Example: x has shape (8, 4) and is on the mesh (replica=2, data=4) with P('data', None). `split_by_mesh_axis(x, 'replica')`
    gives two copies of x, each of shape (8, 4), on the meshes (replica=1, data=4) of the first and of the last four devices.
    `split_by_mesh_axis(x, 'data', 2)` gives two arrays of shape (4, 4): rows 0-3 on (replica=2, data=2), and rows 4-7 on the
    other half. With sections `[1]` it gives rows 0-1 on (2, 1) and rows 2-7 on (2, 3).

    Published as `pathwaysutils.experimental.split_by_mesh_axis`.

    Args:
      tree: jax.Arrays, all of them on one mesh (NamedShardings).
      axis: the mesh axis to split.
      sections: the number of equal parts, or the positions along `axis` at which to split: increasing, from 1 to the size of
        the axis minus 1. None: parts of size 1.

    Returns:
      One tree like `tree` for each part of the mesh, in order, with the same axis names and specs. Along a dimension that
      is sharded over `axis`, each array holds the consecutive shards of its part (for P(('x', 'y')) and 'y', these are strided
      blocks of the original). Other arrays keep their shape. The arrays share their buffers with `tree`: deleting or donating one
      also deletes the other.

    Raises:
      ValueError: a leaf is not a jax.Array on a mesh, leaves are on different meshes, `axis` is missing from the mesh, or
        `sections` is invalid.
    """
    leaves = named_leaves(tree)
    if not leaves:
        raise ValueError("split_by_mesh_axis needs at least one array, whose mesh it splits; the tree has none.")
    mesh = _common_mesh(leaves)
    cuts = _cuts(axis, sections, mesh_shape_of(mesh))
    position = mesh.axis_names.index(axis)
    parts = []
    for start, stop in itertools.pairwise(cuts):
        devices = np.take(mesh.devices, range(start, stop), axis=position)
        part = Mesh(devices, mesh.axis_names, axis_types=mesh.axis_types)
        pieces = [_on_part(leaf, part, axis) for _, leaf in leaves]
        parts.append(jax.tree.unflatten(jax.tree.structure(tree), pieces))
    return parts


def relabel(x: jax.Array, sharding: NamedSharding, shape: Sequence[int] | None = None) -> jax.Array:
    """Returns an array that shares the buffers of `x` but has a different sharding. Nothing is copied.

    The caller guarantees that each device's buffer is the shard that the device has under `sharding`.

    Args:
      x: the array that holds the buffers.
      sharding: the new array's sharding, on some or all of the devices of `x`.
      shape: the new array's shape; default: the shape of `x`.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        data = jax.random.key_data(x)
        keys: jax.Array = jax.random.wrap_key_data(
            relabel(data, sharding, None if shape is None else (*shape, *data.shape[x.ndim :])),
            impl=jax.random.key_impl(x),
        )
        return keys
    wanted = sharding.device_set
    buffers = [shard.data for shard in x.addressable_shards if shard.device in wanted]
    shape = tuple(x.shape if shape is None else shape)
    return jax.make_array_from_single_device_arrays(shape, sharding, buffers, dtype=x.dtype)


def _on_part(x: jax.Array, part: Mesh, axis: str) -> jax.Array:
    sharding: Any = x.sharding
    old, new = mesh_shape_of(sharding.mesh)[axis], mesh_shape_of(part)[axis]
    shape = [
        size // old * new if axis in axes else size
        for size, axes in zip(x.shape, axes_by_dim(sharding.spec, x.ndim), strict=True)
    ]
    return relabel(x, NamedSharding(part, sharding.spec, memory_kind=sharding.memory_kind), shape)


def _common_mesh(leaves: list[tuple[str, Any]]) -> Mesh:
    mesh = None
    for path, leaf in leaves:
        sharding = getattr(leaf, "sharding", None)
        if not isinstance(leaf, jax.Array) or not isinstance(sharding, NamedSharding):
            raise ValueError(
                f"{path or 'tree'}: a {type(leaf).__name__} with sharding {sharding} is not on a mesh. Put it on one "
                "first (`reshard` with a NamedSharding)."
            )
        if mesh is not None and sharding.mesh != mesh:
            raise ValueError(
                f"{path}: its mesh ({mesh_text(mesh_shape_of(sharding.mesh))}) differs from that of {leaves[0][0]} "
                f"({mesh_text(mesh_shape_of(mesh))}) in shape or devices. Split the arrays of one mesh at a time."
            )
        mesh = sharding.mesh
    if not isinstance(mesh, Mesh):
        raise ValueError(f"{leaves[0][0] or 'tree'}: its mesh {mesh} is abstract: it has no devices.")
    return mesh


def _cuts(axis: str, sections: int | Sequence[int] | None, sizes: dict[str, int]) -> list[int]:
    if axis not in sizes:
        raise ValueError(f"Mesh {mesh_text(sizes)} has no axis {axis!r}{did_you_mean(axis, sizes, otherwise='.')}")
    size = sizes[axis]
    if sections is None or isinstance(sections, int):
        count = size if sections is None else sections
        if count < 1 or size % count:
            fits = [n for n in range(1, size + 1) if size % n == 0]
            raise ValueError(
                f"Axis {axis}={size} of mesh {mesh_text(sizes)} cannot be split into {count} equal sections. "
                f"Valid numbers: {fits}."
            )
        return list(range(0, size + 1, size // count))
    cuts = [0, *sections, size]
    if any(after <= before for before, after in itertools.pairwise(cuts)):
        raise ValueError(
            f"sections={list(sections)} leave an empty section of axis {axis}={size} (mesh {mesh_text(sizes)}). Give "
            f"increasing positions between 1 and {size - 1}."
        )
    return cuts
