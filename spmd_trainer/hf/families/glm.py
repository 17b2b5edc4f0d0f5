"""GLM 4.5 to 4.7, with experts."""

from __future__ import annotations

from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec


def _read(config: Settings, fields: Settings) -> None:
    fields["qkv_bias"] = bool(config["attention_bias"])
    fields["query_key_norm"] = "head" if config["use_qk_norm"] else None
    fields["moe"] = shared.sigmoid_experts(config)


def _write(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    config["use_qk_norm"] = spec.query_key_norm is not None
    shared.write_sigmoid_experts(spec.moe, config)


FAMILIES = (
    Family(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            **shared.SIGMOID_DEFAULTS,
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
        _read,
        _write,
        shared.names_like_llama,
        off=shared.SIGMOID_OFF,
    ),
)
