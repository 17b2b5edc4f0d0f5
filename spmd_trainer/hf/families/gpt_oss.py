"""Describes the model family gpt-oss."""

from __future__ import annotations

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec

_EXPERTS_AND_WIDTH = ("num_local_experts", "intermediate_size")


def _read(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    shared.read_layer_types(config, fields)
    if fields["activation"] != "silu":
        raise HfError(f"hidden_act={config['hidden_act']!r}: gpt-oss has 'silu'")
    fields["moe"] = shared.read_moe(
        config,
        *_EXPERTS_AND_WIDTH,
        # The softmax is over the logits of a token's chosen experts only.
        normalise_top_k=True,
        biases=True,
        swiglu_limit=config["swiglu_limit"],
        swiglu_alpha=config["swiglu_alpha"],
    )


def _write(spec: DecoderSpec, config: Settings) -> None:
    if spec.moe is None or spec.moe.swiglu_limit is None:
        raise HfError("it has experts with a swiglu_limit, and the model has none")
    shared.write_biases(spec, config)
    shared.write_layer_types(spec, config)
    config["swiglu_limit"] = float(spec.moe.swiglu_limit)
    config["swiglu_alpha"] = float(spec.moe.swiglu_alpha)
    if spec.rotary_scaling is None:
        config["rope_scaling"] = {"rope_type": "default"}  # transformers 4 scales the frequencies if it is missing
    shared.write_moe(spec.moe, config, *_EXPERTS_AND_WIDTH)


def _names(spec: DecoderSpec) -> Names:
    return shared.names_like_llama(spec, attention=_attention, experts=_experts)


def _attention(spec: DecoderSpec, kind: str) -> list[Rule]:
    sinks = [Rule("attention/sinks", "self_attn.sinks", "n -> n")] if spec.attention_sinks else []
    return [*shared.softmax_attention(spec, kind), *sinks]


def _experts(moe: MoeSpec) -> list[Rule]:
    del moe
    found = [
        Rule("moe/router/w", "mlp.router.weight", "e d -> d e"),
        Rule("moe/router/b", "mlp.router.bias", "e -> e"),
        Rule("moe/down/w", "mlp.experts.down_proj", "e x d -> e x d"),
        Rule("moe/down/b", "mlp.experts.down_proj_bias", "e d -> e d"),
    ]
    for part, ours in enumerate(("gate", "up")):
        # The values of gate and up alternate.
        found.append(Rule(f"moe/{ours}/w", "mlp.experts.gate_up_proj", "e d (x (1 + 1)) -> e d x", part))
        found.append(Rule(f"moe/{ours}/b", "mlp.experts.gate_up_proj_bias", "e (x (1 + 1)) -> e x", part))
    return found


FAMILIES = (
    Family(
        "GptOssForCausalLM",
        "gpt_oss",
        shared.KEYS,
        {
            **shared.DEFAULTS,
            **shared.MOE_DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 64,
            "rms_norm_eps": 1e-5,
            "rope_theta": 150_000.0,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
            "max_position_embeddings": 131072,
            "attention_bias": True,
            "sliding_window": 128,
            "layer_types": None,
            "_every": 2,
            "num_local_experts": 128,
            "num_experts_per_tok": 4,
            "swiglu_alpha": 1.702,
            "swiglu_limit": 7.0,
        },
        {"attention_sinks": True},
        _read,
        _write,
        _names,
        without_effect=frozenset({"experts_per_token", "initial_context_length"}),
        in_mxfp4=True,
    ),
)
