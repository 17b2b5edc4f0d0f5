"""Describes Qwen3-Next and the text models of Qwen 3.5, which mix layers of linear attention and of softmax attention."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, DeltaSpec

_LINEAR = "linear_attention"
_DEFAULTS = {
    **shared.DEFAULTS,
    "head_dim": 256,
    "max_position_embeddings": 32768,
    "partial_rotary_factor": 0.25,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
}
_MOE_DEFAULTS = {
    **shared.MOE_DEFAULTS,
    "num_key_value_heads": 2,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
}
_FIXED = {"norm_scale_offset": 1.0, "query_key_norm": "head", "gated_attention": True}
_OFF = {"attention_bias": (None, False), "attn_output_gate": (None, True), "mlp_only_layers": (None, [])}
# Our recurrent states are float32. transformers does not read the multi-token prediction layers either.
_WITHOUT_EFFECT = frozenset({"mamba_ssm_dtype", "mtp_num_hidden_layers"})
_NOT_READ = ("mtp.",)
# All layers have experts, and none has a feed-forward layer of the width intermediate_size.
_KEYS_WITH_EXPERTS = {field: key for field, key in shared.KEYS.items() if field != "hidden_dims"}
_EXPERTS_AND_WIDTH = ("num_experts", "moe_intermediate_size")

# Letters of the variables of linear attention, without the first one (the input dimension, or the width of a convolution).
_LETTERS = {"query": "g a", "key": "g a", "value": "g j b", "gate": "g j b", "beta": "g j", "decay": "g j"}
# All queries, then all keys, then all values.
_JOINED = "(g a + g a + g j b)"
# {tensor: (its layout, the variables that it holds)}. In Qwen3-Next, the variables are fused within each key head.
_OF_NEXT = {
    "in_proj_qkvz": ("(g (a + a + j b + j b)) d", ("query", "key", "value", "gate")),
    "in_proj_ba": ("(g (j + j)) d", ("beta", "decay")),
}
_OF_3_5 = {
    "in_proj_qkv": (f"{_JOINED} d", ("query", "key", "value")),
    "in_proj_z": ("(g j b) d", ("gate",)),
    "in_proj_b": ("(g j) d", ("beta",)),
    "in_proj_a": ("(g j) d", ("decay",)),
}


def _read(config: Settings, fields: Settings) -> None:
    shared.read_layer_types(config, fields, _LINEAR, "linear")
    heads, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    if values % heads:
        raise HfError(f"linear_num_key_heads={heads} does not divide linear_num_value_heads={values}")
    if "linear" in fields["layer_pattern"]:
        fields["delta"] = DeltaSpec(
            num_heads=heads,
            values_per_head=values // heads,
            key_dims=config["linear_key_head_dim"],
            value_dims=config["linear_value_head_dim"],
            conv_width=config["linear_conv_kernel_dim"],
        )


def _write(spec: DecoderSpec, config: Settings) -> None:
    shared.write_layer_types(spec, config, _LINEAR, "linear")
    config["attention_bias"] = False
    if (delta := spec.delta) is not None:
        config["linear_num_key_heads"] = delta.num_heads
        config["linear_num_value_heads"] = delta.num_heads * delta.values_per_head
        config["linear_key_head_dim"], config["linear_value_head_dim"] = delta.key_dims, delta.value_dims
        config["linear_conv_kernel_dim"] = delta.conv_width


def _read_moe(config: Settings, fields: Settings) -> None:
    _read(config, fields)
    fields["moe"] = shared.read_moe(
        config,
        *_EXPERTS_AND_WIDTH,
        normalise_top_k=config.get("norm_topk_prob") is not False,
        shared_dims=config["shared_expert_intermediate_size"],
        shared_gate=True,
    )


def _write_moe(spec: DecoderSpec, config: Settings) -> None:
    if spec.moe is None or not spec.moe.shared_gate:
        raise HfError("it has experts with a shared_gate, and the model has none")
    _write(spec, config)
    config["shared_expert_intermediate_size"] = spec.moe.shared_dims
    shared.write_moe(spec.moe, config, *_EXPERTS_AND_WIDTH)


def _write_next(spec: DecoderSpec, config: Settings) -> None:
    _write_moe(spec, config)
    config["norm_topk_prob"] = spec.moe is not None and spec.moe.normalise_top_k
    config["decoder_sparse_step"], config["mlp_only_layers"] = 1, []


def _names(spec: DecoderSpec, projections: Mapping[str, tuple[str, tuple[str, ...]]]) -> Names:
    def attention(spec: DecoderSpec, kind: str) -> list[Rule]:
        return _delta(projections) if kind == "linear" else shared.softmax_attention(spec, kind)

    return shared.names_like_llama(spec, attention, functools.partial(shared.named_experts, shared="shared_expert"))


def _delta(projections: Mapping[str, tuple[str, tuple[str, ...]]]) -> list[Rule]:
    """Returns the rules for linear attention. `projections`: {tensor of input projections: (layout, its variables)}."""
    found = [
        Rule("attention/log_decay_rate", "linear_attn.A_log", "(g j) -> g j"),
        Rule("attention/decay_bias", "linear_attn.dt_bias", "(g j) -> g j"),
        Rule("attention/norm/scale", "linear_attn.norm.weight", "b -> b"),
        Rule("attention/output/w", "linear_attn.out_proj.weight", "d (g j b) -> g j b d"),
    ]
    tensors = {**projections, "conv1d": (f"{_JOINED} 1 w", ("query_conv", "key_conv", "value_conv"))}
    for name, (stored, variables) in tensors.items():
        for part, ours in enumerate(variables):
            layout = f"{stored} -> {stored[-1]} {_LETTERS[ours.removesuffix('_conv')]}"
            found.append(Rule(f"attention/{ours}/w", f"linear_attn.{name}.weight", layout, part))
    return found


FAMILIES = (
    Family(
        "Qwen3NextForCausalLM",
        "qwen3_next",
        _KEYS_WITH_EXPERTS,
        {**_DEFAULTS, **_MOE_DEFAULTS, "num_experts": 512, "num_experts_per_tok": 10, "norm_topk_prob": True},
        _FIXED,
        _read_moe,
        _write_next,
        functools.partial(_names, projections=_OF_NEXT),
        off={**_OFF, "decoder_sparse_step": (None, 1)},
        without_effect=_WITHOUT_EFFECT | {"intermediate_size"},
        not_read=_NOT_READ,
    ),
    Family(
        "Qwen3_5ForCausalLM",
        "qwen3_5_text",
        shared.KEYS,
        {**_DEFAULTS, "num_key_value_heads": 4},
        _FIXED,
        _read,
        _write,
        functools.partial(_names, projections=_OF_3_5),
        off={**_OFF, "output_gate_type": (None, "swish", "silu")},
        without_effect=_WITHOUT_EFFECT,
        not_read=_NOT_READ,
    ),
    Family(
        "Qwen3_5MoeForCausalLM",
        "qwen3_5_moe_text",
        _KEYS_WITH_EXPERTS,
        {**_DEFAULTS, **_MOE_DEFAULTS, "num_experts": 256, "num_experts_per_tok": 8},
        _FIXED,
        _read_moe,
        _write_moe,
        functools.partial(_names, projections=_OF_3_5),
        off={**_OFF, "output_gate_type": (None, "swish", "silu")},
        without_effect=_WITHOUT_EFFECT | {"intermediate_size"},
        fused_experts=True,
        not_read=_NOT_READ,
    ),
)
