"""Gathers and scatters of arrays with padding: see `even_rules`.

XLA's partitioner (jaxlib 0.10.2) adds what the padding of uneven rows holds to row 0 of a scattered gradient, which is why a
gather's gradient can't be left to it. Here the padding is the program's, and so is the mask.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from spmd_trainer.sharding.even_rules import HIGHEST, LOWEST, bind, neutral
from spmd_trainer.sharding.even_values import Pins, Shape, Value

_NEUTRAL: dict[str, Any] = {"scatter-add": 0, "scatter-mul": 1, "scatter-max": LOWEST, "scatter-min": HIGHEST}


def gather(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Reads slices at indices. An index that is outside of the logical shape stays outside of the padded one."""
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
    return [pins.value(found, eqn.outvars[0].aval.shape)]


def scatter(pins: Pins, eqn: Any, values: list[Value]) -> list[Value]:
    """Writes slices at indices; what the padding of the indices' rows holds is not written.

    The gradient of a lookup is written into zeros. They are not computed before it is known what padding the gradient needs.
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
        # XLA mixes up the rows of mapped scatters whose indices are split along another dimension than the mapped ones.
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
    """Runs a scatter.

    Args:
      pins: keeps dimensions whole.
      eqn: the scatter.
      values: the array, the indices and the updates.
      held: their physical shapes.
      rows: the dimensions of the updates that the indices have too.
      loose: those of the indices' dimensions that are whole on each device.
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
    # Padded rows may hold any index, so what the program promises of its indices no longer holds.
    promises = {"indices_are_sorted": False, "unique_indices": False} if at_held != indices.shape else {}
    written: jax.Array = bind(eqn, [x.at(x_held), at_array, up_array], mode=mode, **promises)[0]
    return written


def _kept_outside(at: jax.Array, shape: Shape, held: Sequence[int], dims: Sequence[int], mode: Any) -> jax.Array:
    """Returns indices that are outside of the padded shape, or clipped, where they are outside of the logical one."""
    padded = [number for number, dim in enumerate(dims) if held[dim] != shape[dim]]
    if not padded or mode == lax.GatherScatterMode.PROMISE_IN_BOUNDS:
        return at
    most = jnp.iinfo(at.dtype).max
    limits = np.full(len(dims), most, at.dtype)
    limits[padded] = [shape[dims[number]] - 1 for number in padded]
    inside = jnp.asarray(limits).reshape((1,) * (at.ndim - 1) + (-1,))
    return jnp.minimum(at, inside) if mode == lax.GatherScatterMode.CLIP else jnp.where(at > inside, most, at)


def _outside(at: jax.Array, shape: Shape, rows: Iterable[int]) -> jax.Array:
    """Returns the indices with those of padded rows outside of every array."""
    for dim in rows:
        real = lax.broadcasted_iota(jnp.int32, at.shape, dim) < shape[dim]
        at = jnp.where(real, at, jnp.iinfo(at.dtype).max)
    return at
