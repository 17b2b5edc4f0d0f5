"""The checks of compiled programs find what they look for."""

import jax
import jax.numpy as jnp
import pytest

from tests.kernels.hlo_checks import arrays_over_queries_and_keys, custom_call_targets, splash_kernels


@pytest.mark.parametrize(
    ("instruction", "found"),
    [
        ("%exp.1 = f32[2,8,4096,4096]{3,2,1,0:T(8,128)} exponential(%sub)", ["f32[2,8,4096,4096]"]),
        ("%f = (bf16[4096,128]{1,0}, pred[4096,4096]{1,0:T(8,128)(4,1)}) fusion(%p)", ["pred[4096,4096]"]),
        # Queries of one device, and keys that are padded.
        ("%dot = bf16[1,2048,4,4608]{3,1,2,0} dot(%q, %k)", ["bf16[1,2048,4,4608]"]),
        ("%flat = f8e4m3fn[2,16777216]{1,0} reshape(%logits)", ["f8e4m3fn[2,16777216]"]),
        ("%keys = bf16[2,4096,8,128]{3,2,1,0:T(8,128)(2,1)} copy(%x)", []),
        ("%table = s32[4096,40960]{1,0} broadcast(%x), dimensions={0}", []),
    ],
)
def test_finds_arrays_over_queries_and_keys(instruction, found):
    assert arrays_over_queries_and_keys(f"%body {{\n  {instruction}\n}}", 4096, 2048, 4608) == found


def test_finds_the_logits_inside_of_a_compiled_fusion():
    def attention(query, key):
        return jnp.max(jnp.exp(query @ key.T), axis=1)

    heads = jax.ShapeDtypeStruct((200, 8), jnp.float32)
    assert arrays_over_queries_and_keys(jax.jit(attention).lower(heads, heads).compile().as_text(), 200)


def test_finds_custom_calls():
    hlo = """
  %a = bf16[2]{0} custom-call(%x), custom_call_target="tpu_custom_call", metadata={op_name="jit(f)/splash_mha_dq_no_residuals"}
  %b = bf16[2]{0} custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax", metadata={op_name="jit(f)/splash_mha_fwd"}
"""
    assert custom_call_targets(hlo) == ["tpu_custom_call", "__cudnn$fmhaSoftmax"]
    assert splash_kernels(hlo) == {"splash_mha_dq_no_residuals"}
