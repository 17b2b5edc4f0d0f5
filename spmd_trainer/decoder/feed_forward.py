"""Feed-forward layers: plain, gated, and as a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.decoder.axes import Projection, SpecLayer
from spmd_trainer.models.decoder_spec import MoeSpec

ACTIVATION_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class FeedForward(SpecLayer):
    """down(activation(gate(x)) * up(x)) if the spec is gated, otherwise down(activation(up(x)))."""

    def setup(self) -> None:
        outer, inner = self.spec.model_dims, self.spec.hidden_dims
        into = ((outer, inner), ("embed", "mlp"), "activation_mlp")
        parts = {"gate": into, "up": into, "down": ((inner, outer), ("mlp", "embed"), "activation_embed")}
        for name, (shape, split_axes, activation_axis) in parts.items():
            if name != "gate" or self.spec.gated:
                self.child(
                    name,
                    Projection,
                    equation="btd,df->btf",
                    shape=shape,
                    split_axes=split_axes,
                    bias_axes=("norm",) if self.spec.mlp_bias else (),
                    output_axes=("batch", "length", activation_axis),
                )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, time, model_dims] for the same shape."""
        activation = ACTIVATION_FNS[self.spec.activation]
        up = self.up(x)
        hidden = activation(self.gate(x)) * up if self.spec.gated else activation(up)
        output: jax.Array = self.down(checkpoint_name(hidden, "ffn1"))
        return checkpoint_name(output, "ffn2")


class Router(SpecLayer):
    """Chooses each token's experts."""

    def setup(self) -> None:
        moe = moe_of(self)
        self.add_weight("w", (self.spec.model_dims, moe.num_experts), ("embed", "router"))

    def __call__(self, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the probabilities of all experts, and each token's experts with their weights. `x`: [batch, time,
        model_dims].

        Returns:
          float32 [batch, time, E], int32 [batch, time, num_experts_per_token], and float32 of that shape.
        """
        moe = moe_of(self)
        logits = jnp.einsum("btd,de->bte", x, self.read("w"), preferred_element_type=jnp.float32)
        probabilities = jax.nn.softmax(logits, axis=-1)
        weights, experts = jax.lax.top_k(probabilities, moe.num_experts_per_token)
        if moe.normalise_top_k:
            # The sum is 1 / E or more. Rows that XLA adds where the mesh does not divide the batch have 0, and their 0 / 0 would
            # reach the gradient of token 0: XLA does not mask the added rows of a scatter.
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 1 / moe.num_experts)
        return probabilities, experts, weights


class MixtureOfExperts(SpecLayer):
    """Gated feed-forward layers (experts). The router chooses some experts for each token, and drops no token.

    Every expert computes every token, and its output is multiplied by the router's weight (0 if not chosen). This partitions
    over any mesh without moving tokens, but costs E / num_experts_per_token times the arithmetic.
    """

    def setup(self) -> None:
        moe, outer = moe_of(self), self.spec.model_dims
        self.child("router", Router)
        for name in ("gate", "up"):
            shape, split_axes = (moe.num_experts, outer, moe.hidden_dims), ("experts", "embed", "expert_mlp")
            self.child(name, Projection, equation="btd,edf->btef", shape=shape, split_axes=split_axes)
        self.child(
            "down",
            Projection,
            equation="btef,efd->btd",
            shape=(moe.num_experts, moe.hidden_dims, outer),
            split_axes=("experts", "expert_mlp", "embed"),
            output_axes=("batch", "length", "activation_embed"),
        )

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """Computes the layer, and adds the load-balancing loss if it has a weight. Returns the shape of x.

        Args:
          x: [batch, time, model_dims].
          real: bool [batch, time], False for padding, which is left out of the load.
        """
        moe = moe_of(self)
        probabilities, experts, weights = self.router(x)
        chosen = jax.nn.one_hot(experts, moe.num_experts, dtype=jnp.float32)
        if moe.aux_loss_weight:
            self._add_load_balancing_loss(probabilities, chosen, real)
        per_expert = jnp.einsum("btk,btke->bte", weights, chosen)
        hidden = ACTIVATION_FNS[self.spec.activation](self.gate(x)) * self.up(x)
        hidden = self.split(hidden, "batch", "length", "activation_experts", "expert_mlp")
        hidden = checkpoint_name(hidden * per_expert[..., None].astype(hidden.dtype), "ffn1")
        output: jax.Array = self.down(hidden)
        return checkpoint_name(output, "ffn2")

    def _add_load_balancing_loss(self, probabilities: jax.Array, chosen: jax.Array, real: jax.Array) -> None:
        moe = moe_of(self)
        share = real / jnp.maximum(jnp.sum(real), 1)
        load = jnp.einsum("btke,bt->e", chosen, share)
        mean_probability = jnp.einsum("bte,bt->e", probabilities, share)
        loss = moe.num_experts * jnp.sum(load * mean_probability)
        self.add_aux_loss("load_balancing", loss * moe.aux_loss_weight / self.spec.num_layers)


def moe_of(layer: SpecLayer) -> MoeSpec:
    """Returns the settings of the experts, which must be set."""
    moe = layer.spec.moe
    assert moe is not None  # only specs with experts build the layers that ask
    return moe
