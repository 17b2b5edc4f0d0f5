"""Arrays with logical and physical (padded) shapes, for programs that `even_program` evaluates with padding.

`even_program` evaluates a program so that XLA sees only dimensions that are divisible by their shard counts. A `Value` is one
array of the program. The elements in its padding are arbitrary, e.g. NaN, and must be masked before a reduction.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding.specs import mesh_shape_of

Shape: TypeAlias = tuple[int, ...]
# Names of the functions that mark padding in a program.
SLICE_OFF, PUT_BACK = "slice_off_padding", "put_padding_back"
# The mesh axes over which each dimension is sharded: () if it is unsharded, None if the axes are unknown.
DimAxes: TypeAlias = tuple[tuple[str, ...] | None, ...]


@dataclasses.dataclass(eq=False)
class Value:
    """An array of a program that `even_program` evaluates. It is computed, or deferred until its padding is known.

    Attributes:
      shape: logical shape.
      physical: shape in memory; for a deferred array, its smallest possible physical shape.
      make: takes a physical shape, and returns the array in this shape.
      axes: the mesh axes over which each dimension is sharded, derived from the program's constraints; XLA may shard the array
        differently. Axes of an earlier dimension are omitted.
      is_held: True if the array has been computed. A deferred array is computed by `make` when the needed physical shape is
        known. For example, a mask of positions is computed with the padding of the array that it masks.
      depth: the length of the chain of deferred operations that ends with this array.
    """

    shape: Shape
    physical: Shape
    make: Callable[[Shape], jax.Array]
    axes: DimAxes
    is_held: bool = True
    depth: int = 0
    _made: dict[Any, jax.Array] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        self.axes = once_each(self.axes)

    @property
    def is_padded(self) -> bool:
        """True if the physical shape has padding."""
        return self.physical != self.shape

    @property
    def array(self) -> jax.Array:
        """The array in its physical shape."""
        return self.at(self.physical)

    def at(self, physical: Shape) -> jax.Array:
        """Returns the array in a physical shape, which must be at least the logical shape in each dimension."""
        if physical not in self._made:
            self._made[physical] = self.make(physical)
        return self._made[physical]

    def without_padding_of(self, dims: Iterable[int]) -> Shape:
        """Returns the physical shape, with logical sizes in the dimensions `dims`."""
        dropped = set(dims)
        return tuple(
            size if dim in dropped else held
            for dim, (size, held) in enumerate(zip(self.shape, self.physical, strict=True))
        )

    def masked(self, dims: Iterable[int], fill: Any, physical: Shape | None = None) -> jax.Array:
        """Returns the array in the shape `physical` (default: its own), with `fill` in the padding of `dims`."""
        physical = self.physical if physical is None else physical
        padded = tuple(dim for dim in dims if physical[dim] != self.shape[dim])
        key = (physical, padded, str(fill))
        if key not in self._made:
            self._made[key] = filled(self.at(physical), self.shape, padded, fill)
        return self._made[key]


def once_each(dims: DimAxes) -> DimAxes:
    """Returns the mesh axes of each dimension, without those of earlier dimensions."""
    taken: set[str] = set()
    found: list[tuple[str, ...] | None] = []
    for over in dims:
        found.append(None if over is None else tuple(axis for axis in over if axis not in taken))
        taken.update(over or ())
    return tuple(found)


def whole_in(axes: DimAxes, dims: Iterable[int]) -> DimAxes:
    """Returns `axes`, but with () for the dimensions `dims`, which are unsharded."""
    whole = set(dims)
    return tuple(() if dim in whole else over for dim, over in enumerate(axes))


def agreed_axes(several: Sequence[DimAxes]) -> DimAxes:
    """Returns each dimension's mesh axes if they are the same in all arrays for which they are known; otherwise None."""
    known = [{over for over in dim if over is not None} for dim in zip(*several, strict=True)]
    return tuple(dim.pop() if len(dim) == 1 else None for dim in known)


def filled(x: jax.Array, shape: Shape, dims: Sequence[int], fill: Any) -> jax.Array:
    """Returns `x` with `fill` in place of the elements beyond the logical shape `shape`, in the dimensions `dims`."""
    for dim in dims:
        inside = lax.broadcasted_iota(jnp.int32, x.shape, dim) < shape[dim]
        x = lax.select(inside, x, lax.full_like(x, fill))
    return x


@dataclasses.dataclass(frozen=True)
class Pins:
    """Makes `Value`s, and constrains dimensions to be unsharded when their sizes change.

    Attributes:
      mesh: the mesh; None for no constraints (for tests on one device).
    """

    mesh: Mesh | None

    def value(self, array: Any, shape: Shape | None = None, axes: DimAxes | None = None) -> Value:
        """Wraps an array in a `Value`.

        Args:
          array: the array in its physical shape.
          shape: the array's logical shape; None if it has no padding.
          axes: the mesh axes over which each dimension is sharded; None if unknown.
        """
        held = tuple(np.shape(array))
        logical = held if shape is None else tuple(shape)

        def make(physical: Shape) -> jax.Array:
            resized: jax.Array = array if physical == held else self.resized(array, logical, physical)
            return resized

        return Value(logical, held, make, axes or (None,) * len(held))

    def whole(self, x: jax.Array, dims: Iterable[int]) -> jax.Array:
        """Returns `x` with the dimensions `dims` constrained to be unsharded; the compiler may shard other dimensions."""
        unsplit = set(dims)
        if self.mesh is None or not unsplit:
            return x
        entries = [None if dim in unsplit else PartitionSpec.UNCONSTRAINED for dim in range(x.ndim)]
        pinned: jax.Array = lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))
        return pinned

    def split(self, x: jax.Array, axes: DimAxes) -> jax.Array:
        """Returns `x` sharded over `axes`; the compiler may shard dimensions whose axes are None.

        If a dimension's axes don't divide its size, the dimension is left unsharded.
        """
        if self.mesh is None:
            return x
        entries: list[Any] = []
        for over, size in zip(axes, x.shape, strict=True):
            divides = over is None or size % self.shards(over) == 0
            entries.append(PartitionSpec.UNCONSTRAINED if over is None else over if divides else None)
        found: jax.Array = lax.with_sharding_constraint(x, NamedSharding(self.mesh, PartitionSpec(*entries)))
        return found

    def shards(self, over: Iterable[str]) -> int:
        """Returns the number of shards of a dimension that is sharded over the mesh axes `over`."""
        return 1 if self.mesh is None else math.prod(mesh_shape_of(self.mesh)[axis] for axis in over)

    def resizing(
        self,
        arrays: Sequence[jax.Array],
        axes: DimAxes,
        dims: Iterable[int],
        run: Callable[[list[jax.Array]], list[jax.Array]],
        always: bool = False,
    ) -> tuple[list[jax.Array], DimAxes]:
        """Runs an operation that changes the sizes of the dimensions `dims`.

        These dimensions are constrained to be unsharded, unless the device count divides their sizes before and after.

        Args:
          arrays: the operands.
          axes: the mesh axes over which the operands' dimensions are sharded.
          dims: the dimensions whose sizes change.
          run: operands -> results of the operation.
          always: True constrains the dimensions even if the device count divides all sizes.

        Returns:
          The results, and the mesh axes over which the results' dimensions are sharded.
        """
        devices = 1 if self.mesh is None else self.mesh.size
        changing = list(dims)
        sizes = [x.shape[dim] for x in (*arrays, *jax.eval_shape(run, list(arrays))) for dim in changing]
        if not always and all(size % devices == 0 for size in sizes):
            return run(list(arrays)), axes
        found = [self.whole(x, changing) for x in run([self.whole(x, changing) for x in arrays])]
        return found, whole_in(axes, changing)

    def resized(self, x: jax.Array, shape: Shape, physical: Shape) -> jax.Array:
        """Returns an array of logical shape `shape` in a different physical shape; new padding is filled with zeros.

        Dimensions whose size changes are constrained to be unsharded, because the old or new size may not be evenly divisible.
        """
        changing = [dim for dim, (old, new) in enumerate(zip(x.shape, physical, strict=True)) if old != new]
        x = self.whole(x, changing)
        logical = tuple(shape[dim] if dim in changing else size for dim, size in enumerate(x.shape))
        if logical != x.shape:
            x = self.whole(lax.slice(x, (0,) * x.ndim, logical), changing)
        if logical != physical:
            widths = [(0, new - old, 0) for old, new in zip(logical, physical, strict=True)]
            x = self.whole(lax.pad(x, jnp.zeros((), x.dtype), widths), changing)
        return x


def padded_sizes(shape: Shape, held: Shape, axes: Sequence[Sequence[str]], sizes: Mapping[str, int]) -> Shape:
    """Returns the physical shape of an array after a sharding constraint.

    Rounds each logical size up to a multiple of the shard count, but keeps an old size that is a multiple, at most 1/16 larger.

    Args:
      shape: logical shape.
      held: physical shape before the constraint.
      axes: the mesh axes over which each dimension is sharded.
      sizes: {axis: size} of the mesh.
    """

    def size_of(size: int, now: int, over: Sequence[str]) -> int:
        shards = math.prod(sizes[axis] for axis in over)
        least = -(-size // shards) * shards
        # Changing the padding moves rows between devices. A sixteenth more arithmetic is cheaper.
        return now if now % shards == 0 and now - least <= least // 16 else least

    return tuple(size_of(*dim) for dim in zip(shape, held, axes, strict=True))


def slice_off(x: jax.Array, shape: Shape) -> jax.Array:
    """Slices `x` to its logical shape, as `lax.slice` does, but so that `even_program` recognizes the rest as padding."""

    def slice_off_padding(x: jax.Array) -> jax.Array:
        return lax.slice(x, (0,) * x.ndim, shape)

    return x if x.shape == tuple(shape) else jax.jit(slice_off_padding)(x)


def put_back(x: jax.Array, shape: Shape) -> jax.Array:
    """Pads `x` with zeros to a padded shape, as `lax.pad` does, but so that `even_program` recognizes the padding."""

    def put_padding_back(x: jax.Array) -> jax.Array:
        widths = [(0, new - old, 0) for old, new in zip(x.shape, shape, strict=True)]
        return lax.pad(x, jnp.zeros((), x.dtype), widths)

    return x if x.shape == tuple(shape) else jax.jit(put_padding_back)(x)
