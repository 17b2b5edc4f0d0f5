"""Cheaper versions of praxis' layers, with the same variables, and the same results up to rounding.

`use_cheaper_layers(task_p.model)` replaces layer norms, and the softmax that shares its weights with the token embedding. The
experiments of `model_params` call it. In praxis, the embedding lookup is also a matrix product with the softmax's weights. In
this module it isn't, so LoRA adapters of the softmax have different shapes than in praxis.

`use_fused_loss_in(task_p.model)` makes softmaxes compute the loss without storing the logits; see `FusedFullSoftmax`.
Experiments with USE_FUSED_ATTENTION call it.
"""

from __future__ import annotations

from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors
from flax import linen as nn
from praxis import base_layer, layers
from praxis.layers import base_ops, linears

from spmd_trainer.kernels import cross_entropy
from spmd_trainer.sharding.specs import entry_axes


class LayerNorm(layers.LayerNorm):
    """praxis' `LayerNorm` (Ba et al. 2016, arXiv:1607.06450), with one subtraction of the mean instead of two.

    Fields and variables are those of praxis' layer, and results are equal up to rounding.
    """

    def __call__(self, inputs: jax.Array, paddings: jax.Array | None = None) -> jax.Array:
        """Normalizes the last dimension of `inputs`. Returns [..., dim], in the wider of the inputs' and variables' dtypes."""
        del paddings
        x = inputs.astype(jnp.float32) if self.reductions_in_fp32 else inputs
        centred = x - jnp.mean(x, axis=-1, keepdims=True)
        variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
        normed = centred * jax.lax.rsqrt(variance + self.epsilon)
        if self.reductions_in_fp32:
            normed = normed.astype(inputs.dtype)
        if self.use_scale:
            normed *= self.theta.scale if self.direct_scale else 1 + self.theta.scale
        if self.use_bias:
            normed += self.theta.bias
        return normed


def use_layer_norm(model_p: Any) -> None:
    """Replaces praxis' `LayerNorm`, but not its subclasses, with this module's `LayerNorm` in a model's config, in place."""
    for norm_p in selectors.select(model_p, layers.LayerNorm, match_subclasses=False):
        fdl.update_callable(norm_p, LayerNorm)


class SharedEmbeddingSoftmax(layers.SharedEmbeddingSoftmax):
    """praxis' `SharedEmbeddingSoftmax` with a cheaper embedding lookup. Fields and variables are the same.

    With lookup_style 'matmul', praxis multiplies the embedding table by one-hot ids. This layer gathers rows of the table
    instead. The backward pass still computes praxis' matrix product, because a scatter-add in bfloat16 would round after each
    token, and would add in no fixed order on GPUs. Sequences longer than 1,024 tokens are multiplied in chunks of 1,024.
    """

    def emb_lookup(self, ids: jax.Array) -> jax.Array:
        """Returns the embeddings [..., input_dims] of the token ids `ids` [...]; zeros for ids that are not in the table."""
        if self.lookup_style != "matmul" or fdl.get_callable(self.einsum_tpl) is not base_ops.EinsumOp:
            return super().emb_lookup(ids)
        table = jnp.transpose(self.logits_ffn.linear.theta.w)
        embeddings = _rows_of(
            ids, base_layer.maybe_shard(table, [self._row_axes() or None, None], self.mesh_axis_names)
        )
        if self.scale_sqrt_depth:
            embeddings *= self.input_dims**0.5
        return base_layer.maybe_shard(
            embeddings, self.activation_split_dims_mapping.emb_out_split_dims_mapping, self.mesh_axis_names
        )

    @nn.nowrap
    def _row_axes(self) -> tuple[str, ...]:
        """Returns the mesh axes over which the vocabulary dimension of the weights [input_dims, num_classes] is split."""
        splits = self.weight_split_dims_mapping.wt
        return entry_axes(splits[1]) if splits is not None and self.mesh_axis_names is not None else ()


# Number of tokens per sequence whose one-hot ids exist at the same time, in the backward pass of a lookup.
_LOOKUP_TOKENS = 1024


@jax.custom_vjp
def _rows_of(ids: jax.Array, table: jax.Array) -> jax.Array:
    return table.at[ids].get(mode="fill", fill_value=0, wrap_negative_indices=False)


def _rows_forward(ids: jax.Array, table: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _rows_of(ids, table), (ids, table)


def _rows_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[None, jax.Array]:
    ids, table = residuals
    length = ids.shape[-1] if ids.ndim else 1
    if length <= _LOOKUP_TOKENS:
        return None, _one_hot_product(ids, table, gradient).astype(table.dtype)
    if missing := -length % _LOOKUP_TOKENS:
        ids = jnp.pad(ids, [(0, 0)] * (ids.ndim - 1) + [(0, missing)], constant_values=-1)  # -1 as one-hot is zeros
        gradient = jnp.pad(gradient, [(0, 0)] * (gradient.ndim - 2) + [(0, missing), (0, 0)])

    def add(total: jax.Array, part: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
        return total + _one_hot_product(part[0], table, part[1]), None

    # The sequences' chunks one after another: the one-hot ids of all tokens would be as large as the logits.
    parts = (
        jnp.moveaxis(ids.reshape(*ids.shape[:-1], -1, _LOOKUP_TOKENS), -2, 0),
        jnp.moveaxis(gradient.reshape(*ids.shape[:-1], -1, _LOOKUP_TOKENS, gradient.shape[-1]), -3, 0),
    )
    total = jax.lax.scan(add, jnp.zeros(table.shape, jnp.float32), parts)[0]
    return None, total.astype(table.dtype)


def _one_hot_product(ids: jax.Array, table: jax.Array, gradient: jax.Array) -> jax.Array:
    one_hot = jax.nn.one_hot(ids, table.shape[0], dtype=table.dtype)
    product: jax.Array = jnp.einsum("...v,...d->vd", one_hot, gradient, preferred_element_type=jnp.float32)
    return product


_rows_of.defvjp(_rows_forward, _rows_backward)


class FusedFullSoftmax(layers.FullSoftmax):
    """praxis' `FullSoftmax`, except that the loss is computed in blocks of tokens; see `kernels.cross_entropy`.

    Fields and variables are the same, and results are equal up to rounding: logits stay in float32, while praxis rounds them to
    the dtype of the inputs. If a program uses the outputs 'logits' or 'log_probs', these are computed in addition to the loss.
    praxis' own code computes the loss in four cases: inputs that aren't [batch, time, input_dims], class probabilities as
    labels, bi-tempered losses, and a projection that isn't praxis' plain `FeedForward`.
    """

    def __call__(
        self,
        inputs: jax.Array,
        class_weights: jax.Array,
        class_ids: jax.Array | None = None,
        class_probabilities: jax.Array | None = None,
        input_ids: jax.Array | None = None,
    ) -> base_layer.NestedMap:
        """Computes the loss. Arguments and result are those of praxis' `FullSoftmax`."""
        output = super().__call__(inputs, class_weights, class_ids, class_probabilities, input_ids)
        if output.logits is not None and self._in_blocks(inputs, class_probabilities):
            logits = self.get_logits(inputs).astype(jnp.float32)
            output.logits, output.log_probs = (
                logits.astype(inputs.dtype),
                jax.nn.log_softmax(logits).astype(inputs.dtype),
            )
        return output

    @nn.nowrap
    def _in_blocks(self, inputs: jax.Array, class_probabilities: jax.Array | None) -> bool:
        ffn_p = self.feed_forward_tpl
        return (
            inputs.ndim == 3
            and class_probabilities is None
            and self.bi_tempered_loss_tpl is None
            and ffn_p is not None
            and fdl.get_callable(ffn_p) is linears.FeedForward
            and fdl.get_callable(ffn_p.linear_tpl) is linears.Linear
            and fdl.get_callable(ffn_p.linear_tpl.einsum_tpl) is base_ops.EinsumOp
            and (not ffn_p.has_bias or fdl.get_callable(ffn_p.bias_tpl) is linears.Bias)
        )

    @nn.nowrap
    def _compute_xent(
        self,
        inputs: jax.Array,
        class_ids: jax.Array | None = None,
        class_probabilities: jax.Array | None = None,
    ) -> tuple[jax.Array, ...]:
        """Returns each token's cross entropy and most likely label, and two copies of the log-sum-exps [..., 1] of the logits.

        The copies stand in for the logits and log-probabilities that praxis expects. Its z-loss needs only log-sum-exps.
        """
        if class_ids is None or not self._in_blocks(inputs, class_probabilities):
            return super()._compute_xent(inputs, class_ids, class_probabilities)
        smooths = not self.do_eval or self.label_smoothing_apply_for_eval
        ffn = self.logits_ffn
        found = cross_entropy.cross_entropy(
            inputs * self.input_dims**-0.5 if self.scale_before_logits else inputs,
            jnp.transpose(ffn.linear.theta.w),
            jnp.squeeze(class_ids, axis=-1),
            biases=ffn.bias.theta.b if ffn.has_bias else None,
            softcap=self.soft_cap_logits or None,
            label_smoothing=self.label_smoothing_prob if smooths else 0.0,
            split=self._vocabulary_split(),
        )
        log_sum = found.log_sum[..., None]
        return found.xent, found.argmax, log_sum, log_sum

    @nn.nowrap
    def _vocabulary_split(self) -> cross_entropy.VocabularySplit:
        weights, outputs = self.weight_split_dims_mapping.wt, self.activation_split_dims_mapping.out
        if self.mesh_axis_names is None:
            return cross_entropy.VocabularySplit()
        width, vocab = map(entry_axes, weights if weights is not None else (None, None))
        batch, length = map(entry_axes, outputs[:2] if outputs is not None else (None, None))
        return cross_entropy.VocabularySplit(batch, length, vocab, width)


class FusedSharedEmbeddingSoftmax(FusedFullSoftmax, SharedEmbeddingSoftmax):
    """`SharedEmbeddingSoftmax` with the loss of `FusedFullSoftmax`."""


# The softmaxes of this file, whose weights are [input_dims, num_classes].
SOFTMAXES = (SharedEmbeddingSoftmax, FusedFullSoftmax, FusedSharedEmbeddingSoftmax)
_FUSED = {
    layers.FullSoftmax: FusedFullSoftmax,
    layers.SharedEmbeddingSoftmax: FusedSharedEmbeddingSoftmax,
    SharedEmbeddingSoftmax: FusedSharedEmbeddingSoftmax,
}


def use_fused_loss_in(model_p: Any) -> None:
    """Replaces `FullSoftmax` and `SharedEmbeddingSoftmax` in a config, in place, with classes that have a fused loss.

    Other subclasses of `FullSoftmax` stay as they are. `model_p`: config of a model, or of a part of a model.
    """
    for softmax_p in selectors.select(model_p, layers.FullSoftmax, check_nonempty=False):
        if (cls := fdl.get_callable(softmax_p)) in _FUSED:
            fdl.update_callable(softmax_p, _FUSED[cls])


def use_cheaper_layers(model_p: Any) -> None:
    """Replaces praxis' `LayerNorm` and `SharedEmbeddingSoftmax` in a config, in place, with this module's classes.

    Subclasses of the two stay as they are. `model_p`: config of a model, or of a part of a model.
    """
    use_layer_norm(model_p)
    for softmax_p in selectors.select(
        model_p, layers.SharedEmbeddingSoftmax, match_subclasses=False, check_nonempty=False
    ):
        fdl.update_callable(softmax_p, SharedEmbeddingSoftmax)
