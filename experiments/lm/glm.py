"""GLM-4.5 in the sizes that Zhipu AI published, on synthetic text.

Sizes are from the config.json of GLM-4.5 and GLM-4.5-Air on Hugging Face (arXiv:2508.06471), without the multi-token
prediction layer. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import MoeSpec


class Glm4Moe(SyntheticDecoder):
    """Base of all sizes: rotary embeddings on half of each head; router biases balance the experts."""

    VOCAB_SIZE = 151_552
    HEAD_DIMS = 128
    ROTARY_DIMS = 64
    ROTARY_BASE = 1_000_000.0
    NORM_EPSILON = 1e-5
    QKV_BIAS = True
    MAX_POSITIONS = 131_072


@experiment_registry.register
class Glm4_5Air(Glm4Moe):
    """GLM-4.5-Air: 106B, 8 of 128 experts per token, on 256 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 46, 4096, 10_944, 96, 8
    MOE = MoeSpec(
        num_experts=128,
        num_experts_per_token=8,
        hidden_dims=1408,
        dense_layers=1,
        score="sigmoid",
        shared_dims=1408,
        choice_bias=True,
    )
    ICI_MESH_SHAPE = (1, 32, 8)


@experiment_registry.register
class Glm4_5(Glm4Moe):
    """GLM-4.5: 355B, 8 of 160 experts per token, on 1024 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 92, 5120, 12_288, 96, 8
    QUERY_KEY_NORM = "head"
    MOE = MoeSpec(
        num_experts=160,
        num_experts_per_token=8,
        hidden_dims=1536,
        dense_layers=3,
        score="sigmoid",
        scaling_factor=2.5,
        shared_dims=1536,
        choice_bias=True,
    )
    ICI_MESH_SHAPE = (1, 128, 8)


@experiment_registry.register(tags=["tiny"])
class TinyGlm4(TinySizes, Glm4_5):
    """GLM-4.5's structure with 2 of 5 experts per token, after one layer without experts."""

    NUM_LAYERS = 3
    ROTARY_DIMS = 4
    MOE = MoeSpec(
        num_experts=5,
        num_experts_per_token=2,
        hidden_dims=7,
        dense_layers=1,
        score="sigmoid",
        scaling_factor=2.5,
        shared_dims=3,
        choice_bias=True,
    )
