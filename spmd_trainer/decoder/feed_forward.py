"""Feed-forward layers: plain, gated, and as a mixture of experts."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.decoder.axes import Projection, SpecLayer
from spmd_trainer.kernels import token_groups
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.kernels.token_groups import Groups, TokenParts
from spmd_trainer.models.decoder_spec import MoeSpec
from spmd_trainer.step import masks

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
            # reach the gradient of token 0: XLA does not mask the added rows of a scatter. The bound is half of the least sum:
            # where both are equal, the gradient of a maximum would be shared by them.
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), 0.5 / moe.num_experts)
        return probabilities, experts, weights


class ExpertProjection(SpecLayer):
    """A matrix for each expert, and the product of sorted rows with them.

    Attributes:
      shape: E, K and N.
      split_axes: logical axes of `shape`.
    """

    shape: Any = ()
    split_axes: Any = ()

    def setup(self) -> None:
        moe = moe_of(self)
        share = f"{masks.READ_PER_TOKEN}{moe.num_experts_per_token}/{moe.num_experts}"
        self.add_weight("w", self.shape, self.split_axes, collections=[share])

    def __call__(self, rows: jax.Array, groups: Groups, parts: TokenParts) -> jax.Array:
        """Returns [S, X, M, N] for sorted rows [S, X, M, K]."""
        split = parts.split(*map(self.mesh_axes, self.split_axes[1:]))
        out = grouped_dot(
            rows,
            self.read("w"),
            groups.sizes,
            split=split,
            pair=groups.pair,
            num_pairs=groups.num_pairs,
            name=self.path,
        )
        # JAX's policies that save matrix products know them by their primitive. This one, with the number 1, makes them save the
        # experts' products too; XLA removes it.
        no_dims: tuple[int, ...] = ()
        one, numbers = jnp.ones((), out.dtype), ((no_dims, no_dims), (no_dims, no_dims))
        return jax.lax.dot_general(out, one, numbers, precision=jax.lax.Precision.HIGHEST)


class MixtureOfExperts(SpecLayer):
    """Gated feed-forward layers (experts). The router chooses some experts for each token, and drops no token.

    Each token is computed by its experts only: tokens are sorted by expert (`kernels.token_groups`), multiplied by group
    (`kernels.grouped_dot`), and put back.
    """

    def setup(self) -> None:
        moe, outer = moe_of(self), self.spec.model_dims
        self.child("router", Router)
        into = ((moe.num_experts, outer, moe.hidden_dims), ("experts", "embed", "expert_mlp"))
        back = ((moe.num_experts, moe.hidden_dims, outer), ("experts", "expert_mlp", "embed"))
        for name, (shape, split_axes) in {"gate": into, "up": into, "down": back}.items():
            self.child(name, ExpertProjection, shape=shape, split_axes=split_axes)

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """Computes the layer, and adds the load-balancing loss if it has a weight. Returns the shape of x.

        Args:
          x: [batch, time, model_dims].
          real: bool [batch, time], False for padding, which is left out of the load.
        """
        moe = moe_of(self)
        probabilities, experts, weights = self.router(x)
        if moe.aux_loss_weight:
            self._add_load_balancing_loss(probabilities, experts, real)
        batch, length, over = map(self.mesh_axes, ("batch", "length", "experts"))
        parts = TokenParts.of(x, moe.num_experts, batch=batch, length=length, experts=over)
        groups = token_groups.sort(experts, parts)
        # Whole tokens on each device, as the sort needs them.
        rows = token_groups.dispatch(self.split(x, "batch", "length", "norm"), groups, parts)
        gate, up = self.gate(rows, groups, parts), self.up(rows, groups, parts)
        hidden = checkpoint_name(ACTIVATION_FNS[self.spec.activation](gate) * up, "ffn1")
        output = token_groups.combine(self.down(hidden, groups, parts), weights, groups, parts)
        output = self.split(output, "batch", "length", "norm")
        return checkpoint_name(self.split(output, "batch", "length", "activation_embed"), "ffn2")

    def _add_load_balancing_loss(self, probabilities: jax.Array, experts: jax.Array, real: jax.Array) -> None:
        moe = moe_of(self)
        share = real / jnp.maximum(jnp.sum(real), 1)
        # A sum that XLA fuses, instead of one-hot vectors for all tokens and experts.
        is_chosen = experts[..., None] == jnp.arange(moe.num_experts)
        load = jnp.sum(jnp.where(is_chosen, share[..., None, None], 0.0), axis=(0, 1, 2))
        mean_probability = jnp.einsum("bte,bt->e", probabilities, share)
        loss = moe.num_experts * jnp.sum(load * mean_probability)
        self.add_aux_loss("load_balancing", loss * moe.aux_loss_weight / self.spec.num_layers)


def moe_of(layer: SpecLayer) -> MoeSpec:
    """Returns the settings of the experts, which must be set."""
    moe = layer.spec.moe
    assert moe is not None  # only specs with experts build the layers that ask
    return moe
