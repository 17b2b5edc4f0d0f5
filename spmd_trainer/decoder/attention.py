"""Causal self-attention with grouped key and value heads, windows, soft caps and a cache of keys and values."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer

from spmd_trainer.decoder import cached_attention, rotary
from spmd_trainer.decoder.axes import Norm, Projection, SpecLayer
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.kernels import Pattern
from spmd_trainer.kernels.sequence_order import SequenceOrder

# Segment id of padding.
PADDING = -1


@dataclasses.dataclass
class Context:
    """Inputs shared by all layers of a forward pass.

    Attributes:
      rotary: kind of layer -> (sine, cosine), float32 [batch, time, head_dims / 2]; empty without rotary embeddings.
      segment_ids: int32 [batch, time]; a token sees only tokens of its segment. Padding has the segment `PADDING`.
      order: how rows lie on the sequence axes of the mesh; None in a decode step.
      cache_length: number of tokens for which a prefill makes a cache; None for the length of its input.
      cache_index: int32 [time], where the new tokens are in the cache, in a decode step.
      first_index: int32 [batch], index in the cache of each row's first token, in a decode step.
      kernel, context_parallel: see `DecoderLm.attention_kernel` and `DecoderLm.context_parallel`.
    """

    rotary: dict[str, tuple[jax.Array, jax.Array]]
    segment_ids: jax.Array
    order: SequenceOrder | None = None
    cache_length: int | None = None
    cache_index: jax.Array | None = None
    first_index: jax.Array | None = None
    kernel: str | None = None
    context_parallel: str | None = None


class Attention(SpecLayer):
    """Self-attention of one layer.

    Attributes:
      layer_kind: 'global' or 'local'.
    """

    layer_kind: str = "global"

    def setup(self) -> None:
        spec = self.spec
        for name in ("query", "key", "value"):
            heads, axis = (spec.num_heads, "heads") if name == "query" else (spec.num_kv_heads, "kv_heads")
            self.child(
                name,
                Projection,
                equation="btd,dnh->btnh",
                shape=(spec.model_dims, heads, spec.head_dims),
                split_axes=("embed", axis, "head_dims"),
                bias_axes=(axis, "head_dims") if spec.qkv_bias else (),
                output_axes=("batch", "length", f"activation_{axis}", "head_dims"),
            )
            if spec.query_key_norm is not None and name != "value":
                over_all = spec.query_key_norm == "all"
                shape = (heads, spec.head_dims) if over_all else (spec.head_dims,)
                split_axes = (axis, "head_dims") if over_all else ("head_dims",)
                self.child(f"{name}_norm", Norm, shape=shape, split_axes=split_axes, kind="rms")
        self.child(
            "output",
            Projection,
            equation="btnh,nhd->btd",
            shape=(spec.num_heads, spec.head_dims, spec.model_dims),
            split_axes=("heads", "head_dims", "embed"),
            bias_axes=("norm",) if spec.output_bias else (),
            output_axes=("batch", "length", "activation_embed"),
        )

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends over a whole row, and stores its keys and values if the decode cache is mutable. `x`: [batch, time,
        model_dims], in the order of `context.order`. Returns [batch, time, model_dims].
        """
        query, key, value = self._heads(x, context)
        if self.is_mutable_collection(base_layer.DECODE_CACHE) and not self.is_initializing():
            self._fill_cache(key, value, context)
        drops = self.spec.attention_dropout and not self.do_eval
        heads = attend(
            query,
            key,
            value,
            self._pattern,
            segment_ids=context.segment_ids,
            split=self._attention_split,
            kernel=None if self.is_initializing() else context.kernel,
            context_parallel=context.context_parallel,
            dropout=(lambda x: self.dropped(x, self.spec.attention_dropout)) if drops else None,
            name=self.layer_kind,
        )
        return self._project(heads)

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends from new tokens to the cache and to each other, and adds them to the cache. Takes and returns [batch, new
        tokens, model_dims].
        """
        query, new_key, new_value = self._heads(x, context)
        assert context.cache_index is not None  # always set in decode steps, like the next one
        assert context.first_index is not None
        layout = self._cache_layout
        key, value = (
            self._keep(name, layout.write(self.get_decode_state(name), heads, context.cache_index))
            for name, heads in (("key_state", new_key), ("value_state", new_value))
        )
        heads = cached_attention.attend(
            query, key, value, self._pattern, layout, context.cache_index, context.first_index
        )
        return self._project(heads)

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

    def _fill_cache(self, key: jax.Array, value: jax.Array, context: Context) -> None:
        """Stores the keys and values of whole rows, in row order."""
        assert context.order is not None  # None only in decode steps
        for name, heads in (("key_state", key), ("value_state", value)):
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
    def _pattern(self) -> Pattern:
        spec = self.spec
        return Pattern(
            causal=True,
            window=spec.window if self.layer_kind == "local" else None,
            softcap=spec.attention_softcap,
            scale=spec.head_dims**-0.5 if spec.query_scale is None else spec.query_scale,
        )

    @property
    def _attention_split(self) -> Split:
        batch, length, heads = map(self.mesh_axes, ("batch", "length", "activation_heads"))
        return Split(batch=batch, length=length, heads=heads)

    @property
    def _cache_layout(self) -> cached_attention.CacheLayout:
        return cached_attention.CacheLayout.on_mesh(
            num_heads=self.spec.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            kv_heads_axes=self.mesh_axes("activation_kv_heads"),
            length_axes=self.mesh_axes("length"),
        )
