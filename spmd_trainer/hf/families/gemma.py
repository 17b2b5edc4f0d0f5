"""Gemma 2 and 3."""

from __future__ import annotations

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec

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
            # The folders of models for text and images lack these two.
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
)
