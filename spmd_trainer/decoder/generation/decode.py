"""Decodes a batch of prompts; arguments and results as for praxis' `LanguageModel.decode`."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from praxis import decoder_hparams
from praxis.py_utils import NestedMap

from spmd_trainer.decoder.generation import loop, sampling
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.generation.stop_strings import StopTable, cut, stop_table
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.token_bytes import token_bytes
from spmd_trainer.inputs.tokenizers import Tokenizer

# {setting of praxis' decoders: field of `GenerationSettings` with the same meaning}
_COUNTERPARTS = {
    "eos_id": "eos_ids",
    "k": "top_k",
    "max_decode_steps": "max_tokens",
    "num_samples": "num_samples",
    "p": "top_p",
    "temperature": "temperature",
}

_tokenizer: contextvars.ContextVar[Tokenizer | None] = contextvars.ContextVar(
    "tokenizer of the decoded texts", default=None
)


@contextlib.contextmanager
def tokenizer_of_texts(tokenizer: Tokenizer | None) -> Iterator[None]:
    """Context manager that sets the tokenizer for `decode`, which needs it for stop strings and the default end-of-text token.

    `decode` reads the tokenizer while JAX traces it, so only the tracing must be inside this context.
    """
    token = _tokenizer.set(tokenizer)
    try:
        yield
    finally:
        _tokenizer.reset(token)


def decode(model: Any, batch: NestedMap, settings: GenerationSettings) -> tuple[NestedMap, NestedMap, dict[str, Any]]:
    """Continues the prompts of a batch.

    Args:
      model: a praxis language model with the methods that `loop.generate` needs.
      batch: ids int32 [B, P], B prompts, each at the left of its row; prefix_lengths int32 [B], or paddings [B, P]. Rows with
        eval_sample_weights [B] of 0 are not continued. A row's random numbers depend on its prompt_index [B] if given,
        otherwise on its index in the batch.
      settings: the settings; S is their `num_samples` and N their `max_tokens`.

    Returns:
      1. Scalars, each as (value, weight): num_decoded, and generated_tokens, a mean over rows and samples.
      2. The batch with the results: output_ids int32 [B, S, P + N], prompts and their continuations; decode_lengths int32
        [B, S], length of prompt plus continuation; logprobs float32 [B, S, P + N], 0 for prompts; prefix_ids int32 [B, S, P];
        prefix_lengths int32 [B] and original_lengths int32 [B, S], the lengths of the prompts. The samples of a prompt are
        sorted by the sum of their logprobs, the largest first.
      3. An empty dict, where praxis returns more metrics.

    Raises:
      UserError: a setting is invalid, or stop strings are set but no tokenizer is.
    """
    vocab_size = model.lm_tpl.spec.vocab_size
    settings.check(vocab_size)
    refuse_decoder_tpl(model.decoder_tpl)
    ids, samples = batch.ids, settings.num_samples
    lengths = batch.prefix_lengths if "prefix_lengths" in batch else jnp.sum(batch.paddings < 0.5, axis=-1)
    lengths = jnp.maximum(lengths.astype(jnp.int32), 1)
    counts = batch.get("eval_sample_weights", jnp.ones(len(ids), jnp.float32)).astype(jnp.float32)
    generated = loop.generate(
        model,
        ids,
        lengths,
        settings,
        eos_ids=eos_ids(settings, _tokenizer.get()),
        stops=_stops(settings, vocab_size),
        keys=None if settings.greedy else _keys(model.next_prng_key(), batch, samples),
        ended=counts == 0,
    )
    tokens, made, log_probs = _best_first([x.reshape(len(ids), samples, *x.shape[1:]) for x in generated])
    is_prompt, output_ids = _behind_prompts(ids, lengths, tokens, settings.pad_id)
    _, output_log_probs = _behind_prompts(jnp.zeros(ids.shape, jnp.float32), lengths, log_probs, 0.0)
    result = NestedMap(batch)
    result.prefix_lengths = lengths
    result.prefix_ids = jnp.where(is_prompt[:, :, : ids.shape[1]], jnp.repeat(ids[:, None], samples, axis=1), 0)
    result.original_lengths = jnp.repeat(lengths[:, None], samples, axis=1)
    result.output_ids, result.logprobs = output_ids, output_log_probs
    result.decode_lengths = lengths[:, None] + made
    decoded = jnp.sum(counts)
    mean_length = jnp.sum(made * counts[:, None]) / (jnp.maximum(decoded, 1) * samples)
    scalars = NestedMap(num_decoded=(decoded, jnp.ones(())), generated_tokens=(mean_length, decoded))
    return scalars, result, {}


def refuse_decoder_tpl(given: Any) -> None:
    """Checks that a model's praxis decode settings (`decoder_tpl`), which `decode` ignores, are at their defaults.

    Raises:
      UserError: a setting was changed; the message names the setting to use instead.
    """
    if type(given) is decoder_hparams.GreedyDecoderHParams:
        changed = {
            field.name: getattr(given, field.name)
            for field in dataclasses.fields(given)
            if getattr(given, field.name) != getattr(decoder_hparams.GreedyDecoderHParams(), field.name)
        }
        if not changed:
            return
    else:
        changed = {name: value for name, value in vars(given).items() if name in _COUNTERPARTS}
    instead = [
        f"task.model.generation.{new} for {old}={changed[old]!r}"
        for old, new in _COUNTERPARTS.items()
        if old in changed
    ]
    others = sorted(changed.keys() - _COUNTERPARTS.keys())
    raise UserError(
        f"task.model.decoder_tpl is a {type(given).__name__} with changed settings, but this model uses "
        f"task.model.generation; set {', '.join(instead) or 'its fields'}"
        + (f"; {', '.join(others)} have no counterpart: remove them" if others else "")
    )


def text_before_stops(model: Any, tokenizer: Tokenizer | None) -> Callable[[np.ndarray], str] | None:
    """Returns a function (generated ids [n]) -> text before the first stop string; None without stop strings or tokenizer."""
    stops = tuple(getattr(getattr(model, "generation", None), "stop", ()))
    if not stops or tokenizer is None:
        return None
    return functools.partial(cut, tokenizer, stops=stops, texts=token_bytes(tokenizer))


def eos_ids(settings: GenerationSettings, tokenizer: Tokenizer | None) -> tuple[int, ...]:
    """Returns the tokens that end a row: `settings.eos_ids`, or else the tokenizer's end-of-text token; () without either."""
    if settings.eos_ids is not None:
        return tuple(settings.eos_ids)
    return () if tokenizer is None else (tokenizer.eos_id,)


def _stops(settings: GenerationSettings, vocab_size: int) -> StopTable | None:
    if not settings.stop:
        return None
    tokenizer = _tokenizer.get()
    if tokenizer is None:
        raise UserError(
            f"task.model.generation.stop={settings.stop!r} needs the tokenizer of the prompts, and the decode dataset has none; "
            "use a text input such as PromptInput or ChatPromptInput, or set eos_ids instead"
        )
    return stop_table(settings.stop, token_bytes(tokenizer), vocab_size)


def _keys(key: jax.Array, batch: NestedMap, samples: int) -> jax.Array:
    rows = batch.get("prompt_index", jnp.arange(len(batch.ids)))
    keys = jax.vmap(lambda row: sampling.row_keys(row, jnp.arange(samples)))(sampling.row_keys(key, rows))
    return keys.reshape(-1, *keys.shape[2:])


def _best_first(generated: Sequence[jax.Array]) -> list[jax.Array]:
    """Sorts the samples of each prompt by the sum of their log-probabilities, the largest first.

    Args:
      generated: tokens [B, S, N], lengths [B, S] and log-probabilities [B, S, N], for B prompts and S samples per prompt.
    """
    order = jnp.argsort(-jnp.sum(generated[2], axis=-1), axis=1, stable=True)
    return [jnp.take_along_axis(x, order.reshape(*order.shape, *[1] * (x.ndim - 2)), axis=1) for x in generated]


def _behind_prompts(
    prompts: jax.Array, lengths: jax.Array, continuations: jax.Array, fill: float
) -> tuple[jax.Array, jax.Array]:
    """Puts each continuation directly after its prompt, and `fill` after the continuation. Returns a mask that is True for
    prompt tokens, and the joined rows. Shapes: prompts [B, P], continuations [B, S, N], both results [B, S, P + N].
    """
    width, steps = prompts.shape[1], continuations.shape[2]
    shape = (*continuations.shape[:2], width + steps)
    index = jnp.broadcast_to(jnp.arange(width + steps), shape)
    after = index - lengths[:, None, None]
    is_prompt = after < 0
    prompt = jnp.broadcast_to(jnp.pad(prompts, ((0, 0), (0, steps)))[:, None], shape)
    continuation = jnp.take_along_axis(continuations, jnp.clip(after, 0, steps - 1), axis=2)
    return is_prompt, jnp.where(is_prompt, prompt, jnp.where(after < steps, continuation, fill))
