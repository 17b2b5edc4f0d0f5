"""Linear attention by the gated delta rule (arXiv:2412.06464), and the causal convolution before it.

Each head has a state S, [key width A, value width B], which maps keys to values. At token t, the state decays (g is `log_decay`),
then changes so that it maps the token's key closer to the token's value, and is then read with the token's query:

    S_t = exp(g_t) S_(t-1);   S_t += k_t (beta_t (v_t - S_t^T k_t))^T;   o_t = S_t^T q_t / sqrt(A)

Rows are computed in chunks of C tokens. Within a chunk, the changes by all tokens are one triangular system (the WY form of
arXiv:2406.06484), so nearly all arithmetic is matrix products; a scan carries the states from chunk to chunk.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

CHUNK = 64
_EXACT = jax.lax.Precision.HIGHEST


def gated_delta_rule(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    log_decay: jax.Array,
    beta: jax.Array,
    segment_ids: jax.Array,
    state: jax.Array | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Computes the gated delta rule over rows. Each segment begins with the state 0, except the first one if `state` is given.

    The arithmetic is float32. On TPUs and GPUs, matrix products have the default, faster precision, as in attention, except in
    the triangular systems, which would amplify errors.

    Args:
      query, key: [batch, time, G, A], for G key heads of width A; each vector has the length 1.
      value: [batch, time, G, J, B]; J value heads of width B share the queries and keys of a key head.
      log_decay, beta: [batch, time, G, J]; log_decay is at most 0, and beta is between 0 and 1.
      segment_ids: int32 [batch, time]. The tokens of a segment are consecutive.
      state: float32 [batch, G, J, A, B], the state before the first token; None: 0.

    Returns:
      The outputs, float32 [batch, time, G, J, B], and the state after the last token.
    """
    length = query.shape[1]
    chunk = min(CHUNK, 1 << (length - 1).bit_length())
    query = query.astype(jnp.float32) * query.shape[-1] ** -0.5
    query, key, value, log_decay, beta = (
        _chunked(x.astype(jnp.float32), chunk) for x in (query, key, value, log_decay, beta)
    )
    if state is None:
        _, batch, _, heads, width = query.shape
        state = jnp.zeros((batch, heads, value.shape[4], width, value.shape[5]), jnp.float32)
    chunks = _systems(query, key, value, log_decay, beta, _chunked(segment_ids, chunk, mode="edge"))
    outputs, state = _scanned(chunks, state)
    return jnp.moveaxis(outputs, 0, 1).reshape(*outputs.shape[1:2], -1, *outputs.shape[3:])[:, :length], state


def _chunked(x: jax.Array, chunk: int, mode: str = "constant") -> jax.Array:
    """Returns x, [batch, time, ...], as [chunks, batch, tokens of a chunk, ...], with padding that changes no state."""
    missing = -x.shape[1] % chunk
    x = jnp.pad(x, [(0, missing if dim == 1 else 0) for dim in range(x.ndim)], mode=mode)
    return jnp.moveaxis(x.reshape(x.shape[0], -1, chunk, *x.shape[2:]), 1, 0)


def _systems(
    query: jax.Array, key: jax.Array, value: jax.Array, log_decay: jax.Array, beta: jax.Array, segments: jax.Array
) -> tuple[jax.Array, ...]:
    """Computes what the scan over chunks needs. Takes the arguments of `gated_delta_rule`, in chunks: [n, b, c, ...].

    Returns for each chunk: queries that read the state, attention within the chunk, keys that write to the state, values to
    write if the state is 0, keys for correcting these values by the state, and the decay over the whole chunk. Dimensions:
    n chunks, b rows, c and d tokens of a chunk, g key heads, j value heads per key head, a and v widths.
    """
    last, before = segments[..., -1], jnp.concatenate([segments[:1, :, 0], segments[:-1, :, -1]])
    total = jnp.cumsum(log_decay, axis=2)
    is_seen = (segments[..., :, None] == segments[..., None, :]) & jnp.tril(jnp.ones((key.shape[2],) * 2, bool))
    between = total[:, :, :, None] - total[:, :, None]  # n b c d g j
    decay = jnp.exp(jnp.where(is_seen[..., None, None], between, -jnp.inf)).transpose(0, 1, 4, 5, 2, 3)
    from_before = jnp.exp(total) * (segments == before[..., None])[..., None, None]
    to_last = jnp.exp(total[:, :, -1:] - total) * (segments == last[..., None])[..., None, None]
    kept = jnp.exp(total[:, :, -1]) * (before == last)[..., None, None]

    attention = jnp.einsum("nbcga,nbdga->nbgcd", query, key)[:, :, :, None] * decay
    products = jnp.einsum("nbcga,nbdga->nbgcd", key, key, precision=_EXACT)[:, :, :, None]
    shares = beta.transpose(0, 1, 3, 4, 2)[..., None]
    solved = _unit_lower_inverse(jnp.tril(products * decay * shares, -1))
    values = jnp.einsum("nbgjcd,nbdgj,nbdgjv->nbcgjv", solved, beta, value)
    keys = jnp.einsum("nbgjcd,nbdgj,nbdga->nbcgja", solved, beta * from_before, key)
    reading = query[:, :, :, :, None] * from_before[..., None]
    writing = key[:, :, :, :, None] * to_last[..., None]
    return reading, attention, writing, values, keys, kept


def _scanned(chunks: tuple[jax.Array, ...], state: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Scans over the results of `_systems`, beginning with `state`. Returns the outputs of all chunks, and the last state."""

    def step(state: jax.Array, of_chunk: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        reading, attention, writing, values, keys, kept = of_chunk
        new = values - jnp.einsum("bcgja,bgjav->bcgjv", keys, state)
        output = jnp.einsum("bcgja,bgjav->bcgjv", reading, state) + jnp.einsum("bgjcd,bdgjv->bcgjv", attention, new)
        return state * kept[..., None, None] + jnp.einsum("bcgja,bcgjv->bgjav", writing, new), output

    state, outputs = jax.lax.scan(step, state, chunks)
    return outputs, state


def _unit_lower_inverse(lower: jax.Array) -> jax.Array:
    """Returns the inverses of I + `lower`, for strictly lower triangular matrices [..., C, C] whose size C is a power of 2.

    Each step doubles the size of the inverted blocks on the diagonal. This is as exact as substitution, unlike a sum of powers
    of the matrix, whose terms cancel. It has only products, which XLA can split over a mesh, unlike a triangular solve.
    """
    size = lower.shape[-1]
    index = jnp.arange(size)
    inverse = jnp.broadcast_to(jnp.eye(size, dtype=lower.dtype), lower.shape)
    block = 1
    while block < size:
        pair, half = index // (2 * block), index // block % 2
        is_between = (pair[:, None] == pair) & (half[:, None] > half)
        between = jnp.where(is_between, lower, 0)
        inverse = inverse - jnp.matmul(inverse, jnp.matmul(between, inverse, precision=_EXACT), precision=_EXACT)
        block *= 2
    return inverse


def causal_convolution(
    x: jax.Array, kernel: jax.Array, segment_ids: jax.Array, before: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
    """Computes a convolution over time for each channel. A token sees itself and the width - 1 tokens before it in its segment.

    Args:
      x: [batch, time, ...].
      kernel: [width, ...]; the last entry is the weight of the token itself.
      segment_ids: int32 [batch, time].
      before: [batch, width - 1, ...], inputs of earlier tokens of the first token's segment; None if there are none.

    Returns:
      The output, of x's shape, and the inputs of the last width - 1 tokens. Inputs are 0 outside the last token's segment.
    """
    batch, length = segment_ids.shape
    past = kernel.shape[0] - 1
    if before is None:
        before = jnp.zeros((batch, past, *x.shape[2:]), x.dtype)
    inputs = jnp.concatenate([before.astype(x.dtype), x], axis=1)
    segments = jnp.concatenate([jnp.broadcast_to(segment_ids[:, :1], (batch, past)), segment_ids], axis=1)
    output = jnp.zeros_like(x)
    for shift in range(past + 1):
        first = past - shift
        is_same = segments[:, first : first + length] == segment_ids
        output += kernel[first] * jnp.where(_like(is_same, x), inputs[:, first : first + length], 0)
    is_last = segments[:, length:] == segment_ids[:, -1:]
    return output, jnp.where(_like(is_last, x), inputs[:, length:], 0)


def _like(mask: jax.Array, x: jax.Array) -> jax.Array:
    return mask.reshape(*mask.shape, *(1,) * (x.ndim - mask.ndim))
