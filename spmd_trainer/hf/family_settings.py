"""Settings of a config.json that need more than a renaming, per family: `read_...` and its inverse `write_...`.

A `read_...` takes (config with the family's defaults, fields of `DecoderSpec`) and adds fields; a `write_...` takes (spec,
config) and adds keys. `families.FAMILIES` lists both functions for each architecture.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeAlias

from spmd_trainer.hf.errors import HfError
from spmd_trainer.models.decoder_spec import DecoderSpec, LatentSpec, MoeSpec

Settings: TypeAlias = dict[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"
# The base of OLMo 3's rotary frequencies, unless its config has one for each kind of layer.
OLMO3_ROPE_THETA = 500_000.0


def head_dims(dims: int, heads: int, dims_key: str, heads_key: str) -> int:
    """Returns the default width of a head, dims / heads. Raises HfError, which names the keys, if it is not a whole number."""
    if dims % heads:
        raise HfError(f"{heads_key}={heads} does not divide {dims_key}={dims}, and there is no head_dim")
    return dims // heads


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that gives the kinds of all layers when repeated."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:length])


def read_window_of_all(config: Settings, fields: Settings) -> None:
    """Reads the window of families such as Mistral and Mixtral, in which all layers or none have it."""
    fields["window"] = config["sliding_window"]
    fields["layer_pattern"] = ("global",) if config["sliding_window"] is None else ("local",)


def write_window_of_all(spec: DecoderSpec, config: Settings) -> None:
    config["sliding_window"] = spec.window if "local" in spec.layer_kinds else None


def _read_layer_types(config: Settings, fields: Settings) -> None:
    """Reads the kinds of the layers, for families whose config lists the kind of each layer."""
    if (types := config["layer_types"]) is None:
        # One layer in this many is global. Gemma 2, OLMo 3 and gpt-oss lack the key.
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or config["_every"]
        types = [_SLIDING if (i + 1) % every else _FULL for i in range(config["num_hidden_layers"])]
    unknown = sorted(set(types) - {_SLIDING, _FULL})
    if unknown:
        raise HfError(f"layer_types has {unknown[0]!r}; {_FULL!r} and {_SLIDING!r} are supported")
    if len(types) != config["num_hidden_layers"]:
        raise HfError(f"layer_types has {len(types)} entries, and num_hidden_layers is {config['num_hidden_layers']}")
    kinds = ["local" if kind == _SLIDING else "global" for kind in types]
    fields["layer_pattern"] = shortest_pattern(kinds)
    fields["window"] = config["sliding_window"] if "local" in kinds else None


def _write_layer_types(spec: DecoderSpec, config: Settings) -> None:
    config["layer_types"] = [_SLIDING if kind == "local" else _FULL for kind in spec.layer_kinds]
    config["sliding_window"] = spec.window


def read_llama(config: Settings, fields: Settings) -> None:
    fields["qkv_bias"] = fields["output_bias"] = bool(config["attention_bias"])


def write_llama(spec: DecoderSpec, config: Settings) -> None:
    config["attention_bias"] = spec.qkv_bias


def read_qwen(config: Settings, fields: Settings) -> None:
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    if config["layer_types"] is None:
        first = config["max_window_layers"] if config["sliding_window"] is not None else config["num_hidden_layers"]
        config["layer_types"] = [_SLIDING if i >= first else _FULL for i in range(config["num_hidden_layers"])]
    _read_layer_types(config, fields)


def write_qwen(spec: DecoderSpec, config: Settings) -> None:
    _write_layer_types(spec, config)
    config["use_sliding_window"] = spec.window is not None
    config["max_window_layers"] = spec.layer_kinds.index("local") if spec.window is not None else spec.num_layers


def read_qwen3(config: Settings, fields: Settings) -> None:
    read_llama(config, fields)
    read_qwen(config, fields)


def write_qwen3(spec: DecoderSpec, config: Settings) -> None:
    write_llama(spec, config)
    write_qwen(spec, config)


def read_qwen3_moe(config: Settings, fields: Settings) -> None:
    read_llama(config, fields)
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    read_window_of_all(config, fields)
    # transformers 5 may call it num_local_experts, as it does in Mixtral.
    experts = config.get("num_local_experts") or config["num_experts"]
    fields["moe"] = MoeSpec(
        num_experts=experts,
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["moe_intermediate_size"],
        normalise_top_k=bool(config["norm_topk_prob"]),
        aux_loss_weight=config["router_aux_loss_coef"] if config["output_router_logits"] else 0.0,
    )


def write_qwen3_moe(spec: DecoderSpec, config: Settings) -> None:
    write_llama(spec, config)
    write_window_of_all(spec, config)
    config["use_sliding_window"] = config["sliding_window"] is not None
    if spec.moe is not None:
        config["num_experts"] = spec.moe.num_experts
        config["moe_intermediate_size"] = spec.moe.hidden_dims
        config["norm_topk_prob"] = spec.moe.normalise_top_k
        _write_moe(spec.moe, config)


def _write_moe(moe: MoeSpec, config: Settings) -> None:
    config["num_experts_per_tok"] = moe.num_experts_per_token
    config["output_router_logits"] = moe.aux_loss_weight != 0
    if moe.aux_loss_weight:
        config["router_aux_loss_coef"] = float(moe.aux_loss_weight)


def read_glm4_moe(config: Settings, fields: Settings) -> None:
    fields["qkv_bias"] = bool(config["attention_bias"])
    fields["query_key_norm"] = "head" if config["use_qk_norm"] else None
    fields["moe"] = _sigmoid_experts(config)


def _sigmoid_experts(config: Settings) -> MoeSpec:
    """Returns the experts of GLM and DeepSeek: with sigmoid scores, groups, shared experts and choice biases."""
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
        # transformers does not move them, and fine-tuning is not where a load goes wrong.
        choice_bias_rate=0.0,
    )


def write_glm4_moe(spec: DecoderSpec, config: Settings) -> None:
    config["attention_bias"] = spec.qkv_bias
    config["use_qk_norm"] = spec.query_key_norm is not None
    _write_sigmoid_experts(spec.moe, config)


def _write_sigmoid_experts(moe: MoeSpec | None, config: Settings) -> None:
    if moe is None:
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
    config["num_nextn_predict_layers"] = 0


def read_deepseek_v3(config: Settings, fields: Settings) -> None:
    fields["moe"] = _sigmoid_experts(config)
    fields["head_dims"] = config["qk_nope_head_dim"] + config["qk_rope_head_dim"]
    fields["rotary_dims"] = config["qk_rope_head_dim"]
    fields["rotary_pairs_adjacent"] = config["rope_interleave"]
    fields["latent"] = LatentSpec(
        query_dims=config["q_lora_rank"] or 0, key_value_dims=config["kv_lora_rank"], value_dims=config["v_head_dim"]
    )
    scaling = fields["rotary_scaling"]
    if scaling is not None and scaling.mscale_all_dim:
        fields["query_scale"] = scaling.query_scale(fields["head_dims"])


def write_deepseek_v3(spec: DecoderSpec, config: Settings) -> None:
    if spec.latent is None:
        raise HfError("it has latent attention, and the model has none")
    _write_sigmoid_experts(spec.moe, config)
    # transformers gives the rotated part's width the name of a head's.
    config["head_dim"] = config["qk_rope_head_dim"] = spec.rotary_dims
    config["qk_nope_head_dim"] = spec.head_dims - spec.rotary_dims
    config["rope_interleave"] = spec.rotary_pairs_adjacent
    config["q_lora_rank"] = spec.latent.query_dims or None
    config["kv_lora_rank"], config["v_head_dim"] = spec.latent.key_value_dims, spec.latent.value_dims
    config["attention_bias"] = False
    # vLLM reads them, and takes other values where they are missing.
    config["scoring_func"], config["topk_method"], config["moe_layer_freq"] = "sigmoid", "noaux_tc", 1


def read_mixtral(config: Settings, fields: Settings) -> None:
    read_window_of_all(config, fields)
    fields["moe"] = MoeSpec(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["intermediate_size"],
        normalise_top_k=True,
        aux_loss_weight=config["router_aux_loss_coef"] if config["output_router_logits"] else 0.0,
    )


def write_mixtral(spec: DecoderSpec, config: Settings) -> None:
    write_window_of_all(spec, config)
    if spec.moe is not None:
        config["num_local_experts"] = spec.moe.num_experts
        config["intermediate_size"] = spec.moe.hidden_dims
        _write_moe(spec.moe, config)


def read_gpt_oss(config: Settings, fields: Settings) -> None:
    read_llama(config, fields)
    _read_layer_types(config, fields)
    if fields["activation"] != "silu":
        raise HfError(f"hidden_act={config['hidden_act']!r}: gpt-oss has 'silu'")
    fields["moe"] = MoeSpec(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["intermediate_size"],
        # The softmax over the logits of a token's experts alone.
        normalise_top_k=True,
        biases=True,
        swiglu_limit=config["swiglu_limit"],
        swiglu_alpha=config["swiglu_alpha"],
        aux_loss_weight=config["router_aux_loss_coef"] if config["output_router_logits"] else 0.0,
    )


def write_gpt_oss(spec: DecoderSpec, config: Settings) -> None:
    if spec.moe is None or spec.moe.swiglu_limit is None:
        raise HfError("it has experts with a swiglu_limit, and the model has none")
    write_llama(spec, config)
    _write_layer_types(spec, config)
    config["num_local_experts"] = spec.moe.num_experts
    config["intermediate_size"] = spec.moe.hidden_dims
    config["swiglu_limit"] = float(spec.moe.swiglu_limit)
    config["swiglu_alpha"] = float(spec.moe.swiglu_alpha)
    if spec.rotary_scaling is None:
        config["rope_scaling"] = {"rope_type": "default"}  # transformers 4 scales the frequencies if it is missing
    _write_moe(spec.moe, config)


def read_gemma(config: Settings, fields: Settings) -> None:
    read_llama(config, fields)
    fields["query_scale"] = config["query_pre_attn_scalar"] ** -0.5
    fields["embedding_scale"] = config["hidden_size"] ** 0.5
    _read_layer_types(config, fields)


def write_gemma(spec: DecoderSpec, config: Settings) -> None:
    write_llama(spec, config)
    _write_layer_types(spec, config)
    scalar = (spec.query_scale or spec.head_dims**-0.5) ** -2
    if abs(scalar - round(scalar)) >= 1e-6 * scalar:
        raise HfError(f"query_scale={spec.query_scale}: query_pre_attn_scalar={scalar:.6g} must be a whole number")
    config["query_pre_attn_scalar"] = round(scalar)
    # vLLM reads hidden_act where transformers reads hidden_activation.
    config["hidden_act"] = config["hidden_activation"]


def read_olmo3(config: Settings, fields: Settings) -> None:
    read_llama(config, fields)
    _read_layer_types(config, fields)
    by_type = config.get("rope_parameters") or {}
    if by_type and not {_FULL, _SLIDING} & by_type.keys():
        raise HfError(f"rope_parameters has neither {_FULL} nor {_SLIDING}; give an object for each")
    base = config["rope_theta"]
    if base != OLMO3_ROPE_THETA and not all("rope_theta" in (by_type.get(kind) or {}) for kind in (_FULL, _SLIDING)):
        raise HfError(
            f"rope_theta={base}: transformers 4 gives it to all layers, and transformers 5 to those with {_FULL} alone. Give "
            f"rope_parameters a rope_theta for {_FULL} and one for {_SLIDING}"
        )


def write_olmo3(spec: DecoderSpec, config: Settings) -> None:
    write_llama(spec, config)
    _write_layer_types(spec, config)
    del config["rope_local_base_freq"]


def read_gpt2(config: Settings, fields: Settings) -> None:
    dims, heads = config["n_embd"], config["n_head"]
    fields["num_kv_heads"] = heads
    fields["head_dims"] = head_dims(dims, heads, "n_embd", "n_head")
    fields["hidden_dims"] = config["n_inner"] or 4 * dims
    # A head's width gives the default scale.
    fields["query_scale"] = None if config["scale_attn_weights"] else 1.0


def write_gpt2(spec: DecoderSpec, config: Settings) -> None:
    config["n_inner"] = spec.hidden_dims
    config["scale_attn_weights"] = spec.query_scale is None
