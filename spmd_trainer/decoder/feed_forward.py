"""Feed-forward layers: plain, gated, and mixtures of experts."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.decoder.axes import Projection, SpecLayer
from spmd_trainer.decoder.router import Router, moe_of, parts_of
from spmd_trainer.kernels import token_groups
from spmd_trainer.kernels.grouped_dot import grouped_dot
from spmd_trainer.kernels.token_groups import Groups, TokenParts
from spmd_trainer.step import masks

ACTIVATION_FNS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
    "relu": jax.nn.relu,
}


class FeedForward(SpecLayer):
    """Feed-forward layer: down(activation(gate(x)) * up(x)) if `spec.gated`, otherwise down(activation(up(x))).

    Attributes:
      hidden_dims: width of the hidden activations; 0 for `spec.hidden_dims`.
    """

    hidden_dims: int = 0

    def setup(self) -> None:
        outer, inner = self.spec.model_dims, self.hidden_dims or self.spec.hidden_dims
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
        """Returns the layer's output, [batch, time, model_dims], for x of the same shape."""
        activation = ACTIVATION_FNS[self.spec.activation]
        up = self.up(x)
        hidden = activation(self.gate(x)) * up if self.spec.gated else activation(up)
        output: jax.Array = self.down(checkpoint_name(hidden, "ffn1"))
        return checkpoint_name(output, "ffn2")


class ExpertProjection(SpecLayer):
    """A weight matrix, and a bias if `spec.moe.biases`, for each expert. Multiplies each row by the matrix of its expert.

    Attributes:
      shape: [E, K, N]: number of experts, width of the input, width of the output.
      split_axes: logical axes of `shape`.
    """

    shape: Any = ()
    split_axes: Any = ()

    def setup(self) -> None:
        moe = moe_of(self)
        share = f"{masks.READ_PER_TOKEN}{moe.num_experts_per_token}/{moe.num_experts}"
        self.add_weight("w", self.shape, self.split_axes, collections=[share])
        if moe.biases:
            self.add_weight("b", self.shape[::2], self.split_axes[::2], init=0.0, collections=[share])

    def __call__(self, rows: jax.Array, groups: Groups, parts: TokenParts) -> jax.Array:
        """Multiplies rows [S, X, M, K], sorted by expert, by their experts' matrices. Returns [S, X, M, N].

        There are S token shards, X expert shards, M rows in each, K inputs and N outputs; see `grouped_dot`.
        """
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
        if moe_of(self).biases:
            # The bias is a product with one input, so that its gradient is summed over the rows of each group. It is negated
            # twice, because LoRA takes a variable that only products read for a matrix.
            inputs, weights = jnp.full((*rows.shape[:3], 1), -1, rows.dtype), -self.read("b")[:, None]
            of_bias = dataclasses.replace(split, inputs=())
            out += grouped_dot(
                inputs, weights, groups.sizes, split=of_bias, pair=groups.pair, num_pairs=groups.num_pairs
            )
        # JAX's policies that save matrix products recognize them by their primitive. This product with the number 1 makes the
        # policies save the experts' products too; XLA removes it.
        no_dims: tuple[int, ...] = ()
        one, numbers = jnp.ones((), out.dtype), ((no_dims, no_dims), (no_dims, no_dims))
        return jax.lax.dot_general(out, one, numbers, precision=jax.lax.Precision.HIGHEST)


class MixtureOfExperts(SpecLayer):
    """A mixture of gated feed-forward layers (experts). The router chooses some experts for each token, and drops no token.

    Shared experts are one feed-forward layer, applied to all tokens. Its output is added to that of the routed experts.

    A routed expert is applied only to the tokens for which it was chosen: tokens are sorted by expert (`kernels.token_groups`),
    multiplied by their expert's matrices (`kernels.grouped_dot`), and put back in order.
    """

    def setup(self) -> None:
        moe, outer = moe_of(self), self.spec.model_dims
        self.child("router", Router)
        into = ((moe.num_experts, outer, moe.hidden_dims), ("experts", "embed", "expert_mlp"))
        back = ((moe.num_experts, moe.hidden_dims, outer), ("experts", "expert_mlp", "embed"))
        for name, (shape, split_axes) in {"gate": into, "up": into, "down": back}.items():
            self.child(name, ExpertProjection, shape=shape, split_axes=split_axes)
        if moe.shared_dims:
            self.child("shared", FeedForward, hidden_dims=moe.shared_dims)
        if moe.shared_gate:
            self.child(
                "shared_gate", Projection, equation="btd,do->bto", shape=(outer, 1), split_axes=("embed", "norm")
            )

    def __call__(self, x: jax.Array, real: jax.Array) -> jax.Array:
        """Applies the experts to all tokens. Returns [batch, time, model_dims].

        Args:
          x: [batch, time, model_dims].
          real: bool [batch, time], False for padding, which the router's losses leave out.
        """
        moe = moe_of(self)
        experts, weights = self.router(x, real)
        parts = parts_of(self, x)
        groups = token_groups.sort(experts, parts)
        # Each device needs whole tokens for the sort.
        rows = token_groups.dispatch(self.split(x, "batch", "length", "norm"), groups, parts)
        if moe.weigh_inputs:
            rows *= token_groups.weights_of_rows(weights, groups, parts).astype(rows.dtype)
            weights = jnp.ones_like(weights)
        gate, up = self.gate(rows, groups, parts), self.up(rows, groups, parts)
        hidden = checkpoint_name(self._activated(gate, up), "ffn1")
        output = token_groups.combine(self.down(hidden, groups, parts), weights, groups, parts)
        output = self.split(output, "batch", "length", "norm")
        output = checkpoint_name(self.split(output, "batch", "length", "activation_embed"), "ffn2")
        return output + self._shared(x) if moe.shared_dims else output

    def _shared(self, x: jax.Array) -> jax.Array:
        output: jax.Array = self.shared(x)
        return output * jax.nn.sigmoid(self.shared_gate(x)) if moe_of(self).shared_gate else output

    def _activated(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        moe = moe_of(self)
        if moe.swiglu_limit is None:
            return ACTIVATION_FNS[self.spec.activation](gate) * up
        gate, up = jnp.minimum(gate, moe.swiglu_limit), jnp.clip(up, -moe.swiglu_limit, moe.swiglu_limit)
        return gate * jax.nn.sigmoid(moe.swiglu_alpha * gate) * (up + 1)
