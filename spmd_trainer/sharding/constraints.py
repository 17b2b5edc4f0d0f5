"""Sharding constraints on the arrays of a batch."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.specs import AnyMesh, entry_axes, mesh_shape_of

# Two sets of axes that split two dimensions of one array, such as {{'data'}, {'mdl'}} of a weight.
AxesPair: TypeAlias = frozenset[frozenset[str]]


def axes_pairs(specs: Iterable[PartitionSpec]) -> frozenset[AxesPair]:
    """Returns the pairs of axes that split two dimensions of the same array, for all arrays with these specs."""
    return frozenset(
        frozenset(map(frozenset, pair))
        for spec in specs
        for pair in itertools.combinations(filter(None, map(entry_axes, _known(spec))), 2)
    )


def computable(
    spec: PartitionSpec, sizes: Mapping[str, int], pairs: Collection[AxesPair] | None = None
) -> PartitionSpec:
    """Returns the spec of an activation with its axes in an order for which XLA computes right products.

    XLA's partitioner (seen in jaxlib 0.10.2 and 0.12.0.1, with GSPMD and with Shardy) swaps rows of a product y = x @ w if all
    of this is so: the rows of x and y are split over several axes, the last of which is 'data'; their last dimension is split
    over 'mdl'; w is split over 'mdl' and 'data', in either order; and 'data' and 'mdl' have the same size. It compares the
    numbers of pieces, and takes those of 'data' for those of 'mdl'. With 'data' first, as in ('data', 'replica'), it does not.

    If axes of other sizes can come last, they do. Otherwise the order is the mesh's reversed, so that its outermost axis, which
    seldom splits weights, comes last; or, if `pairs` has that axis, the next order of which `pairs` has no end.

    Args:
      spec: the spec.
      sizes: {axis: size} of the mesh, outermost axis first.
      pairs: `axes_pairs` of the program's other arrays; None if they are not known.

    Returns:
      The spec. Other devices hold its pieces, and their number stays; only if `pairs` forbids every order, a dimension is split
      over fewer axes.
    """
    return PartitionSpec(*(_in_order(entry, sizes, pairs) for entry in spec))


def _known(spec: PartitionSpec) -> list[Any]:
    return [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]


def _in_order(entry: Any, sizes: Mapping[str, int], pairs: Collection[AxesPair] | None) -> Any:
    if not isinstance(entry, tuple) or any(axis not in sizes for axis in entry):
        return entry  # JAX says what is wrong with an axis that doesn't exist
    others = {size for axis, size in sizes.items() if axis not in entry and size > 1}
    real = tuple(axis for axis in entry if sizes[axis] > 1)

    def pieces(axes: Iterable[str]) -> int:
        return math.prod(sizes[axis] for axis in axes)

    def ends(order: tuple[str, ...]) -> list[frozenset[str]]:
        return [frozenset(order[-n:]) for n in range(1, len(order))]

    def confused(order: tuple[str, ...]) -> bool:
        return any(pieces(end) in others for end in ends(order))

    def forbidden(order: tuple[str, ...]) -> bool:
        partners = [
            (end, other) for end in ends(order) for pair in pairs or () if end in pair for other in pair - {end}
        ]
        return any(not other & set(real) and pieces(other) == pieces(end) for end, other in partners)

    if not confused(real) and not forbidden(real):
        return entry
    outermost_last = [axis for axis in reversed(list(sizes)) if axis in real]
    orders = [order for order in itertools.permutations(real) if not confused(order)]
    for count in range(len(real), 0, -1):
        orders += itertools.permutations(outermost_last, count)
    return next(order for order in orders if not forbidden(order))


def constrain(x: jax.Array, spec: PartitionSpec, mesh: AnyMesh | None = None) -> jax.Array:
    """Splits an activation as a spec says, on a mesh or, if it is None, on the ambient mesh. Under jit; see `computable`."""
    spec = computable(spec, mesh_shape_of(jax.sharding.get_abstract_mesh() if mesh is None else mesh))
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec if mesh is None else NamedSharding(mesh, spec))
    return constrained


def constrain_together(
    arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: AnyMesh | None
) -> list[jax.Array]:
    """Splits the arrays of a batch as their specs say; small ones that are split in the same way move in one collective.

    A batch of tokens is a handful of arrays of a few kilobytes each. A collective of that size costs its latency, so six of them
    cost six times as much as one. Only arrays of rank 1 and 2 with elements of 4 bytes that are split along the rows are joined,
    and only where they have to move: a batch arrives split over the whole mesh.

    Args:
      arrays: the arrays.
      specs: a PartitionSpec for each.
      mesh: the mesh; None for the ambient one.

    Returns:
      The arrays, in order.
    """
    sizes = mesh_shape_of(jax.sharding.get_abstract_mesh() if mesh is None else mesh)
    groups: dict[tuple[int, tuple[str, ...]], list[int]] = {}
    for number, (x, spec) in enumerate(zip(arrays, specs, strict=True)):
        if x.ndim in (1, 2) and x.dtype.itemsize == 4 and not any(spec[1:]):
            rows_over = entry_axes(spec[0]) if len(spec) else ()
            if math.prod(sizes[axis] for axis in rows_over) < math.prod(sizes.values()):
                groups.setdefault((x.shape[0], rows_over), []).append(number)
    moved: dict[int, jax.Array] = {}
    for (_, rows_over), members in groups.items():
        if len(members) > 1:
            small = [arrays[i] for i in members]
            joined = constrain(_joined(small), PartitionSpec(rows_over or None, None), mesh)
            moved.update(zip(members, _parted(joined, small), strict=True))
    return [moved[i] if i in moved else constrain(x, specs[i], mesh) for i, x in enumerate(arrays)]


def _joined(arrays: Sequence[jax.Array]) -> jax.Array:
    """Returns the columns of all arrays side by side, as int32 with the same bits."""
    columns = [jax.lax.bitcast_convert_type(x.reshape(x.shape[0], math.prod(x.shape[1:])), jnp.int32) for x in arrays]
    return jnp.concatenate(columns, axis=1)


def _parted(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    """Returns the arrays that `_joined` was made from."""
    parts, begin = [], 0
    for x in like:
        width = math.prod(x.shape[1:])
        columns = jax.lax.slice_in_dim(joined, begin, begin + width, axis=1)
        parts.append(jax.lax.bitcast_convert_type(columns, x.dtype).reshape(x.shape))
        begin += width
    return parts
