"""Describes the text models of Llama 4."""

from __future__ import annotations

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec, TemperatureSpec

_CHUNKED = "chunked_attention"
_INSIDE = "feed_forward"


def _read(config: Settings, fields: Settings) -> None:
    shared.read_biases(config, fields)
    _read_layers(config, fields)
    fields["query_key_norm"] = "unit" if config["use_qk_norm"] else None
    if config["attn_temperature_tuning"] and "global" in fields["layer_pattern"]:
        fields["temperature"] = TemperatureSpec(factor=config["attn_scale"], interval=config["floor_scale"])
    dense_layers, every = _read_sparse_layers(config)
    if every:
        fields["moe"] = MoeSpec(
            num_experts=config["num_local_experts"],
            num_experts_per_token=config["num_experts_per_tok"],
            hidden_dims=config["intermediate_size"],
            dense_layers=dense_layers,
            every=every,
            score="sigmoid",
            normalise_top_k=False,
            weigh_inputs=True,
            shared_dims=config["intermediate_size"],
        )


def _read_layers(config: Settings, fields: Settings) -> None:
    # In spite of its name, no_rope_layers is 1 for a layer with rotary embeddings.
    interval, numbers = config["no_rope_layer_interval"], shared.layer_numbers(config)
    rotated = (config["no_rope_layers"] or [int((i + 1) % interval != 0) for i in numbers])[: len(numbers)]
    if len(rotated) != len(numbers):
        raise HfError(f"no_rope_layers has {len(rotated)} entries, and num_hidden_layers is {len(numbers)}")
    wanted = [_CHUNKED if is_rotated else shared.FULL for is_rotated in rotated]
    config["layer_types"] = config["layer_types"] or wanted
    if config["layer_types"] != wanted:
        raise HfError(
            f"no_rope_layers and layer_types contradict each other: {_CHUNKED} has rotary embeddings, and {shared.FULL} has none"
        )
    shared.read_layer_types(config, fields, _CHUNKED, "chunked")
    fields["window"] = config["attention_chunk_size"]


def _read_sparse_layers(config: Settings) -> tuple[int, int]:
    """Returns (d, n): after the first d layers, every n-th layer has experts. If no layer has experts, n is 0."""
    num_layers, every = config["num_hidden_layers"], config["interleave_moe_layer_step"]
    layers = list(range(every - 1, num_layers, every)) if config["moe_layers"] is None else config["moe_layers"]
    layers = [layer for layer in layers if layer < num_layers]
    if not layers:
        return 0, 0
    every = layers[1] - layers[0] if len(layers) > 1 else layers[0] + 1
    if every < 1 or (layers[0] + 1) % every or layers != list(range(layers[0], num_layers, every)):
        raise HfError(
            f"moe_layers={layers}; give the numbers of every n-th layer, e.g. [1, 3, 5, ...] for every second one"
        )
    return layers[0] + 1 - every, every


def _write(spec: DecoderSpec, config: Settings) -> None:
    shared.write_biases(spec, config)
    shared.write_layer_types(spec, config, _CHUNKED, "chunked")
    config["no_rope_layers"] = [int(kind == "chunked") for kind in spec.layer_kinds]
    config["attention_chunk_size"] = spec.window
    config["use_qk_norm"] = spec.query_key_norm == "unit"
    config["attn_temperature_tuning"] = spec.temperature is not None
    if spec.temperature is not None:
        config["attn_scale"], config["floor_scale"] = float(spec.temperature.factor), spec.temperature.interval
    config["moe_layers"] = [i for i, layer in enumerate(spec.layers) if layer.has_experts]
    config["intermediate_size"] = spec.hidden_dims
    if (moe := spec.moe) is not None:
        config["num_local_experts"], config["num_experts_per_tok"] = moe.num_experts, moe.num_experts_per_token
        config["intermediate_size"], config["interleave_moe_layer_step"] = moe.hidden_dims, moe.every
        config["intermediate_size_mlp"] = spec.hidden_dims or moe.hidden_dims  # any width, if all layers have experts


def _names(spec: DecoderSpec) -> Names:
    return shared.names_like_llama(spec, experts=_experts, inside=_INSIDE)


def _experts(moe: MoeSpec) -> list[Rule]:
    del moe
    found = [
        Rule("moe/router/w", f"{_INSIDE}.router.weight", "e d -> d e"),
        Rule("moe/down/w", f"{_INSIDE}.experts.down_proj", "e x d -> e x d"),
    ]
    for part, ours in enumerate(("gate", "up")):
        found.append(Rule(f"moe/{ours}/w", f"{_INSIDE}.experts.gate_up_proj", "e d (x + x) -> e d x", part))
    return [*found, *shared.gated("moe/shared", f"{_INSIDE}.shared_expert", "s")]


FAMILIES = (
    Family(
        "Llama4ForCausalLM",
        "llama4_text",
        {**shared.KEYS, "hidden_dims": "intermediate_size_mlp"},
        {
            **shared.DEFAULTS,
            "num_key_value_heads": 8,
            "head_dim": 128,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500_000.0,
            "max_position_embeddings": 131_072,
            "intermediate_size": 8192,
            "intermediate_size_mlp": 16_384,
            "num_local_experts": 16,
            "num_experts_per_tok": 1,
            "moe_layers": None,
            "interleave_moe_layer_step": 1,
            "use_qk_norm": True,
            "no_rope_layers": None,
            "no_rope_layer_interval": 4,
            "attention_chunk_size": 8192,
            "layer_types": None,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        {"rotary_pairs_adjacent": True, "unrotated_kinds": ("global",)},
        _read,
        _write,
        _names,
        off={"router_jitter_noise": (None, 0, 0.0)},
        # transformers computes no auxiliary loss.
        without_effect=frozenset({"output_router_logits", "router_aux_loss_coef", "for_llm_compressor"}),
    ),
)
