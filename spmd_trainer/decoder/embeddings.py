"""Token and position embeddings, and the projection to the vocabulary."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from spmd_trainer.decoder.axes import SpecLayer


class Embedding(SpecLayer):
    """A vector for each token id or position.

    Attributes:
      num_rows: number of ids.
      rows_axis: logical axis of the ids.
    """

    num_rows: int = 0
    rows_axis: str = "vocab"

    def setup(self) -> None:
        self.add_weight("w", (self.num_rows, self.spec.model_dims), (self.rows_axis, "embed"))

    def __call__(self, ids: jax.Array) -> jax.Array:
        """Returns [batch, time, model_dims] for ids [batch, time]."""
        # The batch is split over the axes of 'embed', so the lookup needs whole rows.
        rows = self.split(self.read("w"), self.rows_axis, "norm")
        return self.split(jnp.take(rows, ids, axis=0, mode="clip"), "batch", "length", "activation_embed")

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns x [batch, time, model_dims] times all rows, float32 [batch, time, num_rows]."""
        return jnp.einsum("btd,vd->btv", x, self.read("w"), preferred_element_type=jnp.float32)


class Logits(SpecLayer):
    """Projection to the vocabulary."""

    def setup(self) -> None:
        self.add_weight("w", (self.spec.model_dims, self.spec.vocab_size), ("embed", "vocab"))

    def logits(self, x: jax.Array) -> jax.Array:
        """Returns float32 [batch, time, vocab_size] for [batch, time, model_dims]."""
        return jnp.einsum("btd,dv->btv", x, self.read("w"), preferred_element_type=jnp.float32)
