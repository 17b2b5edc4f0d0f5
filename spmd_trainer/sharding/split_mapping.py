"""Split mappings: the mesh axes over which to shard the inputs of each rank.

    inputs_split_mapping = dict(
        map_1d=(('replica', 'data'),),            # labels [batch]
        map_2d=(('replica', 'data'), None),       # token ids [batch, time]
        map_4d=('data', None, None, 'mdl'),       # images [batch, height, width, channels]
        by_name={'audio/*': ('data', 'mdl')},     # overrides the rank's entry for one input, or for a glob of inputs
    )

The value for a rank is a tuple with one item per dimension: an axis name, an axis index, a tuple of axes (sharded over
their product), or None / -1 (unsharded). None instead of the tuple replicates the inputs of that rank. The keys of `by_name` are
paths (`images/patches`) or fnmatch globs, not regular expressions. An exact path takes precedence over a glob, an earlier glob
over a later one, and `by_name` over the rank.

To support a new rank, add one line (`map_3d=(('replica', 'data'), None, None)`). To make an exception for one input, add one
key to `by_name`.

In this module, every `mesh_axis_names` may also be a mapping of names to sizes (`mesh.shape`); errors then show the sizes too.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.constraints import constrain, constrain_together
from spmd_trainer.sharding.messages import count_text, did_you_mean
from spmd_trainer.sharding.specs import AnyMesh, PyTree, check_divides, check_spec, entry_axes, mesh_shape_of
from spmd_trainer.sharding.split_dims import (
    MeshAxes,
    SplitDimsMapping,
    SplitMapping,
    axes_names_text,
    check_mesh_axes,
    parse_split_dims,
)
from spmd_trainer.sharding.variables import leaf_shape_dtype, named_leaves

FIELD = "task.train.inputs_split_mapping"
BY_NAME = "by_name"
_RANK_KEY = re.compile(r"map_([1-9][0-9]*)d")


def to_partition_spec(split_dims_mapping: SplitDimsMapping, mesh_axis_names: MeshAxes) -> PartitionSpec:
    """Returns the PartitionSpec of one split_dims_mapping.

    For the axes ('replica', 'data', 'mdl'), `(0, -1)` is `P('replica', None)`, and `(('replica', 'data'), 'mdl')` is
    `P(('replica', 'data'), 'mdl')`.

    Args:
      split_dims_mapping: one item per dimension: an axis name, an axis index, a tuple of axes, or None / -1 (unsharded). None
        instead of the tuple: replicated.
      mesh_axis_names: the mesh's axes, in order.

    Returns:
      A spec with as many entries as the mapping.

    Raises:
      ValueError: an unknown axis name, an index outside the mesh, an axis used twice, or an item of a wrong type.
    """
    return parse_split_dims("split_dims_mapping", split_dims_mapping, mesh_axis_names)


def shard_on_batch_dim_partition_spec(mesh_axis_names: MeshAxes, x: Any) -> PartitionSpec:
    """Returns the spec of a batch as it arrives from the host: dimension 0 is sharded over all mesh axes.

    Rank 3 on ('replica', 'data', 'mdl') is `P(('replica', 'data', 'mdl'), None, None)`.

    Args:
      mesh_axis_names: the mesh's axes, in order.
      x: anything with a shape.

    Returns:
      A spec with one entry per dimension of `x`.

    Raises:
      ValueError: `x` is a scalar, or `mesh_axis_names` is invalid.
    """
    check_mesh_axes(mesh_axis_names)
    rank = len(np.shape(x))
    if rank == 0:
        raise ValueError(
            f"A scalar has no batch dimension to split over the mesh ({axes_names_text(mesh_axis_names)}). "
            "Give every input a leading batch dimension, or replicate scalars with P()."
        )
    return PartitionSpec(tuple(mesh_axis_names), *(None,) * (rank - 1))


def infer_partition_spec_based_on_rank_fn(
    mapping_dict: SplitMapping | None, mesh_axis_names: MeshAxes, x: Any
) -> PartitionSpec | None:
    """Returns the spec of `x` from the mapping's entry `map_{rank}d` for its rank.

    Args:
      mapping_dict: `map_1d`, `map_2d`, ...; None for no mapping.
      mesh_axis_names: the mesh's axes, in order.
      x: anything with a shape.

    Returns:
      The spec, or None (fully replicated) if the entry or the whole mapping is None. `P()` for a scalar.

    Raises:
      ValueError: the mapping has no entry for this rank, or the entry is invalid.
    """
    return _spec_by_rank(mapping_dict, mesh_axis_names, "", tuple(np.shape(x)))


def input_partition_spec(
    mapping_dict: SplitMapping | None, mesh_axis_names: MeshAxes, path: str, x: Any
) -> PartitionSpec | None:
    """Returns the spec of the input at `path`: from `by_name` if a key matches, otherwise from its rank.

    With `by_name={'images': ('data', None, None, 'mdl')}`, the input `images` [batch, height, width, channels] gets
    `P('data', None, None, 'mdl')`, even if `map_4d` differs.

    Args:
      mapping_dict: a split mapping (see the module `split_mapping`); None for no mapping.
      mesh_axis_names: the mesh's axes, in order.
      path: the input's path, such as `images/patches`.
      x: anything with a shape.

    Returns:
      The spec, or None for fully replicated.

    Raises:
      ValueError: the mapping has no entry for this input, or an entry of a different rank.
    """
    shape = tuple(np.shape(x))
    by_name = (mapping_dict or {}).get(BY_NAME) or {}
    key = _name_key(by_name, path)
    if key is None:
        return _spec_by_rank(mapping_dict, mesh_axis_names, path, shape)
    entry = by_name[key]
    if entry is None:
        return None
    spec = parse_split_dims(f"{FIELD} {BY_NAME}[{key!r}]", entry, mesh_axis_names)
    if len(spec) != len(shape):
        raise ValueError(
            f"{FIELD} {BY_NAME}[{key!r}] = {entry!r} has {count_text(len(spec), 'entry', 'entries')}, but input "
            f"{path!r} has rank {len(shape)} (shape {shape}). Mesh axes: {axes_names_text(mesh_axis_names)}. Give one "
            "entry per dimension, None for a dimension that is not split."
        )
    return spec


def input_partition_specs(mapping_dict: SplitMapping | None, mesh_axis_names: MeshAxes, inputs: PyTree) -> PyTree:
    """Returns the specs of a whole batch (see `input_partition_spec`); `P()` for fully replicated inputs.

    Args:
      mapping_dict: a split mapping (see the module `split_mapping`); None for no mapping.
      mesh_axis_names: the mesh's axes, in order.
      inputs: a pytree of arrays or ShapeDtypeStructs.

    Returns:
      A tree like `inputs`.

    Raises:
      ValueError: as `input_partition_spec`; also if an argument has the wrong type, e.g. because two arguments were swapped.
    """
    check_mesh_axes(mesh_axis_names)
    _check_keys(mapping_dict, mesh_axis_names)
    leaves = named_leaves(inputs)
    for path, x in leaves:
        leaf_shape_dtype(f"input {path!r}", x)
    specs = [input_partition_spec(mapping_dict, mesh_axis_names, path, x) or PartitionSpec() for path, x in leaves]
    return jax.tree.unflatten(jax.tree.structure(inputs), specs)


def reshard_input_based_on_rank_fn(
    mapping_dict: SplitMapping | None,
    mesh_axis_names: MeshAxes,
    x: jax.Array,
    *,
    mesh: AnyMesh | None = None,
) -> jax.Array:
    """Constrains one input inside jit to the sharding that a split mapping gives for its rank.

    Args:
      mapping_dict: a split mapping (see the module `split_mapping`); None leaves `x` unchanged.
      mesh_axis_names: the mesh's axes, in order.
      x: the input.
      mesh: default the ambient mesh (`jax.set_mesh`).

    Returns:
      `x` with its values unchanged.

    Raises:
      ValueError: as `input_partition_spec`; also if there is no mesh, or if a dimension's axes don't divide its size.
    """
    if mapping_dict is None:
        return x
    spec = input_partition_spec(mapping_dict, mesh_axis_names, "", x) or PartitionSpec()
    _check("", x, spec, mesh, False)
    return constrain(x, spec, mesh)


def reshard_inputs(
    mapping_dict: SplitMapping | None,
    mesh_axis_names: MeshAxes,
    inputs: PyTree,
    *,
    mesh: AnyMesh | None = None,
    allow_uneven: bool = False,
) -> PyTree:
    """Constrains every input of a batch inside jit to the sharding that a split mapping gives for its path or rank.

    Args:
      mapping_dict: a split mapping (see the module `split_mapping`); None leaves the inputs unchanged.
      mesh_axis_names: the mesh's axes, in order.
      inputs: a pytree of arrays.
      mesh: default the ambient mesh (`jax.set_mesh`).
      allow_uneven: True accepts a dimension that is not divisible by its number of shards; XLA then pads it for the
        computation. False by default, because JAX silently replicates an uneven value that the jitted function returns.

    Returns:
      A tree like `inputs`.

    Raises:
      ValueError: as `input_partition_specs`; also if there is no mesh or, unless `allow_uneven`, if a dimension is uneven.
    """
    if mapping_dict is None:
        return inputs
    specs = jax.tree.leaves(input_partition_specs(mapping_dict, mesh_axis_names, inputs))
    named = named_leaves(inputs)
    for (path, x), spec in zip(named, specs, strict=True):
        _check(path, x, spec, mesh, allow_uneven)
    leaves = constrain_together([x for _, x in named], specs, mesh)
    return jax.tree.unflatten(jax.tree.structure(inputs), leaves)


def validate_split_mapping(mapping_dict: SplitMapping | None, mesh_axis_names: MeshAxes, inputs: PyTree = None) -> None:
    """Checks a split mapping against the names of a mesh's axes. Needs no devices.

    Args:
      mapping_dict: a split mapping (see the module `split_mapping`); None is valid.
      mesh_axis_names: the mesh's axes, in order.
      inputs: the training batch, if its shapes are known: a pytree of anything with shapes. Then every input must have an entry,
        and every `by_name` key must match an input. (Evaluation and decode batches share the mapping and may lack some inputs.)

    Raises:
      ValueError: the mesh is empty, a key or an axis is unknown, an entry's length differs from its key's rank, or an entry
        has an axis twice. The message names the key, the entry, the mesh axes and the fix.
    """
    if mapping_dict is None:
        return
    axes = axes_names_text(mesh_axis_names)
    if not tuple(mesh_axis_names):
        raise ValueError(
            f"{FIELD} is set, but the mesh has no axes. Set the model's mesh_axis_names, or set {FIELD} to None."
        )
    _check_keys(mapping_dict, mesh_axis_names)
    for key, entry in mapping_dict.items():
        if key == BY_NAME:
            _validate_by_name(entry, mesh_axis_names)
            continue
        rank = int(str(key).removeprefix("map_").removesuffix("d"))
        if entry is None:
            continue
        spec = parse_split_dims(f"{FIELD} {key}", entry, mesh_axis_names)
        if len(spec) != rank:
            raise ValueError(
                f"{FIELD} {key} = {entry!r} has {count_text(len(spec), 'entry', 'entries')}, but needs {rank}: one per "
                f"dimension. Mesh axes: {axes}. {_rank_fix(key, tuple(spec), rank)}"
            )
    if inputs is not None:
        input_partition_specs(mapping_dict, mesh_axis_names, inputs)
        paths = [path for path, _ in named_leaves(inputs)]
        for key in mapping_dict.get(BY_NAME) or {}:
            if not any(path == key or fnmatch.fnmatchcase(path, key) for path in paths):
                raise ValueError(
                    f"{FIELD} {BY_NAME}[{key!r}] matches no input{did_you_mean(key, paths, otherwise='.')} "
                    f"The inputs are {paths}."
                )


def _check_keys(mapping_dict: object, mesh_axis_names: MeshAxes) -> None:
    if mapping_dict is None:
        return
    axes = axes_names_text(mesh_axis_names)
    if not isinstance(mapping_dict, Mapping):
        raise ValueError(
            f"{FIELD} must be a dict, not a {type(mapping_dict).__name__} ({mapping_dict!r}), e.g. "
            f"{{'map_1d': {_batch_entry(None, mesh_axis_names, 1)!r}}}. Mesh axes: {axes}."
        )
    for key in mapping_dict:
        if key != BY_NAME and _RANK_KEY.fullmatch(str(key)) is None:
            raise ValueError(
                f"{FIELD} has a key {key!r}{_nearest_key(key)} The valid keys are map_1d, map_2d, ... (one per "
                f"rank) and {BY_NAME}. Mesh axes: {axes}."
            )


def _validate_by_name(by_name: object, mesh_axis_names: MeshAxes) -> None:
    if by_name is None:
        return
    if not isinstance(by_name, Mapping) or not all(isinstance(key, str) for key in by_name):
        raise ValueError(
            f"{FIELD} {BY_NAME} = {by_name!r} must map input paths to entries, e.g. "
            f"{{'images': {_batch_entry(None, mesh_axis_names, 4)!r}}}. Mesh axes: {axes_names_text(mesh_axis_names)}."
        )
    for key, entry in by_name.items():
        if entry is not None:
            parse_split_dims(f"{FIELD} {BY_NAME}[{key!r}]", entry, mesh_axis_names)


def _spec_by_rank(
    mapping_dict: SplitMapping | None, mesh_axes: MeshAxes, path: str, shape: tuple[int, ...]
) -> PartitionSpec | None:
    if mapping_dict is None:
        return None
    if not shape:
        return PartitionSpec()
    key = f"map_{len(shape)}d"
    if key not in mapping_dict:
        entry = _batch_entry(mapping_dict, mesh_axes, len(shape))
        raise ValueError(
            f"{FIELD} has no {key}, and input {path!r} has rank {len(shape)} (shape {shape}).\n"
            f"Mesh axes: {axes_names_text(mesh_axes)}. To split its batch, add {key}={entry!r} to {FIELD}, or "
            f"{key}=None to replicate it."
        )
    if mapping_dict[key] is None:
        return None
    spec = parse_split_dims(f"{FIELD} {key}", mapping_dict[key], mesh_axes)
    if len(spec) != len(shape):
        raise ValueError(
            f"{FIELD} {key} = {mapping_dict[key]!r} has {count_text(len(spec), 'entry', 'entries')}, but input "
            f"{path!r} has rank {len(shape)} (shape {shape}). Mesh axes: {axes_names_text(mesh_axes)}. "
            f"{_rank_fix(key, tuple(spec), len(shape))}"
        )
    return spec


def _check(path: str, x: jax.Array, spec: PartitionSpec, mesh: AnyMesh | None, allow_uneven: bool) -> None:
    ambient = jax.sharding.get_abstract_mesh()
    if mesh is None and ambient.empty:
        raise ValueError(
            f"There is no mesh to split input {path!r} (shape {x.shape}) on. Run under `with jax.set_mesh(mesh):`, or "
            "pass mesh=."
        )
    sizes = mesh_shape_of(ambient if mesh is None else mesh)
    name = f"input {path!r}"
    check_spec(name, x.shape, spec, sizes)
    if not allow_uneven:
        check_divides(name, x.shape, spec, sizes)


def _name_key(by_name: Mapping[str, Any], path: str) -> str | None:
    if path in by_name:
        return path
    return next((key for key in by_name if fnmatch.fnmatchcase(path, key)), None)


def _batch_entry(mapping_dict: SplitMapping | None, mesh_axes: MeshAxes, rank: int) -> tuple[Any, ...]:
    """Proposes an entry for a rank without one. It shards the batch dimension as other ranks do, or over the whole mesh."""
    for key, entry in (mapping_dict or {}).items():
        if _RANK_KEY.fullmatch(str(key)) and entry:
            return (entry[0], *(None,) * (rank - 1))
    names = tuple(mesh_axes)
    return (names[0] if len(names) == 1 else names, *(None,) * (rank - 1))


def _rank_fix(key: str, entries: tuple[Any, ...], rank: int) -> str:
    axes = tuple(axis for entry in entries for axis in entry_axes(entry))
    if rank == 1 and len(axes) > 1:
        return f"To split one dimension over several axes, write {key}=({axes!r},)."
    if len(entries) < rank:
        return f"E.g. {key}={entries + (None,) * (rank - len(entries))!r}, with None for a dimension that is not split."
    return f"Entries of this length belong under map_{len(entries)}d."


def _nearest_key(key: object) -> str:
    if str(key) == "map_0d":
        return ". A scalar has nothing to split: remove it."
    ranks = re.findall(r"\d+", str(key)) or range(1, 7)
    return did_you_mean(key, [f"map_{rank}d" for rank in ranks] + [BY_NAME], otherwise=".")
