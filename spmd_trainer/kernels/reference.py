"""Attention that computes all logits at once, [rows, heads, tokens, tokens]. Always usable; the only kernel with dropout."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.kernels.kernels import MASKED, Call, Pattern, Rows


def reasons_against(call: Call) -> list[str]:
    """Returns [], because this kernel can compute every call; see `Kernel.reasons_against`."""
    return []


def attend(rows: Rows, pattern: Pattern, dropout: Callable[[jax.Array], jax.Array] | None = None) -> jax.Array:
    """Computes attention on one device, see `Kernel.attend`. `dropout`: function that drops probabilities, float32 [rows, key
    heads, query heads per key head, tokens, tokens]; None for no dropout.
    """
    query, key, value, segment_ids, sinks = rows
    batch, length, heads, width = query.shape
    kv_heads = key.shape[2]
    # One dimension for the queries of all heads of a group, because XLA computes products with two such dimensions more slowly.
    grouped = query.transpose(0, 2, 1, 3).reshape(batch, kv_heads, -1, width)
    products = jnp.einsum("bkqh,bskh->bkqs", grouped, key, preferred_element_type=jnp.float32)
    logits = pattern.logits(products).reshape(batch, heads, length, length)
    if (seen := seen_keys(length, segment_ids, pattern)) is not None:
        logits = jnp.where(seen[:, None], logits, MASKED)
    probabilities = softmax(logits, None if sinks is None else sinks[:, :, None, None])
    if dropout is not None:
        probabilities = dropout(probabilities.reshape(batch, kv_heads, heads // kv_heads, length, length))
    probabilities = probabilities.astype(value.dtype).reshape(batch, kv_heads, -1, length)
    out = jnp.einsum("bkqs,bskh->bkqh", probabilities, value)
    return checkpoint_name(out.reshape(batch, heads, length, width).transpose(0, 2, 1, 3), "context")


def softmax(logits: jax.Array, sinks: jax.Array | None) -> jax.Array:
    """Returns the softmax over the last dimension.

    `sinks` [..., 1] is an additional logit in the softmax, whose probability is not returned; None for no sinks.
    """
    if sinks is None:
        return jax.nn.softmax(logits, axis=-1)
    largest = jax.lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, keepdims=True), sinks))
    exps = jnp.exp(logits - largest)
    return exps / (jnp.sum(exps, axis=-1, keepdims=True) + jnp.exp(sinks - largest))


def seen_keys(length: int, segment_ids: jax.Array | None, pattern: Pattern) -> jax.Array | None:
    """Returns a mask, bool [1 or rows, queries, keys], True where a query sees a key; None if every query sees all keys."""
    seen = None
    if pattern.causal:
        index = jnp.arange(length)
        distance = index[:, None] - index[None, :]
        seen = (distance >= 0)[None]
        if pattern.window is not None:
            seen &= distance < pattern.window
    if segment_ids is not None:
        same = segment_ids[:, :, None] == segment_ids[:, None, :]
        seen = same if seen is None else seen & same
    return seen
