"""Makes random tiny models with Hugging Face transformers, and records their outputs.

Runs in a separate environment with torch and transformers (`make interop` creates it), without this project:

    python tools/make_hf_goldens.py DIR [NAME ...]

For each model it writes DIR/NAME with the files of `save_pretrained`, and beside them expected.npz:
  ids [rows, length] int32, logits [rows, length, vocab] float32, loss: the mean cross entropy of the next token.
  prompts [rows, prompt] int32, padded on the left; prompt_lengths [rows]; tokens [rows, 64]: the greedy continuation.
  eos_id: a token of the first row's continuation; tokens_to_eos [rows, 64]: the continuation with it as end-of-text,
    then -1.
Folders with a tokenizer also have stop_strings, and tokens_to_stop [rows, 64]: the continuation up to the first of
them, then -1.

tests/interop/data/hf holds the output for all names. Remake it with the versions of torch and transformers that its
README names.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import pathlib
from typing import Any

import numpy as np
import safetensors.torch
import tokenizers
import torch
import transformers
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

ROWS, LENGTH, NEW_TOKENS = 3, 11, 64
PROMPT_LENGTHS = (7, 4, 2)
# Greedy tokens must not depend on the last bits of a logit, and a model that repeats one token proves little.
MIN_GAP, MIN_DISTINCT = 2e-3, 10
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
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] | trim }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TEXT = (
    "The trainer pads variables whose dimensions the mesh does not divide, and slices the padding off inside the step.\n"
    "A model never sees padding. Tensors are read slice by slice, straight to the devices that hold them.\n"
)


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


LLAMA, LLAMA4, QWEN2, QWEN3 = "LlamaForCausalLM", "Llama4ForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"
QWEN3_MOE, MISTRAL, MIXTRAL = "Qwen3MoeForCausalLM", "MistralForCausalLM", "MixtralForCausalLM"
GLM4_MOE = "Glm4MoeForCausalLM"
GEMMA2, GEMMA3, GEMMA4, GPT2 = "Gemma2ForCausalLM", "Gemma3ForCausalLM", "Gemma4ForCausalLM", "GPT2LMHeadModel"
GPT_OSS = "GptOssForCausalLM"
DEEPSEEK = "DeepseekV3ForCausalLM"
OLMO2, OLMO3 = "Olmo2ForCausalLM", "Olmo3ForCausalLM"
FULL, SLIDING, LINEAR = "full_attention", "sliding_attention", "linear_attention"
QWEN3_NEXT, QWEN3_5, QWEN3_5_MOE = "Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM"

CASES = (
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
    Case(
        "qwen3_moe",
        QWEN3_MOE,
        sizes(89, 14, 23, 2, 3, 1, head_dim=6, num_experts=5, num_experts_per_tok=2, moe_intermediate_size=9),
    ),
    Case(
        "qwen3_moe_normalised",
        QWEN3_MOE,
        sizes(
            97,
            16,
            23,
            2,
            4,
            2,
            head_dim=4,
            num_experts=4,
            num_experts_per_tok=3,
            moe_intermediate_size=11,
            norm_topk_prob=True,
            tie_word_embeddings=True,
        ),
    ),
    Case(
        "qwen3_moe_wide",
        QWEN3_MOE,
        sizes(
            71,
            18,
            23,
            3,
            5,
            5,
            head_dim=4,
            num_experts=7,
            num_experts_per_tok=1,
            moe_intermediate_size=5,
            norm_topk_prob=False,
        ),
    ),
    Case("mistral", MISTRAL, sizes(97, 18, 26, 3, 3, 1, sliding_window=5, head_dim=6)),
    Case("mistral_no_window", MISTRAL, sizes(107, 20, 21, 2, 5, 5, sliding_window=None, head_dim=4)),
    Case(
        "mistral_wide_heads",
        MISTRAL,
        sizes(83, 14, 19, 2, 6, 2, sliding_window=3, head_dim=8, tie_word_embeddings=True),
    ),
    Case("mixtral", MIXTRAL, sizes(89, 18, 11, 2, 3, 1, head_dim=6, num_local_experts=4, num_experts_per_tok=2)),
    Case(
        "mixtral_window",
        MIXTRAL,
        sizes(97, 15, 9, 2, 5, 1, head_dim=4, num_local_experts=5, num_experts_per_tok=3, sliding_window=4),
    ),
    Case(
        "mixtral_one_expert",
        MIXTRAL,
        sizes(73, 16, 10, 3, 4, 4, head_dim=4, num_local_experts=3, num_experts_per_tok=1, tie_word_embeddings=True),
    ),
    Case(
        "glm4_moe",
        GLM4_MOE,
        sizes(
            89,
            14,
            23,
            3,
            3,
            1,
            head_dim=8,
            attention_bias=True,
            use_qk_norm=True,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=9,
            routed_scaling_factor=2.5,
        ),
    ),
    Case(
        "glm4_moe_groups",
        GLM4_MOE,
        sizes(
            97,
            16,
            19,
            4,
            4,
            2,
            head_dim=4,
            n_routed_experts=6,
            num_experts_per_tok=3,
            moe_intermediate_size=7,
            n_shared_experts=2,
            n_group=3,
            topk_group=2,
            first_k_dense_replace=2,
            tie_word_embeddings=True,
        ),
    ),
    Case(
        "glm4_moe_rope",
        GLM4_MOE,
        sizes(
            83,
            18,
            17,
            2,
            5,
            5,
            head_dim=8,
            n_routed_experts=3,
            num_experts_per_tok=1,
            moe_intermediate_size=5,
            norm_topk_prob=False,
            rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.25},
        ),
    ),
    Case(
        "deepseek_v3",
        DEEPSEEK,
        sizes(
            89,
            14,
            23,
            3,
            3,
            3,
            q_lora_rank=11,
            kv_lora_rank=9,
            qk_nope_head_dim=6,
            qk_rope_head_dim=4,
            v_head_dim=5,
            n_routed_experts=6,
            num_experts_per_tok=2,
            moe_intermediate_size=7,
            n_group=3,
            topk_group=2,
            first_k_dense_replace=1,
            rope_parameters={**YARN, "rope_theta": 300.0, "mscale": 0.8, "mscale_all_dim": 1.2},
        ),
    ),
    Case(
        "deepseek_v3_direct",
        DEEPSEEK,
        sizes(
            83,
            18,
            17,
            2,
            5,
            5,
            q_lora_rank=None,
            kv_lora_rank=7,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=6,
            n_routed_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=7,
            n_shared_experts=2,
            n_group=1,
            topk_group=1,
            first_k_dense_replace=1,
            rope_interleave=False,
            rms_norm_eps=1e-3,
        ),
    ),
    Case(
        "llama4",
        LLAMA4,
        sizes(
            97,
            18,
            7,
            5,
            6,
            2,
            head_dim=8,
            intermediate_size_mlp=23,
            num_local_experts=5,
            interleave_moe_layer_step=2,
            no_rope_layers=[1, 1, 0, 1, 1],
            attention_chunk_size=4,
            floor_scale=3,
            attn_scale=0.5,
            rope_parameters={**LLAMA3_ROPE, "high_freq_factor": 1.0},
        ),
    ),
    Case(
        "llama4_two_of_four",
        LLAMA4,
        sizes(
            83,
            20,
            9,
            3,
            5,
            5,
            head_dim=6,
            intermediate_size_mlp=11,
            num_local_experts=4,
            num_experts_per_tok=2,
            no_rope_layer_interval=2,
            attention_chunk_size=3,
            attn_temperature_tuning=False,
            use_qk_norm=False,
            attention_bias=True,
            tie_word_embeddings=True,
        ),
    ),
    Case(
        "qwen3_next",
        QWEN3_NEXT,
        sizes(
            97,
            18,
            11,
            5,
            3,
            1,
            head_dim=8,
            num_experts=5,
            num_experts_per_tok=2,
            moe_intermediate_size=7,
            shared_expert_intermediate_size=9,
            linear_num_key_heads=3,
            linear_num_value_heads=6,
            linear_key_head_dim=6,
            linear_value_head_dim=5,
            layer_types=[LINEAR, LINEAR, FULL, LINEAR, LINEAR],
            # With less, torch's own float32 is 3e-4 from its float64: where a state gives little, its norm divides by little.
            rms_norm_eps=1e-2,
        ),
    ),
    Case(
        "qwen3_5",
        QWEN3_5,
        sizes(
            89,
            20,
            23,
            4,
            4,
            2,
            head_dim=8,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=7,
            linear_value_head_dim=4,
            linear_conv_kernel_dim=3,
            tie_word_embeddings=True,
            rms_norm_eps=1e-2,
        ),
    ),
    Case(
        "qwen3_5_moe",
        QWEN3_5_MOE,
        sizes(
            83,
            16,
            7,
            2,
            5,
            5,
            head_dim=4,
            num_experts=3,
            num_experts_per_tok=1,
            moe_intermediate_size=5,
            shared_expert_intermediate_size=6,
            linear_num_key_heads=1,
            linear_num_value_heads=3,
            linear_key_head_dim=4,
            linear_value_head_dim=8,
            layer_types=[LINEAR, FULL],
            rope_parameters={"rope_type": "default", "rope_theta": 300.0, "partial_rotary_factor": 0.5},
        ),
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
    Case(
        "gpt_oss",
        GPT_OSS,
        sizes(97, 18, 9, 3, 6, 2, head_dim=6, num_local_experts=5, num_experts_per_tok=2, sliding_window=4),
    ),
    Case(
        "gpt_oss_limit",
        GPT_OSS,
        sizes(
            83,
            16,
            7,
            2,
            5,
            1,
            head_dim=4,
            num_local_experts=3,
            num_experts_per_tok=1,
            sliding_window=5,
            layer_types=[FULL, SLIDING],
            swiglu_limit=0.5,
            swiglu_alpha=1.3,
            attention_bias=False,
            tie_word_embeddings=True,
            rope_parameters={**YARN, "rope_theta": 300.0},
        ),
    ),
    Case(
        "gpt_oss_mxfp4",
        GPT_OSS,
        sizes(71, 32, 32, 2, 3, 1, head_dim=4, num_local_experts=3, num_experts_per_tok=2, sliding_window=4),
        in_mxfp4=True,
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


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Randomises every parameter, so that a wrong or missing one changes the logits."""
    # Layers that are weak beside the embeddings give models that repeat one token.
    weak = isinstance(
        model, transformers.Gemma2ForCausalLM | transformers.Gemma3ForCausalLM | transformers.GPT2LMHeadModel
    )
    embedding = 0.4 if weak else 0.8
    for name, parameter in model.named_parameters():
        values = torch.empty_like(parameter)
        if "norm" in name or ".ln_" in name:
            values.normal_(0.0, 0.3, generator=generator)
            parameter.data.add_(values + 2.0 if weak and "post_" in name else values)
        elif "wpe" in name:
            parameter.data = values.normal_(0.0, 1.0, generator=generator)
        elif "embed" in name or "wte" in name or "lm_head" in name:
            parameter.data = values.normal_(0.0, embedding, generator=generator)
        elif name.endswith("A_log"):
            parameter.data = values.normal_(-2.0, 1.0, generator=generator)  # states that last
        elif values.ndim == 1:
            parameter.data = values.normal_(0.0, 0.3, generator=generator)
        else:
            gain = 4.0 if weak and "c_proj" in name else 1.6
            parameter.data = values.normal_(0.0, gain / values.shape[-1] ** 0.5, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            # Above 0: transformers gives groups that are not chosen the score 0, and a group that is chosen must have more.
            buffer.uniform_(0.0, 0.3, generator=generator)


def make_model(case: Case, seed: int) -> Any:
    """Makes a model with random float32 parameters, tied as its config says."""
    model_class = getattr(transformers, case.architecture)
    special = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    settings = {key: value for key, value in case.config.items() if value is not None or key != "rope_parameters"}
    config = model_class.config_class(**special, **settings)
    model = model_class._from_config(
        config, attn_implementation="eager", experts_implementation="eager", dtype=torch.float32
    )
    generator = torch.Generator().manual_seed(seed)
    randomise(model, generator)
    if case.in_mxfp4:
        for name, (blocks, scales) in mxfp4_of(model, seed).items():
            model.get_parameter(name).data = convert_moe_packed_tensors(blocks, scales, dtype=torch.float32)
    model.tie_weights()
    return model.eval()


def mxfp4_of(model: Any, seed: int) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Returns random blocks and scales for each matrix of the experts, by its name."""
    random, found = np.random.default_rng(seed), {}
    for name, parameter in model.named_parameters():
        if name.endswith(("gate_up_proj", "down_proj")):
            experts, inputs, outputs = parameter.shape
            # A byte is two values; the numbers 0 and 8 are zeros.
            low, high = random.choice([*range(1, 8), *range(9, 16)], (2, experts, outputs, inputs // 32, 16))
            blocks = (low + 16 * high).astype(np.uint8)
            scales = random.integers(120, 124, blocks.shape[:-1], np.uint8)
            found[name] = torch.tensor(blocks), torch.tensor(scales)
    return found


def store_in_mxfp4(folder: pathlib.Path, quantised: dict[str, tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Replaces tensors of a folder by their blocks and scales, as in OpenAI's folders."""
    tensors = safetensors.torch.load_file(folder / "model.safetensors")
    for name, (blocks, scales) in quantised.items():
        del tensors[name]
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    safetensors.torch.save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    kept = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": kept}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def continuation(
    model: Any, prompts: np.ndarray, lengths: np.ndarray, stop_strings: list[str] | None = None, tokenizer: Any = None
) -> tuple[np.ndarray, float]:
    """Returns the greedy tokens after left-padded prompts ([rows, NEW_TOKENS], or fewer if all rows end earlier), and
    the smallest difference between the best and the second-best logit.
    """
    ids = torch.tensor(prompts, dtype=torch.long)
    mask = torch.arange(prompts.shape[1])[None] >= prompts.shape[1] - torch.tensor(lengths)[:, None]
    config = transformers.GenerationConfig(
        max_new_tokens=NEW_TOKENS,
        do_sample=False,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_logits=True,
        stop_strings=stop_strings,
    )
    # generate() would take what its own config lacks from the model's.
    model.generation_config = config
    output = model.generate(ids, attention_mask=mask.long(), tokenizer=tokenizer)
    tokens = output.sequences[:, ids.shape[1] :].numpy().astype(np.int32)
    best = torch.stack(output.logits).topk(2, dim=-1).values
    gap = float((best[..., 0] - best[..., 1]).min())
    return tokens, gap


def to_end(tokens: np.ndarray, eos_id: int) -> np.ndarray:
    """Returns continuations cut after their first end-of-text; -1 fills the rest."""
    result = np.full_like(tokens, -1)
    for row, (source, target) in enumerate(zip(tokens, result, strict=True)):
        found = np.flatnonzero(source == eos_id)
        end = int(found[0]) + 1 if len(found) else len(source)
        target[:end] = tokens[row, :end]
    return result


def make_tokenizer(vocab_size: int) -> Any:
    """Returns a byte-level BPE of ASCII text, with special tokens and a chat template."""
    special = ["<|pad|>", "<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|system|>"]
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special,
        initial_alphabet=[symbol for symbol in tokenizers.pre_tokenizers.ByteLevel.alphabet() if symbol.isascii()]
        + ["\u0120", "\u010a"],
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 4, trainer)
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_object=bpe, pad_token=special[0], bos_token=special[1], eos_token=special[2], padding_side="left"
    )
    fast.chat_template = CHAT_TEMPLATE
    return fast


def expected(case: Case, model: Any, tokenizer: Any, seed: int) -> dict[str, np.ndarray] | None:
    """Returns the arrays of expected.npz; None if this seed's model is too repetitive or close to a tie."""
    random, vocab = np.random.default_rng(seed), model.config.vocab_size
    ids = random.integers(3, vocab, (ROWS, LENGTH)).astype(np.int32)
    with torch.no_grad():
        output = model(torch.tensor(ids, dtype=torch.long), labels=torch.tensor(ids, dtype=torch.long))
    lengths = np.array(PROMPT_LENGTHS, np.int32)
    prompts = np.zeros((ROWS, max(PROMPT_LENGTHS)), np.int32)
    for row, length in enumerate(PROMPT_LENGTHS):
        prompts[row, -length:] = random.integers(3, vocab, length)
    saved_config = model.generation_config
    tokens, gap = continuation(model, prompts, lengths)
    distinct = min(len(set(row)) for row in tokens.tolist())
    if gap < MIN_GAP or distinct < MIN_DISTINCT:
        return None
    first_seen = {token: place for place, token in reversed(list(enumerate(tokens[0].tolist())))}
    eos_id = next(token for token, place in first_seen.items() if place >= 9)
    tokens_to_eos = to_end(tokens, eos_id)
    found = {
        "ids": ids,
        "logits": output.logits.numpy().astype(np.float32),
        "loss": np.float32(output.loss),
        "prompts": prompts,
        "prompt_lengths": lengths,
        "tokens": tokens,
        "eos_id": np.int32(eos_id),
        "tokens_to_eos": tokens_to_eos,
    }
    if tokenizer is not None:
        text = tokenizer.decode(tokens[0])
        stop = [text[len(text) // 3 :][:4], "never in the text"]
        # In a batch, generate() goes on with rows that have ended by a stop string alone: each row by itself.
        stopped = [
            continuation(model, prompts[[row], -length:], lengths[[row]], stop, tokenizer)[0][0]
            for row, length in enumerate(PROMPT_LENGTHS)
        ]
        if not (10 < len(stopped[0]) < 40 and stop[0] in tokenizer.decode(stopped[0])):
            return None
        found["stop_strings"] = np.array(stop)
        found["tokens_to_stop"] = np.stack(
            [np.pad(row, (0, NEW_TOKENS - len(row)), constant_values=-1) for row in stopped]
        )
    model.generation_config = saved_config
    return found


def write(case: Case, directory: pathlib.Path) -> None:
    """Writes one folder. Takes the first seed whose greedy tokens are varied and far from a tie."""
    for seed in range(200):
        model = make_model(case, seed)
        tokenizer = make_tokenizer(model.config.vocab_size) if case.has_tokenizer else None
        arrays = expected(case, model, tokenizer, seed)
        if arrays is not None:
            break
    else:
        raise SystemExit(f"{case.name}: no seed below 200 gives a model with varied greedy tokens")
    folder = directory / case.name
    model.save_pretrained(folder)
    if case.in_mxfp4:
        store_in_mxfp4(folder, mxfp4_of(model, seed))
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    np.savez_compressed(folder / "expected.npz", **arrays)
    size = sum(file.stat().st_size for file in folder.iterdir())
    print(f"{case.name}: seed {seed}, loss {float(arrays['loss']):.3f}, {size / 1024:.0f} KiB", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=pathlib.Path)
    parser.add_argument("names", nargs="*", help="models to make; all by default")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - {case.name for case in CASES}
    if unknown:
        raise SystemExit(
            f"no model is named {', '.join(sorted(unknown))}; there are {', '.join(c.name for c in CASES)}"
        )
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    for case in CASES:
        if not arguments.names or case.name in arguments.names:
            write(case, arguments.directory)


if __name__ == "__main__":
    main()
