"""The inputs that all layers share in a forward pass: positions, segments, and indices in the decode cache."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spmd_trainer.decoder import rotary
from spmd_trainer.kernels.sequence_order import SequenceOrder
from spmd_trainer.models.decoder_spec import DecoderSpec

# Segment id of padding.
PADDING = -1


@dataclasses.dataclass
class Context:
    """Inputs shared by all layers of a forward pass.

    Attributes:
      rotary: {kind of layer: (sine, cosine)}, float32 [batch, time, rotated dims / 2], for the kinds with rotary embeddings.
      positions: int32 [batch, time], position of each token in its text.
      segment_ids: int32 [batch, time]; a token sees only tokens of its segment. Padding has the segment `PADDING`.
      order: order in which each row's tokens are split over the mesh; None in a decode step.
      cache_length: size in tokens of the decode cache that a prefill creates; None for the length of its input.
      cache_index: in a decode step, int32 [time], the index of each new token in the cache; otherwise None.
      first_index: in a decode step, int32 [batch], the index in the cache of each row's first token; otherwise None.
      kernel, context_parallel: see `DecoderLm.attention_kernel` and `DecoderLm.context_parallel`.
    """

    rotary: dict[str, tuple[jax.Array, jax.Array]]
    positions: jax.Array
    segment_ids: jax.Array
    order: SequenceOrder | None = None
    cache_length: int | None = None
    cache_index: jax.Array | None = None
    first_index: jax.Array | None = None
    kernel: str | None = None
    context_parallel: str | None = None


def of_rows(
    spec: DecoderSpec,
    order: SequenceOrder,
    segment_ids: jax.Array,
    positions: jax.Array,
    cache_length: int | None = None,
    kernel: str | None = None,
    context_parallel: str | None = None,
) -> Context:
    """Returns the context for whole rows. `segment_ids` and `positions` must be in row order; for the others see `Context`."""
    positions = order.apply(positions)
    return Context(
        rotary=rotary.of_layers(spec, positions),
        positions=positions,
        segment_ids=order.apply(segment_ids, fill=PADDING),
        order=order,
        cache_length=cache_length,
        kernel=kernel,
        context_parallel=context_parallel,
    )


def of_step(spec: DecoderSpec, cache_index: jax.Array, first_index: jax.Array) -> Context:
    """Returns the context for a decode step; see `Context` for the arguments."""
    positions = cache_index - first_index[:, None]
    return Context(
        rotary=rotary.of_layers(spec, positions),
        positions=positions,
        segment_ids=jnp.ones_like(positions),
        cache_index=cache_index,
        first_index=first_index,
    )
