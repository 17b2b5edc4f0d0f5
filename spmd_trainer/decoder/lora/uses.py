"""Finds the matrix products and other operations that read a model's variables, and chooses the variables that get adapters."""

from __future__ import annotations

import dataclasses
import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from spmd_trainer.decoder.lora import dims as dims_lib
from spmd_trainer.decoder.lora.adapted_weight import MatrixDims
from spmd_trainer.decoder.lora.interpreter import CALLS, GROUPED, REMATERIALISED
from spmd_trainer.decoder.lora.products import GROUPED_NUMBERS
from spmd_trainer.decoder.lora.settings import Lora
from spmd_trainer.errors import UserError

# Operations that keep zeros and ones.
_KEEPS_MASK = frozenset(
    {"convert_element_type", "reshape", "transpose", "squeeze", "broadcast_in_dim", "sharding_constraint"}
)


@dataclasses.dataclass
class Uses:
    """How one variable is used.

    Attributes:
      rank: number of dimensions of the variable.
      products: dimension roles in each kind of matrix product that reads it.
      others: names of the other operations that read it.
      is_lookup: True if a product is with one-hot vectors: a lookup of rows.
      is_read_on: True if another product, or one of a later layer, reads the products' results.
    """

    rank: int
    products: list[MatrixDims] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    is_lookup: bool = False
    is_read_on: bool = False

    @property
    def fits(self) -> bool:
        """True if every use is a matrix product, all with the same roles of dimensions."""
        return len(self.products) == 1 and not self.others


@dataclasses.dataclass(frozen=True)
class _Value:
    """Facts about a value: the variable that it is, if any, and the variables whose products it depends on.

    `is_mask` is True for zeros and ones, such as one-hot vectors.
    """

    path: str | None = None
    dims: dims_lib.Dims = ()
    is_mask: bool = False
    after: frozenset[str] = frozenset()


def find_uses(jaxpr: Any, variables: Mapping[int, str]) -> dict[str, Uses]:
    """Returns how a program uses variables.

    Args:
      jaxpr: a ClosedJaxpr.
      variables: argument number -> path.
    """
    invars = jaxpr.jaxpr.invars
    found = {path: Uses(len(invars[i].aval.shape)) for i, path in variables.items()}
    values = [
        _Value(variables[i], dims_lib.of_variable(len(var.aval.shape))) if i in variables else _Value()
        for i, var in enumerate(invars)
    ]
    _walk(jaxpr.jaxpr, values, found)
    return found


def _walk(jaxpr: Any, values: Sequence[_Value], found: dict[str, Uses]) -> list[_Value]:
    env = dict(zip(jaxpr.invars, values, strict=True))

    def read(var: Any) -> _Value:
        return _Value() if isinstance(var, jax.extend.core.Literal) else env.get(var, _Value())

    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, _one(eqn, [read(var) for var in eqn.invars], found), strict=True))
    return [read(var) for var in jaxpr.outvars]


def _one(eqn: Any, values: list[_Value], found: dict[str, Uses]) -> list[_Value]:
    name, params = eqn.primitive.name, eqn.params
    after = frozenset().union(*(value.after for value in values))
    plain = [_Value(after=after, is_mask=_is_mask(eqn, values))] * len(eqn.outvars)
    if not any(value.path for value in values):
        return plain
    if name == "dot_general" and not all(value.path for value in values):
        return [_product(params["dimension_numbers"], values, found)]
    if name == GROUPED and not values[0].path:
        return [_product(GROUPED_NUMBERS, values[:2], found)]
    if name in CALLS:
        return _walk((params.get("jaxpr") or params["call_jaxpr"]).jaxpr, values, found)
    if name in REMATERIALISED:
        return _walk(params["jaxpr"], values, found)
    if name in ("scan", "while"):
        return _loop(eqn, values, found)
    if name == "cond":
        _as_arrays(values[:1], name, found)
        results = [_walk(jaxpr.jaxpr, values[1:], found) for jaxpr in params["branches"]]
        joined = [frozenset().union(*(value.after for value in group)) for group in zip(*results, strict=True)]
        for result in results:
            _as_arrays(result, name, found)
        return [_Value(after=x) for x in joined]
    weight, *others = values
    if weight.path and not any(other.path for other in others):
        moves = dims_lib.moves(eqn, weight.dims)
        if moves is not None:
            return [dataclasses.replace(weight, dims=move.dims) for move in moves]
    _as_arrays(values, name, found)
    return plain


def _is_mask(eqn: Any, values: Sequence[_Value]) -> bool:
    name = eqn.primitive.name
    if name == "convert_element_type" and eqn.invars[0].aval.dtype == bool:
        return True
    if name in CALLS:
        return "one_hot" in str(eqn.params.get("name"))
    return name in _KEEPS_MASK and values[0].is_mask


def _as_arrays(values: Sequence[_Value], operation: str, found: dict[str, Uses]) -> None:
    """Records that an operation reads variables as plain arrays."""
    for value in values:
        if value.path and operation not in found[value.path].others:
            found[value.path].others.append(operation)


def _product(numbers: Any, values: Sequence[_Value], found: dict[str, Uses]) -> _Value:
    contract, batch = numbers
    side = 0 if values[0].path else 1
    weight, x = values[side], values[1 - side]
    assert weight.path is not None
    for path in x.after:
        found[path].is_read_on = True
    uses = found[weight.path]
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


def _loop(eqn: Any, values: list[_Value], found: dict[str, Uses]) -> list[_Value]:
    """Walks the body twice, because a product may read a result of the previous iteration."""
    params = eqn.params
    if eqn.primitive.name == "scan":
        body, num_consts = params["jaxpr"].jaxpr, params["num_consts"]
        num_carry = params["num_carry"]
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
    carry = [_Value(after=value.after) for value in carry]
    slices = [dataclasses.replace(x, dims=x.dims[1:]) if x.path else x for x in xs]
    results: list[_Value] = []
    for _ in range(2):
        results = _walk(body, [*consts, *carry, *slices], found)
        _as_arrays(results, f"{eqn.primitive.name} result", found)
        carry = [_Value(after=old.after | new.after) for old, new in zip(carry, results[:num_carry], strict=True)]
    return [_Value(after=value.after) for value in [*carry, *results[num_carry:]]]


def choose_targets(settings: Lora, uses: Mapping[str, Uses]) -> dict[str, MatrixDims]:
    """Returns the targets and the roles of their dimensions.

    Args:
      settings: the settings.
      uses: path -> how the model uses the variable, for all variables that learn without adapters.

    Raises:
      UserError: a regex matches no variable, or one that adapters don't fit.
    """
    fitting = [path for path, use in uses.items() if use.fits]
    if not settings.regexes:
        linear = [path for path in fitting if not uses[path].is_lookup]
        # A model's only layer is also its output layer.
        chosen = [path for path in linear if uses[path].is_read_on] or linear
        if not chosen:
            raise UserError("task.lora.targets='all-linear' finds no variable used in matrix products only")
    else:
        matched = {path for regex in settings.regexes for path in _matches(regex, uses, fitting)}
        chosen = [path for path in uses if path in matched]
    for path in chosen:
        _check(path, uses[path], fitting)
    return {path: uses[path].products[0] for path in chosen}


def _matches(regex: str, uses: Mapping[str, Uses], fitting: list[str]) -> list[str]:
    found = [path for path in uses if re.search(regex, path)]
    if not found:
        raise UserError(
            f"task.lora.targets: {regex!r} matches no variable; nearest variables that can have adapters: "
            f"{_nearest(regex, fitting)}"
        )
    return found


def _check(path: str, use: Uses, fitting: list[str]) -> None:
    """Raises UserError if the variable is in no matrix product, or in products with contradicting roles."""
    near = f"nearest variables that can have adapters: {_nearest(path, fitting)}"
    if len(use.products) > 1:
        raise UserError(
            f"task.lora.targets: the model uses {path} in matrix products over different dimensions "
            f"({' and '.join(str(kind.inputs) for kind in use.products)}), so the adapters' inputs are ambiguous; {near}"
        )
    if not use.products:
        how = f"in {', '.join(use.others)}" if use.others else "not at all"
        raise UserError(
            f"task.lora.targets: the model uses {path} {how}, but adapters need a weight used in matrix products; {near}"
        )


def _nearest(text: str, paths: list[str]) -> str:
    plain = re.sub(r"[\\^$.*+?()\[\]{}|]", "", text)

    def likeness(path: str) -> float:
        # A regex usually names the end of a path.
        return difflib.SequenceMatcher(None, plain, path[-len(plain) :]).ratio()

    return ", ".join(sorted(paths, key=likeness, reverse=True)[:3]) or "none"
