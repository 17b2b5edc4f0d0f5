"""Padding rules (see `even_rules`) for gathers, scatters, convolutions and windowed reductions.

XLA's partitioner (jaxlib 0.10.2) pads rows that it can't shard evenly. In the gradient of a gather, which is a scatter, it
adds these padding rows to row 0. So these rules pad the rows before XLA does, and mask the padding.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_trainer.sharding.even_rules import HIGHEST, LOWEST, Rule, bind, common_shape, neutral, results
from spmd_trainer.sharding.even_values import Pins, Shape, Value, whole_in

_NEUTRAL: dict[str, Any] = {"scatter-add": 0, "scatter-mul": 1, "scatter-max": LOWEST, "scatter-min": HIGHEST}


def gather(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for `gather`. Indices that lie outside the array's logical shape never read its padding."""
    x, indices = values
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.start_indices_batching_dims, strict=True))
    indexed = set(numbers.start_index_map)
    x_held = list(
        x.without_padding_of(
            dim
            for dim, size in enumerate(sizes)
            if dim not in batching and (size != 1 if dim in indexed else size != x.shape[dim])
        )
    )
    at_held = list(indices.without_padding_of([len(indices.shape) - 1]))
    for dim, at in batching.items():
        x_held[dim] = at_held[at] = max(x_held[dim], at_held[at])
    window = [dim for dim in range(len(x.shape)) if dim not in numbers.collapsed_slice_dims and dim not in batching]
    taken = [x_held[dim] if dim in window and dim not in indexed else size for dim, size in enumerate(sizes)]
    at = _kept_outside(indices.at(tuple(at_held)), x.shape, x_held, numbers.start_index_map, eqn.params["mode"])
    (found,) = bind(eqn, [x.at(tuple(x_held)), at], slice_sizes=tuple(taken))
    rows, features = iter(indices.axes), iter([() if dim in indexed else x.axes[dim] for dim in window])
    axes = tuple(next(features if dim in numbers.offset_dims else rows) for dim in range(found.ndim))
    return [pins.value(found, eqn.outvars[0].aval.shape, axes)]


def scatter(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for the scatter primitives. Indices in padding rows write nothing.

    The gradient of an embedding lookup is scattered into an array of zeros. Where possible, the result of such a scatter is
    deferred (see `Value.is_held`) until the padding that the gradient needs is known.
    """
    x, indices, updates = values
    numbers, replaces = eqn.params["dimension_numbers"], eqn.primitive.name not in _NEUTRAL
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    indexed = set(numbers.scatter_dims_to_operand_dims)
    window = [dim for dim in range(len(x.shape)) if dim not in numbers.inserted_window_dims and dim not in batching]
    rows = [dim for dim in range(len(updates.shape)) if dim not in numbers.update_window_dims]
    pairs = list(zip(window, numbers.update_window_dims, strict=True))
    whole = {dim for dim, up in pairs if dim not in indexed and updates.shape[up] == x.shape[dim]}
    no_row_can_be_left_out = replaces and eqn.params["mode"] == lax.GatherScatterMode.CLIP

    def write(physical: Shape) -> jax.Array:
        x_held, up_held = list(physical), list(updates.physical)
        at_held = list(indices.without_padding_of([len(indices.shape) - 1]))
        for dim, up in pairs:
            up_held[up] = x_held[dim] if dim in whole else updates.shape[up]
        for at, up in enumerate(rows):
            at_held[at] = up_held[up] = max(at_held[at], up_held[up])
        for dim, at in batching.items():
            at_held[at] = up_held[rows[at]] = x_held[dim]
        if no_row_can_be_left_out:
            at_held, up_held = list(indices.shape), list(updates.shape)
        # XLA mixes up the rows of vmapped scatters whose indices are sharded along a dimension that is not vmapped.
        loose = [at for at in range(len(rows)) if batching and at not in batching.values()]
        held = tuple(x_held), tuple(at_held), tuple(up_held)
        return _written(pins, eqn, (x, indices, updates), held, rows, loose)

    least = list(x.without_padding_of(set(window) - whole))
    for dim, up in pairs:
        least[dim] = max(least[dim], updates.physical[up]) if dim in whole else least[dim]
    for dim, at in batching.items():
        least[dim] = max(least[dim], indices.physical[at], updates.physical[rows[at]])
    if no_row_can_be_left_out:
        least = list(x.shape)
    grows = not x.is_held and not no_row_can_be_left_out and set(window) == whole
    if grows:
        return [Value(x.shape, tuple(least), write, (None,) * len(least), is_held=False)]
    return [pins.value(write(tuple(least)), eqn.outvars[0].aval.shape)]


def _written(
    pins: Pins,
    eqn: Any,
    values: tuple[Value, Value, Value],
    held: tuple[Shape, Shape, Shape],
    rows: Sequence[int],
    loose: Sequence[int],
) -> jax.Array:
    """Runs a scatter at the given physical shapes, and returns its result.

    Args:
      pins: constrains dimensions to be unsharded.
      eqn: the scatter's equation.
      values: the scatter's array, indices and updates.
      held: the physical shapes of these three.
      rows: the dimensions of the updates that correspond to dimensions of the indices.
      loose: the dimensions of the indices to constrain to be unsharded.
    """
    (x, indices, updates), (x_held, at_held, up_held) = values, held
    mode = eqn.params["mode"]
    at_array = _kept_outside(
        indices.at(at_held), x.shape, x_held, eqn.params["dimension_numbers"].scatter_dims_to_operand_dims, mode
    )
    if eqn.primitive.name in _NEUTRAL:
        fill = neutral(eqn.invars[2].aval.dtype, _NEUTRAL[eqn.primitive.name])
        up_array = updates.masked(rows, fill, up_held)
    else:
        padded = [at for at, up in enumerate(rows) if up_held[up] != updates.shape[up]]
        at_array = _outside(at_array, indices.shape, padded)
        mode = lax.GatherScatterMode.FILL_OR_DROP if padded else mode
        up_array = updates.at(up_held)
    at_array, up_array = pins.whole(at_array, loose), pins.whole(up_array, [rows[at] for at in loose])
    # Padding rows may hold any index, so the program's promises about its indices no longer hold.
    promises = {"indices_are_sorted": False, "unique_indices": False} if at_held != indices.shape else {}
    written: jax.Array = bind(eqn, [x.at(x_held), at_array, up_array], mode=mode, **promises)[0]
    return written


def _kept_outside(at: jax.Array, shape: Shape, held: Sequence[int], dims: Sequence[int], mode: Any) -> jax.Array:
    """Changes indices that lie outside an array's logical shape, so that they don't read or write the array's padding.

    Args:
      at: the indices [..., len(dims)].
      shape: the logical shape of the indexed array.
      held: the physical shape of the indexed array.
      dims: `at[..., i]` indexes dimension `dims[i]` of the array.
      mode: the operation's GatherScatterMode. With CLIP, indices are clipped to the logical shape; otherwise they are moved
        outside the physical shape.
    """
    padded = [number for number, dim in enumerate(dims) if held[dim] != shape[dim]]
    if not padded or mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return at
    most = jnp.iinfo(at.dtype).max
    limits = np.full(len(dims), most, at.dtype)
    limits[padded] = [shape[dims[number]] - 1 for number in padded]
    inside = jnp.asarray(limits).reshape((1,) * (at.ndim - 1) + (-1,))
    return jnp.minimum(at, inside) if mode == lax.GatherScatterMode.CLIP else jnp.where(at > inside, most, at)


def _outside(at: jax.Array, shape: Shape, rows: Iterable[int]) -> jax.Array:
    """Replaces the indices in padding rows with the largest integer, which lies outside every array."""
    for dim in rows:
        real = lax.broadcasted_iota(jnp.int32, at.shape, dim) < shape[dim]
        at = jnp.where(real, at, jnp.iinfo(at.dtype).max)
    return at


def convolution(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for convolutions. Without groups, batch and features keep their padding, which is masked in input features."""
    x, kernel = values
    numbers = eqn.params["dimension_numbers"]
    row_groups = eqn.params["batch_group_count"] != 1
    grouped = row_groups or eqn.params["feature_group_count"] != 1
    rows, features, *space = numbers.lhs_spec
    outputs, inputs, *window = numbers.rhs_spec
    x_whole = [features, *space, *([rows] if row_groups else [])]
    x_held = list(x.without_padding_of(x_whole))
    kernel_held = list(kernel.without_padding_of([*window, inputs, *([outputs] if grouped else [])]))
    if not grouped:
        x_held[features] = kernel_held[inputs] = max(x.physical[features], kernel.physical[inputs])
    x_array = pins.whole(x.masked([features], 0, tuple(x_held)), space)
    kernel_array = pins.whole(kernel.masked([inputs], 0, tuple(kernel_held)), window)
    if grouped:
        x_array = pins.whole(x_array, x_whole)
        kernel_array = pins.whole(kernel_array, range(kernel_array.ndim))
    (found,) = bind(eqn, [x_array, kernel_array])
    whole = range(found.ndim) if row_groups else numbers.out_spec[1 if grouped else 2 :]
    axes: list[tuple[str, ...] | None] = [()] * found.ndim
    if not row_groups:
        axes[numbers.out_spec[0]] = x.axes[rows]
        axes[numbers.out_spec[1]] = () if grouped else kernel.axes[outputs]
    return results(pins, eqn, [pins.whole(found, whole)], tuple(axes))


def windowed(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Padding rule for windowed reductions. Dimensions with windows lose their padding and are left unsharded; others keep it."""
    params, rank = eqn.params, len(values[0].shape)
    names = ("window_dimensions", "window_strides", "base_dilation", "window_dilation")
    trivial = [all((params.get(name) or (1,) * rank)[dim] == 1 for name in names) for dim in range(rank)]
    trivial = [ok and tuple(params["padding"][dim]) == (0, 0) for dim, ok in enumerate(trivial)]
    dims = [dim for dim, ok in enumerate(trivial) if not ok]
    arrays = [v for v in values if v.shape]
    common = common_shape([v for v in arrays if len(v.shape) == rank])
    held = [
        tuple(common[dim] if trivial[dim] else v.shape[dim] for dim in range(rank)) if v.shape else () for v in values
    ]
    taken = [pins.whole(v.at(shape), dims) if v.shape else v.array for v, shape in zip(values, held, strict=True)]
    return results(pins, eqn, [pins.whole(x, dims) for x in bind(eqn, taken)], whole_in(values[0].axes, dims))


_SCATTERS = ("scatter-add", "scatter-mul", "scatter-min", "scatter-max", "scatter")
_WINDOWS = ("reduce_window", "reduce_window_max", "reduce_window_min", "reduce_window_sum")
_SELECTS = ("select_and_scatter_add", "select_and_gather_add")
RULES: dict[str, Rule] = {
    "conv_general_dilated": convolution,
    "gather": gather,
    **dict.fromkeys(_SCATTERS, scatter),
    **dict.fromkeys((*_WINDOWS, *_SELECTS), windowed),
}
