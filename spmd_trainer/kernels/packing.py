"""The segments of packed rows as cuDNN needs them: an offset and a length for each."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp


class Packing(NamedTuple):
    """Segments of B rows of T tokens, B * M of them, listed in order regardless of their row.

    Attributes:
      lengths: number of tokens of each segment, int32 [B, M]; 0 after the last segment.
      offsets: first token of each segment, counted over all rows, int32 [B, M + 1]; B * T after the last segment.
      fits: bool []; False if there are more than B * M segments, or if two segments of a row have the same id.
    """

    lengths: jax.Array
    offsets: jax.Array
    fits: jax.Array


def packing(segment_ids: jax.Array, max_segments: int) -> Packing:
    """Returns where the segments lie: a segment is a run of tokens of one row with the same id.

    Args:
      segment_ids: int32 [B, T].
      max_segments: M, at least 2; most segments per row, on average.
    """
    batch, length = segment_ids.shape
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True).reshape(-1)
    end, count = batch * length, batch * max_segments
    offsets = jnp.nonzero(starts, size=count + 1, fill_value=end)[0].astype(jnp.int32)
    # cuDNN reads the first B * M + 1 offsets, but the primitive wants them as [B, M + 1].
    padded = jnp.pad(offsets, (0, batch - 1), constant_values=end)
    fits = (starts.sum() <= count) & _all_differ(offsets[:-1], segment_ids)
    return Packing(jnp.diff(offsets).reshape(batch, -1), padded.reshape(batch, -1), fits)


def _all_differ(starts: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns True if no row has two segments with the same id. `starts`: first tokens of segments, then B * T."""
    batch, length = segment_ids.shape
    rows = starts // length
    ids = jnp.take(segment_ids.reshape(-1), starts, mode="clip")
    order = jnp.lexsort((ids, rows))
    rows, ids = rows[order], ids[order]
    return ~jnp.any((rows[1:] == rows[:-1]) & (ids[1:] == ids[:-1]) & (rows[1:] < batch))


def folded(packed: Packing, num_tokens: int) -> Packing:
    """Merges the packings of several batches (a leading axis in each array) into one packing of all their rows."""
    size, rows, segments = packed.lengths.shape
    first = num_tokens * jnp.arange(size, dtype=jnp.int32)
    offsets = packed.offsets.reshape(size, -1)[:, : rows * segments] + first[:, None]
    end = size * num_tokens
    padded = jnp.pad(offsets.reshape(-1), (0, size * rows), constant_values=end)
    return Packing(packed.lengths.reshape(size * rows, -1), padded.reshape(size * rows, -1), packed.fits.all())
