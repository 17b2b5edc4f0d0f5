"""All-to-all attention (DeepSpeed-Ulysses, Jacobs et al. 2023, arXiv:2309.14509): splits heads in place of tokens.

At first, each device has a part of the row's tokens, with all heads. All-to-all exchanges of queries, keys and values then give
it all tokens, with a part of the heads. Any attention kernel can compute these heads, and another all-to-all exchange returns
the outputs. Tokens keep their order.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.kernels.kernels import Kernel, Pattern, Rows


def attend(rows: Rows, pattern: Pattern, axes: tuple[str, ...], kernel: Kernel) -> jax.Array:
    """Computes attention over rows whose tokens are split over mesh axes. Call this function under `jax.shard_map`.

    Returns this device's part of the output, with the shape of `rows.query` and the dtype of the values.

    Args:
      rows: this device's part of the rows, with all heads.
      pattern: which keys a query sees.
      axes: the mesh axes that split the tokens.
      kernel: the kernel, which gets whole rows of the shapes that `shapes_of_kernel` returns.
    """
    query, key, value, segment_ids, sinks = rows
    heads = query.shape[2]
    query, key, value = (
        lax.all_to_all(x, axes, split_axis=2, concat_axis=1, tiled=True)
        for x in with_divisible_heads(query, key, value, lax.axis_size(axes))
    )
    if segment_ids is not None:
        segment_ids = lax.all_gather(segment_ids, axes, axis=1, tiled=True)
    if sinks is not None:
        count = query.shape[2]
        sinks = jnp.pad(sinks, ((0, 0), (0, count * lax.axis_size(axes) - heads)))
        sinks = lax.dynamic_slice_in_dim(sinks, count * lax.axis_index(axes), count, axis=1)
    out = kernel.attend(Rows(query, key, value, segment_ids, sinks), pattern)
    return lax.all_to_all(out, axes, split_axis=1, concat_axis=2, tiled=True)[:, :, :heads]


def shapes_of_kernel(
    query: jax.ShapeDtypeStruct, key: jax.ShapeDtypeStruct, count: int
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Returns the shapes of the queries and keys that the kernel gets on each device.

    Args:
      query, key: a device's part, [rows, tokens / count, heads, width], before the exchange.
      count: number of devices that split the tokens.
    """
    padded = jax.eval_shape(lambda q, k: with_divisible_heads(q, k, k, count)[:2], query, key)
    queries, keys = (
        jax.ShapeDtypeStruct((x.shape[0], x.shape[1] * count, x.shape[2] // count, x.shape[3]), x.dtype) for x in padded
    )
    return queries, keys


def with_divisible_heads(
    query: jax.Array, key: jax.Array, value: jax.Array, count: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Repeats key and value heads, and pads heads with zeros, so that `count` divides the numbers of heads.

    Args:
      query: [rows, tokens, N, width].
      key, value: [rows, tokens, K, width]; N is a multiple of K.
      count: number of equal pieces that the heads must divide into.

    Returns:
      Queries with at least N heads (the first N unchanged), keys and values. Piece i of the queries' heads uses piece i of the
      key heads.
    """
    heads, kv_heads = query.shape[2], key.shape[2]
    if kv_heads % count == 0:
        return query, key, value
    repeated = count if heads % count == 0 and count % kv_heads == 0 else heads
    key, value = (jnp.repeat(x, repeated // kv_heads, axis=2) for x in (key, value))
    if repeated % count == 0:
        return query, key, value
    padding = ((0, 0), (0, 0), (0, -heads % count), (0, 0))
    query, key, value = (jnp.pad(x, padding) for x in (query, key, value))
    return query, key, value
