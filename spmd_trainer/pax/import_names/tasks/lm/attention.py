"""praxis' attention layers, computed by the kernels of `spmd_trainer.kernels` without a [batch, 1, time, time] mask.

    class Mine(model_params.TransformerLmSpmdAdafactor, MyDataset):
        USE_FUSED_ATTENTION = True

For other models, call `use_fused_attention_in(model_p)` on the model's config. It replaces attention layers with this module's
fused classes, and `TransformerLm` with a class that passes them segment ids instead of a mask. Variables stay the same. Layers
that still get a mask (encoders, cross-attention, prefix LMs, masks in the batch) use praxis' own attention; so do decode steps.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from fiddle import selectors
from flax import linen as nn
from praxis import base_layer, layers
from praxis.layers import attentions, base_ops, transformer_models

from spmd_trainer.errors import UserError
from spmd_trainer.kernels import attend, kernels
from spmd_trainer.sharding.specs import entry_axes

_MASK_GIVEN = "the layer got a mask instead of segment ids"
LanguageModelType = transformer_models.LanguageModelType


class FusedDotProductAttention(layers.DotProductAttention):
    """praxis' `DotProductAttention`, computed by a fused kernel, which returns no attention probabilities.

    Variables are the same as in praxis. Results are equal up to rounding: praxis rounds the logits, while they stay in float32
    here. Settings that no kernel supports raise errors. praxis' summaries of the logits are missing.

    Only the kernel 'reference' stores logits and probabilities. It is used for dropout of probabilities, and for sequences of
    up to 512 tokens if neither splash (TPU) nor cuDNN (GPU) can be used.

    Attributes:
      kernel: name of the kernel to use, one of `spmd_trainer.kernels.kernels.NAMES`; 'xla' is another name for 'reference'.
        None for the first kernel that can be used on the device.
      causal: True if a token attends to no later token. Set by `SegmentedTransformerLm`; only used with segment ids.
    """

    kernel: str | None = None
    causal: bool = True

    def setup(self) -> None:
        """Builds the layer.

        Raises:
          UserError: no kernel supports one of the layer's settings, or `kernel` is not the name of a kernel.
        """
        if self.kernel not in (None, "xla"):
            kernels.kernel(self.kernel)
        for reason in self._reasons_against():
            raise UserError(f"fused attention can't be used: {reason}; or set USE_FUSED_ATTENTION = False")
        super().setup()

    def _reasons_against(self) -> list[str]:
        checks = {
            "relative_bias_tpl is set; set RELATIVE_BIAS = False": self.relative_bias_tpl is not None,
            "attention_extra_logit is set; set it to None": self.attention_extra_logit is not None,
            "attention_mask_summary is set; set it to False": self.attention_mask_summary,
            "the n-grammer uses attention scores; set ngrammer_tpl to None": self.ngrammer_tpl is not None
            and self.ngrammer_tpl.ngram_using_attention_scores,
            "qk_einsum_tpl or pv_einsum_tpl is not the plain EinsumOp": any(
                fdl.get_callable(tpl) is not base_ops.EinsumOp for tpl in (self.qk_einsum_tpl, self.pv_einsum_tpl)
            ),
        }
        return [reason for reason, applies in checks.items() if applies]

    def _dot_atten(
        self,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        atten_mask: jax.Array,
        relative_bias: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None]:
        """Computes attention. Returns the attention output [batch, time, heads, width], and the probabilities or None.

        Args:
          query, key, value: [batch, time, heads, width].
          atten_mask: either int32 segment ids [batch, time], where a token attends only to tokens of its own segment, or
            praxis' mask [1 or batch, 1, 1 or time, source time] of 0 or a large negative number. With a mask, praxis' own
            attention is used, which also returns the probabilities.
          relative_bias: always None, because `setup` refuses relative biases.

        Raises:
          UserError: `kernel` can't compute this attention.
        """
        kernel = "reference" if self.kernel == "xla" else self.kernel
        if atten_mask.ndim != 2:
            if kernel not in (None, "reference"):
                raise UserError(
                    f"attention kernel {kernel!r} can't be used: {_MASK_GIVEN}. Prefix LMs, encoders, cross-attention and "
                    "batches with a segment_mask have masks; leave the choice to the trainer with None"
                )
            kernels.record(self._layer_path, kernels.Choice("praxis", {"others": [_MASK_GIVEN]}))
            encoded, probabilities = super()._dot_atten(query, key, value, atten_mask, relative_bias)
            return encoded, probabilities
        encoded = attend.attend(
            self._scale_query(self._shard_blnh(query)),
            self._shard_blnh(key),
            self._shard_blnh(value),
            self._pattern(),
            segment_ids=atten_mask,
            split=self._split(),
            # Variables are created without a mesh, on the host's devices.
            kernel=None if self.is_initializing() else kernel,
            context_parallel="all_to_all",  # the only form that takes tokens in order
            dropout=self._dropout(key.dtype),
            name=self._layer_path,
        )
        return self._shard_blnh(encoded), None

    @property
    def _layer_path(self) -> str:
        return "/".join(self.path)

    @nn.nowrap
    def _pattern(self) -> kernels.Pattern:
        head = self.dim_per_head or self.hidden_dim // self.num_heads
        capped = self.atten_logit_cap and self.atten_logit_cap > 0
        return kernels.Pattern(
            causal=self.causal,
            softcap=float(self.atten_logit_cap) if capped else None,
            scale=head**-0.5 if self.scale_logits_by_head_dims else 1.0,
        )

    @nn.nowrap
    def _split(self) -> attend.Split:
        blnh = self.activation_split_dims_mapping.blnh
        if blnh is None or self.mesh_axis_names is None:
            return attend.Split()
        batch, length, heads, _ = (entry_axes(entry) for entry in blnh)
        return attend.Split(batch=batch, length=length, heads=heads)

    @nn.nowrap
    def _dropout(self, dtype: jnp.dtype) -> Callable[[jax.Array], jax.Array] | None:
        """Returns a function that applies praxis' dropout to attention probabilities; None if there is no dropout."""
        if not self.atten_dropout_prob or (self.do_eval and not self.dropout_tpl.dropout_at_eval):
            return None

        def drop(probabilities: jax.Array) -> jax.Array:
            batch, kv_heads, groups, *times = probabilities.shape
            dropped = self.atten_dropout(probabilities.reshape(batch, kv_heads * groups, *times).astype(dtype))
            return dropped.reshape(probabilities.shape)

        return drop


class FusedDotProductAttentionWithLPB(FusedDotProductAttention, attentions.DotProductAttentionWithLPB):
    """`FusedDotProductAttention` that decodes like praxis' `DotProductAttentionWithLPB`."""


class FusedLocalSelfAttention(FusedDotProductAttention, attentions.LocalSelfAttention):
    """praxis' `LocalSelfAttention`, computed by a fused kernel: a token attends to itself and a window of earlier tokens.

    See `FusedDotProductAttention`. If the layer gets segment ids, `block_size` and `simulated` have no effect.
    """

    @nn.nowrap
    def _reasons_against(self) -> list[str]:
        reasons = super()._reasons_against()
        if self.right_context != 0:
            reasons.append(f"right_context is {self.right_context}, and windows end at the query's token; set it to 0")
        if self.scale_logits_by_head_dims and not self.simulated:
            reasons.append("praxis' local attention ignores scale_logits_by_head_dims; set it to False")
        return reasons

    @nn.nowrap
    def _pattern(self) -> kernels.Pattern:
        plain = super()._pattern()
        return kernels.Pattern(causal=True, window=self.left_context, softcap=plain.softcap, scale=plain.scale)


class SegmentedTransformerLm(layers.TransformerLm):
    """praxis' `TransformerLm` for fused attention: passes segment ids [batch, time] to its layers instead of a mask.

    Fields and variables are the same. The attention layers must be fused, see `use_fused_attention_in`.
    """

    @nn.nowrap
    def create_child(self, name: str, params: Any) -> None:
        """Creates a child layer like praxis, but lets attention layers in the child 'transformer' apply the causal mask."""
        if name == "transformer":
            params = params.clone()
            for stack_p in selectors.select(params, layers.StackedTransformer):
                stack_p.mask_self_attention = False
            for attention_p in selectors.select(params, FusedDotProductAttention, check_nonempty=False):
                attention_p.causal = self._is_causal
        super().create_child(name, params)

    @property
    def _is_causal(self) -> bool:
        return self.model_type == LanguageModelType.CAUSAL

    def __call__(
        self,
        inputs: jax.Array,
        paddings: jax.Array,
        labels: base_layer.NestedMap | None = None,
        segment_ids: jax.Array | None = None,
        segment_pos: jax.Array | None = None,
        causal_attention_mask: jax.Array | None = None,
        segment_mask: jax.Array | None = None,
        start_time_step: int = 0,
        **input_kwargs: Any,
    ) -> Any:
        """Computes logits, and the loss if there are labels. Arguments and result are those of praxis' `TransformerLm`."""
        if segment_mask is not None:
            if self._is_causal:  # praxis' stack would add it
                causal = attentions.causal_mask(jnp.zeros((1, inputs.shape[1], 1), segment_mask.dtype))
                segment_mask = attentions.merge_masks(segment_mask, causal)
        elif self.model_type != LanguageModelType.PREFIX:
            segment_mask = jnp.asarray(1 - paddings if segment_ids is None else segment_ids, jnp.int32)
        return super().__call__(
            inputs,
            paddings,
            labels,
            segment_ids,
            segment_pos,
            causal_attention_mask,
            segment_mask,
            start_time_step,
            **input_kwargs,
        )


_FUSED = {
    layers.DotProductAttention: FusedDotProductAttention,
    attentions.DotProductAttentionWithLPB: FusedDotProductAttentionWithLPB,
    attentions.LocalSelfAttention: FusedLocalSelfAttention,
}


def use_fused_attention_in(model_p: Any, kernel: str | None = None) -> None:
    """Replaces attention layers in a config with fused ones, and `TransformerLm` with `SegmentedTransformerLm`, in place.

    Args:
      model_p: config of a model, or of a part of a model.
      kernel: see `FusedDotProductAttention`.

    Raises:
      UserError: the class of an attention layer has no fused counterpart.
    """
    for attention_p in selectors.select(model_p, layers.DotProductAttention, check_nonempty=False):
        cls = fdl.get_callable(attention_p)
        if cls not in (*_FUSED, *_FUSED.values()):
            raise UserError(
                f"USE_FUSED_ATTENTION is for plain attention, but this is a {cls.__name__}; set one of the two only"
            )
        fdl.update_callable(attention_p, _FUSED.get(cls, cls))
        attention_p.kernel = kernel
    for lm_p in selectors.select(model_p, layers.TransformerLm, match_subclasses=False, check_nonempty=False):
        fdl.update_callable(lm_p, SegmentedTransformerLm)
