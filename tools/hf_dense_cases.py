"""The dense models of `make_hf_goldens.py`, and what describes a model."""

from __future__ import annotations

import dataclasses
from typing import Any

LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN = {
    "rope_type": "yarn",
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 4.0,
    "beta_slow": 1.0,
}

LLAMA, QWEN2, QWEN3, MISTRAL = "LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "MistralForCausalLM"
GEMMA2, GEMMA3, GEMMA4, GPT2 = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GPT2LMHeadModel"
OLMO2, OLMO3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM"
FULL, SLIDING = "full_attention", "sliding_attention"


@dataclasses.dataclass(frozen=True)
class Case:
    """A model to make.

    Attributes:
      name: its folder's name.
      architecture: the model's class in transformers.
      config: arguments of its config class.
      has_tokenizer: True writes a tokenizer with a chat template too.
      in_mxfp4: True stores the experts' matrices of gpt-oss as blocks and scales.
    """

    name: str
    architecture: str
    config: dict[str, Any]
    has_tokenizer: bool = False
    in_mxfp4: bool = False


def sizes(vocab: int, dims: int, hidden: int, layers: int, heads: int, kv_heads: int, **others: Any) -> dict[str, Any]:
    """Arguments shared by most config classes."""
    return {
        "vocab_size": vocab,
        "hidden_size": dims,
        "intermediate_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "max_position_embeddings": 128,
        **others,
    }


DENSE = (
    Case("llama_untied", LLAMA, sizes(97, 18, 26, 3, 3, 1, head_dim=6)),
    Case("llama_tokenizer", LLAMA, sizes(211, 16, 20, 2, 4, 2, tie_word_embeddings=True), has_tokenizer=True),
    Case("llama_biases", LLAMA, sizes(89, 15, 22, 2, 5, 5, head_dim=4, attention_bias=True, mlp_bias=True)),
    Case("llama3_rope", LLAMA, sizes(101, 20, 27, 2, 5, 1, head_dim=8, rope_parameters=LLAMA3_ROPE)),
    Case(
        "llama3_rope_tied",
        LLAMA,
        sizes(
            103, 18, 20, 3, 6, 3, head_dim=10, tie_word_embeddings=True, rope_parameters={**LLAMA3_ROPE, "factor": 8.0}
        ),
    ),
    Case(
        "llama_linear_rope",
        LLAMA,
        sizes(
            79, 14, 17, 2, 7, 7, head_dim=4, rope_parameters={"rope_type": "linear", "rope_theta": 900.0, "factor": 2.5}
        ),
    ),
    Case("qwen2", QWEN2, sizes(97, 18, 25, 3, 3, 1)),
    Case("qwen2_tied", QWEN2, sizes(107, 24, 21, 2, 6, 2, tie_word_embeddings=True, rope_parameters=None)),
    Case(
        "qwen2_window",
        QWEN2,
        sizes(83, 20, 19, 3, 5, 5, use_sliding_window=True, sliding_window=4, max_window_layers=1),
    ),
    Case("qwen3", QWEN3, sizes(97, 18, 25, 3, 3, 1, head_dim=8)),
    Case("qwen3_tied", QWEN3, sizes(109, 22, 23, 2, 6, 3, head_dim=6, tie_word_embeddings=True)),
    Case(
        "qwen3_yarn",
        QWEN3,
        sizes(
            83,
            17,
            19,
            2,
            5,
            1,
            head_dim=12,
            attention_bias=True,
            rope_parameters={
                "rope_type": "yarn",
                "rope_theta": 500.0,
                "factor": 4.0,
                "original_max_position_embeddings": 32,
            },
        ),
    ),
    Case("mistral", MISTRAL, sizes(97, 18, 26, 3, 3, 1, sliding_window=5, head_dim=6)),
    Case("mistral_no_window", MISTRAL, sizes(107, 20, 21, 2, 5, 5, sliding_window=None, head_dim=4)),
    Case(
        "mistral_wide_heads",
        MISTRAL,
        sizes(83, 14, 19, 2, 6, 2, sliding_window=3, head_dim=8, tie_word_embeddings=True),
    ),
    Case(
        "gemma4",
        GEMMA4,
        sizes(
            97,
            18,
            23,
            4,
            6,
            3,
            head_dim=8,
            global_head_dim=16,
            num_global_key_value_heads=2,
            attention_k_eq_v=True,
            hidden_size_per_layer_input=0,
            sliding_window=4,
            final_logit_softcapping=30.0,
            tie_word_embeddings=False,
            layer_types=[SLIDING, FULL, SLIDING, FULL],
        ),
    ),
    Case(
        "gemma4_own_values",
        GEMMA4,
        sizes(
            83,
            20,
            19,
            3,
            5,
            5,
            head_dim=6,
            global_head_dim=10,
            hidden_size_per_layer_input=0,
            sliding_window=3,
            layer_types=[SLIDING, SLIDING, FULL],
            tie_word_embeddings=False,
        ),
    ),
    Case("gemma2", GEMMA2, sizes(97, 18, 26, 3, 3, 1, head_dim=6, query_pre_attn_scalar=9, sliding_window=5)),
    Case(
        "gemma2_small_caps",
        GEMMA2,
        sizes(
            107,
            20,
            21,
            2,
            5,
            5,
            head_dim=4,
            query_pre_attn_scalar=4,
            sliding_window=4,
            attn_logit_softcapping=3.0,
            final_logit_softcapping=8.0,
        ),
    ),
    Case(
        "gemma2_no_caps",
        GEMMA2,
        sizes(
            83,
            12,
            19,
            4,
            6,
            2,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=3,
            attn_logit_softcapping=None,
            final_logit_softcapping=None,
        ),
    ),
    Case(
        "gemma3",
        GEMMA3,
        sizes(97, 18, 20, 8, 3, 1, head_dim=6, query_pre_attn_scalar=6, sliding_window=4),
    ),
    Case(
        "gemma3_linear_rope",
        GEMMA3,
        sizes(
            107,
            20,
            21,
            3,
            5,
            5,
            head_dim=4,
            query_pre_attn_scalar=7,
            sliding_window=5,
            layer_types=[SLIDING, FULL, SLIDING],
            rope_parameters={
                FULL: {"rope_type": "linear", "rope_theta": 1000.0, "factor": 8.0},
                SLIDING: {"rope_type": "default", "rope_theta": 50.0},
            },
        ),
    ),
    Case(
        "gemma3_untied",
        GEMMA3,
        sizes(
            83,
            18,
            19,
            2,
            6,
            2,
            head_dim=8,
            query_pre_attn_scalar=8,
            sliding_window=3,
            layer_types=[SLIDING, FULL],
            final_logit_softcapping=20.0,
            tie_word_embeddings=False,
        ),
    ),
    Case("gpt2", GPT2, {"vocab_size": 97, "n_embd": 18, "n_layer": 3, "n_head": 3, "n_positions": 96}),
    Case(
        "gpt2_inner",
        GPT2,
        {"vocab_size": 107, "n_embd": 20, "n_layer": 2, "n_head": 5, "n_positions": 80, "n_inner": 23},
    ),
    Case(
        "gpt2_relu",
        GPT2,
        {
            "vocab_size": 83,
            "n_embd": 14,
            "n_layer": 2,
            "n_head": 7,
            "n_positions": 90,
            "activation_function": "relu",
            "layer_norm_epsilon": 1e-3,
        },
    ),
    Case("olmo2", OLMO2, sizes(97, 18, 26, 3, 3, 1)),
    Case("olmo2_tied", OLMO2, sizes(107, 24, 21, 4, 6, 2, tie_word_embeddings=True)),
    Case(
        "olmo2_wide", OLMO2, sizes(83, 20, 19, 2, 5, 5, rope_parameters={"rope_type": "default", "rope_theta": 300.0})
    ),
    Case("olmo3", OLMO3, sizes(97, 18, 22, 5, 3, 1, sliding_window=4)),
    Case(
        "olmo3_yarn",
        OLMO3,
        sizes(
            83,
            24,
            19,
            3,
            6,
            2,
            head_dim=8,
            sliding_window=5,
            layer_types=[SLIDING, FULL, SLIDING],
            tie_word_embeddings=True,
            rope_parameters={FULL: YARN, SLIDING: {"rope_type": "default"}},
        ),
    ),
)
