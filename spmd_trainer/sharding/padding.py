"""Pads dimensions that are not divisible by their numbers of shards, and slices the padding off.

JAX arrays on a mesh must be sharded evenly. If a variable can't be sharded evenly, it is stored with zeros after its logical
region. The training step slices the padding off, computes on the logical shape, and pads the result with zeros again. GSPMD
also pads to the next multiple, but only inside a program (Xu et al. 2021, https://arxiv.org/abs/2105.04663). This module pads
a program's inputs and outputs, which JAX requires to be sharded evenly.

Worked example on a mesh (x=2, y=4): shape (3, 5) with P('x', None) becomes (4, 5); with P(('x', 'y'), None), 8 shards of
dimension 0, it becomes (8, 5); with P(None, 'y') it becomes (3, 8).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_values import put_back, slice_off
from spmd_trainer.sharding.messages import spec_text
from spmd_trainer.sharding.specs import AnyMesh, PyTree, axes_by_dim, check_spec, dimension_paddings, mesh_shape_of
from spmd_trainer.sharding.variables import VariableSpec, broadcast_prefix, is_spec, named_leaves


def uneven_paddings(
    spec: PartitionSpec | None, shape: Sequence[int], mesh_shape: Sequence[int], mesh_axis_names: Sequence[str]
) -> tuple[int, ...]:
    """Returns the padding of each dimension of `shape` up to the next multiple of its number of shards.

    Args:
      spec: the array's spec; None for replicated.
      shape: the logical shape.
      mesh_shape: the mesh's sizes, in the order of `mesh_axis_names`.
      mesh_axis_names: the mesh's axes.

    Returns:
      One number per dimension; () for a scalar.

    Raises:
      ValueError: sizes and names differ in length, or the spec does not fit the shape or the mesh.
    """
    if len(mesh_shape) != len(mesh_axis_names):
        raise ValueError(
            f"mesh_shape {tuple(mesh_shape)} has {len(mesh_shape)} sizes but mesh_axis_names {tuple(mesh_axis_names)} "
            f"has {len(mesh_axis_names)} names: give one size per axis."
        )
    sizes = dict(zip(mesh_axis_names, mesh_shape, strict=True))
    check_spec("uneven_paddings", shape, spec, sizes)
    return dimension_paddings(spec, shape, sizes)


def pad_uneven(tree: PyTree, specs: PyTree, logical_shapes: PyTree, mesh: AnyMesh) -> PyTree:
    """Pads every leaf with zeros from its logical shape to the smallest shape that its spec shards evenly.

    Works on concrete arrays and inside jit; a NumPy leaf stays in host memory. A leaf that needs no padding is returned as the
    same object. Nodes without leaves (None, optax.MaskedNode) pass through.

    Args:
      tree: arrays at their logical shapes.
      specs: a prefix tree of `tree`: PartitionSpecs, NamedShardings, VariableSpecs, or None for replicated.
      logical_shapes: a prefix tree of `tree`: tuples of ints, objects with a `.shape`, or VariableSpecs.
      mesh: the mesh; only its axis sizes are used.

    Returns:
      A tree like `tree`, of padded arrays.

    Raises:
      ValueError: a prefix tree does not fit the tree, a leaf does not have its logical shape, or a spec does not fit the leaf
        or the mesh.
    """
    sizes = mesh_shape_of(mesh)

    def pad(path: str, leaf: Any, spec: PartitionSpec, logical: tuple[int, ...]) -> Any:
        if np.shape(leaf) != logical:
            raise ValueError(
                f"{path}: the array has shape {np.shape(leaf)}, but its logical shape is {logical}; pad_uneven needs an "
                "unpadded array. If it is already padded, call slice_uneven first."
            )
        check_spec(path, logical, spec, sizes)
        paddings = dimension_paddings(spec, logical, sizes)
        if not any(paddings):
            return leaf
        if isinstance(leaf, np.ndarray):
            return np.pad(leaf, [(0, padding) for padding in paddings])
        return put_back(leaf, tuple(size + padding for size, padding in zip(logical, paddings, strict=True)))

    return _map_with_prefixes(pad, tree, specs, logical_shapes)


def slice_uneven(tree: PyTree, specs: PyTree, logical_shapes: PyTree) -> PyTree:
    """Slices the padding off every leaf: the inverse of `pad_uneven`. Arguments as for `pad_uneven`.

    For arrays on a mesh, call it inside jit. Outside jit, JAX would replicate slices that can't be sharded evenly.

    Returns:
      A tree like `tree` with logical shapes; a leaf without padding is returned as the same object.

    Raises:
      ValueError: a prefix tree does not fit the tree, or a leaf is smaller than its logical shape, has a different rank, or
        is larger in a dimension that its spec does not shard.
    """

    def unpad(path: str, leaf: Any, spec: PartitionSpec, logical: tuple[int, ...]) -> Any:
        shape = np.shape(leaf)
        if shape == logical:
            return leaf
        if len(shape) != len(logical) or any(size < least for size, least in zip(shape, logical, strict=True)):
            raise ValueError(
                f"{path}: an array of shape {shape} cannot be sliced to its logical shape {logical}: it needs rank "
                f"{len(logical)} and at least the logical size in each dimension. Does it belong to another variable?"
            )
        for dim, axes in enumerate(axes_by_dim(spec, len(shape))):
            if shape[dim] != logical[dim] and not axes:
                raise ValueError(
                    f"{path}: dimension {dim} has size {shape[dim]} and logical size {logical[dim]}, but spec "
                    f"{spec_text(spec)} does not split it, so the difference is not padding. Check the logical shape."
                )
        if isinstance(leaf, np.ndarray):
            return leaf[tuple(slice(size) for size in logical)]
        return slice_off(leaf, logical)

    return _map_with_prefixes(unpad, tree, specs, logical_shapes)


def _map_with_prefixes(
    fn: Callable[[str, Any, PartitionSpec, tuple[int, ...]], Any], tree: PyTree, specs: PyTree, logical_shapes: PyTree
) -> PyTree:
    """Returns a tree like `tree` with the results of `fn(path, leaf, spec, logical shape)` for every leaf."""
    all_specs = broadcast_prefix("specs", specs, tree, is_leaf=is_spec)
    all_shapes = broadcast_prefix("logical_shapes", logical_shapes, tree, is_leaf=_is_shape)
    leaves = named_leaves(tree)
    results = [
        fn(path, leaf, _as_spec(path, spec), _as_shape(path, shape))
        for (path, leaf), spec, shape in zip(leaves, all_specs, all_shapes, strict=True)
    ]
    return jax.tree.unflatten(jax.tree.structure(tree), results)


def _is_shape(node: object) -> bool:
    return hasattr(node, "shape") or (type(node) is tuple and all(isinstance(size, int | np.integer) for size in node))


def _as_spec(path: str, entry: Any) -> PartitionSpec:
    match entry:
        case None:
            return PartitionSpec()
        case PartitionSpec():
            return entry
        case NamedSharding() | VariableSpec():
            return entry.spec
    raise ValueError(
        f"{path}: {entry!r} is not a spec. Give a PartitionSpec, a NamedSharding, a VariableSpec, or None."
    )


def _as_shape(path: str, entry: Any) -> tuple[int, ...]:
    if isinstance(entry, VariableSpec):
        return entry.logical_shape
    if _is_shape(entry):
        return tuple(getattr(entry, "shape", entry))
    raise ValueError(
        f"{path}: {entry!r} is not a shape. Give a tuple of ints, an object with a .shape, or a VariableSpec."
    )
