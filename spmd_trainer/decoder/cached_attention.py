"""Attention of new tokens over a cache of keys and values, and how the cache is laid out on the mesh.

The cache is split over heads, or over its tokens, or both. Its heads and tokens are padded to divide by the mesh, because
XLA would otherwise keep all heads on every device.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from spmd_trainer.kernels.kernels import MASKED, Pattern
from spmd_trainer.kernels.sequence_order import num_shards


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Sizes of the cache, and the placement of heads in it.

    K key heads with G query heads each become `num_heads` cached heads: each key head is stored `copies` times, each copy for
    some of its query heads, and then zeros fill the rest.

    Attributes:
      num_kv_heads: key and value heads of the model, K.
      group_size: query heads per key head, G.
      head_shards: number of devices that the cached heads are split over.
      length_shards: number of devices that the cached tokens are split over.
    """

    num_kv_heads: int
    group_size: int
    head_shards: int = 1
    length_shards: int = 1

    @classmethod
    def on_mesh(
        cls, *, num_heads: int, num_kv_heads: int, kv_heads_axes: tuple[str, ...], length_axes: tuple[str, ...]
    ) -> CacheLayout:
        """Returns the layout on the ambient mesh (`jax.set_mesh`).

        Args:
          num_heads, num_kv_heads: heads of the model.
          kv_heads_axes, length_axes: mesh axes that the cache's heads and tokens are split over.
        """
        return cls(num_kv_heads, num_heads // num_kv_heads, num_shards(kv_heads_axes), num_shards(length_axes))

    @property
    def copies(self) -> int:
        """Number of times each key head is stored: once per device, if the number of devices is a multiple of K."""
        return self.head_shards // self.num_kv_heads if self.head_shards % self.num_kv_heads == 0 else 1

    @property
    def num_heads(self) -> int:
        """Cached heads; a multiple of `head_shards`."""
        return _rounded_up(self.num_kv_heads * self.copies, self.head_shards)

    @property
    def queries_per_head(self) -> int:
        return -(-self.group_size // self.copies)

    def padded(self, heads: jax.Array, length: int) -> jax.Array:
        """Returns a cache with space for `length` tokens, filled with `heads` from its beginning.

          Args:
            heads: keys or values in row order, [batch, time, K, H].
        length: least number of tokens of the cache.

          Returns:
            [batch, length or a little more, num_heads, H].
        """
        missing = _rounded_up(length, self.length_shards) - heads.shape[1]
        return jnp.pad(self._stored(heads), ((0, 0), (0, missing), (0, 0), (0, 0)))

    def write(self, cache: jax.Array, heads: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the cache with new tokens written to it.

        Args:
          cache: [batch, tokens, num_heads, H].
          heads: keys or values of the new tokens, [batch, new tokens, K, H].
          index: int32 [new tokens], their consecutive indices in the cache.
        """
        new = self._stored(heads).astype(cache.dtype)
        if self.length_shards == 1:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, index[0], axis=1)
        # XLA gathers the whole cache for an update of several tokens, but not for a scatter.
        return cache.at[:, index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def grouped(self, query: jax.Array) -> jax.Array:
        """Returns [batch, new tokens, num_heads, queries_per_head, H] for queries [batch, new tokens, K * G, H]."""
        batch, length, _, width = query.shape
        x = query.reshape(batch, length, self.num_kv_heads, self.group_size, width)
        x = _pad(x, 3, self.copies * self.queries_per_head)
        return _pad(x.reshape(batch, length, -1, self.queries_per_head, width), 2, self.num_heads)

    def ungrouped(self, heads: jax.Array) -> jax.Array:
        """Returns [batch, new tokens, K * G, H]; the inverse of `grouped`."""
        batch, length, *_, width = heads.shape
        x = heads[:, :, : self.num_kv_heads * self.copies].reshape(batch, length, self.num_kv_heads, -1, width)
        return x[:, :, :, : self.group_size].reshape(batch, length, -1, width)

    def _stored(self, heads: jax.Array) -> jax.Array:
        """Returns [batch, time, num_heads, H] for the heads of the model [batch, time, K, H]."""
        return _pad(heads if self.copies == 1 else jnp.repeat(heads, self.copies, axis=2), 2, self.num_heads)


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: Pattern,
    layout: CacheLayout,
    query_index: jax.Array,
    first_index: jax.Array,
) -> jax.Array:
    """Computes attention of new tokens over the cache, which already holds them; logits and probabilities are float32.
    Returns [batch, new tokens, N, H].

    Args:
      query: [batch, new tokens, N, H].
      key, value: the cache, [batch, tokens, layout.num_heads, H].
      pattern: which keys a query sees.
      layout: the layout of the cache.
      query_index: int32 [new tokens], indices of the new tokens in the cache.
      first_index: int32 [batch], index of each row's first token in the cache.
    """
    products = jnp.einsum("btkgh,bskh->bkgts", layout.grouped(query), key, preferred_element_type=jnp.float32)
    logits = pattern.logits(products)
    key_index = jnp.arange(key.shape[1])
    distance = query_index[:, None] - key_index[None, :]
    seen = distance >= 0
    if pattern.window is not None:
        seen &= distance < pattern.window
    seen = seen & (key_index >= first_index[:, None])[:, None]
    probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], logits, MASKED), axis=-1).astype(value.dtype)
    return layout.ungrouped(jnp.einsum("bkgts,bskh->btkgh", probabilities, value))


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])
