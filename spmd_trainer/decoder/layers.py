"""A decoder layer, and the block of layers that is repeated."""

from __future__ import annotations

import jax
from praxis import base_layer

from spmd_trainer.decoder.attention import Attention, Context
from spmd_trainer.decoder.axes import SpecLayer
from spmd_trainer.decoder.feed_forward import FeedForward, MixtureOfExperts
from spmd_trainer.decoder.norms import Norm


class DecoderLayer(SpecLayer):
    """Attention and a feed-forward layer, each with a residual connection.

    Attributes:
      layer_kind: 'global' or 'local'.
    """

    layer_kind: str = "global"

    def setup(self) -> None:
        shape = (self.spec.model_dims,)
        self.child("attention", Attention, layer_kind=self.layer_kind)
        if self.spec.moe is None:
            self.child("mlp", FeedForward)
        else:
            self.child("moe", MixtureOfExperts)
        for part in ("attention", "mlp"):
            if self.spec.norm_placement != "post":
                self.child(f"{part}_norm", Norm, shape=shape)
            if self.spec.norm_placement != "pre":
                self.child(f"{part}_post_norm", Norm, shape=shape)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the new residual stream [batch, time, model_dims]."""
        attended = self.attention(self._normed("attention", x), context)
        return self._feed_forward(self._residual("attention", x, attended, context), context)

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Computes new tokens only, with the keys and values of earlier ones from the cache."""
        attended = self.attention.extend_step(self._normed("attention", x), context)
        return self._feed_forward(self._residual("attention", x, attended, context), context)

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of the cache by `transform_fn(array, batch_dim, time_dim)`."""
        self.attention.transform_decode_state(transform_fn)

    def _feed_forward(self, x: jax.Array, context: Context) -> jax.Array:
        normed = self._normed("mlp", x)
        output = self.mlp(normed) if self.spec.moe is None else self.moe(normed, context.segment_ids > 0)
        return self._residual("mlp", x, output, context)

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


class DecoderBlock(SpecLayer):
    """One layer of each entry of `spec.layer_pattern`, in order: `layer_0`, `layer_1`, ..."""

    def setup(self) -> None:
        for index, kind in enumerate(self.spec.layer_pattern):
            self.child(f"layer_{index}", DecoderLayer, layer_kind=kind)

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Returns the residual stream [batch, time, model_dims] after all layers."""
        for layer in self._layers():
            x = layer(x, context)
        return x

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Computes new tokens only, with the keys and values of earlier ones from the cache."""
        for layer in self._layers():
            x = layer.extend_step(x, context)
        return x

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of the cache by `transform_fn(array, batch_dim, time_dim)`."""
        for layer in self._layers():
            layer.transform_decode_state(transform_fn)

    def _layers(self) -> list[DecoderLayer]:
        return [getattr(self, f"layer_{index}") for index in range(len(self.spec.layer_pattern))]
