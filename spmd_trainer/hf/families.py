"""The supported architectures of transformers: the mapping between their config.json and `DecoderSpec`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from spmd_trainer.hf import family_settings as own
from spmd_trainer.hf.family_settings import Settings
from spmd_trainer.models.decoder_spec import DecoderSpec


@dataclasses.dataclass(frozen=True)
class Family:
    """The config.json format of one architecture of transformers.

    Attributes:
      architecture: the model's class in transformers.
      model_type: value of `model_type` in config.json.
      keys: {field of DecoderSpec: key} of values stored unchanged.
      defaults: transformers' values of keys that a config.json may lack.
      fixed: fields of DecoderSpec that all models of the family share.
      rotary_by_layer_type: True if the config has separate rotary settings for each kind of layer.
      heads_divide_dims: True if transformers requires the number of heads to divide the hidden size.
      off: further unsupported options, {key: values that switch it off}, besides `_SWITCHED_OFF` of `config_json.py`.
      without_effect: further keys without an effect on the model's output, besides `_WITHOUT_EFFECT` of `config_json.py`.
      in_mxfp4: True if the family's folders may have weights in MXFP4.
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
    rotary_by_layer_type: bool = False
    heads_divide_dims: bool = False
    off: Mapping[str, tuple[Any, ...]] = dataclasses.field(default_factory=dict)
    without_effect: frozenset[str] = frozenset()
    in_mxfp4: bool = False


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
# GLM and DeepSeek.
_SIGMOID_DEFAULTS = {
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "n_shared_experts": 1,
    "num_nextn_predict_layers": 0,
}
_SIGMOID_OFF = {"scoring_func": (None, "sigmoid"), "topk_method": (None, "noaux_tc")}
# Settings of how experts are chosen, with the values of families that don't have them.
ROUTING_OFF: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "first_k_dense_replace": (None, 0),
}
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
            own.read_llama,
            own.write_llama,
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
            own.read_window_of_all,
            own.write_window_of_all,
            off={"attention_bias": (None, False)},
        ),
        Family(
            "Qwen2ForCausalLM", "qwen2", _SHARED_KEYS, _QWEN_DEFAULTS, {"qkv_bias": True}, own.read_qwen, own.write_qwen
        ),
        Family(
            "Qwen3ForCausalLM",
            "qwen3",
            _SHARED_KEYS,
            {**_QWEN_DEFAULTS, "head_dim": 128, "num_key_value_heads": 32},
            {"query_key_norm": "head"},
            own.read_qwen3,
            own.write_qwen3,
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
            own.read_qwen3_moe,
            own.write_qwen3_moe,
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
            own.read_mixtral,
            own.write_mixtral,
            off={"attention_bias": (None, False), "router_jitter_noise": (None, 0, 0.0)},
        ),
        Family(
            "Glm4MoeForCausalLM",
            "glm4_moe",
            _SHARED_KEYS,
            {
                **_SHARED_DEFAULTS,
                **_SIGMOID_DEFAULTS,
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
            own.read_glm4_moe,
            own.write_glm4_moe,
            off=_SIGMOID_OFF,
        ),
        Family(
            "DeepseekV3ForCausalLM",
            "deepseek_v3",
            {field: key for field, key in _SHARED_KEYS.items() if field != "head_dims"},
            {
                **_SHARED_DEFAULTS,
                **_SIGMOID_DEFAULTS,
                "num_key_value_heads": 128,
                "max_position_embeddings": 4096,
                "q_lora_rank": 1536,
                "kv_lora_rank": 512,
                "qk_nope_head_dim": 128,
                "qk_rope_head_dim": 64,
                "v_head_dim": 128,
                "rope_interleave": True,
                "n_routed_experts": 256,
                "moe_intermediate_size": 2048,
                "first_k_dense_replace": 3,
                "routed_scaling_factor": 2.5,
                "n_group": 8,
                "topk_group": 4,
            },
            {},
            own.read_deepseek_v3,
            own.write_deepseek_v3,
            off={**_SIGMOID_OFF, "attention_bias": (None, False), "moe_layer_freq": (None, 1)},
            without_effect=frozenset({"aux_loss_alpha", "ep_size", "head_dim", "qk_head_dim", "seq_aux"}),
        ),
        Family(
            "GptOssForCausalLM",
            "gpt_oss",
            _SHARED_KEYS,
            {
                **_SHARED_DEFAULTS,
                **_MOE_DEFAULTS,
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
            own.read_gpt_oss,
            own.write_gpt_oss,
            without_effect=frozenset({"experts_per_token", "initial_context_length"}),
            in_mxfp4=True,
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
            own.read_gemma,
            own.write_gemma,
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
            own.read_gemma,
            own.write_gemma,
            rotary_by_layer_type=True,
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
            own.read_gpt2,
            own.write_gpt2,
            off={"scale_attn_by_inverse_layer_idx": (None, False)},
            without_effect=_GPT2_WITHOUT_EFFECT,
        ),
        Family(
            "Olmo2ForCausalLM",
            "olmo2",
            _SHARED_KEYS,
            {**_SHARED_DEFAULTS, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
            {"norm_placement": "post", "query_key_norm": "all"},
            own.read_llama,
            own.write_llama,
        ),
        Family(
            "Olmo3ForCausalLM",
            "olmo3",
            _SHARED_KEYS,
            {
                **_SHARED_DEFAULTS,
                "rms_norm_eps": 1e-5,
                "rope_theta": own.OLMO3_ROPE_THETA,
                "max_position_embeddings": 2048,
                "sliding_window": 4096,
                "layer_types": None,
                "_every": 4,
            },
            {"norm_placement": "post", "query_key_norm": "all"},
            own.read_olmo3,
            own.write_olmo3,
            rotary_by_layer_type=True,
            off={"rope_local_base_freq": (None,)},
        ),
    )
}
