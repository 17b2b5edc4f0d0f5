"""Describes the model families OLMo 2 and 3."""

from __future__ import annotations

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec

# The base of OLMo 3's rotary frequencies, unless its config has one for each kind of layer.
_ROPE_THETA = 500_000.0
_FIXED = {"norm_placement": "post", "query_key_norm": "all"}


def _read_olmo3(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    shared.read_layer_types(config, fields)
    kinds = (shared.FULL, shared.SLIDING)
    by_type = config.get("rope_parameters") or {}
    if by_type and not set(kinds) & by_type.keys():
        raise HfError(f"rope_parameters has neither {shared.FULL} nor {shared.SLIDING}; give an object for each")
    base = config["rope_theta"]
    if base != _ROPE_THETA and not all("rope_theta" in (by_type.get(kind) or {}) for kind in kinds):
        raise HfError(
            f"rope_theta={base}: transformers 4 gives it to all layers, and transformers 5 to those with {shared.FULL} alone. "
            f"Give rope_parameters a rope_theta for {shared.FULL} and one for {shared.SLIDING}"
        )


def _write_olmo3(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    shared.write_layer_types(spec, config)
    del config["rope_local_base_freq"]


FAMILIES = (
    Family(
        "Olmo2ForCausalLM",
        "olmo2",
        shared.KEYS,
        {**shared.DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
        _FIXED,
        shared.read_biases,
        shared.write_biases,
        shared.names_like_llama,
    ),
    Family(
        "Olmo3ForCausalLM",
        "olmo3",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            "rms_norm_eps": 1e-5,
            "rope_theta": _ROPE_THETA,
            "max_position_embeddings": 2048,
            "sliding_window": 4096,
            "layer_types": None,
            "_every": 4,
        },
        _FIXED,
        _read_olmo3,
        _write_olmo3,
        shared.names_like_llama,
        rotary_by_layer_type=True,
        off={"rope_local_base_freq": (None,)},
    ),
)
