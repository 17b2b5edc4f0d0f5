"""Finds the matrix products of a program that XLA would compute wrongly, and how to split them instead.

XLA's partitioner (jaxlib 0.10.2 and 0.12.0.1) gets a product wrong if the program asks for a split of the result in which an axis
that was summed over splits one dimension, and the axis that the operands suggest for this dimension splits another
(`docs/partitioner_faults.md`). A constraint asks for a split, and so does the sharding of a variable, for its gradient.
"""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.constraints import split_axes
from spmd_trainer.sharding.even_rules import ELEMENTWISE, unchanged_dims
from spmd_trainer.sharding.even_values import DimAxes, Shape, Value

# The splits that a program asks of an array.
Splits: TypeAlias = frozenset[DimAxes]
# Operations that keep the dimensions: what is asked of the result is asked of the operands of its rank.
_PASSING = ELEMENTWISE | {"concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "rev", "slice", "split"}


def asked_splits(jaxpr: Any, results: Sequence[DimAxes]) -> dict[int, Splits]:
    """Returns {id of a dot_general: the splits that the program asks of its result}.

    Args:
      jaxpr: the program.
      results: the axes of each dimension of its first results.
    """
    found: dict[int, Splits] = {}
    asked = [frozenset({axes}) for axes in results]
    _ask(jaxpr, [*asked, *[frozenset()] * (len(jaxpr.outvars) - len(asked))], found)
    return found


def is_suspect(asked: Splits, num_axes: int) -> bool:
    """Returns True if XLA may get a product wrong of which these splits are asked; it depends on its operands' splits."""
    return any(num_axes > 3 or _is_involved(axes) for axes in asked)


def _is_involved(axes: DimAxes) -> bool:
    """Returns True for a split over three axes, or over two of more than two dimensions: XLA is right with all others."""
    return len({axis for dim in axes for axis in dim or ()}) >= (3 if len(axes) < 3 else 2)


def safe_split(
    asked: Splits, suggested: DimAxes, summed: frozenset[str], shape: Shape, sizes: Mapping[str, int]
) -> PartitionSpec | None:
    """Returns how to split a product that XLA would get wrong: as its operands suggest, over so few axes that XLA is right.

    For all other products it returns None.

    Args:
      asked: the splits that the program asks of the product.
      suggested, summed: see `product_axes`.
      shape: of the product, with padding.
      sizes: {axis: size} of the mesh.
    """
    if not any(_is_wrong(axes, suggested, summed, num_real_axes(sizes)) for axes in asked):
        return None
    kept: list[tuple[str, ...]] = [()] * len(shape)
    for dim, over in enumerate(each_once(suggested)):
        more = [*kept[:dim], (over or ())[:1], *kept[dim + 1 :]]
        if shape[dim] % math.prod(sizes[axis] for axis in more[dim]) == 0 and not _is_involved(tuple(more)):
            kept = more
    return PartitionSpec(*(over or None for over in kept))


def num_real_axes(sizes: Mapping[str, int]) -> int:
    return sum(size > 1 for size in sizes.values())


def product_axes(eqn: Any, x: Value, y: Value) -> tuple[DimAxes, frozenset[str]]:
    """Returns the axes that the operands suggest for each dimension (one may be in several), and the axes summed over."""
    (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    summed = {axis for v, dims in ((x, x_contract), (y, y_contract)) for dim in dims for axis in v.axes[dim] or ()}
    dims = [x.axes[i] or y.axes[j] for i, j in zip(x_batch, y_batch, strict=True)]
    for v, used in ((x, {*x_contract, *x_batch}), (y, {*y_contract, *y_batch})):
        dims += [axes for dim, axes in enumerate(v.axes) if dim not in used]
    return tuple(dims), frozenset(summed)


def each_once(dims: DimAxes) -> DimAxes:
    """Returns the axes of each dimension without those that split an earlier one."""
    taken: set[str] = set()
    found: list[tuple[str, ...] | None] = []
    for axes in dims:
        found.append(None if axes is None else tuple(axis for axis in axes if axis not in taken))
        taken.update(axes or ())
    return tuple(found)


def _is_wrong(asked: DimAxes, suggested: DimAxes, summed: frozenset[str], num_axes: int) -> bool:
    """Returns True for a split in which a summed axis takes the place of one that goes to another dimension.

    In a result of more than two dimensions, the summed axis may be anywhere, and two axes that change places are enough. On a
    mesh of four axes, an axis that splits two dimensions of the operands is enough. XLA is right if a dimension is split over
    several axes, all of which were summed over and split nothing else of the operands: so are the gradients of weights over
    ('replica', 'data') and 'mdl'.
    """
    over = [frozenset(dim or ()) for dim in asked]
    of_operands = [frozenset(dim or ()) for dim in suggested]
    free = frozenset[str]().union(*of_operands)
    if num_axes > 3 and len(summed) + sum(map(len, of_operands)) > len(summed | free):
        return True

    def others(dims: Sequence[frozenset[str]], at: int) -> frozenset[str]:
        return frozenset[str]().union(*dims[:at], *dims[at + 1 :])

    def is_wrong_at(at: int) -> bool:
        arriving = over[at] & summed
        if len(over) > 2:
            arriving |= over[at] & others(of_operands, at) | others(over, at) & summed
        is_safe = len(over[at]) > 1 and over[at] <= summed - free
        is_moved = bool(of_operands[at] & others(over, at))
        return is_moved and (bool(arriving) or num_axes > 3) and not is_safe

    return _is_involved(asked) and any(is_wrong_at(at) for at in range(len(over)))


def _ask(jaxpr: Any, results: Sequence[Splits], found: dict[int, Splits]) -> list[Splits]:
    """Returns the splits asked of the program's arguments; adds those of its products to `found`."""
    asked: dict[Any, Splits] = collections.defaultdict(frozenset)

    def ask(variables: Sequence[Any], splits: Sequence[Splits]) -> None:
        for var, wanted in zip(variables, splits, strict=True):
            if wanted and not isinstance(var, jax.extend.core.Literal):
                asked[var] |= wanted

    ask(jaxpr.outvars, results)
    for eqn in reversed(jaxpr.eqns):
        ask(eqn.invars, _of_operands(eqn, [asked[var] for var in eqn.outvars], found))
    return [asked[var] for var in jaxpr.invars]


def _of_operands(eqn: Any, results: list[Splits], found: dict[int, Splits]) -> list[Splits]:
    name, params, nothing = eqn.primitive.name, eqn.params, [frozenset[DimAxes]()] * len(eqn.invars)
    if name == "dot_general":
        found[id(eqn)] = found.get(id(eqn), frozenset()) | results[0]
        return nothing
    if name == "sharding_constraint" and isinstance(params["sharding"], NamedSharding):
        return [frozenset({split_axes(params["sharding"].spec, eqn.invars[0].aval.ndim)})]
    if name == "optimization_barrier":
        return results
    if name in _PASSING:
        rank, together = eqn.outvars[0].aval.ndim, frozenset[DimAxes]().union(*results)
        return [together if var.aval.ndim == rank else frozenset() for var in eqn.invars]
    if (new_of := _new_dims(eqn)) is not None:
        dims = range(eqn.invars[0].aval.ndim)
        return [frozenset(tuple(axes[new_of[dim]] if dim in new_of else () for dim in dims) for axes in results[0])]
    if name == "scan":
        return _of_scan(params, results, found)
    if name == "while":
        return _of_while(params, results, found, nothing)
    if name == "cond":
        branches = [_ask(branch.jaxpr, results, found) for branch in params["branches"]]
        return [frozenset(), *(frozenset[DimAxes]().union(*splits) for splits in zip(*branches, strict=True))]
    return _of_call(eqn, results, found, nothing)


def _new_dims(eqn: Any) -> dict[int, int] | None:
    """Returns {dimension of the operand: the same one of the result}; None for other operations."""
    params = eqn.params
    match eqn.primitive.name:
        case "transpose":
            return {old: new for new, old in enumerate(params["permutation"])}
        case "reshape" if params["dimensions"] is None:
            return {old: new for new, old in unchanged_dims(eqn.invars[0].aval.shape, params["new_sizes"]).items()}
        case "broadcast_in_dim":
            x, y = eqn.invars[0].aval.shape, params["shape"]
            return {old: new for old, new in enumerate(params["broadcast_dimensions"]) if x[old] == y[new]}
        case "squeeze":
            return _left(eqn, params["dimensions"])
        case "reduce_sum":
            return _left(eqn, params["axes"])
    return None


def _left(eqn: Any, gone: Sequence[int]) -> dict[int, int]:
    left = [dim for dim in range(eqn.invars[0].aval.ndim) if dim not in gone]
    return {old: new for new, old in enumerate(left)}


def _of_scan(params: Mapping[str, Any], results: list[Splits], found: dict[int, Splits]) -> list[Splits]:
    consts, carry = params["num_consts"], params["num_carry"]
    steps = [frozenset(axes[1:] for axes in splits) for splits in results[carry:]]
    held = results[:carry]
    for _ in range(2):  # a step's carry goes to the next step
        inside = _ask(params["jaxpr"].jaxpr, [*held, *steps], found)
        held = [old | new for old, new in zip(held, inside[consts : consts + carry], strict=True)]
    stacked = [frozenset(((), *axes) for axes in splits) for splits in inside[consts + carry :]]
    return [*inside[:consts], *held, *stacked]


def _of_while(
    params: Mapping[str, Any], results: list[Splits], found: dict[int, Splits], nothing: list[Splits]
) -> list[Splits]:
    consts, held = params["body_nconsts"], results
    for _ in range(2):
        inside = _ask(params["body_jaxpr"].jaxpr, held, found)
        held = [old | new for old, new in zip(held, inside[consts:], strict=True)]
    return [*nothing[: params["cond_nconsts"]], *inside[:consts], *held]


def _of_call(eqn: Any, results: list[Splits], found: dict[int, Splits], nothing: list[Splits]) -> list[Splits]:
    """Follows calls, except those of `shard_map`, which XLA does not divide."""
    inner = eqn.params.get("jaxpr") or eqn.params.get("call_jaxpr")
    jaxpr = getattr(inner, "jaxpr", inner)
    if eqn.primitive.name == "shard_map" or jaxpr is None or len(jaxpr.invars) != len(eqn.invars):
        return nothing
    return _ask(jaxpr, results, found)
