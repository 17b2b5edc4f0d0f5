"""The decoder's embedding, output layer and transformer layer, and the block of transformer layers that is repeated."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp
from praxis import base_layer

from spmd_trainer.decoder.attention import Attention
from spmd_trainer.decoder.axes import Norm, SpecLayer
from spmd_trainer.decoder.context import Context
from spmd_trainer.decoder.delta_attention import DeltaAttention
from spmd_trainer.decoder.feed_forward import FeedForward, MixtureOfExperts
from spmd_trainer.decoder.latent_attention import LatentAttention
from spmd_trainer.models.decoder_spec import LayerSpec


class Embedding(SpecLayer):
    """An embedding table: a vector for each token id or position.

    Attributes:
      num_rows: number of token ids or positions.
      rows_axis: logical axis of the table's rows, see `axes.DEFAULT_AXES`.
    """

    num_rows: int = 0
    rows_axis: str = "vocab"

    def setup(self) -> None:
        self.add_weight("w", (self.num_rows, self.spec.model_dims), (self.rows_axis, "embed"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns the embeddings, [batch, time, model_dims], of ids [batch, time]."""
        # The mesh axes of 'embed' also split the batch, so the lookup needs table rows that they don't split.
        rows = self.split(self.read("w"), self.rows_axis, "norm")
        return self.split(jnp.take(rows, ids, axis=0, mode="clip"), "batch", "length", "activation_embed")

    def matrix(self) -> jax.Array:
        """Returns the whole table, [num_rows, model_dims]."""
        return self.read("w")

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the products of x [batch, time, model_dims] and all rows of the table, float32 [batch, time, num_rows]."""
        return jnp.einsum("btd,vd->btv", x, self.read("w"), preferred_element_type=jnp.float32)


class Logits(SpecLayer):
    """The output layer: a projection to the vocabulary."""

    def setup(self) -> None:
        self.add_weight("w", (self.spec.model_dims, self.spec.vocab_size), ("embed", "vocab"))

    def matrix(self) -> jax.Array:
        """Returns the transposed weight, with a row for each token id, [vocab_size, model_dims]."""
        return self.read("w").T

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns the logits, float32 [batch, time, vocab_size], of x [batch, time, model_dims]."""
        return jnp.einsum("btd,dv->btv", x, self.read("w"), preferred_element_type=jnp.float32)


class DecoderLayer(SpecLayer):
    """Attention and a feed-forward layer, each with a residual connection.

    Attributes:
      layer_kind: 'global', 'local' or 'chunked', see `Attention`, or 'linear', see `DeltaAttention`.
      has_experts: True for a mixture of experts in place of the feed-forward layer.
    """

    layer_kind: str = "global"
    has_experts: bool = False

    def setup(self) -> None:
        shape = (self.spec.model_dims,)
        attention = Attention if self.spec.latent is None else LatentAttention
        mixer = DeltaAttention if self.layer_kind == "linear" else attention
        self.child("attention", mixer, layer_kind=self.layer_kind)
        if not self.has_experts:
            self.child("mlp", FeedForward)
        else:
            self.child("moe", MixtureOfExperts)
        for part in ("attention", "mlp"):
            if self.spec.norm_placement != "post":
                self.child(f"{part}_norm", Norm, shape=shape)
            if self.spec.norm_placement != "pre":
                self.child(f"{part}_post_norm", Norm, shape=shape)
        if self.spec.layer_scale:
            self.add_weight("layer_scale", (1,), ("norm",), init=1.0, trainable=False)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream after this layer, [batch, time, model_dims]; `x` is the residual stream before it."""
        attended = self.attention(self._normed("attention", x), context)
        return self._feed_forward(self._residual("attention", x, attended, context), context)

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Computes the layer for new tokens only. Keys and values of earlier tokens come from the decode cache."""
        attended = self.attention.extend_step(self._normed("attention", x), context)
        return self._feed_forward(self._residual("attention", x, attended, context), context)

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of this layer's decode cache with `transform_fn(array, batch_dim, time_dim)`."""
        self.attention.transform_decode_state(transform_fn)

    def _feed_forward(self, x: jax.Array, context: Context) -> jax.Array:
        normed = self._normed("mlp", x)
        output = self.moe(normed, context.segment_ids > 0) if self.has_experts else self.mlp(normed)
        x = self._residual("mlp", x, output, context)
        return x * self.get_var("layer_scale").astype(x.dtype) if self.spec.layer_scale else x

    def _normed(self, part: str, x: jax.Array) -> jax.Array:
        if self.spec.norm_placement == "post":
            return x
        normed: jax.Array = getattr(self, f"{part}_norm")(x)
        return normed

    def _residual(self, part: str, x: jax.Array, output: jax.Array, context: Context) -> jax.Array:
        if self.spec.norm_placement != "pre":
            output = getattr(self, f"{part}_post_norm")(output)
        output = self.dropped(output, self.spec.dropout, context.order)
        return self.split(x + output, "batch", "length", "activation_embed")


def create_layers(parent: SpecLayer, name: str, layers: Sequence[LayerSpec]) -> None:
    """Creates a child of `parent` for each of `layers`: `{name}_0`, `{name}_1`, ..."""
    for index, layer in enumerate(layers):
        parent.child(f"{name}_{index}", DecoderLayer, layer_kind=layer.kind, has_experts=layer.has_experts)


class DecoderBlock(SpecLayer):
    """A block with one child for each of `spec.repeated_layers`, in order: `layer_0`, `layer_1`, ..."""

    def setup(self) -> None:
        create_layers(self, "layer", self.spec.repeated_layers)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream [batch, time, model_dims] after all layers of the block."""
        for layer in self._layers():
            x = layer(x, context)
        return x

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Computes the block's layers for new tokens only. Keys and values of earlier tokens come from the decode cache."""
        for layer in self._layers():
            x = layer.extend_step(x, context)
        return x

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of the layers' decode caches with `transform_fn(array, batch_dim, time_dim)`."""
        for layer in self._layers():
            layer.transform_decode_state(transform_fn)

    def _layers(self) -> list[DecoderLayer]:
        return [getattr(self, f"layer_{index}") for index in range(len(self.spec.repeated_layers))]
