"""config.json as a DecoderSpec, and back: today's and yesterday's spellings, defaults, and what is refused."""

from __future__ import annotations

import dataclasses
import json
import math
import re

import pytest
from facts import raises_naming
from hf_models import DATA, NAMES
from praxis import pax_fiddle

from spmd_trainer.decoder import rotary
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import deepseek, gemma, llama4, qwen_next
from spmd_trainer.hf import config_json, text_part
from spmd_trainer.models.decoder_spec import DecoderSpec, HeadSpec, LayerSpec, RotaryScaling
from spmd_trainer.training import experiment_config

# Llama 3.1 8B as its makers wrote it, with transformers 4.
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "eos_token_id": [128001, 128008, 128009],
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "vocab_size": 128256,
}
# Gemma 3 1B, which leaves out what transformers 4 took for granted.
GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "vocab_size": 262144,
}


# GLM-4.5-Air, as its makers wrote it.
GLM4_AIR = {
    "architectures": ["Glm4MoeForCausalLM"],
    "attention_bias": True,
    "first_k_dense_replace": 1,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 10944,
    "max_position_embeddings": 131072,
    "model_type": "glm4_moe",
    "moe_intermediate_size": 1408,
    "n_group": 1,
    "n_routed_experts": 128,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 96,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 46,
    "num_key_value_heads": 8,
    "num_nextn_predict_layers": 1,
    "partial_rotary_factor": 0.5,
    "rms_norm_eps": 1e-05,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "routed_scaling_factor": 1.0,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "use_qk_norm": False,
    "vocab_size": 151552,
}


# DeepSeek V3, as its makers wrote it.
DEEPSEEK_V3 = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "aux_loss_alpha": 0.001,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}


# Olmo 3 7B, as its makers wrote it.
OLMO3 = {
    "architectures": ["Olmo3ForCausalLM"],
    "attention_bias": False,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"] * 8,
    "max_position_embeddings": 65536,
    "model_type": "olmo3",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 32,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 8.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "yarn",
    },
    "rope_theta": 500000,
    "sliding_window": 4096,
    "tie_word_embeddings": False,
    "vocab_size": 100278,
}


# gpt-oss-20b, as its makers wrote it.
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "attention_bias": True,
    "experts_per_token": 4,
    "head_dim": 64,
    "hidden_act": "silu",
    "hidden_size": 2880,
    "initial_context_length": 4096,
    "intermediate_size": 2880,
    "layer_types": ["sliding_attention", "full_attention"] * 12,
    "max_position_embeddings": 131072,
    "model_type": "gpt_oss",
    "num_attention_heads": 64,
    "num_experts_per_tok": 4,
    "num_hidden_layers": 24,
    "num_key_value_heads": 8,
    "num_local_experts": 32,
    "output_router_logits": False,
    "quantization_config": {
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
        "quant_method": "mxfp4",
    },
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    },
    "rope_theta": 150000,
    "router_aux_loss_coef": 0.9,
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
}


def golden(name):
    return json.loads((DATA / name / "config.json").read_text())


def golden_spec(name, **changes):
    return dataclasses.replace(config_json.spec_of(golden(name), "config.json"), **changes)


@pytest.mark.parametrize("name", NAMES)
def test_every_golden_config_comes_back(name):
    config = json.loads((DATA / name / "config.json").read_text())
    spec = config_json.spec_of(config, "config.json")
    back = config_json.config_of(spec, config["architectures"][0])
    assert config_json.spec_of(back, "config.json") == spec


def test_the_spelling_of_transformers_4():
    spec = config_json.spec_of(LLAMA3, "config.json")
    assert spec == DecoderSpec(
        vocab_size=128256,
        model_dims=4096,
        hidden_dims=14336,
        num_layers=32,
        num_heads=32,
        num_kv_heads=8,
        head_dims=128,
        norm_epsilon=1e-5,
        max_positions=131072,
        rotary_base=500000.0,
        rotary_scaling=RotaryScaling("llama3", 8.0, original_max_positions=8192),
    )


def test_experts_with_biases_groups_and_shared_ones():
    spec = config_json.spec_of({**GLM4_AIR, "n_group": 8, "topk_group": 4, "routed_scaling_factor": 2.5}, "config.json")
    assert (spec.rotary_dims, spec.qkv_bias, spec.first_layers) == (64, True, (LayerSpec("global", has_experts=False),))
    assert dataclasses.asdict(spec.moe) == {
        "num_experts": 128, "num_experts_per_token": 8, "hidden_dims": 1408, "dense_layers": 1, "every": 1, "score": "sigmoid",
        "normalise_top_k": True, "scaling_factor": 2.5, "weigh_inputs": False, "num_groups": 8, "num_chosen_groups": 4,
        "shared_dims": 1408, "shared_gate": False, "biases": False, "swiglu_limit": None, "swiglu_alpha": 1.702,
        "choice_bias": True, "choice_bias_rate": 0.0, "aux_loss_weight": 0.0, "z_loss_weight": 0.0,
    }  # fmt: skip
    with raises_naming(UserError, "scoring_func", "softmax", "sigmoid"):
        config_json.spec_of({**GLM4_AIR, "scoring_func": "softmax"}, "config.json")


def test_deepseek_v3_is_the_experiment_of_its_size():
    found = config_json.spec_of(DEEPSEEK_V3, "config.json")
    wanted = pax_fiddle.build(deepseek.DeepSeekV3().spec())
    assert config_json.differing_fields(found, wanted) == []
    # arXiv:2412.19437, 4.2; the factor of the logits is in DeepSeek's own modeling_deepseek.py.
    assert (found.head_dims, found.value_dims_of("global")) == (192, 128)
    assert found.first_layers == (LayerSpec("global", has_experts=False),) * 3
    assert found.query_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    written = config_json.config_of(wanted)
    assert config_json.differing_fields(config_json.spec_of(written, ""), wanted) == []
    # vLLM reads these.
    assert {key: written[key] for key in ("scoring_func", "topk_method")} == {
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    newer = {**DEEPSEEK_V3["quantization_config"], "scale_fmt": "ue8m0"}  # of DeepSeek V3.1
    assert config_json.spec_of({**DEEPSEEK_V3, "quantization_config": newer}, "") == found
    with raises_naming(UserError, "partial_rotary_factor"):
        config_json.spec_of({**DEEPSEEK_V3, "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "")


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        (
            "KimiK2",
            {
                "first_k_dense_replace": 1, "max_position_embeddings": 262144, "model_type": "kimi_k2", "n_group": 1,
                "n_routed_experts": 384, "num_attention_heads": 64, "num_key_value_heads": 64, "num_nextn_predict_layers": 0,
                "rope_scaling": {**DEEPSEEK_V3["rope_scaling"], "beta_fast": 1.0, "beta_slow": 1.0, "factor": 64.0},
                "rope_theta": 50000.0, "routed_scaling_factor": 2.827, "topk_group": 1, "vocab_size": 163840,
            },
        ),
        (
            "Moonlight16B",
            {
                "first_k_dense_replace": 1, "hidden_size": 2048, "intermediate_size": 11264, "max_position_embeddings": 8192,
                "moe_intermediate_size": 1408, "n_group": 1, "n_routed_experts": 64, "n_shared_experts": 2,
                "num_attention_heads": 16, "num_experts_per_tok": 6, "num_hidden_layers": 27, "num_key_value_heads": 16,
                "q_lora_rank": None, "rms_norm_eps": 1e-5, "rope_scaling": None, "rope_theta": 50000.0,
                "routed_scaling_factor": 2.446, "topk_group": 1, "vocab_size": 163840,
            },
        ),
    ],
)  # fmt: skip
def test_other_models_of_its_architecture(name, changes):
    found = config_json.spec_of({**DEEPSEEK_V3, **changes}, "config.json")
    assert config_json.differing_fields(found, pax_fiddle.build(getattr(deepseek, name)().spec())) == []


# The text model of Qwen 3.5 27B, as its makers wrote it.
QWEN3_5 = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_output_gate": True,
    "dtype": "bfloat16",
    "eos_token_id": 248044,
    "full_attention_interval": 4,
    "head_dim": 256,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "initializer_range": 0.02,
    "intermediate_size": 17408,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 16,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 48,
    "linear_value_head_dim": 128,
    "mamba_ssm_dtype": "float32",
    "max_position_embeddings": 262144,
    "mlp_only_layers": [],
    "model_type": "qwen3_5_text",
    "mtp_num_hidden_layers": 1,
    "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 24,
    "num_hidden_layers": 64,
    "num_key_value_heads": 4,
    "rms_norm_eps": 1e-06,
    "tie_word_embeddings": False,
    "use_cache": True,
    "vocab_size": 248320,
    "rope_parameters": {
        "mrope_interleaved": True,
        "mrope_section": [11, 11, 10],
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "rope_type": "default",
    },
}


def test_qwen_3_5_is_the_experiment_of_its_size():
    whole = {
        "architectures": ["Qwen3_5ForConditionalGeneration"], "image_token_id": 248056, "model_type": "qwen3_5",
        "text_config": QWEN3_5, "vision_config": {"depth": 27}, "tie_word_embeddings": False,
    }  # fmt: skip
    wanted = pax_fiddle.build(qwen_next.Qwen3_5_27B().spec())
    config, where = text_part.config_of_text(whole, "config.json")
    assert config_json.spec_of(config, where) == wanted
    with raises_naming(UserError, "text_config", "rope_thta"):
        config_json.spec_of({**config, "rope_thta": 5.0}, where)
    tied = {**whole, "tie_word_embeddings": True, "eos_token_id": 7}
    tied["text_config"] = {**QWEN3_5, "eos_token_id": None}
    tied, _ = text_part.config_of_text(tied, "config.json")
    assert (tied["tie_word_embeddings"], tied["eos_token_id"]) == (True, 7)  # as in transformers
    assert "image_token_id" not in config
    without = {key: value for key, value in config.items() if key != "layer_types"}
    assert config_json.spec_of(without, "config.json") == wanted
    written = config_json.config_of(wanted)
    assert (written["architectures"], written["layer_types"]) == (["Qwen3_5ForCausalLM"], QWEN3_5["layer_types"])
    with raises_naming(UserError, "Qwen3_5ForConditionalGeneration", "text_config"):
        text_part.config_of_text({**whole, "text_config": None}, "config.json")


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"attn_output_gate": False}, ("attn_output_gate", "True")),
        ({"output_gate_type": "sigmoid"}, ("output_gate_type", "silu")),
        ({"linear_num_key_heads": 5}, ("linear_num_key_heads=5", "linear_num_value_heads=48")),
        ({"layer_types": ["sliding_attention"] * 64}, ("sliding_attention", "linear_attention")),
        ({"attention_bias": True}, ("attention_bias", "False")),
    ],
)
def test_settings_that_qwen_3_5_has_in_one_way_alone(changes, facts):
    with raises_naming(UserError, *facts):
        config_json.spec_of({**QWEN3_5, "architectures": ["Qwen3_5ForCausalLM"], **changes}, "config.json")


# Gemma 4 31B as its makers wrote it.
GEMMA4 = {
    "attention_bias": False,
    "attention_k_eq_v": True,
    "dtype": "bfloat16",
    "enable_moe_block": False,
    "final_logit_softcapping": 30.0,
    "global_head_dim": 512,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 5376,
    "hidden_size_per_layer_input": 0,
    "intermediate_size": 21504,
    "layer_types": (["sliding_attention"] * 5 + ["full_attention"]) * 10,
    "max_position_embeddings": 262144,
    "model_type": "gemma4_text",
    "num_attention_heads": 32,
    "num_global_key_value_heads": 4,
    "num_hidden_layers": 60,
    "num_key_value_heads": 16,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "sliding_window": 1024,
    "tie_word_embeddings": True,
    "use_bidirectional_attention": "vision",
    "use_double_wide_mlp": False,
    "vocab_size": 262144,
    "vocab_size_per_layer_input": 262144,
}


def test_gemma_4_is_the_experiment_of_its_size():
    whole = {"architectures": ["Gemma4ForConditionalGeneration"], "model_type": "gemma4", "text_config": GEMMA4}
    wanted = pax_fiddle.build(gemma.Gemma4_31B().spec())
    config, where = text_part.config_of_text(whole, "config.json")
    assert config_json.spec_of(config, where) == wanted
    missing = {"layer_types", "rope_parameters", "vocab_size_per_layer_input"}
    assert config_json.spec_of({k: v for k, v in config.items() if k not in missing}, where) == wanted
    # As transformers writes it.
    full = {str(i): {"head_dim": 512, "num_key_value_heads": 4} for i in range(5, 60, 6)}
    rewritten = {k: v for k, v in config.items() if "global" not in k} | {"per_layer_config": full}
    assert config_json.spec_of(rewritten, where) == wanted
    own_values = config_json.spec_of({**config, "attention_k_eq_v": False}, where)
    assert own_values.global_heads == HeadSpec(16, 512)
    # transformers reads an older spelling first, and then for all layers.
    written = config_json.config_of(wanted)
    assert "rope_scaling" not in written
    assert config_json.spec_of({**config, "rope_parameters": written["rope_parameters"]}, where) == wanted


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"hidden_size_per_layer_input": 256}, ("hidden_size_per_layer_input=256", "0 is")),
        ({"num_kv_shared_layers": 20}, ("num_kv_shared_layers=20", "0")),
        ({"enable_moe_block": True}, ("enable_moe_block=True", "False")),
        ({"use_bidirectional_attention": "all"}, ("use_bidirectional_attention='all'", "vision")),
        ({"per_layer_config": {"5": {"head_dim": 512}}}, ("per_layer_config", "full layers")),
        ({"per_layer_config": {str(i): 7 for i in range(5, 60, 6)}}, ("per_layer_config", "full layers")),
        ({"per_layer_config": {str(i): ["head_dim"] for i in range(5, 60, 6)}}, ("per_layer_config", "full layers")),
        (
            {"rope_parameters": {"full_attention": {"rope_type": "default", "partial_rotary_factor": 0.25}}},
            ("partial_rotary_factor", "proportional"),
        ),
    ],
)
def test_settings_of_gemma_4_that_are_refused(changes, facts):
    with raises_naming(UserError, *facts):
        config_json.spec_of({**GEMMA4, "architectures": ["Gemma4ForCausalLM"], **changes}, "config.json")


def test_a_number_of_layers_that_no_folder_has_is_refused_before_any_list_of_them():
    with raises_naming(UserError, "num_hidden_layers=2147483647", "10,000"):
        config_json.spec_of({**LLAMA4, "num_hidden_layers": 2**31 - 1}, "config.json")


# Llama 4 Scout as its makers wrote it.
LLAMA4 = {
    "architectures": ["Llama4ForCausalLM"],
    "attention_bias": False,
    "attention_chunk_size": 8192,
    "attn_scale": 0.1,
    "attn_temperature_tuning": 4,
    "cache_implementation": "hybrid",
    "floor_scale": 8192,
    "for_llm_compressor": False,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 5120,
    "interleave_moe_layer_step": 1,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "max_position_embeddings": 262144,
    "model_type": "llama4_text",
    "moe_layers": list(range(48)),
    "no_rope_layers": [1, 1, 1, 0] * 12,
    "num_attention_heads": 40,
    "num_experts_per_tok": 1,
    "num_hidden_layers": 48,
    "num_key_value_heads": 8,
    "num_local_experts": 16,
    "output_router_logits": False,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "router_aux_loss_coef": 0.001,
    "router_jitter_noise": 0.0,
    "use_qk_norm": True,
    "vocab_size": 202048,
}


def test_llama_4_is_the_experiment_of_its_size():
    wanted = pax_fiddle.build(llama4.Llama4Scout().spec())
    assert config_json.differing_fields(config_json.spec_of(LLAMA4, "config.json"), wanted) == []
    # What transformers computes where it is missing.
    shorter = {key: value for key, value in LLAMA4.items() if key not in ("moe_layers", "attn_temperature_tuning")}
    shorter["no_rope_layers"] = []
    assert config_json.differing_fields(config_json.spec_of(shorter, "config.json"), wanted) == []
    # transformers reads as many as it needs.
    longer = {"no_rope_layers": [1, 1, 1, 0] * 13, "moe_layers": list(range(4, 52))}
    found = config_json.spec_of({**LLAMA4, **longer}, "config.json")
    assert set(config_json.differing_fields(found, wanted)) == {"hidden_dims", "moe.dense_layers"}
    assert (found.moe.dense_layers, found.hidden_dims) == (4, 16384)
    without_experts = config_json.spec_of({**LLAMA4, "moe_layers": []}, "config.json")
    assert (without_experts.moe, without_experts.hidden_dims) == (None, 16384)
    assert config_json.spec_of(config_json.config_of(without_experts, "Llama4ForCausalLM"), "config.json").moe is None


@pytest.mark.parametrize(
    ("changes", "facts"),
    [
        ({"moe_layers": [1, 2]}, ("moe_layers=[1, 2]", "every")),
        ({"moe_layers": [4, 8, 12]}, ("moe_layers=[4, 8, 12]", "every")),
        ({"layer_types": ["full_attention"] * 48}, ("no_rope_layers", "layer_types")),
        ({"no_rope_layers": [1, 0]}, ("no_rope_layers", "2", "num_hidden_layers", "48")),
        ({"attention_chunk_size": None}, ("window=None", "chunked")),
        ({"router_jitter_noise": 0.1}, ("router_jitter_noise", "0.0")),
    ],
)
def test_settings_of_llama_4_that_are_refused(changes, facts):
    with raises_naming(UserError, *facts):
        config_json.spec_of({**LLAMA4, **changes}, "config.json")


def test_the_text_models_config_of_gemma_3_may_lack_what_transformers_takes_for_granted():
    text = {
        "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text", "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "sliding_window": 1024,
    }  # fmt: skip
    whole = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    spec = config_json.spec_of(*text_part.config_of_text(whole, "config.json"))
    published = pax_fiddle.build(gemma.Gemma3_4B().spec())
    differing = config_json.differing_fields(spec, published)
    assert set(differing) <= {"vocab_size"}  # the published size counts the tokens for images, too
    assert spec.vocab_size == 262_208


@pytest.mark.parametrize(
    ("config", "facts"),
    [
        ({"sliding_windw": 7}, ("sliding_windw=7", "did you mean sliding_window")),
        (
            {"clip_qkv": 8.0, "logit_scale": 2.0},
            ("2 unknown settings", "clip_qkv=8.0", "logit_scale=2.0", "delete them"),
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "facter": 2.0}}, ("rope_parameters.facter",)),
    ],
)
def test_a_setting_that_is_not_known_is_an_error(config, facts):
    with raises_naming(UserError, *facts):
        config_json.spec_of({**golden("mistral"), **config}, "config.json")


# Keys of published folders that change nothing in what transformers computes.
HARMLESS = [
    ("gpt2", {"n_special": 0, "predict_special_tokens": True, "_num_labels": 1, "task_specific_params": {"a": 1}}),
    ("gemma2", {"sliding_window_size": 4096, "cache_implementation": "hybrid"}),
    ("qwen3_moe", {"use_qk_norm": True, "diversity_penalty": 0.0, "router_aux_loss_coef": 0.0}),
    ("qwen2", {"dual_chunk_attention_config": {"chunk_size": 262144}}),
    ("llama_untied", {"activation": "swiglu", "pretraining_tp": 1, "max_sequence_length": 4096, "_comment": "a model"}),
    ("glm4_moe", {"output_router_logits": True, "router_aux_loss_coef": 0.001}),
    ("deepseek_v3", {"aux_loss_alpha": 0.001, "seq_aux": True, "ep_size": 1, "unsloth_version": "2026.1"}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "keys"), HARMLESS, ids=[name for name, _ in HARMLESS])
def test_what_published_folders_have_besides_is_no_error(name, keys):
    assert config_json.spec_of({**golden(name), **keys}, "config.json") == golden_spec(name)


def test_settings_of_a_scaling_have_no_effect_where_there_is_none():
    unscaled = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "factor": 2.0}}
    assert config_json.spec_of({**golden("llama_untied"), **unscaled}, "config.json").rotary_scaling is None


@pytest.mark.parametrize(
    "experiment",
    [
        gemma.Gemma4_31B,
        llama4.Llama4Maverick,
        llama4.Llama4Scout,
        qwen_next.Qwen3Next80B,
        qwen_next.Qwen3_5_27B,
        qwen_next.Qwen3_5_35B_A3B,
    ],
)
def test_published_sizes_have_a_config(experiment):
    spec = pax_fiddle.build(experiment().spec())
    assert config_json.spec_of(config_json.config_of(spec), "config.json") == spec


def test_unknown_settings_that_switch_nothing_on_are_no_error():
    spec = config_json.spec_of(golden("mistral"), "config.json")
    harmless = {
        "clip_qkv": None,
        "use_parallel_residual": False,
        "transformers.js_config": {"dtype": "q4"},
        "id2label": {},
    }
    assert config_json.spec_of({**golden("mistral"), **harmless}, "config.json") == spec


def test_mistral_has_no_biases_of_attention():
    with raises_naming(UserError, "attention_bias", "False"):
        config_json.spec_of({**golden("mistral"), "attention_bias": True}, "config.json")


def test_defaults_are_those_of_the_family():
    spec = config_json.spec_of(GEMMA3, "config.json")
    assert spec.tied_embeddings  # transformers 4 does not write it
    assert spec.layer_pattern == ("local",) * 5 + ("global",)
    assert [layer.kind for layer in spec.last_layers] == ["local", "local"]
    assert (spec.window, spec.rotary_base, spec.local_rotary_base) == (512, 1e6, 1e4)
    assert spec.embedding_scale == 1152**0.5
    assert spec.query_scale == 1 / 16


def test_olmo_3_scales_the_frequencies_of_its_global_layers():
    spec = config_json.spec_of(OLMO3, "config.json")
    assert (spec.rotary_base, spec.local_rotary_base, spec.rotary_scaling.factor) == (5e5, 5e5, 8.0)
    assert rotary.frequencies(spec, "global")[1] == rotary.yarn_attention_factor(RotaryScaling("yarn", 8.0))
    assert rotary.frequencies(spec, "local")[1] == 1.0
    without = {key: value for key, value in OLMO3.items() if key not in ("layer_types", "rope_scaling", "rope_theta")}
    assert config_json.spec_of(without, "").layer_kinds == spec.layer_kinds


def test_rotary_bases_of_olmo_3_that_versions_of_transformers_read_differently():
    with raises_naming(UserError, "rope_theta=10000.0", "transformers 4", "sliding_attention"):
        config_json.spec_of({**OLMO3, "rope_theta": 10000.0}, "config.json")
    with raises_naming(UserError, "rope_parameters", "full_attention"):
        config_json.spec_of({**OLMO3, "rope_scaling": None, "rope_parameters": OLMO3["rope_scaling"]}, "config.json")
    by_type = {"full_attention": {"rope_theta": 300.0}, "sliding_attention": {"rope_theta": 20.0}}
    spec = config_json.spec_of({**golden("olmo3"), "rope_parameters": by_type}, "config.json")
    assert (spec.rotary_base, spec.local_rotary_base) == (300.0, 20.0)
    assert config_json.spec_of(config_json.config_of(spec, "Olmo3ForCausalLM"), "") == spec


def test_gpt_oss_as_its_makers_wrote_it():
    spec = config_json.spec_of(GPT_OSS, "config.json")
    published = experiment_config.resolve("lm.gpt_oss.GptOss20B").task_p.model.lm_tpl.spec
    assert config_json.differing_fields(spec, pax_fiddle.build(published)) == []
    # What transformers takes for granted.
    usual = ("rope_scaling", "rope_theta", "layer_types", "swiglu_limit", "attention_bias", "quantization_config")
    assert config_json.spec_of({key: value for key, value in GPT_OSS.items() if key not in usual}, "") == spec


def test_null_is_the_usual_scaling_of_gpt_oss_as_in_transformers():
    config = json.loads((DATA / "gpt_oss" / "config.json").read_text())
    config.pop("rope_scaling", None)
    found = [
        config_json.spec_of(given, "config.json")
        for given in (
            {**config, "rope_parameters": None},
            {name: value for name, value in config.items() if name != "rope_parameters"},
        )
    ]
    assert found[0] == found[1]
    assert found[0].rotary_scaling.kind == "yarn"


def test_gpt_oss_without_scaled_frequencies_says_so():
    spec = golden_spec("gpt_oss", rotary_scaling=None)
    config = config_json.config_of(spec)
    del config["rope_parameters"]
    assert config_json.spec_of(config, "").rotary_scaling is None


def test_a_qwen_window_begins_at_its_layer():
    config = json.loads((DATA / "qwen2_window" / "config.json").read_text())
    del config["layer_types"]
    assert config_json.spec_of(config, "config.json").layer_kinds == ("global", "local", "local")
    config["use_sliding_window"] = False
    assert config_json.spec_of(config, "config.json").layer_kinds == ("global",) * 3


def test_a_spec_finds_its_architecture():
    for name in ("llama_untied", "mistral", "qwen3_moe", "gpt_oss", "gemma3", "gpt2", "olmo2", "olmo3"):
        config = json.loads((DATA / name / "config.json").read_text())
        assert config_json.config_of(config_json.spec_of(config, ""))["architectures"] == config["architectures"]


def test_a_spec_that_no_architecture_has():
    config = json.loads((DATA / "llama_untied" / "config.json").read_text())
    spec = dataclasses.replace(config_json.spec_of(config, ""), embedding_scale=3.0)
    with raises_naming(UserError, "architecture", "LlamaForCausalLM", "embedding_scale"):
        config_json.config_of(spec)
    with raises_naming(UserError, "GPT2LMHeadModel", "embedding_scale"):
        config_json.config_of(spec, "GPT2LMHeadModel")


def test_routing_that_no_architecture_has_is_named():
    spec = golden_spec("qwen3_moe")
    spec.moe = dataclasses.replace(spec.moe, score="sigmoid", choice_bias=True, shared_dims=4, z_loss_weight=0.1)
    with raises_naming(UserError, "Qwen3MoeForCausalLM", "moe.score", "moe.choice_bias", "moe.shared_dims") as info:
        config_json.config_of(spec)
    assert "z_loss_weight" not in str(info.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architectures": ["LamaForCausalLM"]}, "Olmo3ForCausalLM are; did you mean LlamaForCausalLM"),
        ({"architectures": None, "model_type": "bert"}, "names no architecture: architectures is None"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "rope type 'longrope', which is not supported"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}},
            "no original_max_position_embeddings, low_freq_factor",
        ),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0, "facto": 3}}, "rope_scaling.facto is not supported"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0.5}}, "rotary_scaling.factor=0.5"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported; 1.0 is"),
        ({"quantization_config": {"bits": 4}}, "quantization_config={'bits': 4} is not supported"),
        ({"hidden_act": "silly"}, "hidden_act='silly' is not supported"),
        ({"num_key_value_heads": 5}, "num_kv_heads=5 does not divide num_heads=32"),
        ({"hidden_size": 4095}, "num_attention_heads=32 does not divide hidden_size=4095, and there is no head_dim"),
    ],
)
def test_what_is_not_supported_is_named(change, message):
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        config_json.spec_of({**LLAMA3, **change}, "models/llama/config.json")
    assert "models/llama/config.json" in str(raised.value)


def test_a_missing_setting_is_named():
    config = {key: value for key, value in LLAMA3.items() if key != "vocab_size"}
    with pytest.raises(UserError, match="has no vocab_size"):
        config_json.spec_of(config, "config.json")


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_moe", {"mlp_only_layers": [1]}, r"mlp_only_layers=\[1\] is not supported"),
        ("qwen3_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step=2 is not supported"),
        ("qwen3_moe", {"scoring_func": "sigmoid"}, "scoring_func='sigmoid' is not supported; 'softmax' is"),
        ("qwen3_moe", {"n_group": 8}, "n_group=8 is not supported"),
        ("qwen3_moe", {"topk_group": 4}, "topk_group=4 is not supported"),
        ("qwen3_moe", {"routed_scaling_factor": 2.5}, "routed_scaling_factor=2.5 is not supported"),
        ("qwen3_moe", {"n_shared_experts": 1}, "n_shared_experts=1 is not supported"),
        ("gpt_oss", {"quantization_config": {"quant_method": "awq"}}, "quant_method may be 'fp8' and 'mxfp4'"),
        ("qwen3", {"quantization_config": {"quant_method": "mxfp4"}}, "quant_method may be 'fp8'"),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8"}},
            "weight_block_size=None is not supported; factors of",
        ),
        (
            "qwen3",
            {"quantization_config": {"quant_method": "fp8", "weight_block_size": [8, 8], "fmt": "e5m2"}},
            "fmt='e5m2' is not supported; 'e4m3' is",
        ),
        (
            "gpt_oss_mxfp4",
            {"quantization_config": {"quant_method": "mxfp4", "group": 2}},
            "quantization_config.group is not",
        ),
        ("gpt_oss", {"hidden_act": "gelu"}, "hidden_act='gelu': gpt-oss has 'silu'"),
        ("gpt_oss", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported"),
        ("mixtral", {"norm_topk_prob": False}, "norm_topk_prob=False is not supported; True is"),
        ("mixtral", {"first_k_dense_replace": 1}, "first_k_dense_replace=1 is not supported"),
        ("gemma3", {"layer_types": ["full_attention"]}, "layer_types has 1 entries, and num_hidden_layers is 8"),
        ("gemma3", {"layer_types": ["chunked_attention"] * 8}, "layer_types has 'chunked_attention'"),
        ("gemma2", {"use_bidirectional_attention": True}, "use_bidirectional_attention=True is not supported"),
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True is not supported"),
    ],
)
def test_options_of_a_family_that_are_not_supported(name, change, message):
    config = json.loads((DATA / name / "config.json").read_text())
    with pytest.raises(UserError, match=message):
        config_json.spec_of({**config, **change}, "config.json")


def test_the_older_spelling_of_rotary_settings_comes_first():
    linear = {"rope_type": "linear", "factor": 8.0}
    config = {**golden("llama_untied"), "rope_scaling": linear}
    assert config_json.spec_of(config, "").rotary_scaling == RotaryScaling("linear", 8.0)
    gemma = config_json.spec_of({**golden("gemma3"), "rope_scaling": linear}, "")
    assert (gemma.rotary_scaling, gemma.rotary_base) == (RotaryScaling("linear", 8.0), 1e6)
    assert gemma.local_rotary_base == 1e4
    # An empty one is none.
    assert config_json.spec_of({**golden("llama3_rope"), "rope_scaling": {}}, "").rotary_scaling is not None


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("llama_untied", {"vocab_size": None}, "vocab_size=None; give a whole number above 0"),
        (
            "llama_untied",
            {"hidden_size": 10**30},
            f"hidden_size={10**30}; give a whole number above 0, at most 2,147,483,647",
        ),
        (
            "gpt2",
            {"n_positions": 10**12},
            "n_positions=1000000000000; give a whole number above 0, at most 2,147,483,647",
        ),
        (
            "llama_untied",
            {"num_hidden_layers": 10**9},
            "1,000,000,000 layers with 1 expert in each; a folder may have up to 10,000 layers",
        ),
        ("mixtral", {"num_local_experts": 10**9}, "layers with 1,000,000,000 experts in each"),
        ("llama_untied", {"num_hidden_layers": "3"}, "num_hidden_layers='3'; give a whole number above 0"),
        ("llama_untied", {"num_attention_heads": 0}, "num_attention_heads=0; give a whole number above 0"),
        ("llama_untied", {"hidden_size": 18.5}, "hidden_size=18.5; give a whole number above 0"),
        ("llama_untied", {"hidden_act": ["silu"]}, "hidden_act=['silu']; give a text"),
        ("llama_untied", {"rms_norm_eps": "1e-6"}, "rms_norm_eps='1e-6'; give a number above 0"),
        ("llama_untied", {"tie_word_embeddings": "no"}, "tie_word_embeddings='no'; give true or false"),
        ("llama_untied", {"rope_parameters": [1]}, "rope_parameters is [1]; give an object"),
        (
            "llama_untied",
            {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
            "rope_scaling.factor='2'; give a num",
        ),
        ("gemma3", {"rope_parameters": {"full_attention": 3}}, "full_attention is 3; give an object"),
        ("gemma3", {"layer_types": [["full_attention"]] * 8}, "give a list of texts"),
        ("gemma2", {"query_pre_attn_scalar": 0}, "query_pre_attn_scalar=0; give a number above 0"),
        ("gpt_oss", {"swiglu_limit": None}, "swiglu_limit=None; give a number above 0"),
        ("qwen3_moe", {"num_experts": None}, "num_experts=None; give a whole number above 0"),
        ("llama_untied", {"architectures": None, "model_type": ["llama"]}, "names no architecture"),
    ],
)
def test_settings_of_another_type(name, change, message):
    with pytest.raises(UserError, match=re.escape(message)) as raised:
        config_json.spec_of({**golden(name), **change}, "models/x/config.json")
    assert "models/x/config.json" in str(raised.value)


def test_heads_that_transformers_refuses():
    spec = golden_spec("llama_untied", num_heads=5, num_kv_heads=5, head_dims=4)
    assert spec.model_dims % 5
    # Mistral computes the same.
    assert config_json.config_of(spec)["architectures"] == ["MistralForCausalLM"]
    for name, architecture in (
        ("llama_untied", "LlamaForCausalLM"),
        ("gemma2", "Gemma2ForCausalLM"),
        ("gemma3", "Gemma3ForCausalLM"),
    ):
        spec = golden_spec(name, num_heads=5, num_kv_heads=5)
        with raises_naming(UserError, f"model_dims={spec.model_dims}", "num_heads=5", "multiple", "transformers"):
            config_json.config_of(spec, architecture)


def test_numbers_are_written_with_the_types_of_transformers():
    spec = golden_spec("gemma2", final_softcap=30, attention_softcap=50, norm_epsilon=1, rotary_base=10_000)
    config = config_json.config_of(spec)
    floats = ("final_logit_softcapping", "attn_logit_softcapping", "rms_norm_eps", "rope_theta", "initializer_range")
    assert {key: type(config[key]) for key in floats} == dict.fromkeys(floats, float)
    assert type(config["query_pre_attn_scalar"]) is int
    moe = dataclasses.replace(golden_spec("mixtral").moe, aux_loss_weight=1)
    assert type(config_json.config_of(golden_spec("mixtral", moe=moe))["router_aux_loss_coef"]) is float
    with raises_naming(UserError, "query_scale=0.3", "query_pre_attn_scalar=11.1111", "whole number"):
        config_json.config_of(golden_spec("gemma2", query_scale=0.3))


@pytest.mark.parametrize("name", ["gemma2", "gemma3"])
def test_gemma_has_the_activation_in_both_spellings(name):
    config = config_json.config_of(golden_spec(name))
    assert config["hidden_activation"] == config["hidden_act"] == "gelu_pytorch_tanh"
    assert config_json.config_of(golden_spec("gpt2"))["activation_function"] == "gelu_new"


# transformers 4 has no Gemma 4.
@pytest.mark.parametrize("name", [n for n in NAMES if "rope_parameters" in golden(n) and not n.startswith("gemma4")])
def test_both_spellings_of_rotary_settings_are_written(name):
    spec = golden_spec(name)
    config = config_json.config_of(spec, golden(name)["architectures"][0])
    assert config_json.spec_of(config, "") == spec
    # What transformers 4 reads alone says the same.
    del config["rope_parameters"]
    assert config_json.spec_of(config, "") == spec
    assert ("rope_scaling" in config) == (spec.rotary_scaling is not None)


def test_what_a_model_does_not_say_is_not_made_up():
    config = config_json.config_of(golden_spec("llama_untied", max_positions=0))
    assert "max_position_embeddings" not in config
    assert config["eos_token_id"] is None


def test_the_longest_sequence_matters_to_learned_positions_alone():
    for name, differing in (("llama_untied", []), ("gpt2", ["max_positions"])):
        one, other = golden_spec(name), golden_spec(name, max_positions=4096)
        assert config_json.differing_fields(one, other) == differing
