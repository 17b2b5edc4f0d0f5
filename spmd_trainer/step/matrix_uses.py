"""Finds the matrix products that read each variable of a model, and the role of each dimension of the variable in the products.

The model is traced. The analysis of its jaxpr follows each variable to the products that read it (`tracked_dims`), and each
result of a product to the products that read the result (`product_results`). It needs no names or annotations in the model, so it
works for models of any library.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend

from spmd_trainer.sharding.jaxprs import OWN_DERIVATIVES, PLAIN_CALLS, REMAT, called, live, products_shown, scan_sizes
from spmd_trainer.step import product_results
from spmd_trainer.step import tracked_dims as dims_lib
from spmd_trainer.step.product_results import MatrixDims, Uses
from spmd_trainer.train_states import PyTree

GROUPED = "grouped_dot"
# The dimension numbers of `grouped_dot`, as for `dot_general`: (contracted, batch) dimensions, each of (rows, weights).
GROUPED_NUMBERS = (((3,), (1,)), ((1,), (0,)))
# Calls of functions with custom derivatives, and `select_n` between a variable and itself, as in praxis' pipelines.
EVERY = OWN_DERIVATIVES | {"select_n", "stop_gradient"}
# Operations that only convert, rearrange or repeat elements, so that an array of zeros and ones remains one.
_KEEPS_MASK = frozenset(
    {"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "sharding_constraint"}
)


@dataclasses.dataclass(frozen=True)
class _Value:
    """What the analysis knows about one value of the jaxpr.

    Attributes:
      path: path of the variable, if the value is a variable, perhaps transposed, sliced or reshaped; else None.
      dims: if `path` is set, a `Dim` for each dimension of the value, which records its origin in the variable; else ().
      is_mask: True for arrays of zeros and ones, such as one-hot vectors.
      after: paths of all variables on whose matrix products the value depends.
      result: what is known of the value as a result of matrix products.
    """

    path: str | None = None
    dims: dims_lib.Dims = ()
    is_mask: bool = False
    after: frozenset[str] = frozenset()
    result: product_results.Result = product_results.NOTHING


@dataclasses.dataclass(frozen=True)
class _Found:
    """What the functions of an analysis share: the `Uses` found so far, by variable path, and `find_uses`' argument `also`."""

    uses: dict[str, Uses]
    also: frozenset[str]


def find_uses(jaxpr: Any, variables: Mapping[int, str], also: frozenset[str] = frozenset()) -> dict[str, Uses]:
    """Returns {path: `Uses`}: how a jaxpr uses its variables.

    Args:
      jaxpr: a ClosedJaxpr.
      variables: {index of an argument of the jaxpr: path of the variable that is passed there}.
      also: names of more primitives through which to follow variables: `EVERY` for optimizers, none for adapters (`task.lora`).
    """
    invars = jaxpr.jaxpr.invars
    found = _Found({path: Uses(len(invars[i].aval.shape)) for i, path in variables.items()}, also)
    values = [
        _Value(variables[i], dims_lib.of_variable(len(var.aval.shape))) if i in variables else _Value()
        for i, var in enumerate(invars)
    ]
    _walk(jaxpr.jaxpr, values, found)
    return found.uses


def _walk(jaxpr: Any, values: Sequence[_Value], found: _Found) -> list[_Value]:
    env = dict(zip(jaxpr.invars, values, strict=True))

    def read(var: Any) -> _Value:
        return _Value() if isinstance(var, jax.extend.core.Literal) else env.get(var, _Value())

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _one(eqn, [read(var) for var in eqn.invars], found), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _one(eqn: Any, values: list[_Value], found: _Found) -> list[_Value]:
    name, params = eqn.primitive.name, eqn.params
    if not any(value.path for value in values):
        return _of_activations(eqn, values, found)
    if name == "dot_general" and not all(value.path for value in values):
        product = _product(params["dimension_numbers"], values, found)
        return [dataclasses.replace(product, result=_result(eqn, values, found))]
    if name == GROUPED and not values[0].path:
        return [_product(GROUPED_NUMBERS, values[:2], found)]
    if name in PLAIN_CALLS | REMAT or name in found.also & OWN_DERIVATIVES:
        return _walk(called(eqn)[0], values, found)
    if name in ("scan", "while"):
        return _loop(eqn, values, found)
    if name == "cond":
        _as_arrays(values[:1], name, found)
        results = [_walk(jaxpr.jaxpr, values[1:], found) for jaxpr in params["branches"]]
        joined = [frozenset().union(*(value.after for value in group)) for group in zip(*results, strict=True)]
        for result in results:
            _as_arrays(result, name, found)
        return [_Value(after=x) for x in joined]
    if name in found.also and len({(value.path, value.dims) for value in values if value.path}) == 1:
        return [next(value for value in values if value.path)]
    weight, *others = values
    if weight.path and not any(other.path for other in others):
        moves = dims_lib.moves(eqn, weight.dims)
        if moves is not None:
            return [dataclasses.replace(weight, dims=move.dims) for move in moves]
    _as_arrays(values, name, found)
    return _plain(eqn, values, found)


def _of_activations(eqn: Any, values: list[_Value], found: _Found) -> list[_Value]:
    """Returns the `_Value`s of the results of an equation that reads no variable. If it is a call or loop, analyzes the body."""
    name = eqn.primitive.name
    if all(value.result == product_results.NOTHING for value in values):
        return _plain(eqn, values, found)
    if name in ("scan", "while"):
        return _loop(eqn, values, found)
    if name in PLAIN_CALLS | REMAT | OWN_DERIVATIVES:
        return [dataclasses.replace(v, is_mask=_is_mask(eqn, values)) for v in _walk(called(eqn)[0], values, found)]
    return _plain(eqn, values, found)


def _plain(eqn: Any, values: list[_Value], found: _Found) -> list[_Value]:
    after = frozenset().union(*(value.after for value in values))
    results = product_results.of_activations(eqn, [value.result for value in values], found.uses)
    return [_Value(after=after, is_mask=_is_mask(eqn, values), result=result) for result in results]


def _result(eqn: Any, values: list[_Value], found: _Found) -> product_results.Result:
    known = [product_results.of_weight(v.path, v.dims) if v.path else v.result for v in values]
    columns = product_results.of_product(eqn, known, found.uses).columns
    return product_results.Result(columns, frozenset(value.path for value in values if value.path))


def _is_mask(eqn: Any, values: Sequence[_Value]) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return True
    if name in PLAIN_CALLS:
        return "one_hot" in str(eqn.params.get("name"))
    return name in _KEEPS_MASK and values[0].is_mask


def _as_arrays(values: Sequence[_Value], operation: str, found: _Found) -> None:
    """Notes in `Uses.others`, for each variable among `values`, that `operation`, which isn't a matrix product, reads it."""
    for value in values:
        if value.path and operation not in found.uses[value.path].others:
            found.uses[value.path].others.append(operation)


def _product(numbers: Any, values: Sequence[_Value], found: _Found) -> _Value:
    contract, batch = numbers
    side = 0 if values[0].path else 1
    weight, x = values[side], values[1 - side]
    assert weight.path is not None
    for path in x.after:
        found.uses[path].is_read_on = True
    uses = found.uses[weight.path]
    uses.is_lookup |= x.is_mask
    free = [i for i in range(len(weight.dims)) if i not in contract[side] and i not in batch[side]]
    inputs, outputs = (dims_lib.origins([weight.dims[i] for i in group]) for group in (contract[side], free))
    stack = frozenset(range(uses.rank)) - inputs - outputs
    kinds = [
        MatrixDims(*(tuple(sorted(kind)) for kind in kinds))
        for kinds in ((stack, inputs, outputs), (stack, outputs, inputs))
    ]
    if not inputs or not outputs or inputs & outputs:
        if "a product with a vector" not in uses.others:
            uses.others.append("a product with a vector")
    # A product with the transposed matrix fits the same adapters.
    elif not any(kind in uses.products for kind in kinds):
        uses.products.append(kinds[0])
    return _Value(after=x.after | {weight.path})


def _loop(eqn: Any, values: list[_Value], found: _Found) -> list[_Value]:
    """Returns the `_Value`s of a loop's results. Analyzes its body twice: a product may read the previous iteration's results."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        body, (num_consts, num_carry) = params["jaxpr"].jaxpr, scan_sizes(params)
    else:
        skipped = params["cond_nconsts"]
        _walk(params["cond_jaxpr"].jaxpr, [*values[:skipped], *values[skipped + params["body_nconsts"] :]], found)
        values = values[skipped:]
        body, num_consts = params["body_jaxpr"].jaxpr, params["body_nconsts"]
        num_carry = len(values) - num_consts
    consts, carry, xs = (
        values[:num_consts],
        values[num_consts : num_consts + num_carry],
        values[num_consts + num_carry :],
    )
    _as_arrays(carry, f"{eqn.primitive.name} carry", found)
    for value in (*carry, *xs):
        product_results.leave(value.result, found.uses)
    carry = [_Value(after=value.after) for value in carry]
    slices = [dataclasses.replace(x, dims=x.dims[1:], result=product_results.NOTHING) for x in xs]
    results: list[_Value] = []
    for _ in range(2):
        results = _walk(body, [*consts, *carry, *slices], found)
        _as_arrays(results, f"{eqn.primitive.name} result", found)
        carry = [_Value(after=old.after | new.after) for old, new in zip(carry, results[:num_carry], strict=True)]
    return [_Value(after=value.after) for value in [*carry, *results[num_carry:]]]


def traced(fn: Callable[..., Any], args: tuple[Any, ...], *, shown: bool = True) -> tuple[Any, PyTree]:
    """Returns a function's jaxpr without unused operations, and the ShapeDtypeStructs of the function's results.

    NNX modules, for example, have such unused operations, because their loops over layers return all variables.

    Args:
      fn: the function.
      args: its arguments, arrays or ShapeDtypeStructs.
      shown: True if the jaxpr shall show the products inside functions with custom derivatives; see `jaxprs.products_shown`.
    """
    with products_shown(shown):
        # A new function, because JAX caches traces, and the cached trace of `fn` may be for another value of `shown`.
        closed, shapes = jax.make_jaxpr(lambda *args: fn(*args), return_shape=True)(*args)
    return live(closed), shapes
