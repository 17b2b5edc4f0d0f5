"""The loop that continues prompts, one token per row and step, until every row has ended."""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from praxis import base_layer

from spmd_trainer.decoder.generation import sampling
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.generation.stop_strings import START, StopTable


class Generated(NamedTuple):
    """Continuations of B rows, of at most N = `max_tokens` tokens each.

    Attributes:
      tokens: int32 [B, N]; `pad_id` after a row's end.
      lengths: int32 [B], number of generated tokens, including the token that ended the row.
      log_probs: float32 [B, N], log-probability of each token under the model, before any settings such as the temperature
        apply; 0 after a row's end.
    """

    tokens: jax.Array
    lengths: jax.Array
    log_probs: jax.Array


class _State(NamedTuple):
    """The carry of the generation loop, apart from the decode cache, for B rows and V tokens in the vocabulary.

    Attributes:
      step: number of tokens generated so far.
      done: bool [B], True for rows that have ended.
      stop_states: int32 [B], each row's state in the `StopTable`.
      seen: bool [B, V], True for tokens in the prompt or the generated text; None without a repetition penalty.
      generated: the tokens so far.
    """

    step: jax.Array
    done: jax.Array
    stop_states: jax.Array
    seen: jax.Array | None
    generated: Generated


def generate(
    model: Any,
    ids: jax.Array,
    lengths: jax.Array,
    settings: GenerationSettings,
    *,
    eos_ids: tuple[int, ...] = (),
    stops: StopTable | None = None,
    keys: jax.Array | None = None,
    ended: jax.Array | None = None,
) -> Generated:
    """Continues B prompts, with S samples each. Call this function in a method of the model, with the collection DECODE_CACHE
    mutable. Returns B * S continuations; continuations of one prompt are adjacent.

    Each row ends at one of `eos_ids`, at a stop string, or after `max_tokens`. The loop ends when all rows have ended.

    Args:
      model: the model. `model.lm` has prefill(ids, lengths, cache_length) and extend_step(tokens), which return the next
        token's logits (see `spmd_trainer.decoder.lm`), and transform_decode_state.
      ids: int32 [B, T], prompts at the left.
      lengths: int32 [B], number of tokens in each prompt, 1 or more.
      settings: the settings; S is their `num_samples`.
      eos_ids: tokens that end a row.
      stops: table of the stop strings; None without stop strings.
      keys: PRNG keys of the continuations, [B * S, ...]; None for greedy decoding.
      ended: bool [B], True for padding rows, which are not continued; None to continue all rows.
    """
    samples, steps = settings.num_samples, settings.max_tokens
    logits = model.lm.prefill(ids, lengths, ids.shape[1] + steps)
    done = jnp.zeros(len(ids), bool) if ended is None else ended
    seen = None
    if settings.repetition_penalty != 1:
        inside = jnp.arange(ids.shape[1]) < lengths[:, None]
        seen = _seen(ids, inside, logits.shape[-1])
    if samples > 1:
        model.lm.transform_decode_state(lambda array, batch_dim, _: jnp.repeat(array, samples, axis=batch_dim))
        logits, done, seen = jax.tree.map(lambda array: jnp.repeat(array, samples, axis=0), (logits, done, seen))
    rows = len(ids) * samples
    state = _State(
        step=jnp.zeros((), jnp.int32),
        done=done,
        stop_states=jnp.full(rows, START, jnp.int32),
        seen=seen,
        generated=Generated(
            tokens=jnp.full((rows, steps), settings.pad_id, jnp.int32),
            lengths=jnp.zeros(rows, jnp.int32),
            log_probs=jnp.zeros((rows, steps), jnp.float32),
        ),
    )

    add = functools.partial(_add_token, settings=settings, eos_ids=eos_ids, stops=stops, keys=keys)

    def goes_on(model: Any, state: _State) -> Any:
        del model
        return (state.step < steps) & ~jnp.all(state.done)

    def body(model: Any, state: _State) -> _State:
        last = jax.lax.dynamic_index_in_dim(state.generated.tokens, state.step - 1, axis=1, keepdims=False)
        return add(state, model.lm.extend_step(last).logits)

    # The first token comes from the prompts' logits, so that the loop runs the model once for each further token.
    state = nn.while_loop(goes_on, body, model, add(state, logits), carry_variables=[base_layer.DECODE_CACHE])
    return state.generated


def _add_token(
    state: _State,
    logits: jax.Array,
    settings: GenerationSettings,
    eos_ids: tuple[int, ...],
    stops: StopTable | None,
    keys: jax.Array | None,
) -> _State:
    """Adds each row's next token to the state, chosen from the logits [rows, vocabulary]. Rows that have ended get padding."""
    step, done, stop_states, seen, generated = state
    logits = logits.astype(jnp.float32)
    penalised = logits if seen is None else sampling.penalise_repetition(logits, seen, settings.repetition_penalty)
    chosen = sampling.next_tokens(penalised, settings, keys, step)
    log_probs = sampling.log_probs_of(logits, chosen, largest=settings.greedy and seen is None)
    if stops is not None:
        stop_states = jnp.where(done, stop_states, stops.advance(stop_states, chosen))
    if seen is not None:
        seen |= jax.nn.one_hot(chosen, seen.shape[-1], dtype=bool) & ~done[:, None]
    tokens = jnp.where(done, settings.pad_id, chosen)
    generated = Generated(
        tokens=jax.lax.dynamic_update_index_in_dim(generated.tokens, tokens, step, axis=1),
        lengths=generated.lengths + ~done,
        log_probs=jax.lax.dynamic_update_index_in_dim(
            generated.log_probs, jnp.where(done, 0.0, log_probs), step, axis=1
        ),
    )
    for eos_id in eos_ids:
        done |= chosen == eos_id
    if stops is not None:
        done |= stop_states == stops.found
    return _State(step + 1, done, stop_states, seen, generated)


def _seen(ids: jax.Array, inside: jax.Array, vocab_size: int) -> jax.Array:
    """Returns a mask of the tokens that occur in each prompt, bool [prompts, vocabulary]. `inside`: True for prompt tokens."""
    rows = jnp.broadcast_to(jnp.arange(len(ids))[:, None], ids.shape)
    return jnp.zeros((len(ids), vocab_size), bool).at[rows, ids].max(inside)
