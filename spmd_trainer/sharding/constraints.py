"""Applies sharding constraints to arrays, orders their mesh axes for XLA, and finds the constraints in a jaxpr."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_values import Shape, padded_sizes
from spmd_trainer.sharding.jaxprs import equations
from spmd_trainer.sharding.messages import spec_text
from spmd_trainer.sharding.specs import AnyMesh, axes_by_dim, axes_text, entry_axes, mesh_shape_of

_PACKAGE = os.path.dirname(os.path.dirname(__file__)).replace(os.sep, "/") + "/"
_LIBRARIES = os.path.dirname(os.path.dirname(jax.__file__)).replace(os.sep, "/") + "/"


# Two sets of mesh axes, over which two dimensions of one array are sharded, such as {{'data'}, {'mdl'}} for a weight.
AxesPair: TypeAlias = frozenset[frozenset[str]]


def axes_pairs(specs: Iterable[PartitionSpec], sizes: Mapping[str, int]) -> frozenset[AxesPair]:
    """Returns a pair {mesh axes of one dimension, mesh axes of the other} for every two sharded dimensions of the same spec.

    Args:
      specs: the PartitionSpecs of arrays.
      sizes: {axis: size} of the mesh. Axes that are missing here, or have size 1, are ignored.
    """
    split = [[frozenset(a for a in entry_axes(e) if sizes.get(a, 1) > 1) for e in _known(spec)] for spec in specs]
    return frozenset(frozenset(pair) for dims in split for pair in itertools.combinations(filter(None, dims), 2))


def computable(
    spec: PartitionSpec, sizes: Mapping[str, int], pairs: Collection[AxesPair] | None = None
) -> PartitionSpec:
    """Returns a spec whose mesh axes are ordered so that XLA computes matrix products correctly.

    XLA's partitioner (jaxlib 0.10.2 and 0.12.0.1, with GSPMD and with Shardy) swaps rows of a product y = x @ w if all of these
    are true: the rows of x and y are sharded over several axes, the last of which is 'data'; the last dimension of x and y is
    sharded over 'mdl'; w is sharded over 'mdl' and 'data', in either order; 'data' and 'mdl' have the same size. XLA compares
    only numbers of shards, so it confuses 'data' with 'mdl'. If 'data' is the first of several axes, the product is correct.

    An entry keeps its order if no proper suffix of its axes has as many shards as a mesh axis outside the entry. Otherwise it
    gets an order with this property if there is one, and else the reverse of the mesh's order. (The mesh's outermost axis, over
    which weights are seldom sharded, is then last.) Orders in which XLA could confuse axes of `pairs` are skipped.

    Args:
      spec: the spec.
      sizes: {axis: size} of the mesh, outermost axis first.
      pairs: the `axes_pairs` of the program's arrays; None if unknown.

    Returns:
      The spec with reordered axes. The number of shards does not change, but the devices that hold them do. A dimension for
      which `pairs` rules out every order is not sharded. (Sharding it over fewer axes could cause a different XLA fault, see
      `even_products`.)
    """
    return PartitionSpec(*(_in_order(entry, sizes, pairs) for entry in spec))


def _known(spec: PartitionSpec) -> list[Any]:
    return [None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec]


def _ends(order: Sequence[str]) -> list[frozenset[str]]:
    return [frozenset(order[-n:]) for n in range(1, len(order))]


def _in_order(entry: Any, sizes: Mapping[str, int], pairs: Collection[AxesPair] | None) -> Any:
    if not isinstance(entry, tuple) or any(axis not in sizes for axis in entry):
        return entry  # JAX raises an error for an unknown axis
    others = {size for axis, size in sizes.items() if axis not in entry and size > 1}
    real = tuple(axis for axis in entry if sizes[axis] > 1)

    def pieces(axes: Iterable[str]) -> int:
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def confused(order: tuple[str, ...]) -> bool:
        return any(pieces(end) in others for end in _ends(order))

    def forbidden(order: tuple[str, ...]) -> bool:
        partners = [
            (end, other) for end in _ends(order) for pair in pairs or () if end in pair for other in pair - {end}
        ]
        return any(not other & set(real) and pieces(other) == pieces(end) for end, other in partners)

    if not confused(real) and not forbidden(real):
        return entry
    orders = [order for order in itertools.permutations(real) if not confused(order)]
    orders += itertools.permutations([axis for axis in reversed(list(sizes)) if axis in real])
    return next((order for order in orders if not forbidden(order)), None)


def unsplit(specs: Iterable[PartitionSpec], sizes: Mapping[str, int], pairs: Collection[AxesPair]) -> list[str]:
    """Returns a warning for each dimension of `specs` that `computable` does not shard. For the arguments, see `computable`."""
    return sorted(
        {
            f"the constraint {spec_text(spec)} does not split dimension {dim}: in any order, XLA would take its axes for others "
            "that split the program's weights; give the mesh axes different sizes, or split weights over fewer of them"
            for spec in specs
            for dim, entry in enumerate(spec)
            if entry is not None and _in_order(entry, sizes, pairs) is None
        }
    )


def constrain(x: jax.Array, spec: PartitionSpec, mesh: AnyMesh | None = None) -> jax.Array:
    """Constrains an array to `computable(spec)` on a mesh (None: the ambient mesh). Use it under jit."""
    spec = computable(spec, mesh_shape_of(jax.sharding.get_abstract_mesh() if mesh is None else mesh))
    constrained: jax.Array = jax.lax.with_sharding_constraint(x, spec if mesh is None else NamedSharding(mesh, spec))
    return constrained


def constrain_together(
    arrays: Sequence[jax.Array], specs: Sequence[PartitionSpec], mesh: AnyMesh | None
) -> list[jax.Array]:
    """Constrains each array of a batch to its spec. Arrays whose rows have the same sharding share one collective.

    A batch of tokens consists of a few arrays of some kilobytes each. At this size, a collective's time is all latency, so
    six collectives take six times as long as one. Arrays share a collective only if they have rank 1 or 2, 4-byte elements and
    the same number of rows, their specs shard only the rows, and the constraint moves data (a batch arrives sharded over the
    whole mesh).
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
    """Bitcasts the arrays to int32, and concatenates them along their columns. Returns int32 [rows, all columns]."""
    columns = [jax.lax.bitcast_convert_type(x.reshape(x.shape[0], math.prod(x.shape[1:])), jnp.int32) for x in arrays]
    return jnp.concatenate(columns, axis=1)


def _parted(joined: jax.Array, like: Sequence[jax.Array]) -> list[jax.Array]:
    parts, begin = [], 0
    for x in like:
        width = math.prod(x.shape[1:])
        columns = jax.lax.slice_in_dim(joined, begin, begin + width, axis=1)
        parts.append(jax.lax.bitcast_convert_type(columns, x.dtype).reshape(x.shape))
        begin += width
    return parts


def constraints_of(jaxpr: Any) -> Iterator[tuple[Any, Any]]:
    """Yields (equation, sharding) for each sharding constraint at any depth of a jaxpr, except inside `shard_map`."""
    for eqn in equations(jaxpr, ["shard_map"]):
        if eqn.primitive.name == "sharding_constraint":
            yield eqn, eqn.params["sharding"]


def own_constraints(jaxpr: Any) -> dict[str, list[str]]:
    """Returns {'file:line': notes} for the sharding constraints in user code, i.e. outside this package and praxis.

    The notes of a constraint are sentences, one for each dimension whose size is not divisible by its number of shards.
    """
    found: dict[str, list[str]] = {}
    for eqn, sharding in constraints_of(jaxpr):
        if place := place_of(eqn):
            notes, new = found.setdefault(place, []), uneven(sharding, eqn.invars[0].aval.shape)
            notes += [note for text in new if (note := f"{place}: {text}") not in notes]
    return found


def uneven(sharding: Any, shape: Shape) -> list[str]:
    if not isinstance(sharding, NamedSharding):
        return []
    sizes, axes = mesh_shape_of(sharding.mesh), split_axes(sharding.spec, len(shape))
    held = padded_sizes(shape, shape, axes, sizes)
    return [
        f"the constraint {spec_text(sharding.spec)} splits dimension {dim} (size {size}) of an array of shape {shape} over "
        f"{axes_text(over, sizes)}, which does not divide it: it is padded to {new}"
        for dim, (size, new, over) in enumerate(zip(shape, held, axes, strict=True))
        if size != new
    ]


def split_axes(spec: PartitionSpec, rank: int) -> tuple[tuple[str, ...], ...]:
    """Returns the mesh axes over which a spec shards each of `rank` dimensions; () for unsharded and unconstrained ones."""
    entries = (None if entry is PartitionSpec.UNCONSTRAINED else entry for entry in spec)
    return axes_by_dim(PartitionSpec(*entries), rank)


def place_of(eqn: Any) -> str | None:
    """Returns the 'file:line' of the user code that created an equation; None if this package or praxis created it."""
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback else ():
        path = frame.file_name.replace(os.sep, "/")
        if path.startswith((*(f"{_LIBRARIES}{library}/" for library in ("jax", "jaxlib", "flax")), "<frozen")):
            continue
        is_ours = path.startswith((_PACKAGE, f"{_LIBRARIES}praxis/"))
        return None if is_ours else f"{frame.file_name}:{frame.line_num}"
    return None
