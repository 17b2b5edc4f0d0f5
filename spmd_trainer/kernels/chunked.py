"""Attention in blocks with an online softmax, in `jax.numpy`, for every device. For rows of T tokens, it needs memory O(T).

Queries and keys are cut into blocks. A pair of a query block and a key block is computed only if some query sees some key. A
`lax.scan` computes one pair at a time, so the program's size doesn't depend on T. The forward pass keeps each query's largest
logit, its sum of exponentials and its weighted sum of values (Milakov & Gimelshein 2018, arXiv:1805.02867). The backward pass
computes the logits again from the log-sum-exp (Dao et al. 2022, arXiv:2205.14135).

`forward`, `finish` and `backward` get the positions of the queries and keys as arguments, so ring attention can use them for
keys from a different device:

    queries, keys, values = query_blocks(query, key.shape[2], block), key_blocks(key, block), key_blocks(value, block)
    sums = initial_sums(queries, sinks)
    sums = forward(queries, keys, values, query_tokens, key_tokens, pairs, sums, pattern)  # for each device's keys
    outs, lse = finish(sums)

    out_grads = query_blocks(out_grad, key.shape[2], block)
    rows = RowGrads(out_grads, lse, row_sums(outs, out_grads))
    grads = initial_grads(queries, keys)
    grads = backward(queries, keys, values, query_tokens, key_tokens, pairs, rows, grads, pattern)  # for each device's keys

`pairs` may be traced, e.g. depend on `lax.axis_index`; only its length is fixed when the program is compiled.
"""

from __future__ import annotations

import functools
from typing import NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.kernels import chips
from spmd_trainer.kernels.kernels import MASKED, Call, Pattern, Rows

# Maximum number of tokens in a block. On CPUs the float32 logits of a small block stay in the cache; accelerators need more work
# per step.
_BLOCK, _BLOCK_ON_CPU = 512, 128
# Index of a token that was added to fill a block: no real query sees it.
PADDING_INDEX = np.iinfo(np.int32).max


# (arrays of the attention call, output, log-sum-exp of the logits)
Residuals: TypeAlias = tuple[Rows, jax.Array, jax.Array]


class Tokens(NamedTuple):
    """Positions of queries or keys, in blocks of tokens.

    Attributes:
      position: int32 [blocks, block], each token's index in the whole row; `PADDING_INDEX` for tokens that pad a block.
      segment_ids: int32 [blocks, rows, block]; None if each row is one segment.
    """

    position: jax.Array
    segment_ids: jax.Array | None


class Sums(NamedTuple):
    """Running sums of each query over the keys so far, float32. A group is the query heads that share a key head.

    Attributes:
      largest: [blocks, rows, key heads, group, block], the largest logit.
      total: [blocks, rows, key heads, group, block], sum of exp(logit - largest).
      weighted: [blocks, rows, key heads, group, block, head width], sum of exp(logit - largest) * value.
    """

    largest: jax.Array
    total: jax.Array
    weighted: jax.Array


class RowGrads(NamedTuple):
    """Inputs of the backward pass for each query. A group is the query heads that share a key head.

    Attributes:
      out: [blocks, rows, key heads, group, block, head width], gradient of the output.
      lse: float32 [blocks, rows, key heads, group, block], log of the sum of exp(logit) over all keys.
      row_sum: float32 [blocks, rows, key heads, group, block], see `row_sums`.
    """

    out: jax.Array
    lse: jax.Array
    row_sum: jax.Array


class Grads(NamedTuple):
    """Running sums of gradients, float32, with the shapes of queries, keys and values in blocks."""

    query: jax.Array
    key: jax.Array
    value: jax.Array


def reasons_against(call: Call) -> list[str]:
    """Returns the reasons why this kernel can't compute a call; see `Kernel.reasons_against`."""
    return ["it can't drop probabilities"] if call.dropout else []


def attend(rows: Rows, pattern: Pattern) -> jax.Array:
    """Computes attention on one device; see `Kernel.attend`."""
    return _attention(rows, pattern, block_length(rows.query.shape[1]))


def block_length(length: int) -> int:
    """Returns the tokens per block for rows of `length` tokens: equal blocks, as few as the device's largest block allows."""
    most = _BLOCK_ON_CPU if chips.current_target().platform == "cpu" else _BLOCK
    if length <= most:
        return length
    # A multiple of 16 suits matrix units.
    return -(-length // (16 * -(-length // most))) * 16


def query_blocks(x: jax.Array, kv_heads: int, block: int) -> jax.Array:
    """Cuts tokens into blocks, padded with zeros, and groups the query heads that share a key head.

    [rows, tokens, query heads, head width] -> [blocks, rows, key heads, group, block, head width].
    """
    batch, length, heads, width = x.shape
    x = x.reshape(batch, length, kv_heads, heads // kv_heads, width)
    return _padded(x, block).reshape(batch, -1, block, *x.shape[2:]).transpose(1, 0, 3, 4, 2, 5)


def key_blocks(x: jax.Array, block: int) -> jax.Array:
    """Cuts tokens into blocks, padded with zeros: [rows, tokens, heads, width] -> [blocks, rows, heads, block, width]."""
    return _padded(x, block).reshape(x.shape[0], -1, block, *x.shape[2:]).transpose(1, 0, 3, 2, 4)


def from_query_blocks(x: jax.Array, length: int) -> jax.Array:
    """Inverts `query_blocks`. Returns [rows, length, query heads, head width]."""
    n, batch, kv_heads, groups, block, width = x.shape
    return x.transpose(1, 0, 4, 2, 3, 5).reshape(batch, n * block, kv_heads * groups, width)[:, :length]


def from_key_blocks(x: jax.Array, length: int) -> jax.Array:
    """Inverts `key_blocks`. Returns [rows, length, heads, width]."""
    n, batch, kv_heads, block, width = x.shape
    return x.transpose(1, 0, 3, 2, 4).reshape(batch, n * block, kv_heads, width)[:, :length]


def token_blocks(index: jax.Array | np.ndarray, segment_ids: jax.Array | None, block: int) -> Tokens:
    """Returns the positions and segments of tokens, in blocks.

    Args:
      index: int32 [tokens], each token's index in the whole row.
      segment_ids: int32 [rows, tokens] or None.
      block: number of tokens in a block; the tokens are padded to a multiple of it.
    """
    missing = -len(index) % block
    index = jnp.pad(jnp.asarray(index, jnp.int32), (0, missing), constant_values=PADDING_INDEX)
    if segment_ids is not None:
        segment_ids = _padded(segment_ids, block).reshape(len(segment_ids), -1, block).transpose(1, 0, 2)
    return Tokens(index.reshape(-1, block), segment_ids)


def visible_pairs(length: int, block: int, pattern: Pattern) -> np.ndarray:
    """Returns the (query block, key block) pairs with a query that may see a key, int32 [pairs, 2], for tokens in row order."""
    n = -(-length // block)
    queries, keys = np.divmod(np.arange(n * n, dtype=np.int32), np.int32(n))
    seen = np.ones(n * n, bool)
    if pattern.causal:
        seen &= keys <= queries
        if pattern.window is not None:
            # From the first query of one block to the last key of the other.
            seen &= queries * block - (keys * block + block - 1) < pattern.window
    return np.stack([queries, keys], axis=1)[seen]


def initial_sums(queries: jax.Array, sinks: jax.Array | None) -> Sums:
    """Returns the sums before any key is added. `sinks`, float32 [rows, heads], act as logits of keys whose values are 0."""
    weighted = jnp.zeros_like(queries, jnp.float32)
    if sinks is not None:
        return Sums(weighted[..., 0] + sinks.reshape(*weighted.shape[1:4], 1), weighted[..., 0] + 1, weighted)
    return Sums(weighted[..., 0] + MASKED, weighted[..., 0], weighted)


def forward(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    pairs: jax.Array | np.ndarray,
    sums: Sums,
    pattern: Pattern,
) -> Sums:
    """Adds the keys in the given pairs of blocks to the sums of the queries. Returns the new sums.

    Args:
      queries: queries in blocks, see `query_blocks`.
      keys, values: keys and values in blocks, see `key_blocks`.
      query_tokens, key_tokens: positions of the queries and of the keys; both have segment ids, or neither.
      pairs: int32 [pairs, 2], the (query block, key block) pairs to compute.
      sums: the sums so far.
      pattern: which keys a query sees.
    """
    keys, values, query_tokens, key_tokens, pairs = _tied(keys, values, query_tokens, key_tokens, pairs)

    def add(sums: Sums, pair: jax.Array) -> tuple[Sums, None]:
        i, j = pair
        query, key, value = queries[i], keys[j], values[j]
        old = Sums(*(x[i] for x in sums))
        logits = pattern.logits(_per_pair(query, key))
        logits = _masked(logits, _at(query_tokens, i), _at(key_tokens, j), pattern)
        largest = jnp.maximum(old.largest, jnp.max(logits, axis=-1))
        exps = jnp.exp(logits - largest[..., None])
        decay = jnp.exp(old.largest - largest)
        weighted = _per_query(exps.astype(value.dtype), value)
        new = Sums(largest, old.total * decay + jnp.sum(exps, axis=-1), old.weighted * decay[..., None] + weighted)
        return Sums(*(x.at[i].set(y) for x, y in zip(sums, new, strict=True))), None

    return lax.scan(add, sums, pairs)[0]


def finish(sums: Sums) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the log-sum-exp of the logits, float32, in blocks like `sums`, which must include all keys."""
    return sums.weighted / sums.total[..., None], sums.largest + jnp.log(sums.total)


def sink_grads(sinks: jax.Array | None, rows: RowGrads) -> jax.Array | None:
    """Returns the gradients of the sinks, [rows, heads]. A sink affects the output only by taking probability from the keys."""
    if sinks is None:
        return None
    probabilities = jnp.exp(sinks.reshape(*rows.lse.shape[1:4], 1) - rows.lse)
    return -jnp.sum(probabilities * rows.row_sum, axis=(0, -1)).reshape(sinks.shape)


def row_sums(outs: jax.Array, out_grads: jax.Array) -> jax.Array:
    """Returns the sum of output * gradient over the head width, float32, for each query in blocks.

    It equals the sum over keys of (probability * gradient of that probability), a term in the gradient of the softmax.
    """
    return jnp.sum(outs.astype(jnp.float32) * out_grads.astype(jnp.float32), axis=-1)


def initial_grads(queries: jax.Array, keys: jax.Array) -> Grads:
    """Returns zero gradients, for queries and keys in blocks."""
    key_grads = jnp.zeros_like(keys, jnp.float32)
    return Grads(jnp.zeros_like(queries, jnp.float32), key_grads, key_grads)


def backward(
    queries: jax.Array,
    keys: jax.Array,
    values: jax.Array,
    query_tokens: Tokens,
    key_tokens: Tokens,
    pairs: jax.Array | np.ndarray,
    rows: RowGrads,
    grads: Grads,
    pattern: Pattern,
) -> Grads:
    """Adds the gradients from the given pairs of blocks to `grads`, the gradients so far. Returns the new gradients.

    `rows` has each query's inputs of the backward pass. The other arguments are those of `forward`.
    """
    keys, values, query_tokens, key_tokens, pairs = _tied(keys, values, query_tokens, key_tokens, pairs)

    def add(grads: Grads, pair: jax.Array) -> tuple[Grads, None]:
        i, j = pair
        query, key, value, row = queries[i], keys[j], values[j], RowGrads(*(x[i] for x in rows))
        logits = pattern.logits(_per_pair(query, key))
        seen_logits = _masked(logits, _at(query_tokens, i), _at(key_tokens, j), pattern)
        probabilities = jnp.exp(seen_logits - row.lse[..., None])
        of_value = _per_key(probabilities.astype(row.out.dtype), row.out)
        of_probabilities = _per_pair(row.out, value)
        of_logits = probabilities * (of_probabilities - row.row_sum[..., None])
        if pattern.softcap is not None:
            of_logits *= 1 - jnp.square(logits / pattern.softcap)
        of_logits = (pattern.scale * of_logits).astype(query.dtype)
        of_query, of_key = _per_query(of_logits, key), _per_key(of_logits, query)
        return (
            Grads(grads.query.at[i].add(of_query), grads.key.at[j].add(of_key), grads.value.at[j].add(of_value)),
            None,
        )

    return lax.scan(add, grads, pairs)[0]


def _tied(
    keys: jax.Array, values: jax.Array, query_tokens: Tokens, key_tokens: Tokens, pairs: jax.Array | np.ndarray
) -> tuple[jax.Array, jax.Array, Tokens, Tokens, jax.Array]:
    """Returns the arguments after an optimization barrier, which makes token positions depend on the keys.

    Token positions are the same in all layers. Without the barrier, differentiating a `lax.scan` over layers would move the
    masks of all pairs of blocks, [tokens, tokens], out of the loop and store them, because they depend only on positions.
    """
    tied: tuple[jax.Array, jax.Array, Tokens, Tokens, jax.Array] = lax.optimization_barrier(
        (keys, values, query_tokens, key_tokens, jnp.asarray(pairs))
    )
    return tied


# The three products of a pair of blocks, float32. They treat the queries of a group's heads as one dimension, because XLA
# computes products with two such dimensions more slowly.


def _per_pair(of_query: jax.Array, of_key: jax.Array) -> jax.Array:
    """Multiplies [rows, heads, group, queries, width] by [rows, heads, keys, width] to [rows, heads, group, queries, keys]."""
    merged = of_query.reshape(*of_query.shape[:2], -1, of_query.shape[-1])
    out = jnp.einsum("bkqh,bksh->bkqs", merged, of_key, preferred_element_type=jnp.float32)
    return out.reshape(*of_query.shape[:-1], -1)


def _per_query(of_pair: jax.Array, of_key: jax.Array) -> jax.Array:
    """Multiplies [rows, heads, group, queries, keys] by [rows, heads, keys, width] to [rows, heads, group, queries, width]."""
    merged = of_pair.reshape(*of_pair.shape[:2], -1, of_pair.shape[-1])
    out = jnp.einsum("bkqs,bksh->bkqh", merged, of_key, preferred_element_type=jnp.float32)
    return out.reshape(*of_pair.shape[:-1], -1)


def _per_key(of_pair: jax.Array, of_query: jax.Array) -> jax.Array:
    """Multiplies [rows, heads, group, queries, keys] by [rows, heads, group, queries, width] to [rows, heads, keys, width]."""
    pairs, queries = (x.reshape(*x.shape[:2], -1, x.shape[-1]) for x in (of_pair, of_query))
    return jnp.einsum("bkqs,bkqh->bksh", pairs, queries, preferred_element_type=jnp.float32)


def _at(tokens: Tokens, block: jax.Array) -> Tokens:
    return Tokens(tokens.position[block], None if tokens.segment_ids is None else tokens.segment_ids[block])


def _masked(logits: jax.Array, query: Tokens, key: Tokens, pattern: Pattern) -> jax.Array:
    query_index, key_index = query.position[:, None], key.position[None, :]
    if pattern.causal:
        seen = key_index <= query_index
        if pattern.window is not None:
            seen &= query_index - key_index < pattern.window
    else:
        seen = (key_index == PADDING_INDEX) == (query_index == PADDING_INDEX)
    if query.segment_ids is None or key.segment_ids is None:
        seen = seen[None]
    else:
        seen = seen & (query.segment_ids[:, :, None] == key.segment_ids[:, None, :])
    return jnp.where(seen[:, None, None], logits, MASKED)


def _padded(x: jax.Array, block: int) -> jax.Array:
    return jnp.pad(x, [(0, 0), (0, -x.shape[1] % block)] + [(0, 0)] * (x.ndim - 2))


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _attention(rows: Rows, pattern: Pattern, block: int) -> jax.Array:
    return _attention_forward(rows, pattern, block)[0]


def _attention_forward(rows: Rows, pattern: Pattern, block: int) -> tuple[jax.Array, Residuals]:
    queries, keys, values, tokens, pairs = _blocks(rows, pattern, block)
    sums = initial_sums(queries, rows.sinks)
    outs, lse = finish(forward(queries, keys, values, tokens, tokens, pairs, sums, pattern))
    out = from_query_blocks(outs, rows.query.shape[1]).astype(rows.value.dtype)
    # Both are named like the layers' outputs, so a rematerialization policy that saves these needs no second forward pass.
    out, lse = checkpoint_name(out, "context"), checkpoint_name(lse, "context")
    return out, (rows, out, lse)


def _attention_backward(pattern: Pattern, block: int, residuals: Residuals, out_grad: jax.Array) -> tuple[Rows]:
    rows, out, lse = residuals
    length, kv_heads = rows.key.shape[1:3]
    queries, keys, values, tokens, pairs = _blocks(rows, pattern, block)
    out_grads = query_blocks(out_grad, kv_heads, block)
    of_rows = RowGrads(out_grads, lse, row_sums(query_blocks(out, kv_heads, block), out_grads))
    grads = backward(queries, keys, values, tokens, tokens, pairs, of_rows, initial_grads(queries, keys), pattern)
    found = Rows(
        from_query_blocks(grads.query, length).astype(rows.query.dtype),
        from_key_blocks(grads.key, length).astype(rows.key.dtype),
        from_key_blocks(grads.value, length).astype(rows.value.dtype),
        sinks=sink_grads(rows.sinks, of_rows),
    )
    return (found,)


_attention.defvjp(_attention_forward, _attention_backward)


def _blocks(rows: Rows, pattern: Pattern, block: int) -> tuple[jax.Array, jax.Array, jax.Array, Tokens, np.ndarray]:
    length = rows.query.shape[1]
    return (
        query_blocks(rows.query, rows.key.shape[2], block),
        key_blocks(rows.key, block),
        key_blocks(rows.value, block),
        token_blocks(np.arange(length), rows.segment_ids, block),
        visible_pairs(length, block, pattern),
    )
