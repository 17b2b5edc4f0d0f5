"""The router of a mixture of experts: it scores all experts for each token, and chooses some by the rules of `MoeSpec`."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from praxis import base_layer

from spmd_trainer.decoder.axes import SpecLayer
from spmd_trainer.kernels import token_groups
from spmd_trainer.kernels.token_groups import TokenParts
from spmd_trainer.models.decoder_spec import MoeSpec
from spmd_trainer.step import masks

# Lower bound for the sum by which a token's scores are divided. Its square is a normal float32.
_LEAST_SUM = 1e-18


class Router(SpecLayer):
    """Chooses each token's experts. Computes in float32, from float32 weights, whatever the dtype of the model."""

    def setup(self) -> None:
        moe, exact = moe_of(self), base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION
        self.add_weight("w", (self.spec.model_dims, moe.num_experts), ("embed", "router"), collections=[exact])
        if moe.biases:
            self.add_weight("b", (moe.num_experts,), ("router",), init=0.0, collections=[exact])
        if moe.choice_bias:
            moved = [exact, f"{masks.MOVED_BY_LOAD}{moe.choice_bias_rate}"] if moe.choice_bias_rate else [exact]
            self.add_weight(
                "choice_bias", (moe.num_experts,), ("router",), init=0.0, collections=moved, trainable=False
            )

    def __call__(self, x: jax.Array, real: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns each token's experts, int32 [batch, time, num_experts_per_token], and their weights, float32.

        Also adds the auxiliary losses with nonzero weights and, in training, a summary of the load (tokens of each expert).

        Args:
          x: [batch, time, model_dims].
          real: bool [batch, time], False for padding, which the losses and the load leave out.
        """
        moe = moe_of(self)
        exact = jax.lax.Precision.HIGHEST  # by default a TPU multiplies in bfloat16, and a GPU in TF32
        logits = jnp.einsum("btd,de->bte", *(v.astype(jnp.float32) for v in (x, self.theta.w)), precision=exact)
        if moe.biases:
            logits = logits + self.theta.b.astype(jnp.float32)
        scores = jax.nn.softmax(logits, axis=-1) if moe.score == "softmax" else jax.nn.sigmoid(logits)
        # The sigmoids of large logits are all rounded to 1, so the logits, which have the same order, rank experts better.
        by_logits = moe.score == "sigmoid" and not moe.choice_bias and moe.num_groups == 1
        experts = self._chosen(jax.lax.stop_gradient(logits if by_logits else scores))
        if moe.aux_loss_weight or not self.do_eval:
            tokens = _tokens_of_experts(experts, real, moe.num_experts)
            if not self.do_eval:
                # The choice biases are updated from this summary, so it is written at any verbosity.
                self.add_summary(masks.LOAD, tokens, base_layer.SummaryType.HISTOGRAM, verbosity=0)
            self._add_load_balancing_loss(scores, tokens, real)
        if moe.z_loss_weight:
            squares = jnp.square(jax.nn.logsumexp(logits, axis=-1))
            loss = jnp.sum(squares * _shares(real))
            self.add_aux_loss("router_z", loss * moe.z_loss_weight / self.spec.num_layers_with_experts)
        weights = _scores_of(experts, scores)
        if moe.normalise_top_k:
            # Rows that XLA adds where the mesh does not divide the batch have the sum 0.
            weights = weights / jnp.maximum(jnp.sum(weights, axis=-1, keepdims=True), _LEAST_SUM)
        return experts, weights if moe.scaling_factor == 1 else weights * moe.scaling_factor

    def _chosen(self, scores: jax.Array) -> jax.Array:
        """Chooses each token's experts by the scores [batch, time, experts], plus `choice_bias` if the spec has one."""
        if moe_of(self).choice_bias:
            scores = scores + self.get_var("choice_bias")
        return token_groups.for_each_token(functools.partial(_best, moe_of(self)), scores, parts_of(self, scores))

    def _add_load_balancing_loss(self, scores: jax.Array, tokens: jax.Array, real: jax.Array) -> None:
        moe = moe_of(self)
        if not moe.aux_loss_weight:
            return
        if moe.score == "sigmoid":
            scores = scores / jnp.maximum(jnp.sum(scores, axis=-1, keepdims=True), _LEAST_SUM)
        load = tokens / jnp.maximum(jnp.sum(real), 1)
        loss = moe.num_experts * jnp.sum(load * jnp.einsum("bte,bt->e", scores, _shares(real)))
        self.add_aux_loss("load_balancing", loss * moe.aux_loss_weight / self.spec.num_layers_with_experts)


def moe_of(layer: SpecLayer) -> MoeSpec:
    """Returns `layer.spec.moe`, which must not be None."""
    moe = layer.spec.moe
    assert moe is not None  # only specs with experts build the layers that call this
    return moe


def parts_of(layer: SpecLayer, x: jax.Array) -> TokenParts:
    """Returns how the mesh splits the experts and the tokens `x`, [batch, time, ...]."""
    batch, length, experts = map(layer.mesh_axes, ("batch", "length", "experts"))
    return TokenParts.of(x, moe_of(layer).num_experts, batch=batch, length=length, experts=experts)


def _best(moe: MoeSpec, scores: jax.Array) -> jax.Array:
    """Returns the experts with the highest scores in the best `num_chosen_groups` groups. `scores`: [batch, time, experts].

    The score of a group is the sum of the two highest scores in it.
    """
    if moe.num_chosen_groups < moe.num_groups:
        by_group = scores.reshape(*scores.shape[:2], moe.num_groups, -1)
        best = jnp.sum(jax.lax.top_k(by_group, 2)[0], axis=-1)
        _, groups = jax.lax.top_k(best, moe.num_chosen_groups)
        is_kept = jnp.any(groups[..., None] == jnp.arange(moe.num_groups), axis=-2)
        scores = jnp.where(is_kept[..., None], by_group, jnp.finfo(scores.dtype).min).reshape(scores.shape)
    experts: jax.Array = jax.lax.top_k(scores, moe.num_experts_per_token)[1]
    return experts


def _shares(real: jax.Array) -> jax.Array:
    """Returns each token's weight in a mean over all tokens that are not padding, [batch, time]; 0 for padding."""
    return real / jnp.maximum(jnp.sum(real), 1)


def _tokens_of_experts(experts: jax.Array, real: jax.Array, num_experts: int) -> jax.Array:
    """Returns each expert's number of tokens, float32 [num_experts]. Counted in int32, so it doesn't depend on the mesh."""
    # A sum that XLA fuses, instead of one-hot vectors for all tokens and experts.
    is_chosen = (experts[..., None] == jnp.arange(num_experts)) & real[..., None, None]
    return jnp.sum(is_chosen, axis=(0, 1, 2), dtype=jnp.int32).astype(jnp.float32)


# With this, the backward pass stores no one-hot vectors of tokens and experts, and needs no scatter, which XLA would not split.
@jax.checkpoint
def _scores_of(experts: jax.Array, scores: jax.Array) -> jax.Array:
    """Returns the scores of the chosen experts, [batch, time, num_experts_per_token]."""
    is_chosen = experts[..., None] == jnp.arange(scores.shape[-1])
    return jnp.sum(jnp.where(is_chosen, scores[..., None, :], 0.0), axis=-1)
