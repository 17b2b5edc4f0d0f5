"""Causal self-attention with grouped key and value heads, windows, soft caps and a cache of keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer

from spmd_trainer.decoder import rotary
from spmd_trainer.decoder.axes import Norm, Projection, SpecLayer, unit
from spmd_trainer.decoder.context import PADDING, Context
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.kernels import MASKED, Pattern
from spmd_trainer.kernels.reference import softmax
from spmd_trainer.kernels.sequence_order import num_shards
from spmd_trainer.models.decoder_spec import HeadSpec, TemperatureSpec


class Attention(SpecLayer):
    """Self-attention of one layer.

    Attributes:
      layer_kind: 'global'; 'local' for a sliding window of `spec.window` tokens; 'chunked' for chunks of `spec.window` tokens.
      cached: names of the arrays in the decode cache.
    """

    layer_kind: str = "global"
    cached: ClassVar[tuple[str, ...]] = ("key_state", "value_state")

    def setup(self) -> None:
        spec = self.spec
        self.create_inputs()
        self.child(
            "output",
            Projection,
            equation="btnh,nhd->btd",
            shape=(spec.num_heads, spec.value_dims_of(self.layer_kind), spec.model_dims),
            split_axes=("heads", "head_dims", "embed"),
            bias_axes=("norm",) if spec.output_bias else (),
            output_axes=("batch", "length", "activation_embed"),
        )
        if spec.attention_sinks:
            self.add_weight("sinks", (spec.num_heads,), ("heads",), init=0.0)

    def create_inputs(self) -> None:
        """Creates the layers that compute queries, keys and values, and the gate of the output."""
        spec, of_kind = self.spec, self._kv_heads
        has = {"value": not of_kind.values_are_keys, "gate": spec.gated_attention}
        for name in filter(lambda name: has.get(name, True), ("query", "key", "value", "gate")):
            heads, axis = (of_kind.num_kv_heads, "kv_heads") if name in ("key", "value") else (spec.num_heads, "heads")
            self.child(
                name,
                Projection,
                equation="btd,dnh->btnh",
                shape=(spec.model_dims, heads, of_kind.head_dims),
                split_axes=("embed", axis, "head_dims"),
                bias_axes=(axis, "head_dims") if spec.qkv_bias and name != "gate" else (),
                output_axes=("batch", "length", f"activation_{axis}", "head_dims"),
            )
            if spec.has_query_key_scales and name in ("query", "key"):
                over_all = spec.query_key_norm == "all"
                shape = (heads, of_kind.head_dims) if over_all else (of_kind.head_dims,)
                split_axes = (axis, "head_dims") if over_all else ("head_dims",)
                self.child(f"{name}_norm", Norm, shape=shape, split_axes=split_axes, kind="rms")

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends over whole rows. If the decode cache is mutable, stores the rows' keys and values in it. `x`: [batch, time,
        model_dims], with the tokens in the order `context.order`. Returns [batch, time, model_dims].
        """
        query, key, value = self._heads(x, context)
        self._fill_cache({"key_state": key, "value_state": value}, context)
        return self._project(self._gated(self._attend(query, key, value, context), x))

    def _attend(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> jax.Array:
        drops = self.spec.attention_dropout and not self.do_eval
        return attend(
            query,
            key,
            value,
            self._pattern,
            segment_ids=self._segment_ids(context),
            sinks=self._sinks,
            split=self._attention_split,
            kernel=None if self.is_initializing() else context.kernel,
            context_parallel=context.context_parallel,
            dropout=(lambda x: self.dropped(x, self.spec.attention_dropout)) if drops else None,
            name=self.layer_kind,
        )

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Adds the keys and values of new tokens to the decode cache, and attends from the new tokens to the cache. Takes and
        returns [batch, new tokens, model_dims].
        """
        query, new_key, new_value = self._heads(x, context)
        key, value = self._extended("key_state", new_key, context), self._extended("value_state", new_value, context)
        return self._project(self._gated(self._attend_to_cache(query, key, value, context), x))

    def _gated(self, heads: jax.Array, x: jax.Array) -> jax.Array:
        return heads * jax.nn.sigmoid(self.gate(x)) if self.spec.gated_attention else heads

    def _extended(self, name: str, heads: jax.Array, context: Context) -> jax.Array:
        """Adds new tokens, [batch, new tokens, heads, width], to an array of the cache. Returns the array."""
        assert context.cache_index is not None  # always set in decode steps
        return self._keep(name, self._cache_layout.write(self.get_decode_state(name), heads, context.cache_index))

    def _attend_to_cache(self, query: jax.Array, key: jax.Array, value: jax.Array, context: Context) -> jax.Array:
        """Attends from new tokens to arrays of the cache. Returns [batch, new tokens, heads, width of a value]."""
        assert context.cache_index is not None  # always set in decode steps, like the next one
        assert context.first_index is not None
        seen_from = context.first_index[:, None]
        if self.layer_kind == "chunked":
            seen_from += context.positions // self._window * self._window
        return attend_to_cache(
            query,
            key,
            value,
            self._pattern,
            self._cache_layout,
            context.cache_index,
            seen_from,
            self._sinks,
        )

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of this layer's decode cache with `transform_fn(array, batch_dim=0, time_dim=1)`."""
        for name in self.cached:
            self.update_decode_state(name, transform_fn(self.get_decode_state(name), 0, 1))

    def _heads(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key = self.query(x), self.key(x)
        value = key if self._kv_heads.values_are_keys else self.value(x)
        value = self._unit(value) if self.spec.value_norm else value
        if self.spec.has_query_key_scales:
            query, key = self.query_norm(query), self.key_norm(key)
        query, key = self._rotate(query, context), self._rotate(key, context)
        if self.layer_kind in context.rotary and self.spec.query_key_norm == "unit":
            query, key = self._unit(query), self._unit(key)
        if self.layer_kind not in context.rotary and self.spec.temperature is not None:
            query = self._sharpened(query, self.spec.temperature, context.positions)
        return (
            checkpoint_name(query, "query_proj"),
            checkpoint_name(key, "key_proj"),
            checkpoint_name(value, "value_proj"),
        )

    def _rotate(self, heads: jax.Array, context: Context) -> jax.Array:
        if self.layer_kind not in context.rotary:
            return heads
        sine, cosine = context.rotary[self.layer_kind]
        return rotary.rotate(heads, sine, cosine, pairs_adjacent=self.spec.rotary_pairs_adjacent)

    def _unit(self, heads: jax.Array) -> jax.Array:
        return unit(heads.astype(jnp.float32), (-1,), self.spec.norm_epsilon).astype(heads.dtype)

    def _sharpened(self, query: jax.Array, temperature: TemperatureSpec, positions: jax.Array) -> jax.Array:
        intervals = ((positions + 1) // temperature.interval).astype(jnp.float32)
        factors = 1 + temperature.factor * jnp.log1p(intervals)
        return (query * factors[:, :, None, None]).astype(query.dtype)

    def _segment_ids(self, context: Context) -> jax.Array:
        """Returns each token's segment id, int32 [batch, time]. In a chunked layer, each chunk of a text is a new segment."""
        if self.layer_kind != "chunked":
            return context.segment_ids
        # The maximum number of chunks that a row can have from one text.
        most = -(-context.positions.shape[1] // self._window) + 1
        chunks = context.segment_ids * most + context.positions // self._window % most
        return jnp.where(context.segment_ids == PADDING, PADDING, chunks)

    def _fill_cache(self, states: dict[str, jax.Array], context: Context) -> None:
        """Stores arrays of whole rows in the decode cache, in row order. Does nothing if the cache is not mutable."""
        if not self.is_mutable_collection(base_layer.DECODE_CACHE) or self.is_initializing():
            return
        assert context.order is not None  # None only in decode steps
        for name, heads in states.items():
            in_order = context.order.undo(heads)
            self._keep(name, self._cache_layout.padded(in_order, context.cache_length or in_order.shape[1]))

    def _keep(self, name: str, heads: jax.Array) -> jax.Array:
        heads = self.split(heads, "batch", "length", "activation_kv_heads", "head_dims")
        self.update_decode_state(name, heads)
        return heads

    def _project(self, heads: jax.Array) -> jax.Array:
        heads = self.split(heads, "batch", "length", "activation_heads", "head_dims")
        output: Any = self.output(heads)
        return checkpoint_name(output, "out_proj")

    @property
    def _sinks(self) -> jax.Array | None:
        return self.theta.sinks.astype(jnp.float32) if self.spec.attention_sinks else None

    @property
    def _pattern(self) -> Pattern:
        spec = self.spec
        return Pattern(
            causal=True,
            # In chunked layers, a token sees no farther than this either, so kernels can skip earlier blocks.
            window=self._window if self.layer_kind in ("local", "chunked") else None,
            softcap=spec.attention_softcap,
            scale=self._kv_heads.head_dims**-0.5 if spec.query_scale is None else spec.query_scale,
        )

    @property
    def _window(self) -> int:
        assert self.spec.window is not None  # the spec checks this for the kinds of layers that have a window
        return self.spec.window

    @property
    def _attention_split(self) -> Split:
        batch, length, heads = map(self.mesh_axes, ("batch", "length", "activation_heads"))
        return Split(batch=batch, length=length, heads=heads)

    @property
    def _cached_heads(self) -> int:
        return self._kv_heads.num_kv_heads

    @property
    def _kv_heads(self) -> HeadSpec:
        return self.spec.heads_of(self.layer_kind)

    @property
    def _cache_layout(self) -> CacheLayout:
        return CacheLayout.on_mesh(
            num_heads=self.spec.num_heads,
            num_kv_heads=self._cached_heads,
            kv_heads_axes=self.mesh_axes("activation_kv_heads"),
            length_axes=self.mesh_axes("length"),
        )


@dataclasses.dataclass(frozen=True)
class CacheLayout:
    """Layout of the decode cache: its padded sizes, and the placement of key and value heads in it.

    The cache may be sharded over heads, over tokens, or over both. Both dimensions are padded to multiples of their number
    of shards, because XLA would otherwise keep all heads on every device.

    A model with K key and value heads, each shared by G query heads, has `num_heads` cached heads. Each key or value head is
    stored `copies` times, and each copy serves a part of the G query heads. The remaining cached heads are zeros.

    Attributes:
      num_kv_heads: number of key heads of the model, K. There are as many value heads.
      group_size: number of query heads per key head, G.
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
          num_heads, num_kv_heads: numbers of query heads and of key heads of the model.
          kv_heads_axes, length_axes: mesh axes that the cache's heads and tokens are split over.
        """
        return cls(num_kv_heads, num_heads // num_kv_heads, num_shards(kv_heads_axes), num_shards(length_axes))

    @property
    def copies(self) -> int:
        """Number of copies of each key or value head: `head_shards` / `num_kv_heads` if that is a whole number, else 1."""
        return self.head_shards // self.num_kv_heads if self.head_shards % self.num_kv_heads == 0 else 1

    @property
    def num_heads(self) -> int:
        """Number of cached heads, a multiple of `head_shards`."""
        return _rounded_up(self.num_kv_heads * self.copies, self.head_shards)

    @property
    def queries_per_head(self) -> int:
        return -(-self.group_size // self.copies)

    def padded(self, heads: jax.Array, length: int) -> jax.Array:
        """Returns a cache for at least `length` tokens, which begins with `heads`; zeros fill the rest.

        Args:
          heads: keys or values in row order, [batch, time, num_kv_heads, width].
          length: minimum number of tokens that the cache must hold.

        Returns:
          [batch, length rounded up to a multiple of `length_shards`, num_heads, width].
        """
        missing = _rounded_up(length, self.length_shards) - heads.shape[1]
        return jnp.pad(self._stored(heads), ((0, 0), (0, missing), (0, 0), (0, 0)))

    def write(self, cache: jax.Array, heads: jax.Array, index: jax.Array) -> jax.Array:
        """Returns the cache with new tokens written to it.

        Args:
          cache: [batch, tokens, num_heads, width].
          heads: keys or values of the new tokens, [batch, new tokens, num_kv_heads, width].
          index: int32 [new tokens], their consecutive indices in the cache.
        """
        new = self._stored(heads).astype(cache.dtype)
        if self.length_shards == 1:
            return jax.lax.dynamic_update_slice_in_dim(cache, new, index[0], axis=1)
        # XLA gathers the whole cache for an update of several tokens, but not for a scatter.
        return cache.at[:, index].set(new, mode="drop", unique_indices=True, indices_are_sorted=True)

    def grouped(self, query: jax.Array) -> jax.Array:
        """Groups [batch, time, query heads, width] by cached head: [batch, time, num_heads, queries_per_head, width]."""
        batch, length, _, width = query.shape
        x = query.reshape(batch, length, self.num_kv_heads, self.group_size, width)
        x = _pad(x, 3, self.copies * self.queries_per_head)
        return _pad(x.reshape(batch, length, -1, self.queries_per_head, width), 2, self.num_heads)

    def ungrouped(self, heads: jax.Array) -> jax.Array:
        """Inverts `grouped`. Returns [batch, time, query heads, width], with the query heads of the model."""
        batch, length, *_, width = heads.shape
        x = heads[:, :, : self.num_kv_heads * self.copies].reshape(batch, length, self.num_kv_heads, -1, width)
        return x[:, :, :, : self.group_size].reshape(batch, length, -1, width)

    def _stored(self, heads: jax.Array) -> jax.Array:
        """Converts [batch, time, num_kv_heads, width] to the form in the cache, [batch, time, num_heads, width]."""
        return _pad(heads if self.copies == 1 else jnp.repeat(heads, self.copies, axis=2), 2, self.num_heads)


def attend_to_cache(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    pattern: Pattern,
    layout: CacheLayout,
    query_index: jax.Array,
    seen_from: jax.Array,
    sinks: jax.Array | None = None,
) -> jax.Array:
    """Computes causal attention of new tokens over the cache, which must already include their own keys and values. Logits and
    softmax are float32. Returns [batch, new tokens, N, H], for N query heads of width H.

    Args:
      query: [batch, new tokens, N, H].
      key, value: the cached arrays, [batch, tokens, layout.num_heads, H].
      pattern: window, soft cap and scale of the attention.
      layout: the layout of the cache.
      query_index: int32 [new tokens], indices of the new tokens in the cache.
      seen_from: int32 [batch, new tokens or 1], cache index of the earliest token that each new token may see.
      sinks: float32 [N], see `kernels.attend`; None for no sinks.
    """
    products = jnp.einsum("btkgh,bskh->bkgts", layout.grouped(query), key, preferred_element_type=jnp.float32)
    logits = pattern.logits(products)
    key_index = jnp.arange(key.shape[1])
    distance = query_index[:, None] - key_index[None, :]
    seen = distance >= 0
    if pattern.window is not None:
        seen &= distance < pattern.window
    seen = seen & (key_index >= seen_from[..., None])
    if sinks is not None:
        sinks = layout.grouped(sinks[None, None, :, None]).transpose(0, 2, 3, 1, 4)
    probabilities = softmax(jnp.where(seen[:, None, None], logits, MASKED), sinks).astype(value.dtype)
    return layout.ungrouped(jnp.einsum("bkgts,bskh->btkgh", probabilities, value))


def _rounded_up(size: int, multiple: int) -> int:
    return -(-size // multiple) * multiple


def _pad(x: jax.Array, dim: int, size: int) -> jax.Array:
    if x.shape[dim] == size:
        return x
    return jnp.pad(x, [(0, size - n if d == dim else 0) for d, n in enumerate(x.shape)])
