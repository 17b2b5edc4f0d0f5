"""Padding rules of `even_program`: they say which dimensions of an operation keep their padding, and where padding is masked.

A rule takes the `Pins` (which makes `Value`s), an equation of the jaxpr and the equation's operands, and returns its results.
Operands and results are `Value`s: arrays with a logical and a padded shape. Operations without a rule get their operands without
padding (`without_padding`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_trainer.sharding.constraints import split_axes
from spmd_trainer.sharding.even_values import DimAxes, Pins, Shape, Value, agreed_axes, filled, whole_in

Rule: TypeAlias = Callable[[Pins, Any, list[Value]], list[Value]]

# Operations on each element separately. The operands have the same shape, or are scalars.
# fmt: off
ELEMENTWISE = frozenset({
    "abs", "acos", "acosh", "add", "add_any", "and", "asin", "asinh", "atan", "atan2", "atanh", "bessel_i0e",
    "bessel_i1e", "cbrt", "ceil", "clamp", "clz", "complex", "conj", "convert_element_type", "copy", "copy_p", "cos",
    "cosh", "digamma", "div", "eq", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor", "ge", "gt", "igamma",
    "igamma_grad_a", "igammac", "imag", "integer_pow", "is_finite", "le", "lgamma", "log", "log1p", "logistic", "lt",
    "max", "min", "mul", "name", "ne", "neg", "nextafter", "not", "or", "polygamma", "population_count", "pow",
    "real", "reduce_precision", "regularized_incomplete_beta", "rem", "round", "rsqrt", "select_n", "shift_left",
    "shift_right_arithmetic", "shift_right_logical", "sign", "sin", "sinh", "sqrt", "square", "stop_gradient", "sub",
    "tan", "tanh", "threefry2x32", "xor", "zeta",
})
# fmt: on
_CUMULATIVE = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp")


# The maximum length of a chain of deferred operations: each takes a few frames of Python's stack.
_DEEPEST = 30


def bind(eqn: Any, arrays: Sequence[Any], **changed: Any) -> list[Any]:
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    found = eqn.primitive.bind(*arrays, **params)
    return list(found) if eqn.primitive.multiple_results else [found]


def without_padding(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Removes the padding of an operation's operands, and runs the operation on them."""
    return [pins.value(x) for x in bind(eqn, [v.at(v.shape) for v in values])]


def results(pins: Pins, eqn: Any, arrays: Sequence[Any], axes: DimAxes | None = None) -> list[Value]:
    return [pins.value(x, var.aval.shape, axes) for x, var in zip(arrays, eqn.outvars, strict=True)]


def common_shape(values: Iterable[Value]) -> Shape:
    return tuple(max(sizes) for sizes in zip(*(v.physical for v in values), strict=True))


def elementwise(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for elementwise operations. If all operands are deferred until their padding is known, so are the results."""
    shape = tuple(eqn.outvars[0].aval.shape)
    arrays = [v for v in values if v.shape]
    if not arrays:
        return without_padding(pins, eqn, values)
    # A dimension of size 1 is repeated.
    physical = tuple(
        max(v.physical[dim] if v.shape[dim] == size else size for v in arrays) for dim, size in enumerate(shape)
    )

    def run(physical: Shape) -> list[Any]:
        def taken(v: Value) -> Shape:
            dims = zip(v.shape, shape, physical, strict=True)
            return tuple(held if size == whole else size for size, whole, held in dims)

        return bind(eqn, [v.at(taken(v)) if v.shape else v.array for v in values])

    axes = _agreed_axes(arrays, shape)
    depth = 1 + max(v.depth for v in arrays)
    if any(v.is_held for v in arrays) or depth > _DEEPEST:
        return results(pins, eqn, run(physical), axes)
    numbers = range(len(eqn.outvars))
    return [Value(shape, physical, _one_of(run, number), axes, is_held=False, depth=depth) for number in numbers]


def _one_of(run: Callable[[Shape], list[Any]], number: int) -> Callable[[Shape], jax.Array]:
    return lambda physical: run(physical)[number]


def _agreed_axes(values: Sequence[Value], shape: Shape) -> DimAxes:
    """Returns each dimension's mesh axes if they are the same in all values (see `agreed_axes`). Ignores broadcast dimensions."""
    return agreed_axes(
        [tuple(None if v.shape[dim] == 1 != size else v.axes[dim] for dim, size in enumerate(shape)) for v in values]
    )


def broadcast_in_dim(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for broadcasts. The result is deferred until its padding is known: new dimensions can have any padding."""
    (x,), dims = values, eqn.params["broadcast_dimensions"]
    shape = tuple(eqn.params["shape"])
    repeated = {dim for dim, size in zip(dims, x.shape, strict=True) if size != shape[dim]}
    physical = list(shape)
    axes: list[tuple[str, ...] | None] = [None] * len(shape)
    for dim, size, over in zip(dims, x.physical, x.axes, strict=True):
        if dim not in repeated:
            physical[dim], axes[dim] = size, over

    def make(physical: Shape) -> jax.Array:
        needed = tuple(size if dim in repeated else physical[dim] for dim, size in zip(dims, x.shape, strict=True))
        return lax.broadcast_in_dim(x.at(needed), physical, dims)

    return [Value(shape, tuple(physical), make, tuple(axes), is_held=False)]


def iota(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `iota`. The result is deferred until its padding is known, because it can have any padding."""
    shape, dimension, dtype = tuple(eqn.params["shape"]), eqn.params["dimension"], eqn.params["dtype"]
    make = lambda physical: lax.broadcasted_iota(dtype, physical, dimension)  # noqa: E731
    return [Value(shape, shape, make, (None,) * len(shape), is_held=False)]


def random_bits(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `random_bits`. With partitionable Threefry, the result is deferred until its padding is known."""
    (key,), shape = values, tuple(eqn.params["shape"])
    grows = bool(shape) and not key.shape and bool(jax.config.jax_threefry_partitionable)  # type: ignore[attr-defined]
    if not grows:
        return without_padding(pins, eqn, values)

    def make(physical: Shape) -> jax.Array:
        rows: jax.Array = bind(eqn, [key.array], shape=(physical[0], *shape[1:]))[0]
        return rows if rows.shape == physical else pins.resized(rows, (physical[0], *shape[1:]), physical)

    return [Value(shape, shape, make, (None,) * len(shape), is_held=False)]


def bitcast(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for bitcasts. If the element size changes, a bitcast adds a last dimension, or removes it with its padding."""
    (x,), rank = values, len(eqn.outvars[0].aval.shape)
    if rank == len(x.shape):
        return elementwise(pins, eqn, values)
    last = [len(x.shape) - 1] if rank < len(x.shape) else []
    axes = (*x.axes, ()) if rank > len(x.shape) else x.axes[:rank]
    return results(pins, eqn, bind(eqn, [x.at(x.without_padding_of(last))]), axes)


def transpose(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    (x,), order = values, eqn.params["permutation"]
    return results(pins, eqn, bind(eqn, [x.array]), tuple(x.axes[dim] for dim in order))


def squeeze(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    (x,), dims = values, eqn.params["dimensions"]
    physical = x.without_padding_of(dims)
    axes = tuple(over for dim, over in enumerate(x.axes) if dim not in dims)
    return results(pins, eqn, bind(eqn, [x.at(physical)]), axes)


def reshape(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for reshapes. Padding is kept if it is at the end of a merged or divided dimension, and removed otherwise."""
    (x,), new = values, tuple(eqn.params["new_sizes"])
    if eqn.params["dimensions"] is not None:
        order = eqn.params["dimensions"]
        x = pins.value(lax.transpose(x.array, order), tuple(x.shape[dim] for dim in order))
    kept, physical = list(x.physical), list(new)
    for old_dims, new_dims in dim_groups(x.shape, new):
        padded = [dim for dim in old_dims if x.physical[dim] != x.shape[dim]]
        held = math.prod(x.physical[dim] for dim in old_dims)
        lead = next((dim for dim in new_dims if new[dim] != 1), None)
        rest = math.prod(new[dim] for dim in new_dims if dim != lead)
        at_the_end = len(padded) == 1 and all(x.shape[dim] == 1 for dim in old_dims if dim < padded[0])
        if at_the_end and lead is not None and rest and held % rest == 0:
            physical[lead] = held // rest
        else:
            for dim in padded:
                kept[dim] = x.shape[dim]
    array = lax.reshape(x.at(tuple(kept)), tuple(physical))
    return results(pins, eqn, [array], _reshaped_axes(pins, x, new, array.shape))


def _reshaped_axes(pins: Pins, x: Value, new: Shape, physical: Shape) -> DimAxes:
    """Returns the mesh axes over which each dimension is sharded after a reshape.

    If dimensions are merged or divided, the outermost of the new dimensions gets the axes of the old ones. If it has fewer
    elements than there are shards, the next dimensions get the remaining axes. If axes then remain, the axes are unknown (None).
    """
    found: list[tuple[str, ...] | None] = [()] * len(new)
    for old_dims, new_dims in dim_groups(x.shape, new):
        was, becomes = (
            [dim for dim in dims if shape[dim] != 1] for dims, shape in ((old_dims, x.shape), (new_dims, new))
        )
        over = x.axes[was[0]] if was and not any(x.axes[dim] for dim in was[1:]) else None
        left = over or ()
        for dim in becomes:
            count = next(n for n in range(len(left), -1, -1) if physical[dim] % pins.shards(left[:n]) == 0)
            found[dim], left, pieces = left[:count], left[count:], pins.shards(left[:count])
            if pieces != physical[dim]:
                break
        if over is None or left:
            for dim in becomes:
                found[dim] = None
    return tuple(found)


def dim_groups(old: Shape, new: Shape) -> list[tuple[list[int], list[int]]]:
    """Splits two shapes into the smallest groups of adjacent dimensions with equally many elements. Returns (old, new) pairs.

    For (2, 6) and (2, 3, 2), the groups are ([0], [0]) and ([1], [1, 2]).
    """
    groups: list[tuple[list[int], list[int]]] = []
    i = j = 0
    while i < len(old) or j < len(new):
        left, right = [], []
        a = b = 1
        while True:
            if a <= b and i < len(old):
                a, i = a * old[i], i + 1
                left.append(i - 1)
            elif j < len(new):
                b, j = b * new[j], j + 1
                right.append(j - 1)
            elif i < len(old):
                a, i = a * old[i], i + 1
                left.append(i - 1)
            if a == b and (right or i == len(old)):
                break
        if a == 0:  # no elements: one group
            return [(list(range(len(old))), list(range(len(new))))]
        groups.append((left, right))
    return groups


LOWEST, HIGHEST = "lowest", "highest"
_REDUCTIONS: dict[str, Any] = {
    "reduce_sum": 0,
    "reduce_prod": 1,
    "reduce_max": LOWEST,
    "reduce_min": HIGHEST,
    "reduce_or": 0,
    "reduce_and": -1,
    "reduce_xor": 0,
    "argmax": LOWEST,
    "argmin": HIGHEST,
}


def neutral(dtype: Any, fill: Any) -> Any:
    """Returns a reduction's neutral element. `fill`: a number, or `LOWEST` or `HIGHEST` for `dtype`'s least or greatest value."""
    if dtype == jnp.bool_:
        return fill in (HIGHEST, -1, 1)
    if fill not in (LOWEST, HIGHEST):
        return fill if not (fill == -1 and jnp.issubdtype(dtype, jnp.unsignedinteger)) else jnp.iinfo(dtype).max
    if jnp.issubdtype(dtype, jnp.floating):
        if np.isinf(np.asarray(np.inf, dtype)):
            return -np.inf if fill == LOWEST else np.inf
        return (jnp.finfo(dtype).min if fill == LOWEST else jnp.finfo(dtype).max).astype(np.float32)
    info = jnp.iinfo(dtype)
    return info.min if fill == LOWEST else info.max


def reduction(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for reductions. The padding of reduced dimensions is masked with the reduction's neutral element."""
    (x,), dims = values, eqn.params["axes"]
    array = x.masked(dims, neutral(eqn.invars[0].aval.dtype, _REDUCTIONS[eqn.primitive.name]))
    axes = tuple(over for dim, over in enumerate(x.axes) if dim not in dims)
    return results(pins, eqn, bind(eqn, [array]), axes)


def concatenate(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for concatenations. The concatenated dimension loses its padding."""
    dim, common = eqn.params["dimension"], list(common_shape(values))
    held = [tuple(v.shape[dim] if at == dim else size for at, size in enumerate(common)) for v in values]
    arrays = [v.at(shape) for v, shape in zip(values, held, strict=True)]
    axes = agreed_axes([v.axes for v in values])
    return results(pins, eqn, *pins.resizing(arrays, axes, [dim], lambda arrays: bind(eqn, arrays)))


def along_one(param: str) -> Rule:
    """Returns the padding rule for operations (e.g. sorts) along one dimension. It removes this dimension's padding and sharding.

    Args:
      param: the name of the equation's parameter that holds this dimension.
    """

    def rule(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
        dim = eqn.params[param] % len(values[0].shape)
        common = list(common_shape(values))
        arrays = []
        for v in values:
            common[dim] = v.shape[dim]
            arrays.append(pins.whole(v.at(tuple(common)), [dim]))
        axes = whole_in(agreed_axes([v.axes for v in values]), [dim])
        return results(pins, eqn, [pins.whole(x, [dim]) for x in bind(eqn, arrays)], axes)

    return rule


def losing(param: str) -> Rule:
    """Returns a padding rule that removes the padding of the dimensions that the equation's parameter `param` lists."""

    def rule(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
        (x,), dims = values, eqn.params[param]
        dims = [dims] if isinstance(dims, int) else dims
        axes = whole_in(x.axes, [dim for dim in dims if x.physical[dim] != x.shape[dim]])
        return results(pins, eqn, bind(eqn, [x.at(x.without_padding_of(dims))]), axes)

    return rule


def pad(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `lax.pad`. A dimension that changes loses its padding, unless its new size has the same padded size."""
    x, fill = values
    config, shape = eqn.params["padding_config"], eqn.outvars[0].aval.shape
    changed = [dim for dim, added in enumerate(config) if tuple(added) != (0, 0, 0)]
    is_at_end = not any(low or inner for low, _, inner in config)
    if is_at_end and all(_is_split_for(pins, x, dim, shape[dim]) for dim in changed):
        return results(pins, eqn, [filled(x.array, x.shape, changed, fill.array)], x.axes)
    array = x.at(x.without_padding_of(changed))
    dilated = any(interior for _, _, interior in config)
    run = lambda arrays: bind(eqn, [*arrays, fill.array])  # noqa: E731
    return results(pins, eqn, *pins.resizing([array], x.axes, changed, run, always=dilated))


def slice_(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for slices. A sliced dimension loses its padding, unless its new size has the same padded size."""
    (x,) = values
    starts, limits = eqn.params["start_indices"], eqn.params["limit_indices"]
    strides = eqn.params["strides"] or (1,) * len(starts)
    given = zip(starts, limits, strides, strict=True)
    parts = [dim for dim, part in enumerate(given) if part != (0, x.shape[dim], 1)]
    if all((starts[dim], strides[dim]) == (0, 1) and _is_split_for(pins, x, dim, limits[dim]) for dim in parts):
        return results(pins, eqn, [x.array], x.axes)
    physical = x.without_padding_of(parts)
    ends = tuple(limit if dim in parts else physical[dim] for dim, limit in enumerate(limits))
    cut = lambda arrays: [lax.slice(arrays[0], starts, ends, strides)]  # noqa: E731
    strided = any(stride != 1 for stride in strides)
    return results(pins, eqn, *pins.resizing([x.at(physical)], x.axes, parts, cut, always=strided))


def _is_split_for(pins: Pins, x: Value, dim: int, size: int) -> bool:
    """Returns True if dimension `dim` of `x` has the padded size that `size` elements, in as many shards, would have."""
    shards = pins.shards(x.axes[dim] or ())
    return x.is_held and shards > 1 and x.physical[dim] == -(-size // shards) * shards


def shard_map(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `jax.shard_map`, which runs on arrays without padding."""
    found = without_padding(pins, eqn, values)
    specs = eqn.params["out_specs"]
    return [pins.value(v.array, axes=split_axes(spec, len(v.shape))) for v, spec in zip(found, specs, strict=True)]


def dynamic_slice(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `dynamic_slice`. Dimensions that are not sliced keep their padding."""
    x, *starts = values
    sizes = eqn.params["slice_sizes"]
    parts = [dim for dim, size in enumerate(sizes) if size != x.shape[dim]]
    physical = x.without_padding_of(parts)
    taken = tuple(held if size == whole else size for size, whole, held in zip(sizes, x.shape, physical, strict=True))
    found = bind(eqn, [x.at(physical), *(s.array for s in starts)], slice_sizes=taken)
    return results(pins, eqn, found, whole_in(x.axes, parts))


def dynamic_update_slice(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `dynamic_update_slice`. Dimensions that are updated over their full size keep their padding."""
    x, update, *starts = values
    whole = [a == b for a, b in zip(x.shape, update.shape, strict=True)]

    def held(v: Value) -> Shape:
        common = zip(whole, v.shape, x.physical, update.physical, strict=True)
        return tuple(max(a, b) if is_whole else size for is_whole, size, a, b in common)

    written = bind(eqn, [x.at(held(x)), update.at(held(update)), *(s.array for s in starts)])
    return results(pins, eqn, written, x.axes)


RULES: dict[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(_REDUCTIONS, reduction),
    **{name: along_one("axis") for name in _CUMULATIVE},
    "bitcast_convert_type": bitcast,
    "broadcast_in_dim": broadcast_in_dim,
    "concatenate": concatenate,
    "dynamic_slice": dynamic_slice,
    "dynamic_update_slice": dynamic_update_slice,
    "iota": iota,
    "pad": pad,
    "random_bits": random_bits,
    "reshape": reshape,
    "rev": losing("dimensions"),
    "shard_map": shard_map,
    "slice": slice_,
    "sort": along_one("dimension"),
    "split": losing("axis"),
    "squeeze": squeeze,
    "top_k": along_one("axis"),
    "transpose": transpose,
}
