"""Normalisation over the last dimensions, in float32."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp

from spmd_trainer.decoder.axes import SpecLayer


class Norm(SpecLayer):
    """RMS norm (arXiv:1910.07467) or layer norm (arXiv:1607.06450) over the last len(shape) dimensions.

    Attributes:
      shape: the dimensions to normalise, which is also the shape of the scale.
      split_axes: logical axes of `shape`.
      kind: 'rms' or 'layer'; None for `spec.norm`.
    """

    shape: Any = ()
    split_axes: Any = ("norm",)
    kind: str | None = None

    def setup(self) -> None:
        self.add_weight("scale", self.shape, self.split_axes, init=1.0 - self.spec.norm_scale_offset)
        if self._kind == "layer":
            self.add_weight("bias", self.shape, self.split_axes, init=0.0)

    @property
    def _kind(self) -> str:
        return self.kind or self.spec.norm

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Returns the normalised inputs, in their dtype."""
        dims = tuple(range(-len(self.shape), 0))
        x = inputs.astype(jnp.float32)
        if self._kind == "layer":
            x = x - jnp.mean(x, axis=dims, keepdims=True)
        mean_square = jnp.sum(jnp.square(x), axis=dims, keepdims=True) / math.prod(self.shape)
        x = x * jax.lax.rsqrt(mean_square + self.spec.norm_epsilon)
        x = x * (self.theta.scale.astype(jnp.float32) + self.spec.norm_scale_offset)
        if self._kind == "layer":
            x = x + self.theta.bias.astype(jnp.float32)
        return x.astype(inputs.dtype)
