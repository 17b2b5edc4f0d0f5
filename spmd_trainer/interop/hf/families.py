"""The architectures of transformers that are read and written: how their config.json names what a `DecoderSpec` holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

from spmd_trainer.interop.hf.errors import HfError
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec

Settings: TypeAlias = dict[str, Any]

_SLIDING, _FULL = "sliding_attention", "full_attention"


@dataclasses.dataclass(frozen=True)
class Family:
    """How an architecture of transformers is described by a config.json.

    Attributes:
      architecture: the model's class in transformers.
      model_type: the entry of the same name.
      keys: {field of DecoderSpec: key} of what is stored as it is.
      defaults: transformers' values of keys that a config.json may lack.
      fixed: fields of DecoderSpec that all models of the family share.
      heads_divide_dims: True if transformers refuses a hidden size that is no multiple of the number of heads.
      off: further options that are not supported, as in `_SWITCHED_OFF`.
      without_effect: further keys without an effect.
      read: adds fields that need more than a renaming: (config with defaults, fields).
      write: the inverse of `read`: (spec, config).
    """

    architecture: str
    model_type: str
    keys: Mapping[str, str]
    defaults: Mapping[str, Any]
    fixed: Mapping[str, Any]
    read: Callable[[Settings, Settings], None]
    write: Callable[[DecoderSpec, Settings], None]
    heads_divide_dims: bool = False
    off: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()


def head_dims(dims: int, heads: int, dims_key: str, heads_key: str) -> int:
    """Returns the width of a head if the config has none. The keys are for the HfError that is raised if it is not whole."""
    if dims % heads:
        raise HfError(f"{heads_key}={heads} does not divide {dims_key}={dims}, and there is no head_dim")
    return dims // heads


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that gives the kinds of all layers if it is repeated."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:length])


def _read_window_of_all(config: Settings, fields: Settings) -> None:
    """Mistral, Mixtral: all layers have the window, or none."""
    fields["window"] = config["sliding_window"]
    fields["layer_pattern"] = ("global",) if config["sliding_window"] is None else ("local",)


def _write_window_of_all(spec: DecoderSpec, config: Settings) -> None:
    config["sliding_window"] = spec.window if "local" in spec.layer_kinds else None


def _read_layer_types(config: Settings, fields: Settings) -> None:
    """Families whose config lists the kind of each layer."""
    types = config["layer_types"]
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


def _read_llama(config: Settings, fields: Settings) -> None:
    fields["qkv_bias"] = fields["output_bias"] = bool(config["attention_bias"])


def _write_llama(spec: DecoderSpec, config: Settings) -> None:
    config["attention_bias"] = spec.qkv_bias


def _read_qwen(config: Settings, fields: Settings) -> None:
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    if config["layer_types"] is None:
        first = config["max_window_layers"] if config["sliding_window"] is not None else config["num_hidden_layers"]
        config["layer_types"] = [_SLIDING if i >= first else _FULL for i in range(config["num_hidden_layers"])]
    _read_layer_types(config, fields)


def _write_qwen(spec: DecoderSpec, config: Settings) -> None:
    _write_layer_types(spec, config)
    config["use_sliding_window"] = spec.window is not None
    config["max_window_layers"] = spec.layer_kinds.index("local") if spec.window is not None else spec.num_layers


def _read_qwen3(config: Settings, fields: Settings) -> None:
    _read_llama(config, fields)
    _read_qwen(config, fields)


def _write_qwen3(spec: DecoderSpec, config: Settings) -> None:
    _write_llama(spec, config)
    _write_qwen(spec, config)


def _read_qwen3_moe(config: Settings, fields: Settings) -> None:
    _read_llama(config, fields)
    if not config["use_sliding_window"]:
        config["sliding_window"] = None
    _read_window_of_all(config, fields)
    # transformers 5 may call it num_local_experts, as it does in Mixtral.
    experts = config.get("num_local_experts") or config["num_experts"]
    fields["moe"] = MoeSpec(
        num_experts=experts,
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["moe_intermediate_size"],
        normalise_top_k=bool(config["norm_topk_prob"]),
        aux_loss_weight=config["router_aux_loss_coef"] if config["output_router_logits"] else 0.0,
    )


def _write_qwen3_moe(spec: DecoderSpec, config: Settings) -> None:
    _write_llama(spec, config)
    _write_window_of_all(spec, config)
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


def _read_mixtral(config: Settings, fields: Settings) -> None:
    _read_window_of_all(config, fields)
    fields["moe"] = MoeSpec(
        num_experts=config["num_local_experts"],
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config["intermediate_size"],
        normalise_top_k=True,
        aux_loss_weight=config["router_aux_loss_coef"] if config["output_router_logits"] else 0.0,
    )


def _write_mixtral(spec: DecoderSpec, config: Settings) -> None:
    _write_window_of_all(spec, config)
    if spec.moe is not None:
        config["num_local_experts"] = spec.moe.num_experts
        config["intermediate_size"] = spec.moe.hidden_dims
        _write_moe(spec.moe, config)


def _read_gemma(config: Settings, fields: Settings) -> None:
    _read_llama(config, fields)
    fields["query_scale"] = config["query_pre_attn_scalar"] ** -0.5
    fields["embedding_scale"] = config["hidden_size"] ** 0.5
    if config["layer_types"] is None:
        # One layer in so many is global. Gemma 2 has no such key.
        every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or config["_every"]
        config["layer_types"] = [_SLIDING if (i + 1) % every else _FULL for i in range(config["num_hidden_layers"])]
    _read_layer_types(config, fields)


def _write_gemma(spec: DecoderSpec, config: Settings) -> None:
    _write_llama(spec, config)
    _write_layer_types(spec, config)
    scalar = (spec.query_scale or spec.head_dims**-0.5) ** -2
    if abs(scalar - round(scalar)) >= 1e-6 * scalar:
        raise HfError(f"query_scale={spec.query_scale}: query_pre_attn_scalar={scalar:.6g} must be a whole number")
    config["query_pre_attn_scalar"] = round(scalar)
    # vLLM reads hidden_act where transformers reads hidden_activation.
    config["hidden_act"] = config["hidden_activation"]


def _read_gpt2(config: Settings, fields: Settings) -> None:
    dims, heads = config["n_embd"], config["n_head"]
    fields["num_kv_heads"] = heads
    fields["head_dims"] = head_dims(dims, heads, "n_embd", "n_head")
    fields["hidden_dims"] = config["n_inner"] or 4 * dims
    # A head's width gives the default scale.
    fields["query_scale"] = None if config["scale_attn_weights"] else 1.0


def _write_gpt2(spec: DecoderSpec, config: Settings) -> None:
    config["n_inner"] = spec.hidden_dims
    config["scale_attn_weights"] = spec.query_scale is None


_SHARED_KEYS = {
    "vocab_size": "vocab_size",
    "model_dims": "hidden_size",
    "hidden_dims": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dims": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
_SHARED_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
}
_MOE_DEFAULTS = {"router_aux_loss_coef": 0.001, "output_router_logits": False}
_GEMMA_KEYS = {
    **_SHARED_KEYS,
    "activation": "hidden_activation",
    "attention_softcap": "attn_logit_softcapping",
    "final_softcap": "final_logit_softcapping",
}
_GEMMA_DEFAULTS = {
    **_SHARED_DEFAULTS,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "tie_word_embeddings": True,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "layer_types": None,
}
_GEMMA_FIXED = {"norm_scale_offset": 1.0, "norm_placement": "pre_and_post"}
_QWEN_DEFAULTS = {
    **_SHARED_DEFAULTS,
    "sliding_window": 4096,
    "use_sliding_window": False,
    "max_window_layers": 28,
    "layer_types": None,
    "max_position_embeddings": 32768,
}

_GPT2_WITHOUT_EFFECT = frozenset(
    {
        "attn_pdrop",
        "embd_pdrop",
        "n_ctx",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
        "task_specific_params",
    }
)

# The order matters for `config_of`: a model that several families describe is written as the first of them.
FAMILIES = {
    family.architecture: family
    for family in (
        Family(
            "LlamaForCausalLM",
            "llama",
            {**_SHARED_KEYS, "mlp_bias": "mlp_bias"},
            {**_SHARED_DEFAULTS, "mlp_bias": False, "max_position_embeddings": 2048},
            {},
            _read_llama,
            _write_llama,
            heads_divide_dims=True,
        ),
        Family(
            "MistralForCausalLM",
            "mistral",
            _SHARED_KEYS,
            {
                **_SHARED_DEFAULTS,
                "num_key_value_heads": 8,
                "sliding_window": 4096,
                "max_position_embeddings": 131072,
            },
            {},
            _read_window_of_all,
            _write_window_of_all,
            off={"attention_bias": (None, False)},
        ),
        Family("Qwen2ForCausalLM", "qwen2", _SHARED_KEYS, _QWEN_DEFAULTS, {"qkv_bias": True}, _read_qwen, _write_qwen),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            _SHARED_KEYS,
            {**_QWEN_DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
            {"query_key_norm": "head"},
            _read_qwen3,
            _write_qwen3,
        ),
        Family(
            "Qwen3MoeForCausalLM",
            "qwen3_moe",
            _SHARED_KEYS,
            {
                **_QWEN_DEFAULTS,
                **_MOE_DEFAULTS,
                "num_key_value_heads": 4,
                "num_experts": 128,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 768,
                "norm_topk_prob": False,
            },
            {"query_key_norm": "head"},
            _read_qwen3_moe,
            _write_qwen3_moe,
            off={"mlp_only_layers": (None, []), "decoder_sparse_step": (None, 1)},
            without_effect=frozenset({"max_window_layers", "layer_types", "num_local_experts"}),
        ),
        Family(
            "MixtralForCausalLM",
            "mixtral",
            _SHARED_KEYS,
            {
                **_SHARED_DEFAULTS,
                **_MOE_DEFAULTS,
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
            off={"attention_bias": (None, False), "router_jitter_noise": (None, 0, 0.0)},
        ),
        Family(
            "Gemma2ForCausalLM",
            "gemma2",
            _GEMMA_KEYS,
            {
                **_GEMMA_DEFAULTS,
                "attn_logit_softcapping": 50.0,
                "final_logit_softcapping": 30.0,
                "max_position_embeddings": 8192,
                "_every": 2,
            },
            _GEMMA_FIXED,
            _read_gemma,
            _write_gemma,
            heads_divide_dims=True,
            without_effect=frozenset({"hidden_act"}),
        ),
        Family(
            "Gemma3ForCausalLM",
            "gemma3_text",
            _GEMMA_KEYS,
            {
                **_GEMMA_DEFAULTS,
                "attn_logit_softcapping": None,
                "final_logit_softcapping": None,
                "max_position_embeddings": 131072,
                "rope_theta": 1_000_000.0,
                "rope_local_base_freq": 10_000.0,
                "_every": 6,
            },
            {**_GEMMA_FIXED, "query_key_norm": "head"},
            _read_gemma,
            _write_gemma,
            heads_divide_dims=True,
            without_effect=frozenset({"hidden_act"}),
        ),
        Family(
            "GPT2LMHeadModel",
            "gpt2",
            {
                "vocab_size": "vocab_size",
                "model_dims": "n_embd",
                "num_layers": "n_layer",
                "num_heads": "n_head",
                "max_positions": "n_positions",
                "norm_epsilon": "layer_norm_epsilon",
                "activation": "activation_function",
                "tied_embeddings": "tie_word_embeddings",
            },
            {
                "n_inner": None,
                "n_positions": 1024,
                "activation_function": "gelu_new",
                "layer_norm_epsilon": 1e-5,
                "tie_word_embeddings": True,
                "scale_attn_weights": True,
            },
            {
                "gated": False,
                "norm": "layer",
                "positions": "learned",
                "qkv_bias": True,
                "output_bias": True,
                "mlp_bias": True,
            },
            _read_gpt2,
            _write_gpt2,
            off={"scale_attn_by_inverse_layer_idx": (None, False)},
            without_effect=_GPT2_WITHOUT_EFFECT,
        ),
        Family(
            "Olmo2ForCausalLM",
            "olmo2",
            _SHARED_KEYS,
            {**_SHARED_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
            {"norm_placement": "post", "query_key_norm": "all"},
            _read_llama,
            _write_llama,
        ),
    )
}
