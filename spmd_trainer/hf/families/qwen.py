"""Describes the model families Qwen 2 and 3, and Qwen 3 with experts."""

from __future__ import annotations

from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec

_DEFAULTS = {
    **shared.DEFAULTS,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "max_position_embeddings": 32768,
}


def _read(config: Settings, fields: Settings) -> None:
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    if config["layer_types"] is None:
        first = config["max_window_layers"] if config["sliding_window"] is not None else config["num_hidden_layers"]
        numbers = shared.layer_numbers(config)
        config["layer_types"] = [shared.SLIDING if i >= first else shared.FULL for i in numbers]
    shared.read_layer_types(config, fields)


def _write(spec: DecoderSpec, config: Settings) -> None:
    shared.write_layer_types(spec, config)
    config["use_sliding_window"] = has_window = "local" in spec.layer_kinds
    config["max_window_layers"] = spec.layer_kinds.index("local") if has_window else spec.num_layers


def _read_qwen3(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    _read(config, fields)


def _write_qwen3(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    _write(spec, config)


def _read_moe(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    shared.read_window_of_all(config, fields)
    # transformers 5 may call the number of experts num_local_experts, as it does in Mixtral.
    experts = "num_local_experts" if config.get("num_local_experts") else "num_experts"
    is_normalised = bool(config["norm_topk_prob"])
    fields["moe"] = shared.read_moe(config, experts, "moe_intermediate_size", normalise_top_k=is_normalised)


def _write_moe(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    shared.write_window_of_all(spec, config)
    config["use_sliding_window"] = config["sliding_window"] is not None
    if spec.moe is not None:
        config["norm_topk_prob"] = spec.moe.normalise_top_k
        shared.write_moe(spec.moe, config, "num_experts", "moe_intermediate_size")


FAMILIES = (
    Family(
        "Qwen2ForCausalLM",
        "qwen2",
        shared.KEYS,
        _DEFAULTS,
        {"qkv_bias": True},
        _read,
        _write,
        shared.names_like_llama,
        # Qwen 2.5 1M has this setting, but transformers computes attention without it.
        without_effect=frozenset({"dual_chunk_attention_config"}),
    ),
    Family(
        "Qwen3ForCausalLM",
        "qwen3",
        shared.KEYS,
        {**_DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
        {"query_key_norm": "head"},
        _read_qwen3,
        _write_qwen3,
        shared.names_like_llama,
    ),
    Family(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        shared.KEYS,
        {
            **_DEFAULTS,
            **shared.MOE_DEFAULTS,
            "num_key_value_heads": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
            "norm_topk_prob": False,
        },
        {"query_key_norm": "head"},
        _read_moe,
        _write_moe,
        shared.names_like_llama,
        off={"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1), "use_qk_norm": (None, True)},
        without_effect=frozenset({"max_window_layers", "layer_types", "num_local_experts"}),
    ),
)
