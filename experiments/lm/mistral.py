"""Mistral 7B and Mixtral 8x7B in the sizes that Mistral AI published, on synthetic text.

Sizes are from the config.json of `mistralai/Mistral-7B-v0.1`, `-v0.3` and `mistralai/Mixtral-8x7B-v0.1` on Hugging
Face. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import MoeSpec


class Mistral(SyntheticDecoder):
    """Base of all sizes."""

    HEAD_DIMS = 128
    NORM_EPSILON = 1e-5
    VOCAB_SIZE = 32_000
    MAX_POSITIONS = 32_768


@experiment_registry.register
class Mistral7B(Mistral):
    """Mistral 7B v0.1 (arXiv:2310.06825): attention with a window of 4096 tokens, on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 14_336, 32, 8
    LAYER_PATTERN = ("local",)
    WINDOW = 4096
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Mistral7BV3(Mistral):
    """Mistral 7B v0.3: full attention, on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 14_336, 32, 8
    VOCAB_SIZE = 32_768
    ROTARY_BASE = 1_000_000.0
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Mixtral8x7B(Mistral):
    """Mixtral 8x7B (arXiv:2401.04088): 2 of 8 experts per token, on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 14_336, 32, 8
    ROTARY_BASE = 1_000_000.0
    MOE = MoeSpec(num_experts=8, num_experts_per_token=2, hidden_dims=14_336)
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register(tags=["tiny"])
class TinyMistral(TinySizes, Mistral7B):
    """Mistral's structure in tiny sizes, with a window of 5 tokens."""

    WINDOW = 5


@experiment_registry.register(tags=["tiny"])
class TinyMixtral(TinySizes, Mixtral8x7B):
    """Mixtral's structure in tiny sizes, with 2 of 3 experts per token."""

    MOE = MoeSpec(num_experts=3, num_experts_per_token=2, hidden_dims=7)
