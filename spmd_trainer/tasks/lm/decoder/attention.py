"""Causal self-attention with grouped key and value heads, windows, soft caps and a cache of keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer

from spmd_trainer.tasks.lm.attention import fitting_implementation
from spmd_trainer.tasks.lm.decoder import rotary
from spmd_trainer.tasks.lm.decoder.axes import SpecLayer
from spmd_trainer.tasks.lm.decoder.norms import Norm

_MASKED = -1e30


@dataclasses.dataclass
class Context:
    """What all layers of a forward pass share.

    Attributes:
      rotary: kind of layer -> (sine, cosine), float32 [batch, time, head_dims / 2]; empty without rotary embeddings.
      query_index: int32 [time], where the tokens are in the row or in the cache.
      query_segments: int32 [batch, time]; a token sees only tokens of its segment.
      key_segments: int32 [batch, source]. In a decode step, `first_index` takes its place.
      cache_length: number of tokens for which a prefill makes a cache; None for the length of its input.
      first_index: int32 [batch], index in the cache of each row's first token, in a decode step.
      fused: see `DecoderLm.fused_attention`.
    """

    rotary: dict[str, tuple[jax.Array, jax.Array]]
    query_index: jax.Array
    query_segments: jax.Array
    key_segments: jax.Array | None = None
    cache_length: int | None = None
    first_index: jax.Array | None = None
    fused: bool | None = None


class HeadsIn(SpecLayer):
    """Projection from the residual stream to heads.

    Attributes:
      num_heads: number of heads.
      heads_axis: their logical axis.
    """

    num_heads: int = 0
    heads_axis: str = "heads"

    def setup(self) -> None:
        """Creates the variables."""
        shape = (self.num_heads, self.spec.head_dims)
        self.add_weight("w", (self.spec.model_dims, *shape), ("embed", self.heads_axis, "head_dims"))
        if self.spec.qkv_bias:
            self.add_weight("b", shape, (self.heads_axis, "head_dims"), init=0.0)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, time, num_heads, head_dims] for [batch, time, model_dims]."""
        heads = jnp.einsum("btd,dnh->btnh", x, self.read("w"))
        if self.spec.qkv_bias:
            heads = heads + self.read("b")
        return self.split(heads, "batch", "length", f"activation_{self.heads_axis}", "head_dims")


class HeadsOut(SpecLayer):
    """Projection from the heads to the residual stream."""

    def setup(self) -> None:
        """Creates the variables."""
        spec = self.spec
        self.add_weight("w", (spec.num_heads, spec.head_dims, spec.model_dims), ("heads", "head_dims", "embed"))
        if spec.output_bias:
            self.add_weight("b", (spec.model_dims,), ("norm",), init=0.0)

    def __call__(self, heads: jax.Array) -> jax.Array:
        """Returns [batch, time, model_dims] for [batch, time, num_heads, head_dims]."""
        x = jnp.einsum("btnh,nhd->btd", heads, self.read("w"))
        if self.spec.output_bias:
            x = x + self.read("b")
        return self.split(x, "batch", "length", "activation_embed")


class Attention(SpecLayer):
    """Self-attention of one layer.

    Attributes:
      layer_kind: 'global' or 'local'.
    """

    layer_kind: str = "global"

    def setup(self) -> None:
        """Creates the child layers."""
        spec = self.spec
        self.child("query", HeadsIn, num_heads=spec.num_heads)
        self.child("key", HeadsIn, num_heads=spec.num_kv_heads, heads_axis="kv_heads")
        self.child("value", HeadsIn, num_heads=spec.num_kv_heads, heads_axis="kv_heads")
        self.child("output", HeadsOut)
        if spec.query_key_norm is not None:
            for name, heads, axis in (("query", spec.num_heads, "heads"), ("key", spec.num_kv_heads, "kv_heads")):
                over_all = spec.query_key_norm == "all"
                shape = (heads, spec.head_dims) if over_all else (spec.head_dims,)
                split_axes = (axis, "head_dims") if over_all else ("head_dims",)
                self.child(f"{name}_norm", Norm, shape=shape, split_axes=split_axes, kind="rms")

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends over a whole row, and keeps its keys and values if the decode cache can be written.

        Args:
          x: [batch, time, model_dims].
          context: see `Context`.

        Returns:
          [batch, time, model_dims].
        """
        query, key, value = self._heads(x, context)
        if self.is_mutable_collection(base_layer.DECODE_CACHE) and not self.is_initializing():
            missing = (context.cache_length or key.shape[1]) - key.shape[1]
            for name, heads in (("key_state", key), ("value_state", value)):
                self._keep(name, jnp.pad(heads, ((0, 0), (0, missing), (0, 0), (0, 0))))
        assert context.key_segments is not None  # only decode steps lack it
        seen = self._seen(context, jnp.arange(key.shape[1]), context.key_segments)
        return self._attend(query, key, value, seen, context.fused)

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends from new tokens over the cache and themselves, and adds them to the cache.

        Args:
          x: [batch, new tokens, model_dims].
          context: see `Context`.

        Returns:
          [batch, new tokens, model_dims].
        """
        query, new_key, new_value = self._heads(x, context)
        key, value = (
            self._keep(
                name, jax.lax.dynamic_update_slice_in_dim(state, heads.astype(state.dtype), context.query_index[0], 1)
            )
            for name, state, heads in (
                ("key_state", self.get_decode_state("key_state"), new_key),
                ("value_state", self.get_decode_state("value_state"), new_value),
            )
        )
        assert context.first_index is not None  # set in every decode step
        key_index = jnp.arange(key.shape[1])
        key_segments = (key_index >= context.first_index[:, None]).astype(jnp.int32)
        seen = self._seen(context, key_index, key_segments)
        return self._attend(query, key, value, seen, context.fused)

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces keys and values in the cache by `transform_fn(state, batch_dim=0, time_dim=1)`."""
        for name in ("key_state", "value_state"):
            self.update_decode_state(name, transform_fn(self.get_decode_state(name), 0, 1))

    def _heads(self, x: jax.Array, context: Context) -> tuple[jax.Array, jax.Array, jax.Array]:
        query, key, value = self.query(x), self.key(x), self.value(x)
        if self.spec.query_key_norm is not None:
            query, key = self.query_norm(query), self.key_norm(key)
        if context.rotary:
            sine, cosine = context.rotary[self.layer_kind]
            query, key = rotary.rotate(query, sine, cosine), rotary.rotate(key, sine, cosine)
        return (
            checkpoint_name(query, "query_proj"),
            checkpoint_name(key, "key_proj"),
            checkpoint_name(value, "value_proj"),
        )

    def _keep(self, name: str, heads: jax.Array) -> jax.Array:
        heads = self.split(heads, "batch", "length", "activation_kv_heads", "head_dims")
        self.update_decode_state(name, heads)
        return heads

    def _seen(self, context: Context, key_index: jax.Array, key_segments: jax.Array) -> jax.Array:
        """Returns True where a query sees a key, bool [batch, time, source]."""
        distance = context.query_index[:, None] - key_index[None, :]
        seen = distance >= 0
        if self.layer_kind == "local":
            assert self.spec.window is not None  # the spec is checked
            seen &= distance < self.spec.window
        return seen & (context.query_segments[:, :, None] == key_segments[:, None, :])

    def _attend(
        self, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array, fused: bool | None
    ) -> jax.Array:
        """Computes attention; logits and probabilities are float32.

        Args:
          query: [batch, time, N, H].
          key, value: [batch, source, K, H].
          seen: bool [batch, time, source].
          fused: see `DecoderLm.fused_attention`.

        Returns:
          [batch, time, model_dims].
        """
        kernel: Any = fitting_implementation(query, key)
        dropping = self.spec.attention_dropout and not self.do_eval
        if self.spec.attention_softcap is None and not dropping and (kernel == "cudnn" if fused is None else fused):
            heads = jax.nn.dot_product_attention(
                query, key, value, mask=seen[:, None], scale=self._scale, implementation=kernel
            )
        else:
            heads = self._plain(query, key, value, seen)
        heads = self.split(heads, "batch", "length", "activation_heads", "head_dims")
        output: Any = self.output(checkpoint_name(heads, "context"))
        return checkpoint_name(output, "out_proj")

    def _plain(self, query: jax.Array, key: jax.Array, value: jax.Array, seen: jax.Array) -> jax.Array:
        """Returns the heads' outputs, [batch, time, N, H], from logits and probabilities of their own."""
        spec = self.spec
        groups = (spec.num_kv_heads, spec.num_heads // spec.num_kv_heads)
        grouped = query.reshape(*query.shape[:2], *groups, spec.head_dims)
        logits = self._scale * jnp.einsum("btkgh,bskh->bkgts", grouped, key, preferred_element_type=jnp.float32)
        if spec.attention_softcap is not None:
            logits = spec.attention_softcap * jnp.tanh(logits / spec.attention_softcap)
        probabilities = jax.nn.softmax(jnp.where(seen[:, None, None], logits, _MASKED), axis=-1)
        probabilities = self.dropped(probabilities, spec.attention_dropout).astype(value.dtype)
        return jnp.einsum("bkgts,bskh->btkgh", probabilities, value).reshape(query.shape)

    @property
    def _scale(self) -> float:
        return self.spec.head_dims**-0.5 if self.spec.query_scale is None else self.spec.query_scale
