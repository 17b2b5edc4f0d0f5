"""Computes on whole matrices of split variables: each device gets its share of the matrices, computes, and gives them back.

Matrices of equal shape, of all variables and stacks, (m, n) and (n, m) together, form one batch. It is divided over all devices
of the mesh. For each such group:

- each replica takes its part of the batch;
- one all-to-all, over the axes that split the matrices, makes each device's matrices whole;
- the function computes on them, without exchanges between devices;
- one all-to-all puts each device's parts back, and one all-gather gives all replicas the whole batch.

Variables of equal shape that are split in different ways form several groups. A batch that the devices don't divide is filled up
with matrices of zeros.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from spmd_trainer.errors import UserError
from spmd_trainer.sharding.host_devices import hold_until_known
from spmd_trainer.sharding.specs import axes_by_dim, dimension_paddings
from spmd_trainer.step.matrix_uses import MatrixDims


class Matrices(NamedTuple):
    """An array of matrices.

    Attributes:
      array: the array, of its logical shape.
      dims: its dimensions that are stacks, rows (inputs) and columns (outputs).
      spec: how it is split over the ambient mesh.
    """

    array: jax.Array
    dims: MatrixDims
    spec: PartitionSpec


def apply(
    fn: Callable[[jax.Array], jax.Array], given: Sequence[Matrices], dtype: jax.typing.DTypeLike
) -> list[jax.Array]:
    """Applies a function to every matrix.

    Args:
      fn: [N, m, n] with m <= n -> the same shape and dtype; each matrix for itself, a matrix of zeros gives zeros, and rows and
        columns may change places: fn(x) transposed is fn of x transposed.
      given: the arrays, split over the ambient mesh. Without a mesh everything is computed here.
      dtype: of the batches; they are moved in it.

    Returns:
      For each array the results, in its shape, split as it is, in `dtype`.

    Raises:
      UserError: under a `jax.shard_map`, where no device knows whole matrices.
    """
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.manual_axes:
        raise UserError(
            f"an optimizer of whole matrices runs under a jax.shard_map over {tuple(mesh.manual_axes)}, where each device has a "
            "part of the gradients; update the variables outside of it, as ShardMapPartitioner does"
        )
    sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
    specs = [_kept(x.spec, x.array.ndim, sizes) for x in given]
    paddings = [dimension_paddings(spec, x.array.shape, sizes) for x, spec in zip(given, specs, strict=True)]
    members = [_member(number, x, spec, sizes) for number, (x, spec) in enumerate(zip(given, specs, strict=True))]
    groups: dict[_Group, list[_Member]] = {}
    for group, member in members:
        groups.setdefault(group, []).append(member)

    @jax.named_scope("whole_matrices")
    def local(*parts: jax.Array) -> list[jax.Array]:
        found: dict[int, jax.Array] = {}
        earlier: Sequence[jax.Array] = parts
        for group, of_group in groups.items():
            pieces = jnp.concatenate([member.pieces(parts[member.number]) for member in of_group]).astype(dtype)
            if sizes:
                (pieces,) = hold_until_known(earlier, pieces)
            moved = group.back(fn(group.there(pieces)))[: len(pieces)]
            earlier, first = [moved], 0
            for member in of_group:
                found[member.number] = member.put_back(moved[first : first + member.count])
                first += member.count
        return [found[number] for number in range(len(parts))]

    arrays = [
        # The constraint tells `evenly` that the array has this padding already.
        _padded(lax.with_sharding_constraint(x.array, spec), padding) if any(padding) else x.array
        for x, spec, padding in zip(given, specs, paddings, strict=True)
    ]
    if sizes:
        local = jax.shard_map(local, in_specs=tuple(specs), out_specs=specs, check_vma=False)
    return [_cut(found, x.array.shape) for found, x in zip(local(*arrays), given, strict=True)]


class _Dim(NamedTuple):
    """A dimension of a matrix, or several whose order in memory is that of one: its axes and number of parts, a part's size, and
    the size of all without padding."""

    axes: tuple[str, ...]
    parts: int
    local: int
    size: int


@dataclasses.dataclass(frozen=True)
class _Group:
    """Matrices of equal shape that are split in the same way.

    Attributes:
      short, long: dimensions of the shorter and of the longer side.
      replicas: axes that split neither matrices nor stacks.
      num_replicas: their number of devices.
    """

    short: tuple[_Dim, ...]
    long: tuple[_Dim, ...]
    replicas: tuple[str, ...]
    num_replicas: int

    @property
    def dims(self) -> tuple[_Dim, ...]:
        """All dimensions."""
        return (*self.short, *self.long)

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes that split the matrices."""
        return tuple(axis for dim in self.dims for axis in dim.axes)

    @property
    def num_parts(self) -> int:
        """The parts of each matrix."""
        return math.prod(dim.parts for dim in self.dims)

    def there(self, pieces: jax.Array) -> jax.Array:
        """Parts of all matrices [N, elements] -> a share of whole matrices [n, short, long]."""
        share = -(-len(pieces) // (self.num_parts * self.num_replicas))
        per_replica = share * self.num_parts
        x = _padded(pieces, (per_replica * self.num_replicas - len(pieces), 0))
        if self.replicas:
            x = lax.dynamic_slice_in_dim(x, lax.axis_index(self.replicas) * per_replica, per_replica)
        if self.axes:
            x = lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True)
        count = len(self.dims)
        x = x.reshape([*(dim.parts for dim in self.dims), share, *(dim.local for dim in self.dims)])
        x = x.transpose([count, *(axis for i in range(count) for axis in (i, count + 1 + i))])
        x = x.reshape([share, *(dim.parts * dim.local for dim in self.dims)])
        x = _cut(x, (share, *(dim.size for dim in self.dims)))
        return x.reshape(share, *(math.prod(dim.size for dim in side) for side in (self.short, self.long)))

    def back(self, x: jax.Array) -> jax.Array:
        """Inverts `there`; the matrices that fill up the batch are at the end."""
        share, count = len(x), len(self.dims)
        x = x.reshape(share, *(dim.size for dim in self.dims))
        x = _padded(x, (0, *(dim.parts * dim.local - dim.size for dim in self.dims)))
        x = x.reshape([share, *(size for dim in self.dims for size in (dim.parts, dim.local))])
        x = x.transpose([*range(1, 2 * count, 2), 0, *range(2, 2 * count + 1, 2)])
        x = x.reshape(self.num_parts * share, -1)
        if self.axes:
            x = lax.all_to_all(x, self.axes, split_axis=0, concat_axis=0, tiled=True)
        return lax.all_gather(x, self.replicas, tiled=True) if self.replicas else x


@dataclasses.dataclass(frozen=True)
class _Member:
    """An array of a group.

    Attributes:
      number: its place among the arrays.
      shape: shape of a device's part.
      order: its dimensions in the group's order: stacks, short side, long side.
      count: stacked matrices of a device.
    """

    number: int
    shape: tuple[int, ...]
    order: tuple[int, ...]
    count: int

    def pieces(self, part: jax.Array) -> jax.Array:
        """Returns [matrices, elements] for a device's part."""
        return part.transpose(self.order).reshape(self.count, -1)

    def put_back(self, pieces: jax.Array) -> jax.Array:
        """Inverts `pieces`."""
        inverse = sorted(range(len(self.order)), key=self.order.__getitem__)
        return pieces.reshape([self.shape[dim] for dim in self.order]).transpose(inverse)


def _member(number: int, given: Matrices, spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[_Group, _Member]:
    shape, dims = given.array.shape, given.dims
    found = []
    for over, size in zip(axes_by_dim(spec, len(shape)), shape, strict=True):
        parts = math.prod(sizes[axis] for axis in over)
        found.append(_Dim(over, parts, -(-size // parts), size))
    # Squares are turned so that as many as possible are split in the same way.
    sides = sorted(
        (dims.inputs, dims.outputs),
        key=lambda side: (math.prod(shape[dim] for dim in side), [found[dim].axes for dim in side]),
    )
    short, long = (_merged([found[dim] for dim in side]) for side in sides)
    split = {axis for dim in found for axis in dim.axes}
    replicas = tuple(axis for axis in sizes if axis not in split)
    group = _Group(short, long, replicas, math.prod(sizes[axis] for axis in replicas))
    count = math.prod(found[dim].local for dim in dims.stack)
    order = (*dims.stack, *sides[0], *sides[1])
    return group, _Member(number, tuple(dim.local for dim in found), order, count)


def _merged(dims: Sequence[_Dim]) -> tuple[_Dim, ...]:
    """Merges each dimension that is whole into the one before."""
    found: list[_Dim] = []
    for dim in dims:
        if found and dim.parts == 1:
            last = found.pop()
            dim = _Dim(last.axes, last.parts, last.local * dim.local, last.size * dim.size)
        found.append(dim)
    return tuple(found)


def _kept(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> PartitionSpec:
    """Returns the spec with the axes that split something."""
    return PartitionSpec(*(tuple(a for a in over if a in sizes) or None for over in axes_by_dim(spec, rank)))


def _padded(x: jax.Array, paddings: Sequence[int]) -> jax.Array:
    return jnp.pad(x, [(0, size) for size in paddings]) if any(paddings) else x


def _cut(x: jax.Array, shape: Sequence[int]) -> jax.Array:
    return x if x.shape == tuple(shape) else lax.slice(x, (0,) * x.ndim, tuple(shape))
