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
    """Writes slices at indices; what the padding of the indices' rows holds is not written."""
    x, indices, updates = values
    numbers, mode = eqn.params["dimension_numbers"], eqn.params["mode"]
    batching = dict(zip(numbers.operand_batching_dims, numbers.scatter_indices_batching_dims, strict=True))
    indexed = set(numbers.scatter_dims_to_operand_dims)
    window = [dim for dim in range(len(x.shape)) if dim not in numbers.inserted_window_dims and dim not in batching]
    rows = [dim for dim in range(len(updates.shape)) if dim not in numbers.update_window_dims]
    x_held, up_held = list(x.physical), list(updates.physical)
    at_held = list(indices.without_padding_of([len(indices.shape) - 1]))
    for dim, up in zip(window, numbers.update_window_dims, strict=True):
        if dim in indexed or updates.shape[up] != x.shape[dim]:
            x_held[dim], up_held[up] = x.shape[dim], updates.shape[up]
        else:
            x_held[dim] = up_held[up] = max(x_held[dim], up_held[up])
    for at, up in enumerate(rows):
        at_held[at] = up_held[up] = max(at_held[at], up_held[up])
    for dim, at in batching.items():
        common = max(x_held[dim], at_held[at])
        x_held[dim] = at_held[at] = up_held[rows[at]] = common
    replaces = eqn.primitive.name not in _NEUTRAL
    if replaces and mode == lax.GatherScatterMode.CLIP:  # no index is outside, so no row can be left out
        x_held, at_held, up_held = list(x.shape), list(indices.shape), list(updates.shape)
    at_array = _kept_outside(indices.at(tuple(at_held)), x.shape, x_held, numbers.scatter_dims_to_operand_dims, mode)
    if replaces:
        padded = [at for at, up in enumerate(rows) if up_held[up] != updates.shape[up]]
        at_array = _outside(at_array, indices.shape, padded)
        mode = lax.GatherScatterMode.FILL_OR_DROP if padded else mode
        up_array = updates.at(tuple(up_held))
    else:
        fill = neutral(eqn.invars[2].aval.dtype, _NEUTRAL[eqn.primitive.name])
        up_array = updates.masked(rows, fill, tuple(up_held))
    # Padded rows may hold any index, so what the program promises of its indices no longer holds.
    promises = {"indices_are_sorted": False, "unique_indices": False} if at_held != list(indices.shape) else {}
    (found,) = bind(eqn, [x.at(tuple(x_held)), at_array, up_array], mode=mode, **promises)
    return [pins.value(found, eqn.outvars[0].aval.shape)]


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
