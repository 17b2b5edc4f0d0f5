"""`VariableSpec`, the record of a variable's sharding and padding on a mesh, and the paths that name variables.

A `VariableSpec` is computed once, from shapes alone. Initialization, jit shardings, padding, checkpoints and reports all read
it. Messages, rules and reports write a variable's path in the same form: `layers/0/attn/kernel` (`path_str`).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey, FlattenedIndexKey, GetAttrKey, SequenceKey
from jax.typing import DTypeLike

from spmd_trainer.sharding.specs import (
    AnyMesh,
    PyTree,
    check_spec,
    dimension_paddings,
    full_rank_spec,
    mesh_shape_of,
    shard_counts,
)


@dataclasses.dataclass(frozen=True)
class VariableSpec:
    """Shape, sharding and padding of one variable on a mesh. It is a pytree leaf, so a state's specs form a tree like the state.

    Attributes:
      path: the variable's keys joined by '/', e.g. `params/layers/0/kernel`.
      logical_shape: the shape the model declares.
      dtype: the element type; a NumPy dtype, or one of JAX's extended types (PRNG keys).
      spec: one entry per dimension, or `P()` if nothing is sharded.
      paddings: the padding of each dimension, up to the next multiple of its number of shards.
      reason: the reason for the spec: `declared`, `rule 2 ('.*kernel', fsdp(axis='data'))`, `replicated: ...`.
      memory_kind: JAX's memory kind of the variable's arrays, such as 'pinned_host'; None for the devices' default memory.
    """

    path: str
    logical_shape: tuple[int, ...]
    dtype: np.dtype
    spec: PartitionSpec
    paddings: tuple[int, ...]
    reason: str
    memory_kind: str | None = None

    @property
    def padded_shape(self) -> tuple[int, ...]:
        """The shape on the devices: each dimension padded to the next multiple of its number of shards."""
        return tuple(size + padding for size, padding in zip(self.logical_shape, self.paddings, strict=True))

    @property
    def is_padded(self) -> bool:
        """True if the shape on the devices differs from the logical shape."""
        return any(self.paddings)

    @property
    def is_replicated(self) -> bool:
        """True if every device holds the whole variable."""
        return not any(self.spec)

    def shard_shape(self, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the shape of one device's shard. `mesh_shape` maps axis names to sizes."""
        counts = shard_counts(self.spec, len(self.logical_shape), mesh_shape)
        return tuple(size // count for size, count in zip(self.padded_shape, counts, strict=True))

    def bytes_per_device(self, mesh_shape: Mapping[str, int]) -> int:
        """Returns the bytes of one device's shard, padding included. `mesh_shape` maps axis names to sizes."""
        return math.prod(self.shard_shape(mesh_shape)) * self.dtype.itemsize

    def logical_bytes(self) -> int:
        """Returns the bytes of one whole copy without padding."""
        return math.prod(self.logical_shape) * self.dtype.itemsize

    def padding_bytes(self) -> int:
        """Returns the bytes that padding adds to one whole copy, summed over its shards."""
        return math.prod(self.padded_shape) * self.dtype.itemsize - self.logical_bytes()

    def padding_per_device(self, mesh_shape: Mapping[str, int]) -> int:
        """Returns the average bytes of padding in one device's shard. `mesh_shape` maps axis names to sizes."""
        padding = self.padding_bytes()
        return self.bytes_per_device(mesh_shape) * padding // max(1, self.logical_bytes() + padding)


def make_variable_spec(
    path: str,
    shape: Sequence[int],
    dtype: DTypeLike,
    spec: PartitionSpec | None,
    mesh_shape: Mapping[str, int],
    reason: str,
) -> VariableSpec:
    """Returns the VariableSpec of one variable, after checking `spec` against the shape and the mesh.

    Args:
      path: the variable's path, for errors and reports.
      shape: the logical shape.
      dtype: anything that NumPy accepts as a dtype, or one of JAX's extended types.
      spec: entries for the leading dimensions; None for replicated.
      mesh_shape: {axis name: size} of the mesh.
      reason: the reason for the spec, for the report.

    Returns:
      The VariableSpec. Its spec has an entry for every dimension, or is `P()`.

    Raises:
      ValueError: the spec does not fit (see `specs.check_spec`).
    """
    shape = tuple(int(size) for size in shape)
    check_spec(path, shape, spec, mesh_shape)
    # NumPy has no dtype for PRNG keys; JAX's extended types have the attributes that are used here.
    element: Any = dtype if jnp.issubdtype(dtype, jax.dtypes.extended) else np.dtype(dtype)
    paddings = dimension_paddings(spec, shape, mesh_shape)
    return VariableSpec(path, shape, element, full_rank_spec(spec, len(shape)), paddings, reason)


def path_str(key_path: Sequence[object]) -> str:
    """Returns a leaf's path: its keys joined by '/', in the same form for the trees of every library.

    Keys are dict keys, list indices, and attributes of NamedTuples and dataclasses. The attribute `value`, in which an NNX
    Variable or a Linen Partitioned box keeps its array, is omitted: `{'lin': {'kernel': Param(...)}}` has the path `lin/kernel`.

    Args:
      key_path: the keys that `jax.tree_util.tree_flatten_with_path` returns with each leaf.

    Returns:
      A path such as `params/layers/0/kernel`; '' if the tree is a single leaf.
    """
    keys = list(key_path)
    if len(keys) > 1 and isinstance(keys[-1], GetAttrKey) and keys[-1].name == "value":
        del keys[-1]
    return "/".join(_key_str(key) for key in keys)


def _key_str(key: object) -> str:
    match key:
        case DictKey() | FlattenedIndexKey():
            return str(key.key)
        case SequenceKey():
            return str(key.idx)
        case GetAttrKey():
            return str(key.name)
    return str(key)


def named_leaves(tree: PyTree, is_leaf: Callable[[Any], bool] | None = None) -> list[tuple[str, Any]]:
    """Returns (path, leaf) for every leaf, in the order of `jax.tree.leaves`."""
    return [(path_str(keys), leaf) for keys, leaf in jax.tree_util.tree_flatten_with_path(tree, is_leaf=is_leaf)[0]]


def leaf_shape_dtype(path: str, leaf: Any) -> tuple[tuple[int, ...], np.dtype]:
    """Returns the shape and dtype of an array, a ShapeDtypeStruct or a Python number.

    Raises:
      ValueError: the leaf has neither shape nor dtype, and is not a Python number.
    """
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return tuple(leaf.shape), leaf.dtype
    if isinstance(leaf, bool | int | float | complex):
        return (), jax.dtypes.canonicalize_dtype(np.result_type(type(leaf)))
    raise ValueError(
        f"{path}: a {type(leaf).__name__} ({leaf!r}) has no shape and dtype, so it cannot lie on a mesh. "
        "Remove it from the tree, or make it a static field."
    )


def broadcast_prefix(what: str, prefix: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """Returns the entry of `prefix` that applies to each leaf of `tree`: an entry applies to all leaves below it.

    Args:
      what: the name of `prefix`, for errors.
      prefix: a prefix tree of `tree`.
      tree: any pytree.
      is_leaf: returns True for the nodes of `prefix` to treat as leaves.

    Returns:
      As many entries as `jax.tree.leaves(tree)`.

    Raises:
      ValueError: `prefix` is not a prefix of `tree`; the message names the path where they differ.
    """
    structure: Any
    entries, structure = jax.tree.flatten(prefix, is_leaf=is_leaf)
    try:
        subtrees = structure.flatten_up_to(tree)
    except ValueError as error:
        raise ValueError(
            f"{what} is not a prefix of the tree: {_misfit(what, prefix, tree, is_leaf) or error} Give it the tree's "
            "structure; one entry may also apply to all leaves below a node."
        ) from error
    return [entry for entry, subtree in zip(entries, subtrees, strict=True) for _ in jax.tree.leaves(subtree)]


def _misfit(what: str, prefix: PyTree, tree: PyTree, is_leaf: Callable[[Any], bool]) -> str | None:
    """Describes the first path that only one of `prefix` and `tree` has; None if only node types differ."""

    def covers(entry: str, leaf: str) -> bool:
        return entry in ("", leaf) or leaf.startswith(f"{entry}/")

    entries = [path for path, _ in named_leaves(prefix, is_leaf)]
    leaves = [path for path, _ in named_leaves(tree)]
    for entry in entries:
        if not any(covers(entry, leaf) for leaf in leaves):
            return f"{what} has an entry for {entry}, which the tree lacks."
    for leaf in leaves:
        if not any(covers(entry, leaf) for entry in entries):
            return f"{what} has no entry for {leaf}."
    return None


def is_spec(node: object) -> bool:
    """Returns True if a node of a tree is a spec: a PartitionSpec, a NamedSharding, a VariableSpec, or None (replicated)."""
    return node is None or isinstance(node, PartitionSpec | NamedSharding | VariableSpec)


def named_shardings(variables: PyTree, mesh: AnyMesh) -> PyTree:
    """Returns a tree of NamedShardings for a tree of VariableSpecs; variables with equal specs share one object."""
    sharding = functools.cache(lambda spec, kind: NamedSharding(mesh, spec, memory_kind=kind))
    return jax.tree.map(lambda variable: sharding(variable.spec, variable.memory_kind), variables)


# (path, shape, leaf, current spec with an entry per dimension) -> (spec, reason)
Decision = Callable[[str, tuple[int, ...], Any, PartitionSpec], tuple[PartitionSpec, str]]


def plan_leaves(state: PyTree, mesh: AnyMesh, decide: Decision) -> PyTree:
    """Returns a VariableSpec for every leaf, with the spec and reason that `decide` returns.

    Args:
      state: any pytree of arrays, ShapeDtypeStructs or Python numbers.
      mesh: the mesh.
      decide: (path, shape, leaf, current spec with an entry per dimension) -> (spec, reason).

    Returns:
      A tree like `state`.

    Raises:
      ValueError: a leaf has no shape and dtype, or a spec does not fit its leaf or the mesh.
    """
    sizes = mesh_shape_of(mesh)
    records = []
    for path, leaf in named_leaves(state):
        shape, dtype = leaf_shape_dtype(path, leaf)
        spec, reason = decide(path, shape, leaf, _spec_so_far(leaf, len(shape), sizes))
        try:
            records.append(make_variable_spec(path, shape, dtype, spec, sizes, reason))
        except ValueError as error:
            raise ValueError(f"{error} Decided by: {reason}.") from error
    return jax.tree.unflatten(jax.tree.structure(state), records)


def _spec_so_far(leaf: Any, rank: int, mesh_shape: Mapping[str, int]) -> PartitionSpec:
    """Returns the leaf's current spec; all its entries are None if the leaf is not on a mesh of this shape."""
    sharding = getattr(leaf, "sharding", None)
    entries: tuple[Any, ...] = ()
    if isinstance(sharding, NamedSharding) and mesh_shape_of(sharding.mesh) == dict(mesh_shape):
        entries = tuple(sharding.spec)
    return PartitionSpec(*entries, *(None,) * (rank - len(entries)))
