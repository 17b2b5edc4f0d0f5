"""Describes GLM 4.5 to 4.7 and DeepSeek V3 (also Kimi K2 and Moonlight), which all have the same kind of router."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import MTP_LAYERS, Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, LatentSpec, MoeSpec

_SIGMOID_DEFAULTS: Mapping[str, Any] = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    MTP_LAYERS: 0,
}
_SIGMOID_OFF: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": (None, "sigmoid"),
    "topk_method": (None, "noaux_tc"),
}
_IN_MTP_LAYER = (
    *shared.norm("token_norm", "enorm"),
    *shared.norm("hidden_norm", "hnorm"),
    Rule("token/w", "eh_proj.weight", "d (c + c) -> c d", 0),
    Rule("hidden/w", "eh_proj.weight", "d (c + c) -> c d", 1),
    *shared.norm("final_norm", "shared_head.norm"),
)
_MTP_COPIES = {"embed_tokens.weight": "model.embed_tokens.weight", "shared_head.head.weight": "lm_head.weight"}
# These families balance the experts with biases instead of an auxiliary loss.
_OF_TRAINING = frozenset({"output_router_logits", "router_aux_loss_coef"})


def _experts(config: Settings) -> MoeSpec:
    """Reads the MoE settings of both families: sigmoid scores, groups of experts, shared experts, and routing biases."""
    return MoeSpec(
        num_experts=config["n_routed_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["moe_intermediate_size"],
        dense_layers=config["first_k_dense_replace"],
        score="sigmoid",
        normalise_top_k=bool(config["norm_topk_prob"]),
        scaling_factor=config["routed_scaling_factor"],
        num_groups=config["n_group"],
        num_chosen_groups=config["topk_group"],
        shared_dims=config["n_shared_experts"] * config["moe_intermediate_size"],
        choice_bias=True,
        # transformers does not update the biases, and the load of the experts seldom becomes unbalanced in fine-tuning.
        choice_bias_rate=0.0,
    )


def _write_experts(spec: DecoderSpec, config: Settings) -> None:
    if (moe := spec.moe) is None:
        raise HfError("it has experts, and the model has none")
    if moe.shared_dims % moe.hidden_dims:
        raise HfError(f"moe.shared_dims={moe.shared_dims} is not a multiple of moe.hidden_dims={moe.hidden_dims}")
    config["n_routed_experts"] = moe.num_experts
    config["num_experts_per_tok"] = moe.num_experts_per_token
    config["moe_intermediate_size"] = moe.hidden_dims
    config["first_k_dense_replace"] = moe.dense_layers
    config["norm_topk_prob"] = moe.normalise_top_k
    config["routed_scaling_factor"] = float(moe.scaling_factor)
    config["n_group"], config["topk_group"] = moe.num_groups, moe.num_chosen_groups
    config["n_shared_experts"] = moe.shared_dims // moe.hidden_dims
    config[MTP_LAYERS] = spec.mtp_layers


def _read_glm(config: Settings, fields: Settings) -> None:
    fields["qkv_bias"] = bool(config["attention_bias"])
    fields["query_key_norm"] = "head" if config["use_qk_norm"] else None
    fields["moe"] = _experts(config)


def _write_glm(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    config["use_qk_norm"] = spec.query_key_norm is not None
    _write_experts(spec, config)


def _read_deepseek(config: Settings, fields: Settings) -> None:
    fields["moe"] = _experts(config)
    fields["head_dims"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    fields["rotary_dims"] = config["qk_rope_head_dim"]
    fields["rotary_pairs_adjacent"] = config["rope_interleave"]
    fields["latent"] = LatentSpec(
        query_dims=config["q_lora_rank"] or 0, key_value_dims=config["kv_lora_rank"], value_dims=config["v_head_dim"]
    )
    scaling = fields["rotary_scaling"]
    if scaling is not None and scaling.mscale_all_dim:
        fields["query_scale"] = scaling.query_scale(fields["head_dims"])


def _write_deepseek(spec: DecoderSpec, config: Settings) -> None:
    if spec.latent is None:
        raise HfError("it has latent attention, and the model has none")
    _write_experts(spec, config)
    # transformers stores the rotated width also as head_dim.
    config["head_dim"] = config["qk_rope_head_dim"] = spec.rotary_dims
    config["qk_nope_head_dim"] = spec.head_dims - spec.rotary_dims
    config["rope_interleave"] = spec.rotary_pairs_adjacent
    config["q_lora_rank"] = spec.latent.query_dims or None
    config["kv_lora_rank"], config["v_head_dim"] = spec.latent.key_value_dims, spec.latent.value_dims
    config["attention_bias"] = False
    # vLLM reads these keys, and assumes other values where they are missing.
    config["scoring_func"], config["topk_method"], config["moe_layer_freq"] = "sigmoid", "noaux_tc", 1


def _names(spec: DecoderSpec, attention: Callable[[DecoderSpec, str], Sequence[Rule]] | None = None) -> Names:
    names = shared.names_like_llama(spec, attention=attention)
    return dataclasses.replace(names, in_mtp_layer=_IN_MTP_LAYER, mtp_copies=_MTP_COPIES)


def _attention(spec: DecoderSpec, kind: str) -> list[Rule]:
    del kind
    found = [
        Rule("attention/key_value_down/w", "self_attn.kv_a_proj_with_mqa.weight", "l d -> d l"),
        Rule("attention/key_value_norm/scale", "self_attn.kv_a_layernorm.weight", "r -> r"),
        Rule("attention/key_value/w", "self_attn.kv_b_proj.weight", "(n m) r -> r n m"),
        *shared.attention_output(spec),
    ]
    if spec.latent is None or not spec.latent.query_dims:
        return [*found, Rule("attention/query/w", "self_attn.q_proj.weight", "(n h) d -> d n h")]
    return [
        *found,
        Rule("attention/query_down/w", "self_attn.q_a_proj.weight", "q d -> d q"),
        Rule("attention/query_down_norm/scale", "self_attn.q_a_layernorm.weight", "q -> q"),
        Rule("attention/query/w", "self_attn.q_b_proj.weight", "(n h) q -> q n h"),
    ]


FAMILIES = (
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            **_SIGMOID_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "max_position_embeddings": 131072,
            "partial_rotary_factor": 0.5,
            "use_qk_norm": False,
            "n_routed_experts": 128,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "routed_scaling_factor": 1.0,
            "n_group": 1,
            "topk_group": 1,
        },
        {},
        _read_glm,
        _write_glm,
        _names,
        off=_SIGMOID_OFF,
        without_effect=_OF_TRAINING,
    ),
    Family(
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {field: key for field, key in shared.KEYS.items() if field != "head_dims"},
        {
            **shared.DEFAULTS,
            **_SIGMOID_DEFAULTS,
            "num_key_value_heads": 128,
            "max_position_embeddings": 4096,
            "q_lora_rank": 1536,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "rope_interleave": True,
            "n_routed_experts": 256,
            "moe_intermediate_size": 2048,
            "first_k_dense_replace": 3,
            "routed_scaling_factor": 2.5,
            "n_group": 8,
            "topk_group": 4,
        },
        {},
        _read_deepseek,
        _write_deepseek,
        functools.partial(_names, attention=_attention),
        off={**_SIGMOID_OFF, "attention_bias": (None, False), "moe_layer_freq": (None, 1)},
        without_effect=_OF_TRAINING | {"aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"},
    ),
)
