"""The text models of Llama 4 in the published sizes, on synthetic text.

Sizes are from the config.json of `meta-llama/Llama-4-Scout-17B-16E` and `meta-llama/Llama-4-Maverick-17B-128E` on Hugging Face.
To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import MoeSpec, RotaryScaling, TemperatureSpec


def _experts(num_experts: int, dims: int, every: int = 1) -> MoeSpec:
    return MoeSpec(
        num_experts=num_experts,
        num_experts_per_token=1,
        hidden_dims=dims,
        every=every,
        score="sigmoid",
        normalise_top_k=False,
        weigh_inputs=True,
        shared_dims=dims,
    )


class Llama4(SyntheticDecoder):
    """Base of both sizes: three layers that attend within chunks, then one that attends to all tokens, without positions."""

    VOCAB_SIZE = 202_048
    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS = 48, 5120, 16_384
    NUM_HEADS, NUM_KV_HEADS, HEAD_DIMS = 40, 8, 128
    NORM_EPSILON = 1e-5
    ROTARY_BASE = 500_000.0
    ROTARY_PAIRS_ADJACENT = True
    LAYER_PATTERN = ("chunked",) * 3 + ("global",)
    UNROTATED_KINDS = ("global",)
    WINDOW = 8192
    TEMPERATURE = TemperatureSpec(factor=0.1, interval=8192)


@experiment_registry.register
class Llama4Scout(Llama4):
    """Llama 4 Scout: 109B, one of 16 experts per token in each layer, on 256 chips."""

    QUERY_KEY_NORM = "unit"
    MAX_POSITIONS = 262_144
    ROTARY_SCALING = RotaryScaling("llama3", 8.0, original_max_positions=8192)
    MOE = _experts(16, 8192)
    ICI_MESH_SHAPE = (1, 32, 8)


@experiment_registry.register
class Llama4Maverick(Llama4):
    """Llama 4 Maverick: 400B, one of 128 experts per token in every second layer, on 512 chips."""

    MAX_POSITIONS = 1_048_576
    MOE = _experts(128, 8192, every=2)
    ICI_MESH_SHAPE = (1, 64, 8)


@experiment_registry.register(tags=["tiny"])
class TinyLlama4(TinySizes, Llama4Maverick):
    """Llama 4's structure: chunks of 5 tokens, experts in every second layer, queries that get sharper every 3 positions."""

    NUM_LAYERS = 5
    LAYER_PATTERN = ("chunked", "global")
    QUERY_KEY_NORM = "unit"
    WINDOW = 5
    TEMPERATURE = TemperatureSpec(factor=0.5, interval=3)
    MOE = _experts(5, 7, every=2)
