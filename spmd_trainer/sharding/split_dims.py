"""One split_dims_mapping, e.g. `(('replica', 'data'), None, 'mdl')`, to the PartitionSpec it stands for.

An entry has one place per dimension: an axis name, an axis index, a tuple of them (split over their product), or None /
-1 (whole). Layers declare their variables so, and `split_mapping` its inputs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.messages import mesh_text, nearest_text
from spmd_trainer.sharding.specs import entry_axes, mesh_shape_of

MeshAxes = Sequence[str] | Mapping[str, int]
SplitDimsMapping = Sequence[Any] | None

WHOLE = -1


def parse_split_dims(where: str, mapping: SplitDimsMapping, mesh_axes: MeshAxes) -> PartitionSpec:
    """The spec of one entry (see `split_mapping.to_partition_spec`).

    Args:
      where: where the user wrote the entry; errors begin with it.
      mapping: the entry.
      mesh_axes: the mesh's axes, in order.

    Returns:
      A spec with as many entries as the mapping has places.

    Raises:
      ValueError: an unknown axis name, an index outside the mesh, an axis used twice, or a place that is none of these.
    """
    if mapping is None:
        return PartitionSpec()
    suffix = f"Mesh axes: {axes_names_text(mesh_axes)}."
    if isinstance(mapping, str) or not isinstance(mapping, Sequence | PartitionSpec):
        raise ValueError(
            f"{where} = {mapping!r} must be a tuple with one place per dimension, e.g. ({mapping!r},) with its comma "
            f"for one dimension. {suffix}"
        )
    entries: list[tuple[str, ...] | None] = []
    for dim, place in enumerate(mapping):
        if place is None or _is_index(place, WHOLE):
            entries.append(None)
            continue
        group = place if isinstance(place, tuple | list) else (place,)
        entries.append(tuple(_axis_name(f"{where} = {mapping!r}, dimension {dim}", axis, mesh_axes) for axis in group))
    used = [axis for entry in entries for axis in entry_axes(entry)]
    for axis in used:
        if used.count(axis) > 1:
            dims = [dim for dim, entry in enumerate(entries) for a in entry_axes(entry) if a == axis]
            raise ValueError(
                f"{where} = {mapping!r} uses axis {axis!r} more than once (dimensions {dims}). An axis splits one "
                f"dimension, once: put None in place of one. {suffix}"
            )
    return PartitionSpec(*(entry[0] if entry and len(entry) == 1 else entry or None for entry in entries))


def _is_index(place: Any, value: int | None = None) -> bool:
    return isinstance(place, int | np.integer) and not isinstance(place, bool) and value in (None, place)


def _axis_name(where: str, axis: Any, mesh_axes: MeshAxes) -> str:
    names = tuple(mesh_axes)
    if isinstance(axis, str) and axis in names:
        return axis
    if _is_index(axis) and 0 <= axis < len(names):
        return names[axis]
    suffix = f"Mesh axes: {axes_names_text(mesh_axes)}."
    if isinstance(axis, str):
        raise ValueError(f"{where}: the mesh has no axis {axis!r}.{nearest_text(axis, names)} {suffix}")
    if _is_index(axis):
        raise ValueError(
            f"{where}: the mesh has no axis number {axis}; its axes are numbered 0 to {len(names) - 1}, and -1 (a "
            f"whole dimension) stands by itself. {suffix}"
        )
    raise ValueError(
        f"{where}: {axis!r} is no axis name, axis index, tuple of them, None or -1 (whole; not inside a tuple). "
        f"{suffix}"
    )


def axes_names_text(mesh_axes: MeshAxes) -> str:
    """The axes with their sizes where they are known: given, or those of an ambient mesh with the same axes."""
    if isinstance(mesh_axes, Mapping):
        return mesh_text(mesh_axes)
    ambient = jax.sharding.get_abstract_mesh()
    if not ambient.empty and tuple(ambient.axis_names) == tuple(mesh_axes):
        return mesh_text(mesh_shape_of(ambient))
    return ", ".join(mesh_axes) or "none"
