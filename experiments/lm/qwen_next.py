"""Qwen3-Next, and the text models of Qwen 3.5, in the published sizes, on synthetic text: mostly layers of linear attention.

Sizes are from the config.json of `Qwen/Qwen3-Next-80B-A3B-Instruct` and of the `Qwen/Qwen3.5` models on Hugging Face, without the
vision model and the layers that predict further tokens. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import DeltaSpec, MoeSpec


class QwenNext(SyntheticDecoder):
    """Base of all sizes: three layers of linear attention, then one of softmax attention, whose output has a gate."""

    NORM_SCALE_OFFSET = 1.0
    QUERY_KEY_NORM = "head"
    GATED_ATTENTION = True
    HEAD_DIMS, ROTARY_DIMS = 256, 64
    ROTARY_BASE = 10_000_000.0
    MAX_POSITIONS = 262_144
    LAYER_PATTERN = ("linear",) * 3 + ("global",)
    DELTA = DeltaSpec(num_heads=16, values_per_head=2, key_dims=128, value_dims=128)


@experiment_registry.register
class Qwen3Next80B(QwenNext):
    """Qwen3-Next: 80B, 10 of 512 experts per token, on 256 chips."""

    VOCAB_SIZE = 151_936
    NUM_LAYERS, MODEL_DIMS, NUM_HEADS, NUM_KV_HEADS = 48, 2048, 16, 2
    MOE = MoeSpec(num_experts=512, num_experts_per_token=10, hidden_dims=512, shared_dims=512, shared_gate=True)
    ICI_MESH_SHAPE = (1, 64, 4)


class Qwen3_5(QwenNext):
    """Base of Qwen 3.5."""

    VOCAB_SIZE = 248_320


@experiment_registry.register
class Qwen3_5_4B(Qwen3_5):
    """Qwen 3.5 4B on 16 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 2560, 9216, 16, 4
    TIED_EMBEDDINGS = True
    ICI_MESH_SHAPE = (1, 8, 2)


@experiment_registry.register
class Qwen3_5_9B(Qwen3_5):
    """Qwen 3.5 9B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 12_288, 16, 4
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Qwen3_5_27B(Qwen3_5):
    """Qwen 3.5 27B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 64, 5120, 17_408, 24, 4
    DELTA = DeltaSpec(num_heads=16, values_per_head=3, key_dims=128, value_dims=128)
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register
class Qwen3_5_35B_A3B(Qwen3_5):
    """Qwen 3.5 35B-A3B, 8 of 256 experts per token, on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, NUM_HEADS, NUM_KV_HEADS = 40, 2048, 16, 2
    MOE = MoeSpec(num_experts=256, num_experts_per_token=8, hidden_dims=512, shared_dims=512, shared_gate=True)
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register(tags=["tiny"])
class TinyQwenNext(TinySizes, Qwen3Next80B):
    """Qwen3-Next's structure: two layers of linear attention to each of softmax attention, 2 of 5 experts per token."""

    NUM_LAYERS = 4
    HEAD_DIMS, ROTARY_DIMS = 8, 4
    LAYER_PATTERN = ("linear", "linear", "global")
    # The norm of linear attention's output divides by almost nothing where a query is at right angles to its keys. With the
    # sizes of the other tiny classes, a change of 1e-7 in the weights changed gradients by 2e-4.
    INITIALIZER_RANGE, NORM_EPSILON = 0.1, 1e-3
    DELTA = DeltaSpec(num_heads=3, values_per_head=2, key_dims=6, value_dims=5)
    MOE = MoeSpec(num_experts=5, num_experts_per_token=2, hidden_dims=7, shared_dims=9, shared_gate=True)
