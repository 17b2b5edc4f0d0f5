"""Qwen 2.5 and Qwen 3, also as mixtures of experts, in the sizes that Alibaba published, on synthetic text.

Sizes are from the config.json of the `Qwen` base models on Hugging Face (Qwen2.5-7B, Qwen3-8B-Base, ...). Qwen 2 has
the sizes of Qwen 2.5. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import MoeSpec


class Qwen(SyntheticDecoder):
    """Base of all sizes."""

    HEAD_DIMS = 128
    ROTARY_BASE = 1_000_000.0
    MAX_POSITIONS = 32_768


class Qwen2_5(Qwen):
    """Qwen 2.5 (arXiv:2412.15115): biases in the query, key and value projections."""

    VOCAB_SIZE = 152_064
    QKV_BIAS = True
    MAX_POSITIONS = 131_072


class SmallQwen2_5(Qwen2_5):
    """Qwen 2.5 up to 3B: tied embeddings, and fewer unused rows of the vocabulary."""

    VOCAB_SIZE = 151_936
    TIED_EMBEDDINGS = True


@experiment_registry.register
class Qwen2_5_0_5B(SmallQwen2_5):
    """Qwen 2.5 0.5B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 24, 896, 4864, 14, 2
    HEAD_DIMS = 64
    MAX_POSITIONS = 32_768
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen2_5_1_5B(SmallQwen2_5):
    """Qwen 2.5 1.5B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 28, 1536, 8960, 12, 2
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen2_5_3B(SmallQwen2_5):
    """Qwen 2.5 3B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 36, 2048, 11_008, 16, 2
    MAX_POSITIONS = 32_768
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen2_5_7B(Qwen2_5):
    """Qwen 2.5 7B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 28, 3584, 18_944, 28, 4
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Qwen2_5_14B(Qwen2_5):
    """Qwen 2.5 14B on 64 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 48, 5120, 13_824, 40, 8
    NORM_EPSILON = 1e-5
    ICI_MESH_SHAPE = (1, 32, 2)


@experiment_registry.register
class Qwen2_5_32B(Qwen2_5):
    """Qwen 2.5 32B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 64, 5120, 27_648, 40, 8
    NORM_EPSILON = 1e-5
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register
class Qwen2_5_72B(Qwen2_5):
    """Qwen 2.5 72B on 512 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 80, 8192, 29_568, 64, 8
    NORM_EPSILON = 1e-5
    ICI_MESH_SHAPE = (1, 64, 8)


class Qwen3(Qwen):
    """Qwen 3 (arXiv:2505.09388): norms of queries and keys, per head."""

    VOCAB_SIZE = 151_936
    QUERY_KEY_NORM = "head"


@experiment_registry.register
class Qwen3_0_6B(Qwen3):
    """Qwen 3 0.6B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 28, 1024, 3072, 16, 8
    TIED_EMBEDDINGS = True
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen3_1_7B(Qwen3):
    """Qwen 3 1.7B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 28, 2048, 6144, 16, 8
    TIED_EMBEDDINGS = True
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen3_4B(Qwen3):
    """Qwen 3 4B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 36, 2560, 9728, 32, 8
    TIED_EMBEDDINGS = True
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Qwen3_8B(Qwen3):
    """Qwen 3 8B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 36, 4096, 12_288, 32, 8
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Qwen3_14B(Qwen3):
    """Qwen 3 14B on 64 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 40, 5120, 17_408, 40, 8
    ICI_MESH_SHAPE = (1, 32, 2)


@experiment_registry.register
class Qwen3_32B(Qwen3):
    """Qwen 3 32B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 64, 5120, 25_600, 64, 8
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register
class Qwen3_30B_A3B(Qwen3):
    """Qwen 3 30B-A3B, 8 of 128 experts per token, on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 48, 2048, 6144, 32, 4
    MOE = MoeSpec(num_experts=128, num_experts_per_token=8, hidden_dims=768)
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register(tags=["tiny"])
class TinyQwen2(TinySizes, Qwen2_5):
    """Qwen 2.5's structure in tiny sizes."""


@experiment_registry.register(tags=["tiny"])
class TinyQwen3Moe(TinySizes, Qwen3):
    """Qwen 3's structure with 2 of 5 experts per token, and a loss that balances their load."""

    MOE = MoeSpec(num_experts=5, num_experts_per_token=2, hidden_dims=7, aux_loss_weight=0.1)
