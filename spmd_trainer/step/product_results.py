"""Analyzes how a jaxpr uses the results of matrix products, to find routers and the dimensions of weights that index experts.

`matrix_uses` follows each weight to the products that read it. This module follows a product's result until the next product
reads it. For each dimension of an array, it tracks the *columns*: the dimensions of variables from which the array's dimension
comes. A column is a pair (path of the variable, dimension). The last dimension of `x @ w` has the column ('w', 1). This finds:

- routers: a softmax, top_k, sort or argmax over the router's outputs reads the results of its products. A matrix may also be a
  router if a sigmoid of its products' results scales whole vectors. (A sigmoid alone may be a feed-forward gate.)
- aligned dimensions: dimensions of variables that an operation or a product pairs index by index. A weight's dimension that is
  aligned with a router's outputs indexes experts.
- dimensions read one index at a time: the program slices single indices, e.g. queries, keys and values from one product.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

from spmd_trainer.sharding.even_rules import ELEMENTWISE
from spmd_trainer.step import tracked_dims as dims_lib

# (path of a variable, index of one of its dimensions)
Column: TypeAlias = tuple[str, int]
# For each dimension of an array, its columns: the dimensions of variables from which it comes.
Columns: TypeAlias = tuple[frozenset[Column], ...]

_NONE: frozenset[Column] = frozenset()
_CHOICES = frozenset({"top_k", "approx_top_k", "sort", "argmax", "argmin"})
_CUTS = frozenset({"slice", "dynamic_slice", "split"})
_MOVES = _CUTS | {"transpose", "squeeze", "reshape", "unstack"}
# The result of these operations counts as an exponential or a sigmoid if their first tracked operand is one.
_KEEP_FUNCTION = dims_lib.SAME_DIMENSIONS | {"convert_element_type", "select_n", "stop_gradient", "div"}
_BY_ELEMENT = ELEMENTWISE | _KEEP_FUNCTION | {"sort", "cumsum"}


@dataclasses.dataclass(frozen=True)
class MatrixDims:
    """The roles of a variable's dimensions in a matrix product.

    Attributes:
      stack: dimensions that index separate matrices: stacked layers, or batch dimensions of the product.
      inputs: the matrix's rows: dimensions that the product contracts.
      outputs: the matrix's columns: dimensions that the product's result keeps.
    """

    stack: tuple[int, ...]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]


@dataclasses.dataclass
class Uses:
    """How a program uses one variable. "The products" are the matrix products that read the variable.

    Attributes:
      rank: number of dimensions of the variable.
      products: the roles of the variable's dimensions in the products. Products with the same roles share one entry.
      others: names of all other operations that read the variable.
      is_lookup: True if the other operand of a product is a one-hot array, so that the product looks up rows.
      is_read_on: True if a later product of a variable, possibly in a different layer, depends on the products' results.
      routes: True if a softmax, top_k, sort or argmax reads the products' results, as in a router.
      may_route: True if a sigmoid of the products' results scales whole vectors, as a router's weights scale experts' outputs.
      aligned: {dimension: dimensions of variables, as (path, dimension), that the program pairs with it index by index}.
      heads: dimensions that index attention heads, because each of their indices has a separate product of two activations.
      one_by_one: dimensions from which the program slices single indices in the products' results, e.g. to separate joined
        queries, keys and values.
      elsewhere: dimensions that the analysis can't follow any further, because of a kernel, a loop or an unknown operation.
    """

    rank: int
    products: list[MatrixDims] = dataclasses.field(default_factory=list)
    others: list[str] = dataclasses.field(default_factory=list)
    is_lookup: bool = False
    is_read_on: bool = False
    routes: bool = False
    may_route: bool = False
    aligned: dict[int, set[Column]] = dataclasses.field(default_factory=dict)
    heads: set[int] = dataclasses.field(default_factory=set)
    one_by_one: set[int] = dataclasses.field(default_factory=set)
    elsewhere: set[int] = dataclasses.field(default_factory=set)

    @property
    def fits(self) -> bool:
        """True if only matrix products read the variable, and its dimensions have the same roles in all of them."""
        return len(self.products) == 1 and not self.others


@dataclasses.dataclass(frozen=True)
class Result:
    """What is known about an array that is computed from results of matrix products.

    Attributes:
      columns: for each dimension of the array, its columns: the dimensions of variables from which it comes, each as (path of
        the variable, dimension). () if no columns are known.
      of: paths of the variables from whose products the array is computed, but not of variables in earlier products.
      function: 'exp' or 'logistic' (sigmoid) if the array is this function of a product's results; else ''.
      chosen: (column, size) for each column of the arrays from which a top_k, sort, argmax or argmin chose, with the size of the
        array's dimension. A later dimension of this size without columns gets the column, e.g. in one-hot vectors of the choice.
    """

    columns: Columns = ()
    of: frozenset[str] = frozenset()
    function: str = ""
    chosen: frozenset[tuple[Column, int]] = frozenset()


NOTHING = Result()


def of_weight(path: str, dims: dims_lib.Dims) -> Result:
    """Returns the `Result` for a weight: the variable `path`, or a rearrangement of it. `dims` are the weight's dimensions."""
    return Result(tuple(frozenset((path, i) for i in dim.origins) for dim in dims))


def of_product(eqn: Any, values: Sequence[Result], notes: Mapping[str, Uses]) -> Result:
    """Returns the `Result` of a `dot_general`. Records which dimensions of variables the product pairs index by index.

    Args:
      eqn: the equation of the jaxpr.
      values: the `Result`s of the equation's operands.
      notes: {path of a variable: its `Uses`}. The function adds to `Uses.aligned`.
    """
    contract, batch = eqn.params["dimension_numbers"]
    left, right = (_columns(value, var) for value, var in zip(values, eqn.invars, strict=True))
    pairs = [(left[i], right[j]) for i, j in zip(*contract, strict=True)]
    shared = [left[i] | right[j] for i, j in zip(*batch, strict=True)]
    for columns in (*(one | other for one, other in pairs), *shared):
        _align(columns, notes)
    free = [
        columns
        for side, of_side in enumerate((left, right))
        for i, columns in enumerate(of_side)
        if i not in contract[side] and i not in batch[side]
    ]
    return Result((*shared, *free))


def of_activations(eqn: Any, values: Sequence[Result], notes: Mapping[str, Uses]) -> list[Result]:
    """Returns the `Result` of each output of an operation that reads no weights.

    Adds to `notes` what the operation shows about the use of variables, e.g. as routers. Arguments as for `of_product`.
    """
    if all(value == NOTHING for value in values):
        return [NOTHING] * len(eqn.outvars)
    name, of = eqn.primitive.name, frozenset().union(*(value.of for value in values))
    chosen = frozenset().union(*(value.chosen for value in values))
    if name == "dot_general":
        return [_of_two_activations(eqn, values, notes)]
    if name in _CHOICES or (name == "reduce_sum" and values[0].function == "exp"):
        for path in _read_together(eqn, values[0], of):
            notes[path].routes = True
    if name in _CHOICES:
        sizes = zip(_columns(values[0], eqn.invars[0]), eqn.invars[0].aval.shape, strict=True)
        chosen |= {(column, size) for group, size in sizes for column in group}
    results = []
    for number, var in enumerate(eqn.outvars):
        moved = _moved(eqn, number, values)
        if moved is None:  # an operation of which nothing is known, such as a kernel
            for value in values:
                leave(value, notes)
            results.append(Result(_completed((_NONE,) * len(var.aval.shape), var.aval.shape, chosen), chosen=chosen))
            continue
        for columns in moved:
            _align(columns, notes)
        for value in _weighing(eqn, values, moved):
            _weigh(value, notes)
        if name in _CUTS:
            _cut(moved, eqn.invars[0].aval.shape, var.aval.shape, notes)
        if name == "unstack":
            for path, dim in _columns(values[0], eqn.invars[0])[eqn.params["axis"]]:
                notes[path].one_by_one.add(dim)
        function = name if name in ("exp", "logistic") else ""
        if name in _KEEP_FUNCTION | _MOVES | {"broadcast_in_dim"}:
            function = next((value.function for value in values if value != NOTHING), "")
        results.append(Result(_completed(moved, var.aval.shape, chosen), of, function, chosen))
    return results


def _read_together(eqn: Any, value: Result, of: frozenset[str]) -> Iterator[str]:
    """Yields the paths in `of` whose variables are routers, given an operation that chooses (e.g. top_k) or sums a softmax.

    A variable is a router if the dimension over which the operation chooses or sums comes from the variable, or if it is unknown
    which dimension does. `value` is the operand's `Result`. `of`: variables from whose products the operand is computed.
    """
    params, groups = eqn.params, _columns(value, eqn.invars[0])
    last = params.get("dimension", params.get("reduction_dimension", params.get("axis", len(groups) - 1)))
    over = {path for i in params.get("axes", (last,)) for path, _ in groups[i]}
    known = {path for group in groups for path, _ in group}
    yield from (path for path in of if path in over or path not in known)


def _of_two_activations(eqn: Any, values: Sequence[Result], notes: Mapping[str, Uses]) -> Result:
    for value in values:
        _weigh(value, notes)
    found = of_product(eqn, values, notes)
    contract, batch = eqn.params["dimension_numbers"]
    # Columns with a separate product for each index: batch dimensions, and heads whose own columns are contracted.
    apart = frozenset().union(*found.columns[: len(batch[0])])
    for value, var, dims in zip(values, eqn.invars, contract, strict=True):
        groups = _columns(value, var)
        contracted = frozenset().union(*(groups[dim] for dim in dims))
        whose = {path for path, _ in contracted}
        apart |= {column for column in frozenset().union(*groups) - contracted if column[0] in whose}
    for path, dim in apart:
        notes[path].heads.add(dim)
    return found


def _columns(value: Result, var: Any) -> Columns:
    return value.columns or (_NONE,) * len(var.aval.shape)


def _moved(eqn: Any, number: int, values: Sequence[Result]) -> Columns | None:
    """Returns the columns (see `Result`) of an operation's output `number`; None if the analysis doesn't know the operation."""
    name, params, shape = eqn.primitive.name, eqn.params, eqn.outvars[number].aval.shape
    first = _columns(values[0], eqn.invars[0])
    if name in _BY_ELEMENT:
        # Operands have the rank of the result, or are scalars.
        given = [(_columns(value, var), var.aval.shape) for value, var in zip(values, eqn.invars, strict=True)]
        return tuple(
            frozenset().union(*(columns[i] for columns, of in given if of and of[i] == n)) for i, n in enumerate(shape)
        )
    if name in _MOVES:
        dims = tuple(dims_lib.Dim(i, frozenset({i})) for i in range(len(first)))
        moves = dims_lib.moves(eqn, dims)
        if moves is None:
            return None
        return tuple(frozenset().union(*(first[i] for i in dim.origins)) for dim in moves[number].dims)
    if name == "broadcast_in_dim":
        place = dict(zip(params["broadcast_dimensions"], range(len(first)), strict=True))
        kept = {i: j for i, j in place.items() if shape[i] == eqn.invars[0].aval.shape[j]}
        return tuple(first[kept[i]] if i in kept else _NONE for i in range(len(shape)))
    if name in ("top_k", "approx_top_k"):
        return tuple(first[i] if shape[i] == eqn.invars[0].aval.shape[i] else _NONE for i in range(len(shape)))
    if (name.startswith("reduce_") and "axes" in params) or name in ("argmax", "argmin"):  # not reduce_window
        return tuple(columns for i, columns in enumerate(first) if i not in params["axes"])
    if name in ("concatenate", "pad"):
        joined = [value.columns for value in values if value.columns]
        return tuple(frozenset().union(*group) for group in zip(*joined, strict=True)) or first
    return None


def _weighing(eqn: Any, values: Sequence[Result], columns: Columns) -> Iterator[Result]:
    """Yields the operands of which each element scales a vector: they are broadcast over a dimension after those with columns."""
    made = eqn.outvars[0].aval.shape
    last = max((i for i, group in enumerate(columns) if group), default=len(columns))
    for value, var in zip(values, eqn.invars, strict=True):
        given, own = var.aval.shape, last
        if eqn.primitive.name == "broadcast_in_dim":
            place = dict(zip(eqn.params["broadcast_dimensions"], given, strict=True))
            given = [place.get(i, 1) for i in range(len(made))]
        elif eqn.primitive.name in _BY_ELEMENT:
            own = max((i for i, group in enumerate(value.columns) if group), default=len(made))
        if len(given) == len(made) and any(given[i] == 1 < made[i] for i in range(own + 1, len(made))):
            yield value


def _completed(columns: Columns, shape: Sequence[int], chosen: Iterable[tuple[Column, int]]) -> Columns:
    """Returns `columns`, but gives a dimension without columns the columns that `chosen` lists with the dimension's size."""
    return tuple(
        group or frozenset(column for column, count in chosen if count == size)
        for group, size in zip(columns, shape, strict=True)
    )


def _align(columns: frozenset[Column], notes: Mapping[str, Uses]) -> None:
    if len(columns) > 1:
        for path, dim in columns:
            notes[path].aligned.setdefault(dim, set()).update(columns)


def _cut(columns: Columns, given: Sequence[int], made: Sequence[int], notes: Mapping[str, Uses]) -> None:
    for group, before, after in zip(columns, given, made, strict=True):
        for path, dim in group if after == 1 < before else ():
            notes[path].one_by_one.add(dim)


def leave(value: Result, notes: Mapping[str, Uses]) -> None:
    """Records the columns of a value in `Uses.elsewhere`, because an operation that can't be analyzed reads the value."""
    for path, dim in frozenset().union(*value.columns):
        notes[path].elsewhere.add(dim)


def _weigh(value: Result, notes: Mapping[str, Uses]) -> None:
    if value.function == "logistic":
        for path in value.of:
            notes[path].may_route = True
