"""Describes the model families Llama 1 to 3, Mistral and Mixtral."""

from __future__ import annotations

from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec

_EXPERTS_AND_WIDTH = ("num_local_experts", "intermediate_size")


def _read_mixtral(config: Settings, fields: Settings) -> None:
    shared.read_window_of_all(config, fields)
    fields["moe"] = shared.read_moe(config, *_EXPERTS_AND_WIDTH)


def _write_mixtral(spec: DecoderSpec, config: Settings) -> None:
    shared.write_window_of_all(spec, config)
    if spec.moe is not None:
        shared.write_moe(spec.moe, config, *_EXPERTS_AND_WIDTH)


def _mixtral_names(spec: DecoderSpec) -> Names:
    def experts(moe: MoeSpec) -> list[Rule]:
        return shared.named_experts(moe, "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"})

    return shared.names_like_llama(spec, experts=experts)


FAMILIES = (
    Family(
        "LlamaForCausalLM",
        "llama",
        {**shared.KEYS, "mlp_bias": "mlp_bias"},
        {**shared.DEFAULTS, "mlp_bias": False, "max_position_embeddings": 2048},
        {},
        shared.read_biases,
        shared.write_biases,
        shared.names_like_llama,
        heads_divide_dims=True,
        without_effect=frozenset({"activation"}),  # Falcon 3's second name for hidden_act
    ),
    Family(
        "MistralForCausalLM",
        "mistral",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            "num_key_value_heads": 8,
            "sliding_window": 4096,
            "max_position_embeddings": 131072,
        },
        {},
        shared.read_window_of_all,
        shared.write_window_of_all,
        shared.names_like_llama,
        off={"attention_bias": (None, False)},
    ),
    Family(
        "MixtralForCausalLM",
        "mixtral",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            **shared.MOE_DEFAULTS,
            "num_key_value_heads": 8,
            "rms_norm_eps": 1e-5,
            "rope_theta": 1_000_000.0,
            "sliding_window": None,
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "max_position_embeddings": 131072,
        },
        {},
        _read_mixtral,
        _write_mixtral,
        _mixtral_names,
        off={"attention_bias": (None, False), "router_jitter_noise": (None, 0, 0.0)},
    ),
)
