"""A checksum of variables on the devices, equal on any mesh."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

# Odd multipliers for an element's position along each dimension.
_MULTIPLIERS = (2654435761, 2246822519, 3266489917, 668265263, 374761393)


@jax.jit
def variables_checksum(variables: Any) -> jax.Array:
    """Returns the uint32 sum of all bits of a tree of arrays, each element weighted by its position.

    It is exact, so neither the mesh nor zero padding changes it.
    """
    total = jnp.zeros((), jnp.uint32)
    for leaf in jax.tree.leaves(variables):
        total = total * jnp.uint32(31) + _weighted_bits(leaf)
    return total


def _weighted_bits(x: jax.Array) -> jax.Array:
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        bits = x.astype(jnp.uint32)
    else:
        width = min(x.dtype.itemsize, 4)
        bits = lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * width}")).astype(jnp.uint32)
    weights = jnp.ones(bits.shape, jnp.uint32)
    for dim in range(bits.ndim):
        multiplier = jnp.uint32(_MULTIPLIERS[dim % len(_MULTIPLIERS)])
        weights = weights * (lax.broadcasted_iota(jnp.uint32, bits.shape, dim) * multiplier + jnp.uint32(2 * dim + 1))
    return jnp.sum(bits * weights, dtype=jnp.uint32)
