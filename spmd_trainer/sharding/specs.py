"""Finds the axes, shards and padding of each dimension, from a PartitionSpec, a shape and a mesh, and checks specs.

JAX makes the same checks later, but its errors don't name the variable. So functions that get a spec from the
user call `check_spec` first, whose error names the variable, the dimension and the axis.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from spmd_trainer.sharding.messages import count_text, did_you_mean, mesh_text, spec_text

AnyMesh: TypeAlias = Mesh | AbstractMesh
# A tree of nested containers, or a single leaf; each function says what its leaves are.
PyTree: TypeAlias = Any


def mesh_shape_of(mesh: AnyMesh) -> dict[str, int]:
    """Returns {axis name: size} in the mesh's order, for a Mesh or an AbstractMesh."""
    return {str(name): int(size) for name, size in mesh.shape.items()}


def entry_axes(entry: Any) -> tuple[str, ...]:
    """Returns the axes in an entry of a spec or split mapping: None or -1 -> (), 'x' -> ('x',), ('x', 'y') -> ('x', 'y')."""
    if entry is None or entry == -1:
        return ()
    return (entry,) if isinstance(entry, str) else tuple(entry)


def axes_by_dim(spec: PartitionSpec | None, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which a spec shards each of `rank` dimensions; () for dimensions beyond the spec's end."""
    axes = tuple(entry_axes(entry) for entry in spec or ())
    return axes[:rank] + ((),) * (rank - len(axes))


def shard_counts(spec: PartitionSpec | None, rank: int, mesh_shape: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the number of shards of each of `rank` dimensions."""
    return tuple(math.prod(mesh_shape[axis] for axis in axes) for axes in axes_by_dim(spec, rank))


def full_rank_spec(spec: PartitionSpec | None, rank: int) -> PartitionSpec:
    """Returns the canonical form of a spec: an entry for each dimension, or `P()` if nothing is sharded.

    `P('x')` and `P('x', None)` shard a matrix in the same way but are not equal. Their canonical forms are equal.
    """
    axes = axes_by_dim(spec, rank)
    return PartitionSpec(*(a or None for a in axes)) if any(axes) else PartitionSpec()


def dimension_paddings(
    spec: PartitionSpec | None, shape: Sequence[int], mesh_shape: Mapping[str, int]
) -> tuple[int, ...]:
    """Returns the padding of each dimension up to the next multiple of its number of shards."""
    counts = shard_counts(spec, len(shape), mesh_shape)
    return tuple(-size % count for size, count in zip(shape, counts, strict=True))


def axes_text(axes: Sequence[str], mesh_shape: Mapping[str, int]) -> str:
    """Returns the axes of one dimension and the product of their sizes as text: `data=4`, or `data=4 x mdl=2 (8)`."""
    text = " x ".join(f"{axis}={mesh_shape[axis]}" for axis in axes)
    return text if len(axes) == 1 else f"{text} ({math.prod(mesh_shape[axis] for axis in axes)})"


def check_spec(path: str, shape: Sequence[int], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> None:
    """Checks that `spec` is valid for an array of this shape on this mesh. Does not check divisibility: see `check_divides`.

    Raises:
      ValueError: the spec has more entries than the array has dimensions, leaves a dimension to the compiler, names an
        axis the mesh does not have, or names an axis twice.
    """
    shape = tuple(shape)
    entries = tuple(spec or ())
    if len(entries) > len(shape):
        fix = f"Give at most {len(shape)}: e.g. {spec_text(entries[: len(shape)])}."
        raise ValueError(
            f"{_where(path, shape, spec, mesh_shape)} has {count_text(len(entries), 'entry', 'entries')}, but the "
            f"array has rank {len(shape)}. {fix if shape else 'A scalar cannot be split: use P().'}"
        )
    seen: dict[str, int] = {}
    for dim, entry in enumerate(entries):
        if entry is PartitionSpec.UNCONSTRAINED:
            raise ValueError(
                f"{_where(path, shape, spec, mesh_shape)} leaves dimension {dim} (size {shape[dim]}) UNCONSTRAINED, "
                "which is valid only in a constraint inside jit. Name its axes, or write None to leave it unsplit."
            )
        for axis in entry_axes(entry):
            if axis not in mesh_shape:
                raise ValueError(
                    f"{_where(path, shape, spec, mesh_shape)} splits dimension {dim} (size {shape[dim]}) over "
                    f"{axis!r}, an axis missing from the mesh{did_you_mean(axis, mesh_shape, otherwise='.')} "
                    f"Its axes are {list(mesh_shape)}."
                )
            if axis in seen:
                first, second = (f"dimension {d} (size {shape[d]})" for d in (seen[axis], dim))
                both = f"{first} twice" if seen[axis] == dim else f"both {first} and {second}"
                raise ValueError(
                    f"{_where(path, shape, spec, mesh_shape)} uses axis {axis!r} for {both}. An axis can split "
                    "only one dimension: remove one of the two."
                )
            seen[axis] = dim


def _where(path: str, shape: tuple[int, ...], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> str:
    return f"{path}: spec {spec_text(spec)} for shape {shape} on mesh {mesh_text(mesh_shape)}"


def check_divides(path: str, shape: Sequence[int], spec: PartitionSpec | None, mesh_shape: Mapping[str, int]) -> None:
    """Checks that every dimension is divisible by its number of shards, as JAX requires for arrays on devices.

    Raises:
      ValueError: a dimension is not divisible; the message names the nearest sizes that are.
    """
    for dim, (size, axes) in enumerate(zip(shape, axes_by_dim(spec, len(shape)), strict=True)):
        count = math.prod(mesh_shape[axis] for axis in axes)
        if size % count:
            below = size - size % count
            fits = f"{below} or {below + count}" if below else f"{count}"
            raise ValueError(
                f"{path}: dimension {dim} of shape {tuple(shape)} (size {size}) does not divide by "
                f"{axes_text(axes, mesh_shape)} of spec {spec_text(spec)}; mesh {mesh_text(mesh_shape)}. "
                f"Sizes that do: {fits}. Pad it (`pad_uneven`), leave the dimension unsplit (None), or use fewer axes."
            )
