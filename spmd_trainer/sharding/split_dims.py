"""Parses a split_dims_mapping, e.g. `(('replica', 'data'), None, 'mdl')`, into a PartitionSpec.

A mapping has one item per dimension: an axis name, an axis index, a tuple of axes (sharded over their product), or None / -1
(unsharded). Layers declare the shardings of their variables in this form. The module `split_mapping` uses it for inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.messages import did_you_mean, mesh_text
from spmd_trainer.sharding.specs import entry_axes, mesh_shape_of

MeshAxes = Sequence[str] | Mapping[str, int]
SplitDimsMapping = Sequence[str | int | Sequence[str | int] | None] | PartitionSpec | None
# {"map_1d": SplitDimsMapping, ..., "by_name": {path or glob: SplitDimsMapping}}
SplitMapping = Mapping[str, Any]

WHOLE = -1


def parse_split_dims(where: str, mapping: SplitDimsMapping, mesh_axes: MeshAxes) -> PartitionSpec:
    """Returns the PartitionSpec of one split_dims_mapping; see `split_mapping.to_partition_spec`.

    Args:
      where: the field that holds the mapping; errors begin with it.
      mapping: one item per dimension, or None for replicated.
      mesh_axes: the names of the mesh's axes in order, or {name: size}.

    Returns:
      A spec with as many entries as the mapping has items.

    Raises:
      ValueError: the mapping has an unknown axis name, an index outside the mesh, an axis twice, or an item of a wrong type; or
        `mesh_axes` is invalid (`check_mesh_axes`).
    """
    check_mesh_axes(mesh_axes)
    if mapping is None:
        return PartitionSpec()
    suffix = f"Mesh axes: {axes_names_text(mesh_axes)}."
    if isinstance(mapping, str) or not isinstance(mapping, Sequence | PartitionSpec):
        raise ValueError(
            f"{where} = {mapping!r} must be a tuple with one item per dimension, e.g. ({mapping!r},) with the comma "
            f"for one dimension. {suffix}"
        )
    entries: list[tuple[str, ...] | None] = []
    for dim, item in enumerate(mapping):
        if item is None or _is_index(item, WHOLE):
            entries.append(None)
            continue
        group = item if isinstance(item, tuple | list) else (item,)
        entries.append(tuple(_axis_name(f"{where} = {mapping!r}, dimension {dim}", axis, mesh_axes) for axis in group))
    used = [axis for entry in entries for axis in entry_axes(entry)]
    for axis in used:
        if used.count(axis) > 1:
            dims = [dim for dim, entry in enumerate(entries) for a in entry_axes(entry) if a == axis]
            raise ValueError(
                f"{where} = {mapping!r} uses axis {axis!r} more than once (dimensions {dims}). An axis can split only "
                f"one dimension: write None for the others. {suffix}"
            )
    return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry or None for entry in entries))


def check_mesh_axes(mesh_axes: object) -> None:
    """Checks the type of an argument that gives a mesh's axes.

    Raises:
      ValueError: `mesh_axes` is neither a sequence of names nor a mapping of names to sizes.
    """
    names = tuple(mesh_axes) if isinstance(mesh_axes, Sequence | Mapping) and not isinstance(mesh_axes, str) else None
    sizes = mesh_axes.values() if isinstance(mesh_axes, Mapping) else ()
    if names is None or not all(isinstance(name, str) for name in names) or not all(map(_is_index, sizes)):
        raise ValueError(
            f"mesh_axis_names = {mesh_axes!r:.200} (a {type(mesh_axes).__name__}) must be the names of the mesh's axes, "
            "mesh.axis_names, or their sizes, mesh.shape, e.g. ('data', 'mdl') or {'data': 4, 'mdl': 2}."
        )


def _is_index(item: object, value: int | None = None) -> bool:
    return isinstance(item, int | np.integer) and not isinstance(item, bool) and value in (None, item)


def _axis_name(where: str, axis: object, mesh_axes: MeshAxes) -> str:
    names = tuple(mesh_axes)
    if isinstance(axis, str) and axis in names:
        return axis
    if isinstance(axis, int | np.integer) and _is_index(axis) and 0 <= axis < len(names):
        return names[axis]
    suffix = f"Mesh axes: {axes_names_text(mesh_axes)}."
    if isinstance(axis, str):
        near = did_you_mean(axis, names, otherwise=".")
        raise ValueError(f"{where}: the mesh has no axis {axis!r}{near} {suffix}")
    if _is_index(axis):
        raise ValueError(
            f"{where}: the mesh has no axis number {axis}; its axes are numbered 0 to {len(names) - 1}. -1 (not split) "
            f"is not allowed inside a tuple. {suffix}"
        )
    raise ValueError(
        f"{where}: {axis!r} must be an axis name, an axis index, a tuple of axes, or None or -1 (not split; not allowed "
        f"inside a tuple). {suffix}"
    )


def axes_names_text(mesh_axes: MeshAxes) -> str:
    """Returns a mesh's axis names as text, with sizes if `mesh_axes` or an ambient mesh with these axes has them."""
    if isinstance(mesh_axes, Mapping):
        return mesh_text(mesh_axes)
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty and tuple(ambient.axis_names) == tuple(mesh_axes):
        return mesh_text(mesh_shape_of(ambient))
    return ", ".join(mesh_axes) or "none"
