"""gpt-oss in the sizes that OpenAI published, on synthetic text.

Sizes are from the config.json of `openai/gpt-oss-20b` and `openai/gpt-oss-120b` on Hugging Face (arXiv:2508.10925). To train on
other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import MoeSpec, RotaryScaling


class GptOss(SyntheticDecoder):
    """Base of both sizes: alternating local and global layers; attention sinks, and 4 experts per token."""

    VOCAB_SIZE = 201_088
    MODEL_DIMS, NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = 2880, 64, 8, 64
    MAX_POSITIONS = 131_072
    LAYER_PATTERN = ("local", "global")
    WINDOW = 128
    ATTENTION_SINKS = True
    QKV_BIAS = OUTPUT_BIAS = True
    NORM_EPSILON = 1e-5
    ROTARY_BASE = 150_000.0
    ROTARY_SCALING = RotaryScaling("yarn", 32.0, original_max_positions=4096, truncate=False)


@experiment_registry.register
class GptOss20B(GptOss):
    """gpt-oss-20b: 32 experts, on 32 chips."""

    NUM_LAYERS = 24
    MOE = MoeSpec(num_experts=32, num_experts_per_token=4, hidden_dims=2880, biases=True, swiglu_limit=7.0)
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class GptOss120B(GptOss):
    """gpt-oss-120b: 128 experts, on 256 chips."""

    NUM_LAYERS = 36
    MOE = MoeSpec(num_experts=128, num_experts_per_token=4, hidden_dims=2880, biases=True, swiglu_limit=7.0)
    ICI_MESH_SHAPE = (1, 32, 8)


@experiment_registry.register(tags=["tiny"])
class TinyGptOss(TinySizes, GptOss):
    """gpt-oss' structure with 2 of 5 experts per token, a window of 5 tokens, and a SwiGLU limit low enough to clip."""

    WINDOW = 5
    ROTARY_SCALING = RotaryScaling("yarn", 8.0, original_max_positions=8, beta_fast=1.0, beta_slow=0.1, truncate=False)
    MOE = MoeSpec(num_experts=5, num_experts_per_token=2, hidden_dims=7, biases=True, swiglu_limit=0.5)
