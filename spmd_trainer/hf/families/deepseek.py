"""DeepSeek V3, Kimi K2 and Moonlight."""

from __future__ import annotations

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, LatentSpec


def _read(config: Settings, fields: Settings) -> None:
    fields["moe"] = shared.sigmoid_experts(config)
    fields["head_dims"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    fields["rotary_dims"] = config["qk_rope_head_dim"]
    fields["rotary_pairs_adjacent"] = config["rope_interleave"]
    fields["latent"] = LatentSpec(
        query_dims=config["q_lora_rank"] or 0, key_value_dims=config["kv_lora_rank"], value_dims=config["v_head_dim"]
    )
    scaling = fields["rotary_scaling"]
    if scaling is not None and scaling.mscale_all_dim:
        fields["query_scale"] = scaling.query_scale(fields["head_dims"])


def _write(spec: DecoderSpec, config: Settings) -> None:
    if spec.latent is None:
        raise HfError("it has latent attention, and the model has none")
    shared.write_sigmoid_experts(spec.moe, config)
    # transformers gives the rotated part's width the name of a head's.
    config["head_dim"] = config["qk_rope_head_dim"] = spec.rotary_dims
    config["qk_nope_head_dim"] = spec.head_dims - spec.rotary_dims
    config["rope_interleave"] = spec.rotary_pairs_adjacent
    config["q_lora_rank"] = spec.latent.query_dims or None
    config["kv_lora_rank"], config["v_head_dim"] = spec.latent.key_value_dims, spec.latent.value_dims
    config["attention_bias"] = False
    # vLLM reads them, and takes other values where they are missing.
    config["scoring_func"], config["topk_method"], config["moe_layer_freq"] = "sigmoid", "noaux_tc", 1


def _names(spec: DecoderSpec) -> Names:
    return shared.names_like_llama(spec, attention=_attention)


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
        "DeepseekV3ForCausalLM",
        "deepseek_v3",
        {field: key for field, key in shared.KEYS.items() if field != "head_dims"},
        {
            **shared.DEFAULTS,
            **shared.SIGMOID_DEFAULTS,
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
        _read,
        _write,
        _names,
        off={**shared.SIGMOID_OFF, "attention_bias": (None, False), "moe_layer_freq": (None, 1)},
        without_effect=frozenset({"aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"}),
    ),
)
