"""The one record of how a variable lies on a mesh, and the path strings by which every part of the system names one.

A `VariableSpec` is computed once, from shapes alone; initialisation, jit shardings, padding, checkpoints and reports
all read it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey

from spmd_trainer.sharding.specs import AnyMesh, check_spec, dimension_paddings, full_rank_spec, shard_counts


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """One variable on a mesh. A leaf of any pytree, so that a state's records form a tree like the state itself.

    Attributes:
      path: the variable's name, its keys joined by '/'.
      logical_shape: the shape the model declares.
      dtype: the element type; a NumPy dtype, or one of JAX's extended types (PRNG keys).
      spec: one entry per dimension, or `P()` where nothing is split.
      paddings: what each dimension gains so that it divides by its shards.
      reason: why it lies so, in words: `declared`, `rule 2 ('.*kernel', fsdp(axis='data'))`, `replicated: ...`.
    """

    path: str
    logical_shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    paddings: tuple[int, ...]
    reason: str

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape on the devices: the least that divides, dimension by dimension."""
        return tuple(size + padding for size, padding in zip(self.logical_shape, self.paddings, strict=True))

    @property
    def is_padded(self) -> bool:
        """Whether the shape on the devices differs from the logical one."""
        return any(self.paddings)

    @property
    def is_replicated(self) -> bool:
        """Whether every device holds the whole variable."""
        return not any(self.spec)

    def shard_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """The shape of the piece that one device holds."""
        counts = shard_counts(self.spec, len(self.logical_shape), mesh_shape)
        return tuple(size // count for size, count in zip(self.padded_shape, counts, strict=True))

    def bytes_per_device(self, mesh_shape: Mapping[str, int]) -> int:
        """Bytes of the piece that one device holds, padding included. `mesh_shape` maps axis names to sizes."""
        return math.prod(self.shard_shape(mesh_shape)) * self.dtype.itemsize

    def logical_bytes(self) -> int:
        """Bytes of one whole copy without padding."""
        return math.prod(self.logical_shape) * self.dtype.itemsize

    def padding_bytes(self) -> int:
        """Bytes that padding adds to one whole copy of the variable (spread over the devices that share it)."""
        return math.prod(self.padded_shape) * self.dtype.itemsize - self.logical_bytes()


def make_variable_spec(
    path: str,
    shape: Sequence[int],
    dtype: Any,
    spec: PartitionSpec | None,
    mesh_shape: Mapping[str, int],
    reason: str,
) -> VariableSpec:
    """Checks `spec` against the shape and the mesh, and computes the paddings.

    Args:
      path: names the variable in errors and reports.
      shape: the logical shape.
      dtype: anything NumPy takes for a dtype, or one of JAX's extended types.
      spec: entries for the leading dimensions; None means replicated.
      mesh_shape: axis name to size.
      reason: why this spec, for the report.

    Returns:
      The record; its spec has an entry for every dimension, or is `P()`.

    Raises:
      ValueError: the spec does not fit (see `specs.check_spec`).
    """
    shape = tuple(int(size) for size in shape)
    check_spec(path, shape, spec, mesh_shape)
    if not jax.dtypes.issubdtype(dtype, jax.dtypes.extended):
        dtype = np.dtype(dtype)
    paddings = dimension_paddings(spec, shape, mesh_shape)
    return VariableSpec(path, shape, dtype, full_rank_spec(spec, len(shape)), paddings, reason)


def path_str(key_path: Sequence[Any]) -> str:
    """The name of a leaf: its keys joined by '/', the same whatever library built the tree.

    Dict keys, list indices, attributes of NamedTuples and dataclasses are taken as they are. The field `value` in which
    an NNX Variable or a Linen Partitioned box keeps its array is left out: `{'lin': {'kernel': Param(...)}}` is
    `lin/kernel`.

    Args:
      key_path: what `jax.tree_util.tree_flatten_with_path` gives beside each leaf.

    Returns:
      E.g. `params/layers/0/kernel`; '' for a tree that is one leaf.
    """
    keys = list(key_path)
    if len(keys) > 1 and isinstance(keys[-1], GetAttrKey) and keys[-1].name == "value":
        del keys[-1]
    return "/".join(_key_str(key) for key in keys)


def _key_str(key: Any) -> str:
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return key.name
    return str(key)


def named_leaves(tree: Any, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Every leaf with its path string, in the order of `jax.tree.leaves`."""
    return [(path_str(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def leaf_shape_dtype(path: str, leaf: Any) -> tuple[tuple[int, ...], Any]:
    """Shape and dtype of an array, a ShapeDtypeStruct or a Python number.

    Raises:
      ValueError: the leaf is none of these.
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, bool | int | float | complex):
        return (), jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    raise ValueError(
        f"{path}: a {type(leaf).__name__} ({leaf!r}) has no shape and dtype, so it cannot lie on a mesh. "
        "Leave it out of the tree, or make it a static field."
    )


def broadcast_prefix(what: str, prefix: Any, tree: Any, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """One entry of `prefix` for each leaf of `tree`: a leaf of `prefix` stands for all the leaves below it.

    Args:
      what: the prefix's name, for errors.
      prefix: a prefix tree of `tree`.
      tree: any pytree.
      is_leaf: what counts as a leaf of `prefix` although JAX would look inside.

    Returns:
      As many entries as `jax.tree.leaves(tree)`.

    Raises:
      ValueError: `prefix` is no prefix of `tree`.
    """
    structure: Any
    entries, structure = jax.tree.flatten(prefix, is_leaf=is_leaf)
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{what} is no prefix of the tree: {error}. Give it the tree's own structure, or stop at a node and let "
            "one entry stand for all below it."
        ) from error
    return [entry for entry, subtree in zip(entries, subtrees, strict=True) for _ in jax.tree.leaves(subtree)]


def is_spec(node: Any) -> bool:
    """Whether a node of a prefix tree says how something is split; None says that it is replicated."""
    return node is None or isinstance(node, PartitionSpec | NamedSharding | VariableSpec)


def named_shardings(variables: Any, mesh: AnyMesh) -> Any:
    """The NamedShardings of a tree of VariableSpecs, one object for all variables that are split alike."""
    sharding = functools.cache(lambda spec: NamedSharding(mesh, spec))
    return jax.tree.map(lambda variable: sharding(variable.spec), variables)
