"""Attention through `jax.nn.dot_product_attention`, where cuDNN has a fused kernel for it: no [rows, heads, time, time] array.

    class Mine(model_params.TransformerLmSpmdAdafactor, MyDataset):
        USE_FUSED_ATTENTION = True
        ATTEN_LOGIT_CAP = 0.0

What JAX computes it with (0.10): cuDNN only where that is asked for by name, as done here on CUDA GPUs; XLA's own fusions
elsewhere, on TPU too, so that nothing is won there. Decoding step by step is praxis' own.
"""

from __future__ import annotations

import math
from typing import Any

import fiddle as fdl
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer, layers, py_utils
from praxis.layers import base_ops
from praxis.pax_fiddle import Config

from spmd_trainer.errors import UserError

# cuDNN's kernels take these, in heads whose width is a multiple of 8 and at most 128, and sequences of even length.
_CUDNN_DTYPES = (jnp.bfloat16, jnp.float16)
_CUDNN_MAX_HEAD = 128


class FusedDotProductAttention(layers.DotProductAttention):
    """`DotProductAttention` whose logits and probabilities are nobody's to see: it returns None for the probabilities.

    Same variables, same results to rounding. Refuses what the fused form has no place for. Logits are rounded later than in
    praxis (float32 throughout), and praxis' summaries of them aren't given.

    Attributes:
      implementation: 'cudnn' or 'xla'; None for cuDNN where it can take the arrays, else XLA.
    """

    implementation: str | None = None

    def setup(self) -> None:
        """Builds the layer.

        Raises:
          UserError: a setting that the fused form can't honour.
        """
        for reason in self._reasons_against():
            raise UserError(f"fused attention can't be used: {reason}; or set USE_FUSED_ATTENTION = False")
        super().setup()

    def _reasons_against(self) -> list[str]:
        checks = {
            f"atten_logit_cap is {self.atten_logit_cap}, and logits can't be capped; set ATTEN_LOGIT_CAP = 0.0": (
                self.atten_logit_cap and self.atten_logit_cap > 0
            ),
            f"atten_dropout_prob is {self.atten_dropout_prob}, and probabilities can't be dropped; set it to 0.0": (
                self.atten_dropout_prob
            ),
            "relative_bias_tpl is set; set RELATIVE_BIAS = False": self.relative_bias_tpl is not None,
            "attention_extra_logit is set; set it to None": self.attention_extra_logit is not None,
            "attention_mask_summary is set; set it to False": self.attention_mask_summary,
            "the n-grammer uses attention scores; set ngrammer_tpl to None": self.ngrammer_tpl is not None
            and self.ngrammer_tpl.ngram_using_attention_scores,
            "qk_einsum_tpl or pv_einsum_tpl is not the plain EinsumOp": any(
                fdl.get_callable(tpl) is not base_ops.EinsumOp for tpl in (self.qk_einsum_tpl, self.pv_einsum_tpl)
            ),
            f"implementation is {self.implementation!r}; it can be 'cudnn', 'xla' or None": (
                self.implementation not in ("cudnn", "xla", None)
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
    ) -> tuple[jax.Array, None]:
        """Mixes values by attention.

        Args:
          query: [batch, time, heads, width].
          key, value: [batch, source, heads, width].
          atten_mask: [1 or batch, 1, 1 or time, source], 0 or a large negative number.
          relative_bias: always None, see `setup`.

        Returns:
          [batch, time, heads, width], and None where praxis returns the probabilities.
        """
        query, key, value = self._shard_blnh(query), self._shard_blnh(key), self._shard_blnh(value)
        query = self._scale_query(query)
        seen = atten_mask >= py_utils.get_large_negative_number(jnp.float32) / 2
        kernel: Any = self.implementation or fitting_implementation(query, key)
        encoded = jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=jnp.broadcast_to(seen, (seen.shape[0], 1, query.shape[1], key.shape[1])),
            scale=1 / math.sqrt(key.shape[-1]) if self.scale_logits_by_head_dims else 1.0,
            implementation=kernel,
        )
        if self.zero_fully_masked:
            encoded *= jnp.any(seen, axis=-1)[:, 0, :, None, None]
        encoded = checkpoint_name(encoded, "context")
        return self._shard_blnh(encoded), None


def fitting_implementation(query: jax.Array, key: jax.Array) -> str:
    """Returns 'cudnn' where the devices are CUDA GPUs and its kernels take these arrays, else 'xla'."""
    fits = (
        query.dtype in _CUDNN_DTYPES
        and query.shape[-1] % 8 == 0
        and query.shape[-1] <= _CUDNN_MAX_HEAD
        and query.shape[1] % 2 == key.shape[1] % 2 == 0
    )
    return "cudnn" if fits and _on_cuda() else "xla"


def _on_cuda() -> bool:
    return jax.default_backend() == "gpu" and "cuda" in jax.devices()[0].client.platform_version


def use_fused_attention(attention_p: Config[base_layer.BaseLayer]) -> Config[FusedDotProductAttention]:
    """Returns the config of a plain attention as that of a fused one, all other fields kept.

    Raises:
      UserError: the attention is of another kind.
    """
    cls = fdl.get_callable(attention_p)
    if cls is not layers.DotProductAttention:
        raise UserError(
            f"USE_FUSED_ATTENTION is for plain attention, and this is a {cls.__name__}; set one of the two only"
        )
    fused_p = Config(FusedDotProductAttention)
    fused_p.copy_fields_from(attention_p)
    return fused_p
