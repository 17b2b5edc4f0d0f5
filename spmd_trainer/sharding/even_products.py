"""Finds the matrix products of a program that XLA would compute wrongly, and chooses other shardings for their results.

A program requests shardings for the results of its products: by sharding constraints, and by the shardings of its variables,
which also apply to the variables' gradients. For some of them, XLA's partitioner (jaxlib 0.10.2 and 0.12.0.1) computes the
product wrongly, for example if dimension d of the result is to be sharded over a mesh axis of a contracted dimension, while the
axis over which d is sharded in the operand is to shard a different dimension of the result (`docs/partitioner_faults.md`).

On a mesh of three or more axes, shardings that XLA itself chooses can trigger the fault, so all products are constrained there.
"""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

import jax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.constraints import split_axes
from spmd_trainer.sharding.even_rules import ELEMENTWISE, bind, dim_groups
from spmd_trainer.sharding.even_values import DimAxes, Pins, Shape, Value, once_each
from spmd_trainer.sharding.jaxprs import CALLS, REMAT, called, scan_sizes
from spmd_trainer.sharding.specs import mesh_shape_of

# The shardings that a program requests for one array. Each sharding has the mesh axes of every dimension.
Splits: TypeAlias = frozenset[DimAxes]
# Operations that keep the dimensions: shardings requested for the result are also requested for operands of the same rank.
_PASSING = ELEMENTWISE | {"concatenate", "dynamic_slice", "dynamic_update_slice", "pad", "rev", "slice", "split"}


def asked_splits(jaxpr: Any, results: Sequence[DimAxes]) -> dict[int, Splits]:
    """Returns {id(equation): shardings that the program requests for its result}, for all `dot_general` equations.

    Args:
      jaxpr: the program.
      results: the mesh axes of every dimension, for each of the program's first results.
    """
    found: dict[int, Splits] = {}
    asked = [frozenset({axes}) for axes in results]
    _ask(jaxpr, [*asked, *[frozenset()] * (len(jaxpr.outvars) - len(asked))], found)
    return found


@dataclasses.dataclass(frozen=True)
class Operands:
    """The shardings of the operands of a matrix product.

    Attributes:
      suggested: for each dimension of the result, the mesh axes over which it is sharded in the operand that it comes from.
        One axis may occur in several dimensions.
      summed: the mesh axes over which contracted dimensions are sharded.
      num_batch: the number of batch dimensions, which come first in the result.
      is_crossed: True if the contracted dimensions of each operand have a mesh axis that those of the other operand lack.
    """

    suggested: DimAxes
    summed: frozenset[str]
    num_batch: int
    is_crossed: bool = False

    @classmethod
    def of(cls, eqn: Any, x: Value, y: Value) -> Operands:
        (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]
        x_summed, y_summed = (
            frozenset(axis for dim in dims for axis in v.axes[dim] or ())
            for v, dims in ((x, x_contract), (y, y_contract))
        )
        dims = [x.axes[i] or y.axes[j] for i, j in zip(x_batch, y_batch, strict=True)]
        for v, used in ((x, {*x_contract, *x_batch}), (y, {*y_contract, *y_batch})):
            dims += [axes for dim, axes in enumerate(v.axes) if dim not in used]
        is_crossed = bool(x_summed - y_summed and y_summed - x_summed)
        return cls(tuple(dims), x_summed | y_summed, len(x_batch), is_crossed)

    @property
    def axes(self) -> DimAxes:
        """The mesh axes of `suggested`. An axis that occurs in several dimensions is kept only in the first of them."""
        return once_each(self.suggested)


def is_changed(eqn: Any, asked: Splits, sizes: Mapping[str, int]) -> bool:
    """Returns True if a product must be constrained: if XLA may compute it wrongly, or the mesh has three or more axes.

    Args:
      eqn: the equation of a dot_general.
      asked: the shardings that the program requests for the result.
      sizes: {axis: size} of the mesh.
    """
    return _num_real_axes(sizes) > 2 or _may_be_wrong(eqn, asked, sizes)


def product(pins: Pins, eqn: Any, x: Value, y: Value, asked: Splits) -> Value:
    """Padding rule for `dot_general`. Padding of contracted dimensions is masked in both operands, because 0 * NaN is NaN.

    On a mesh of more than two axes, the operands are constrained to the shardings that are known for them. If the program
    requests no sharding for the result, the result is constrained to the one that its operands suggest. Otherwise XLA might
    choose shardings that match arrays to be added to the result, and compute the product wrongly.
    """
    (x_contract, y_contract), (x_batch, y_batch) = eqn.params["dimension_numbers"]
    sizes = {} if pins.mesh is None else mesh_shape_of(pins.mesh)
    x_used, y_used = {*x_contract, *x_batch}, {*y_contract, *y_batch}
    x_held = _held_for(x, x_used, len(x_batch), asked, sizes)
    y_held = _held_for(y, y_used, len(x_batch) + len(x.shape) - len(x_used), asked, sizes)
    pairs = list(zip((*x_contract, *x_batch), (*y_contract, *y_batch), strict=True))
    for i, j in pairs:
        x_held[i] = y_held[j] = max(x_held[i], y_held[j])
    left, right = x.masked(x_contract, 0, tuple(x_held)), y.masked(y_contract, 0, tuple(y_held))
    operands, shape = Operands.of(eqn, x, y), eqn.outvars[0].aval.shape
    if pins.mesh is None:
        return pins.value(bind(eqn, [left, right])[0], shape, operands.axes)
    is_pinned = _num_real_axes(sizes) > 2
    if is_pinned:
        # If at most one dimension's axes are unknown, and few axes are requested, XLA may choose how to shard that dimension.
        is_free = not _may_be_wrong(eqn, asked, sizes) and operands.suggested.count(None) < 2
        left = pins.split(left, _operand_axes(x.axes, {i: y.axes[j] for i, j in pairs}, is_free))
        right = pins.split(right, _operand_axes(y.axes, {j: x.axes[i] for i, j in pairs}, is_free))
    (found,) = bind(eqn, [left, right])
    wanted = asked or frozenset({operands.axes} if is_pinned else ())
    if (spec := safe_split(wanted, operands, found.shape, sizes)) is not None:
        found = pins.split(found, split_axes(spec, found.ndim))
    elif is_pinned and not asked:
        found = pins.split(found, operands.axes)
    return pins.value(found, shape, operands.axes)


def _held_for(value: Value, used: Collection[int], first: int, asked: Splits, sizes: Mapping[str, int]) -> list[int]:
    """Returns the physical (padded) shape that an operand gets for a matrix product.

    An operand that has been computed keeps its physical shape. In a deferred operand (see `Value.is_held`), such as one-hot
    ids, each dimension that the result keeps is padded to a multiple of the number of shards that the program requests for it.

    Args:
      value: the operand.
      used: the operand's batch and contracted dimensions. Its other dimensions become dimensions of the result.
      first: the dimension of the result that the first of these other dimensions becomes.
      asked: the shardings that the program requests for the result.
      sizes: {axis: size} of the mesh.
    """
    held = list(value.physical)
    free = [dim for dim in range(len(held)) if dim not in used]
    for out, dim in enumerate(() if value.is_held else free, start=first):
        shards = (math.prod(sizes.get(axis, 1) for axis in axes[out] or ()) for axes in asked)
        held[dim] += -held[dim] % max(shards, default=1)
    return held


def _operand_axes(axes: DimAxes, others: Mapping[int, tuple[str, ...] | None], is_free: bool) -> DimAxes:
    """Returns the mesh axes over which to shard each dimension of one operand of a matrix product.

    A dimension with unknown axes is sharded like the dimension of the other operand with which it is paired.

    Args:
      axes: the mesh axes of each dimension of the operand; None if unknown.
      others: {dimension of the operand: mesh axes of the paired dimension of the other operand}.
      is_free: if a dimension's axes are unknown in both operands, True leaves its sharding to XLA; False leaves it unsharded.
    """
    found = [others.get(dim) if over is None else over for dim, over in enumerate(axes)]
    return once_each(tuple(() if over is None and not is_free else over for over in found))


def safe_split(asked: Splits, operands: Operands, shape: Shape, sizes: Mapping[str, int]) -> PartitionSpec | None:
    """Returns a safe PartitionSpec for the result of a product that XLA would compute wrongly; None for other products.

    The spec has the axes that the operands suggest, except those with which XLA would still compute the product wrongly.

    Args:
      asked: the shardings that the program requests for the result.
      operands: the shardings of the product's operands.
      shape: the shape of the result, with padding.
      sizes: {axis: size} of the mesh.
    """
    num_axes, num_batch = _num_real_axes(sizes), operands.num_batch
    summed = frozenset(axis for axis in operands.summed if sizes[axis] > 1)
    operands = dataclasses.replace(operands, suggested=_real(operands.suggested, sizes), summed=summed)
    if not any(_is_wrong(_real(axes, sizes), operands, num_axes) for axes in asked):
        return None

    def is_right(split: list[tuple[str, ...]]) -> bool:
        if num_axes > 3:
            return max(map(len, split)) < 2 and sum(map(len, split)) <= (2 if len(shape) == 2 else 1)
        free = split[num_batch:]
        return sum(map(bool, free)) < 2 or sum(map(len, free)) < 3

    kept: list[tuple[str, ...]] = [()] * len(shape)
    for dim, over in enumerate(operands.axes):
        for count in range(len(over or ()), 0, -1):
            more = [*kept[:dim], (over or ())[:count], *kept[dim + 1 :]]
            if shape[dim] % math.prod(sizes[axis] for axis in more[dim]) == 0 and is_right(more):
                kept = more
                break
    return PartitionSpec(*(over or None for over in kept))


def _may_be_wrong(eqn: Any, asked: Splits, sizes: Mapping[str, int]) -> bool:
    """Returns True if XLA may compute a product wrongly for some shardings of its operands. Arguments as for `is_changed`."""
    fewest = 2 if eqn.params["dimension_numbers"][1][0] else 3
    if _num_real_axes(sizes) > 3:
        return True
    return any(len({axis for dim in _real(axes, sizes) for axis in dim or ()}) >= fewest for axes in asked)


def _num_real_axes(sizes: Mapping[str, int]) -> int:
    return sum(size > 1 for size in sizes.values())


def _real(dims: DimAxes, sizes: Mapping[str, int]) -> DimAxes:
    """Returns the mesh axes of each dimension, without axes of size 1."""
    return tuple(None if over is None else tuple(axis for axis in over if sizes.get(axis, 1) > 1) for over in dims)


def _is_wrong(asked: DimAxes, operands: Operands, num_axes: int) -> bool:
    """Returns True if XLA computes a product wrongly when its result has the sharding `asked`.

    "Summed" axes are those over which contracted dimensions are sharded. An axis is "suggested" for a dimension of the result
    if this dimension is sharded over it in the operand. On a mesh of four or more axes, the product is wrong if an axis shards
    two dimensions of the operands. Otherwise it is correct if the result is sharded over fewer than three axes, or over fewer
    than two if the sharding of a batch dimension changes. (Axes of batch dimensions whose sharding does not change are not
    counted.) In all other cases, the product is wrong if one of these is true:

    - The operands' contracted dimensions are sharded over different axes (`Operands.is_crossed`), and a dimension of the
      result is sharded over a summed axis that is not suggested for it.
    - An axis suggested for dimension d shards a different dimension, and (a) d is sharded over a summed axis, (b) the mesh has
      four or more axes, or (c) the result has more than two dimensions, and either d is sharded over an axis suggested for a
      different dimension, or a different dimension is sharded over a summed axis. (But d may be sharded over several summed
      axes that shard no other dimension of the operands, as in gradients of weights over ('replica', 'data') and 'mdl'.)
    """
    over = [frozenset(dim or ()) for dim in asked]
    suggested = [frozenset(dim or ()) for dim in operands.suggested]
    summed, free = operands.summed, frozenset[str]().union(*suggested)
    if num_axes > 3 and len(summed) + sum(map(len, suggested)) > len(summed | free):
        return True
    changed = [dim for dim in range(len(over)) if dim >= operands.num_batch or over[dim] != suggested[dim]]
    fewest = 3 if not changed or changed[0] >= operands.num_batch else 2
    if len(frozenset[str]().union(*(over[dim] for dim in changed))) < fewest:
        return False

    if operands.is_crossed and any(
        summed & now - frozenset(old or ()) for now, old in zip(over, operands.axes, strict=True)
    ):
        return True

    def others(dims: Sequence[frozenset[str]], at: int) -> frozenset[str]:
        return frozenset[str]().union(*dims[:at], *dims[at + 1 :])

    def is_wrong_at(at: int) -> bool:
        arriving = over[at] & summed
        if len(over) > 2:
            arriving |= over[at] & others(suggested, at) | others(over, at) & summed
        is_safe = len(over[at]) > 1 and over[at] <= summed - free
        is_moved = bool(suggested[at] & others(over, at))
        return is_moved and (bool(arriving) or num_axes > 3) and not is_safe

    return any(is_wrong_at(at) for at in range(len(over)))


def _ask(jaxpr: Any, results: Sequence[Splits], found: dict[int, Splits]) -> list[Splits]:
    """Propagates requested shardings backward from a program's results to its arguments. Adds those of products to `found`."""
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
    if (sources := _sources(eqn)) is not None:
        return [frozenset(tuple(sum((axes[new] or () for new in dims), ()) for dims in sources) for axes in results[0])]
    if name == "scan":
        return _of_scan(params, results, found)
    if name == "while":
        return _of_while(params, results, found, nothing)
    if name == "cond":
        branches = [_ask(branch.jaxpr, results, found) for branch in params["branches"]]
        return [frozenset(), *(frozenset[DimAxes]().union(*splits) for splits in zip(*branches, strict=True))]
    # Calls, but not `shard_map`, which XLA does not partition.
    return _ask(called(eqn)[0], results, found) if name in CALLS | REMAT else nothing


def _sources(eqn: Any) -> list[list[int]] | None:
    """Returns which dimensions of the result come from each dimension of the operand; None for an unsupported operation."""
    params = eqn.params
    x, out = eqn.invars[0].aval.shape if eqn.invars else (), eqn.outvars[0].aval.shape if eqn.outvars else ()
    match eqn.primitive.name:
        case "transpose":
            return [[params["permutation"].index(dim)] for dim in range(len(x))]
        case "reshape" if params["dimensions"] is None:
            new_of: list[list[int]] = [[] for _ in x]
            for old_dims, new_dims in dim_groups(x, out):
                lead = next((dim for dim in old_dims if x[dim] != 1), None)
                if lead is not None:
                    new_of[lead] = new_dims
            return new_of
        case "broadcast_in_dim":
            return [[new] if x[old] == out[new] else [] for old, new in enumerate(params["broadcast_dimensions"])]
        case "squeeze" | "reduce_sum":
            gone = params["dimensions" if eqn.primitive.name == "squeeze" else "axes"]
            left = [dim for dim in range(len(x)) if dim not in gone]
            return [[left.index(dim)] if dim in left else [] for dim in range(len(x))]
    return None


def _of_scan(params: Mapping[str, Any], results: list[Splits], found: dict[int, Splits]) -> list[Splits]:
    consts, carry = scan_sizes(params)
    steps = [frozenset(axes[1:] for axes in splits) for splits in results[carry:]]
    held = results[:carry]
    for _ in range(2):  # the carry of one iteration goes to the next
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
