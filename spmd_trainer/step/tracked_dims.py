"""Tracks a weight's dimensions through transpositions, slices and reshapes, until a matrix product reads the weight.

A weight is a variable, or a variable after such operations. A `Dim` records from which of the variable's dimensions a dimension
of the weight comes. So the role of each variable dimension in the matrix product is known. Slices and reshapes are also recorded
as edits, with which the same operations are later applied to the factors of adapters (`task.lora`).
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Hashable, Sequence
from typing import Any, TypeAlias

import jax.numpy as jnp

Name: TypeAlias = Hashable
# Operations that keep the shape and the position of each element.
SAME_DIMENSIONS = frozenset({"copy", "copy_p", "sharding_constraint", "name", "pvary", "reshard", "mesh_cast"})


@dataclasses.dataclass(frozen=True)
class Dim:
    """A dimension of a weight.

    Attributes:
      name: the dimension's name in edits, unique in the weight.
      origins: the variable's dimensions from which this dimension comes; empty for an added dimension of size 1.
    """

    name: Name
    origins: frozenset[int]


Dims: TypeAlias = tuple[Dim, ...]


@dataclasses.dataclass(frozen=True)
class Slice:
    """An edit (a recorded operation on a weight) that slices one dimension.

    Attributes:
      name: the name of the dimension.
      start: first index; None for a dynamic slice.
      size: end index minus start index, whatever the stride is.
      stride: distance between two indices.
      operand: only for a dynamic slice: which of the operation's start indices is that of this dimension (0 for the first).
    """

    name: Name
    start: int | None
    size: int
    stride: int = 1
    operand: int = 0


@dataclasses.dataclass(frozen=True)
class Squeeze:
    """An edit (a recorded operation on a weight) that removes the dimension `name`, whose size is 1."""

    name: Name


@dataclasses.dataclass(frozen=True)
class Reshape:
    """An edit (a recorded operation on a weight) that reshapes adjacent dimensions `old` to dimensions `new` of these `sizes`."""

    old: tuple[Name, ...]
    new: tuple[Name, ...]
    sizes: tuple[int, ...]


Edit: TypeAlias = Slice | Squeeze | Reshape


@dataclasses.dataclass(frozen=True)
class Move:
    """The effect of an operation on a weight's dimensions.

    Attributes:
      dims: the dimensions of the result.
      edits: the operations, in order, to repeat on an array with only some of the dimensions, such as an adapter's factor.
    """

    dims: Dims
    edits: tuple[Edit, ...] = ()


def of_variable(rank: int) -> Dims:
    """Returns the `Dim`s of a variable with `rank` dimensions."""
    return tuple(Dim(i, frozenset({i})) for i in range(rank))


def origins(dims: Sequence[Dim]) -> frozenset[int]:
    """Returns the union of the `origins` of dimensions."""
    return frozenset().union(*(dim.origins for dim in dims))


def moves(eqn: Any, dims: Dims) -> list[Move] | None:
    """Returns a `Move` for each result of an operation on a weight; None if the operation can't be tracked.

    Args:
      eqn: the equation of the jaxpr; its first operand is the weight.
      dims: the weight's dimensions.
    """
    if eqn.primitive.name == "split":
        name, ends = dims[eqn.params["axis"]].name, list(itertools.accumulate(eqn.params["sizes"]))
        return [Move(dims, (Slice(name, end - n, n),)) for n, end in zip(eqn.params["sizes"], ends, strict=True)]
    if eqn.primitive.name == "unstack":  # from JAX 0.11 on: `q, k, v = array`
        axis = eqn.params["axis"]
        kept, name = (*dims[:axis], *dims[axis + 1 :]), dims[axis].name
        return [Move(kept, (Slice(name, i, 1), Squeeze(name))) for i in range(len(eqn.outvars))]
    found = _move(eqn, dims)
    return None if found is None else [found]


def _move(eqn: Any, dims: Dims) -> Move | None:
    name, params, shape = eqn.primitive.name, eqn.params, eqn.invars[0].aval.shape
    if name in SAME_DIMENSIONS:
        return Move(dims)
    if name == "convert_element_type":
        return Move(dims) if jnp.issubdtype(params["new_dtype"], jnp.floating) else None
    if name == "transpose":
        return Move(tuple(dims[i] for i in params["permutation"]))
    if name == "squeeze":
        gone = {i % len(dims) for i in params["dimensions"]}
        kept = tuple(dim for i, dim in enumerate(dims) if i not in gone)
        return Move(kept, tuple(Squeeze(dims[i].name) for i in sorted(gone)))
    if name == "slice":
        strides = params["strides"] or (1,) * len(dims)
        bounds = zip(params["start_indices"], params["limit_indices"], strides, strict=True)
        cuts = [Slice(dim.name, b, e - b, s) for dim, (b, e, s) in zip(dims, bounds, strict=True)]
        return Move(dims, _real_cuts(cuts, shape))
    if name == "dynamic_slice":
        sizes = enumerate(zip(dims, params["slice_sizes"], strict=True))
        return Move(dims, _real_cuts([Slice(dim.name, None, n, operand=i) for i, (dim, n) in sizes], shape))
    if name == "broadcast_in_dim":
        return _broadcast(dims, shape, params["shape"], params["broadcast_dimensions"])
    if name == "reshape" and params["dimensions"] is None:
        return _reshape(dims, shape, params["new_sizes"])
    return None


def _real_cuts(cuts: Sequence[Slice], shape: Sequence[int]) -> tuple[Slice, ...]:
    return tuple(cut for cut, n in zip(cuts, shape, strict=True) if cut.size != n or cut.stride != 1)


def _broadcast(dims: Dims, shape: Sequence[int], new: Sequence[int], places: Sequence[int]) -> Move | None:
    """Returns the `Move` of a `broadcast_in_dim`; None if an added dimension is larger than 1, because the weight is repeated."""
    found = dict(zip(places, range(len(dims)), strict=True))
    if any(new[place] != (shape[found[place]] if place in found else 1) for place in range(len(new))):
        return None
    names = {dim.name for dim in dims}
    return Move(tuple(dims[found[i]] if i in found else _added(names) for i in range(len(new))))


def _reshape(dims: Dims, shape: Sequence[int], new: Sequence[int]) -> Move | None:
    """Returns the `Move` of a reshape; None if it can't be tracked.

    Splits both shapes into the smallest groups of dimensions with equal numbers of elements.
    """
    names: set[Name] = {dim.name for dim in dims}
    result: list[Dim] = []
    edits: list[Edit] = []
    i = j = 0
    while i < len(shape) or j < len(new):
        old_size, new_size = (s[k] if k < len(s) else None for s, k in ((shape, i), (new, j)))
        if old_size == new_size:
            result.append(dims[i])
            i, j = i + 1, j + 1
        elif new_size == 1:
            result.append(_added(names))
            j += 1
        elif old_size == 1:
            edits.append(Squeeze(dims[i].name))
            i += 1
        else:
            last, end = _group(shape, new, i, j)
            if last is None:
                return None
            group = dims[i:last]
            made = tuple(Dim((tuple(d.name for d in group), k), origins(group)) for k in range(end - j))
            edits.append(Reshape(tuple(d.name for d in group), tuple(d.name for d in made), tuple(new[j:end])))
            result.extend(made)
            i, j = last, end
    return Move(tuple(result), tuple(edits))


def _group(old: Sequence[int], new: Sequence[int], i: int, j: int) -> tuple[int | None, int]:
    """Returns the ends of the shortest `old[i:end]` and `new[j:end]` with equal products. The first is None if there are none."""
    last, end = i + 1, j + 1
    while (have := math.prod(old[i:last])) != (want := math.prod(new[j:end])):
        if have < want:
            last += 1
        else:
            end += 1
        if last > len(old) or end > len(new):
            return None, end
    return last, end


def _added(names: set[Name]) -> Dim:
    name = ("added", len(names))
    names.add(name)
    return Dim(name, frozenset())
