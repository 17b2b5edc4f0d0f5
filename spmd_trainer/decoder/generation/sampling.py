"""Chooses the next token of each row from its logits.

A row's token depends only on the row's logits and key, not on other rows. Random numbers are drawn for the vocabulary
without padding, so tokens don't depend on the mesh either.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmd_trainer.decoder.generation.settings import GenerationSettings

REMOVED = -jnp.inf  # the logit of a token that can't be drawn


def row_keys(key: jax.Array, rows: jax.Array) -> jax.Array:
    """Returns a PRNG key for each row.

    Args:
      key: the PRNG key for all rows, typed or raw.
      rows: int [B], a number that identifies each row, e.g. its prompt's index in the dataset.
    """
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(rows)


def next_tokens(
    logits: jax.Array, settings: GenerationSettings, keys: jax.Array | None = None, step: jax.Array | int = 0
) -> jax.Array:
    """Chooses one token per row. Returns tokens, int32 [B].

    Args:
      logits: floating [B, V], for B rows and V tokens in the vocabulary.
      settings: temperature, top_k and top_p.
      keys: the rows' PRNG keys [B, ...], see `row_keys`; None for greedy decoding.
      step: index of the generated token, which is folded into the keys.
    """
    if settings.greedy:
        return most_likely(logits)
    if keys is None:
        raise ValueError("sampling needs a key for each row; give `keys`")
    kept = warp(logits, settings)

    def draw(key: jax.Array, row: jax.Array) -> jax.Array:
        return jax.random.categorical(jax.random.fold_in(key, step), row)

    return jax.vmap(draw)(keys, kept).astype(jnp.int32)


def most_likely(logits: jax.Array) -> jax.Array:
    """Returns the index of the largest of the logits [..., V], int32 [...]; the lowest index if several are equal.

    If the vocabulary is split over devices, XLA computes this as two reductions, a maximum (also needed for the
    log-probability) and a minimum. For argmax it would gather values and indices.
    """
    index = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    last = logits.shape[-1] - 1
    return jnp.min(jnp.where(logits == jnp.max(logits, axis=-1, keepdims=True), index, last), axis=-1)


def log_probs_of(logits: jax.Array, tokens: jax.Array, *, largest: bool) -> jax.Array:
    """Returns the log-probability of one token per row, float32 [rows].

    Args:
      logits: float32 [rows, vocabulary].
      tokens: int32 [rows].
      largest: True if each token has the largest logit of its row; this saves looking up the tokens' logits.
    """
    own = jnp.max(logits, axis=-1) if largest else jnp.take_along_axis(logits, tokens[:, None], axis=-1)[:, 0]
    return own - jax.nn.logsumexp(logits, axis=-1)


def warp(logits: jax.Array, settings: GenerationSettings) -> jax.Array:
    """Applies temperature, top_k and top_p, in this order. Returns float32 logits, divided by the temperature, and minus infinity
    for removed tokens.

    Args:
      logits: floating [rows, vocabulary].
      settings: temperature (above 0), top_k and top_p.
    """
    warped = logits.astype(jnp.float32) / settings.temperature
    if 0 < settings.top_k < warped.shape[-1]:
        warped = keep_top_k(warped, settings.top_k)
    if settings.top_p < 1:
        warped = keep_top_p(warped, settings.top_p)
    return warped


def keep_top_k(logits: jax.Array, k: int) -> jax.Array:
    """Keeps each row's k largest logits, and those equal to the k-th. Sets the others to minus infinity."""
    smallest = jax.lax.top_k(logits, k)[0][..., -1:]
    return jnp.where(logits < smallest, REMOVED, logits)


def keep_top_p(logits: jax.Array, p: float) -> jax.Array:
    """Keeps the most likely tokens until their probabilities sum to more than p. Sets other logits to minus infinity.

    As in transformers, tokens are removed in ascending order of probability while the sum of the removed probabilities is at
    most 1 - p. The most likely token always stays. Among equal logits, lower ids are removed first (a stable sort);
    transformers may remove other ids, because torch's sort is not stable.

    Args:
      logits: float32 [rows, vocabulary].
      p: above 0 and below 1.
    """
    order = jnp.argsort(logits, axis=-1, stable=True)
    ascending = jnp.take_along_axis(logits, order, axis=-1)
    cumulative = jnp.cumsum(jax.nn.softmax(ascending, axis=-1), axis=-1)
    keeps = (cumulative > 1 - p).at[..., -1].set(True)
    keeps = jnp.put_along_axis(jnp.zeros_like(keeps), order, keeps, axis=-1, inplace=False)
    return jnp.where(keeps, logits, REMOVED)


def penalise_repetition(logits: jax.Array, seen: jax.Array, penalty: float) -> jax.Array:
    """Divides positive logits by the penalty, and multiplies negative logits by it, for tokens where `seen` is True."""
    return jnp.where(seen, jnp.where(logits < 0, logits * penalty, logits / penalty), logits)
