"""Describes the model families Gemma 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Sequence

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import NON_TRAINABLE, Family, Names, Rule, Settings
from spmd_trainer.hf.setting_types import check_types
from spmd_trainer.models.decoder_spec import DecoderSpec, HeadSpec

_KEYS = {
    **shared.KEYS,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
}
_DEFAULTS = {
    **shared.DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_FIXED = {"norm_scale_offset": 1.0, "norm_placement": "pre_and_post"}


def _read(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    fields["query_scale"] = config["query_pre_attn_scalar"] ** -0.5
    fields["embedding_scale"] = config["hidden_size"] ** 0.5
    shared.read_layer_types(config, fields)


def _write(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    shared.write_layer_types(spec, config)
    scalar = (spec.query_scale or spec.head_dims**-0.5) ** -2
    if abs(scalar - round(scalar)) >= 1e-6 * scalar:
        raise HfError(f"query_scale={spec.query_scale}: query_pre_attn_scalar={scalar:.6g} must be a whole number")
    config["query_pre_attn_scalar"] = round(scalar)
    # vLLM reads hidden_act where transformers reads hidden_activation.
    config["hidden_act"] = config["hidden_activation"]


def _read_gemma4(config: Settings, fields: Settings) -> None:
    if config["hidden_size_per_layer_input"]:
        raise HfError(
            f"hidden_size_per_layer_input={config['hidden_size_per_layer_input']}: embeddings for each layer, as in the E2B and "
            "E4B models, are not supported; 0 is"
        )
    shared.read_biases(config, fields)
    fields["query_scale"], fields["embedding_scale"] = 1.0, config["hidden_size"] ** 0.5
    # As in transformers, the last layer always has full attention.
    types = [*shared.layer_types(config)[:-1], shared.FULL]
    shared.read_layer_types({**config, "layer_types": types}, fields)
    of_keys, few = config["attention_k_eq_v"], config["num_global_key_value_heads"]
    given = {"head_dim": config["global_head_dim"], "num_key_value_heads": few if of_keys else None}
    given = _of_full_layers(config["per_layer_config"], types) or given
    kv_heads = given.get("num_key_value_heads") or fields["num_kv_heads"]
    heads = HeadSpec(kv_heads, given.get("head_dim") or fields["head_dims"], values_are_keys=of_keys)
    fields["global_heads"] = None if heads == HeadSpec(fields["num_kv_heads"], fields["head_dims"]) else heads


def _of_full_layers(given: object, types: Sequence[str]) -> dict[str, int]:
    """Returns what `given`, the config's `per_layer_config`, sets for layers with full attention; {} if `given` is None."""
    if given is None:
        return {}
    full = {str(i) for i, kind in enumerate(types) if kind == shared.FULL}
    known = {"head_dim", "num_key_value_heads"}
    if (
        not isinstance(given, dict)
        or {*given} != full
        or any(not isinstance(x, dict) or x != given[min(full)] or {*x} - known for x in given.values())
    ):
        raise HfError(
            f"per_layer_config={given!r:.200}; give all full layers, and no others, the same head_dim and num_key_value_heads"
        )
    found: dict[str, int] = given[min(full)]
    check_types(found, inside="per_layer_config")
    return found


def _write_gemma4(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    shared.write_layer_types(spec, config)
    heads = spec.heads_of("global")
    config["attention_k_eq_v"], config["global_head_dim"] = heads.values_are_keys, heads.head_dims
    config["num_global_key_value_heads"] = heads.num_kv_heads if heads.values_are_keys else None
    config["hidden_size_per_layer_input"], config["num_kv_shared_layers"], config["enable_moe_block"] = 0, 0, False


def _gemma4_names(spec: DecoderSpec) -> Names:
    def attention(spec: DecoderSpec, kind: str) -> list[Rule]:
        return [
            *shared.softmax_attention(spec, kind),
            Rule("layer_scale", "layer_scalar", "1 -> 1", root=NON_TRAINABLE),
        ]

    return shared.names_like_llama(spec, attention=attention)


FAMILIES = (
    Family(
        "Gemma2ForCausalLM",
        "gemma2",
        _KEYS,
        {
            **_DEFAULTS,
            "attn_logit_softcapping": 50.0,
            "final_logit_softcapping": 30.0,
            "max_position_embeddings": 8192,
            "_every": 2,
        },
        _FIXED,
        _read,
        _write,
        shared.names_like_llama,
        heads_divide_dims=True,
        without_effect=frozenset({"hidden_act", "sliding_window_size"}),
    ),
    Family(
        "Gemma3ForCausalLM",
        "gemma3_text",
        _KEYS,
        {
            **_DEFAULTS,
            # The folders of multimodal models lack these two.
            "vocab_size": 262_208,
            "num_attention_heads": 8,
            "attn_logit_softcapping": None,
            "final_logit_softcapping": None,
            "max_position_embeddings": 131072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "_every": 6,
        },
        {**_FIXED, "query_key_norm": "head"},
        _read,
        _write,
        shared.names_like_llama,
        rotary_by_layer_type=True,
        heads_divide_dims=True,
        without_effect=frozenset({"hidden_act"}),
    ),
    Family(
        "Gemma4ForCausalLM",
        "gemma4_text",
        {field: key for field, key in _KEYS.items() if field != "attention_softcap"},
        {
            **{key: value for key, value in _DEFAULTS.items() if key != "query_pre_attn_scalar"},
            "final_logit_softcapping": None,
            "sliding_window": 512,
            "max_position_embeddings": 131_072,
            "rope_theta": 1_000_000.0,
            "rope_local_base_freq": 10_000.0,
            "rope_parameters": {
                shared.FULL: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1_000_000.0},
                shared.SLIDING: {"rope_type": "default", "rope_theta": 10_000.0},
            },
            "attention_k_eq_v": False,
            "global_head_dim": 512,
            "num_global_key_value_heads": None,
            # transformers 5 writes this key in place of the last two.
            "per_layer_config": None,
            "hidden_size_per_layer_input": 256,
            "_every": 6,
        },
        {"norm_placement": "pre_and_post", "query_key_norm": "head", "value_norm": True, "layer_scale": True},
        _read_gemma4,
        _write_gemma4,
        _gemma4_names,
        rotary_by_layer_type=True,
        off={
            # 'vision' is for tokens of images only; text is causal.
            "use_bidirectional_attention": (None, False, "vision"),
            "num_kv_shared_layers": (None, 0),
            "enable_moe_block": (None, False),
        },
        without_effect=frozenset(
            {
                "vocab_size_per_layer_input",
                "use_double_wide_mlp",
                "num_experts",
                "top_k_experts",
                "moe_intermediate_size",
                "hidden_act",
            }
        ),
    ),
)
