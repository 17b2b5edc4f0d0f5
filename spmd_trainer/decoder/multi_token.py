"""Multi-token prediction (DeepSeek V3, arXiv:2412.19437, section 2.2): an additional loss for tokens after the next one.

Multi-token layer k = 1, 2, ... gets the hidden states of multi-token layer k - 1 (for k = 1, those of the model) and, at each
position, the embedding of the token k positions later. It predicts the token k + 1 positions later. These layers use the
model's embedding and output layer. Decoding doesn't use them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from praxis.layers.checkpoint_policy import AutodiffCheckpointType, custom_policy

from spmd_trainer.decoder.axes import Norm, Projection, SpecLayer
from spmd_trainer.decoder.context import PADDING, Context
from spmd_trainer.decoder.layers import DecoderLayer
from spmd_trainer.kernels.cross_entropy import TokenLosses


class Rows(NamedTuple):
    """A batch of whole rows with their labels, in row order.

    Attributes:
      ids: token ids, int32 [batch, time].
      class_ids, class_weights: the labels, which are the next tokens, and their weights, [batch, time].
      segment_ids: int32 [batch, time], the text that each token belongs to.
    """

    ids: jax.Array
    class_ids: jax.Array
    class_weights: jax.Array
    segment_ids: jax.Array

    def later(self, count: int) -> Rows:
        """Returns the rows shifted by `count`, so that each position has the entries of the token `count` positions later.

        A weight becomes 0 if the later token belongs to a different text than the token at the position.
        """

        def moved(x: jax.Array, fill: int) -> jax.Array:
            return jnp.pad(x[:, count:], ((0, 0), (0, min(count, x.shape[1]))), constant_values=fill)

        segment_ids = moved(self.segment_ids, PADDING)
        weights = moved(self.class_weights.astype(jnp.float32), 0) * (segment_ids == self.segment_ids)
        return Rows(moved(self.ids, 0), moved(self.class_ids, 0), weights, segment_ids)


class MultiTokenLayer(SpecLayer):
    """One multi-token prediction layer. Its caller applies `final_norm` to its output, before the model's output layer."""

    def setup(self) -> None:
        dims, last = self.spec.model_dims, self.spec.layers[-1]
        for name in ("token", "hidden"):
            self.child(f"{name}_norm", Norm, shape=(dims,))
            self.child(
                name,
                Projection,
                equation="btc,cd->btd",
                shape=(dims, dims),
                split_axes=("embed", "norm"),
                output_axes=("batch", "length", "activation_embed"),
            )
        self.child("layer", DecoderLayer, layer_kind=last.kind, has_experts=last.has_experts)
        self.child("final_norm", Norm, shape=(dims,))

    def __call__(self, hidden: jax.Array, embedded: jax.Array, context: Context) -> jax.Array:
        """Returns new hidden states, made from hidden states and embeddings of later tokens; all [batch, time, model_dims]."""
        joined = self.token(self.token_norm(embedded)) + self.hidden(self.hidden_norm(hidden))
        output: jax.Array = self.layer(joined, context)
        return output


class MultiTokenPrediction(SpecLayer):
    """All multi-token prediction layers: `layer_0`, `layer_1`, ...

    Attributes:
      checkpoint_policy: rematerialization policy of each layer.
    """

    checkpoint_policy: AutodiffCheckpointType = AutodiffCheckpointType.SAVE_NOTHING

    def setup(self) -> None:
        for index in range(self.spec.mtp_layers):
            self.child(f"layer_{index}", MultiTokenLayer)

    def __call__(
        self,
        hidden: jax.Array,
        rows: Rows,
        context: Context,
        embed: Callable[[jax.Array], jax.Array],
        token_losses: Callable[[jax.Array, jax.Array], TokenLosses],
    ) -> None:
        """Adds the auxiliary loss `multi_token`, the layers' mean cross entropy times `mtp_weight`, and a summary per layer.

        Args:
          hidden: the model's hidden states after its final norm, [batch, padded time, model_dims], in the order `context.order`.
          rows: the model's inputs and labels. In each layer, a label has the weight that it has in the model's own loss, or 0
            if it belongs to a different text than the token at its position.
          context: context of the model's forward pass.
          embed: function (ids) -> embeddings, in the order `context.order`.
          token_losses: function (hidden states, labels) -> losses of the tokens, in the same order.
        """
        order = context.order
        assert order is not None  # None only in decode steps

        def run(layer: MultiTokenLayer, hidden: jax.Array, embedded: jax.Array) -> jax.Array:
            return layer(hidden, embedded, context)

        run = nn.remat(run, policy=custom_policy(self.checkpoint_policy))
        total = jnp.zeros((), jnp.float32)
        for index in range(self.spec.mtp_layers):
            layer = getattr(self, f"layer_{index}")
            later = rows.later(index + 1)
            hidden = run(layer, hidden, embed(order.apply(later.ids)))
            losses = token_losses(layer.final_norm(hidden), order.apply(later.class_ids))
            weights = order.apply(later.class_weights)
            mean = jnp.sum(losses.xent * weights) / (jnp.sum(weights) + 1e-6)
            self.add_summary(f"multi_token_xent_{index + 1}", mean)
            total += mean
        self.add_aux_loss("multi_token", total * (self.spec.mtp_weight / self.spec.mtp_layers))
