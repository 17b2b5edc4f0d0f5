"""What a PartitionSpec means for one shape on one mesh: axes per dimension, shards per dimension, and whether it fits.

JAX checks the same things later and names no variable. Everything in this package that accepts a spec passes it through
`check_spec` first, so that a user reads which variable, which dimension and which axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from spmd_trainer.sharding.messages import count_text, mesh_text, nearest_text, spec_text

AnyMesh = Mesh | AbstractMesh


def mesh_shape_of(mesh: AnyMesh) -> dict[str, int]:
    """Axis name to size, in the mesh's order; also for the abstract mesh of a job that has no devices yet."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def entry_axes(entry: Any) -> tuple[str, ...]:
    """The axes of one spec entry: None -> (), 'x' -> ('x',), ('x', 'y') -> ('x', 'y')."""
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_by_dim(spec: PartitionSpec | None, rank: int) -> tuple[tuple[str, ...], ...]:
    """The axes that split each of `rank` dimensions; dimensions beyond the spec's end are whole."""
    axes = tuple(entry_axes(entry) for entry in spec or ())
    return axes[:rank] + ((),) * (rank - len(axes))


def shard_counts(spec: PartitionSpec | None, rank: int, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Into how many pieces each of `rank` dimensions is cut."""
    return tuple(math.prod(mesh_shape[axis] for axis in axes) for axes in axes_by_dim(spec, rank))


def full_rank_spec(spec: PartitionSpec | None, rank: int) -> PartitionSpec:
    """The one spelling of a layout: an entry for each dimension, or `P()` where nothing is split.

    `P('x')` and `P('x', None)` lay a matrix out alike and are not equal; after this they are.
    """
    axes = axes_by_dim(spec, rank)
    return PartitionSpec(*(a or None for a in axes)) if any(axes) else PartitionSpec()


def dimension_paddings(
    spec: PartitionSpec | None, shape: Sequence[int], mesh_shape: Mapping[str, int]
) -> tuple[int, ...]:
    """How much each dimension lacks to the next multiple of its number of shards."""
    counts = shard_counts(spec, len(shape), mesh_shape)
    return tuple(-size % count for size, count in zip(shape, counts, strict=True))


def axes_text(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> str:
    """The axes that split one dimension, with their arithmetic: `data=4`, or `data=4 x mdl=2 (8)`."""
    text = " x ".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
    return text if len(axes) == 1 else f"{text} ({math.prod(mesh_shape[axis] for axis in axes)})"


def check_spec(path: str, shape: Sequence[int], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> None:
    """Checks that `spec` can be said of an array of this shape on this mesh. Divisibility is not asked: see `padding`.

    Raises:
      ValueError: the spec has more entries than the array has dimensions, leaves a dimension to the compiler, names an
        axis the mesh does not have, or names an axis twice.
    """
    shape = tuple(shape)
    entries = tuple(spec or ())
    if len(entries) > len(shape):
        fix = f"Give at most {len(shape)}: e.g. {spec_text(entries[: len(shape)])}."
        raise ValueError(
            f"{_where(path, shape, spec, mesh_shape)} has {count_text(len(entries), 'entry', 'entries')}, and the "
            f"array has rank {len(shape)}. {fix if shape else 'A scalar cannot be split: use P().'}"
        )
    seen: dict[str, int] = {}
    for dim, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"{_where(path, shape, spec, mesh_shape)} leaves dimension {dim} (size {shape[dim]}) UNCONSTRAINED, "
                "which only a constraint inside jit may do. Name its axes, or write None to keep it whole."
            )
        for axis in entry_axes(entry):
            if axis not in mesh_shape:
                raise ValueError(
                    f"{_where(path, shape, spec, mesh_shape)} splits dimension {dim} (size {shape[dim]}) over "
                    f"{axis!r}, an axis the mesh does not have.{nearest_text(axis, mesh_shape)} "
                    f"Its axes are {list(mesh_shape)}."
                )
            if axis in seen:
                first, second = (f"dimension {d} (size {shape[d]})" for d in (seen[axis], dim))
                both = f"{first} twice" if seen[axis] == dim else f"both {first} and {second}"
                raise ValueError(
                    f"{_where(path, shape, spec, mesh_shape)} uses axis {axis!r} for {both}. An axis splits one "
                    "dimension, once: drop one."
                )
            seen[axis] = dim


def _where(path: str, shape: tuple[int, ...], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> str:
    return f"{path}: spec {spec_text(spec)} for shape {shape} on mesh {mesh_text(mesh_shape)}"


def check_divides(path: str, shape: Sequence[int], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> None:
    """Checks that every split dimension divides by its shards, as placing an array on devices needs.

    Raises:
      ValueError: a dimension does not divide; the message gives the sizes that would.
    """
    for dim, (size, axes) in enumerate(zip(shape, axes_by_dim(spec, len(shape)), strict=True)):
        count = math.prod(mesh_shape[axis] for axis in axes)
        if size % count:
            below = size - size % count
            fits = f"{below} or {below + count}" if below else f"{count}"
            raise ValueError(
                f"{path}: dimension {dim} of shape {tuple(shape)} (size {size}) does not divide by "
                f"{axes_text(axes, mesh_shape)} of spec {spec_text(spec)}; mesh {mesh_text(mesh_shape)}. "
                f"Sizes that do: {fits}. Pad it (`pad_uneven`), keep the dimension whole (None), or use fewer axes."
            )
