"""DeepSeek V3, Kimi K2 and Moonlight in their published sizes, on synthetic text: latent attention and many small experts.

Sizes are from the config.json of `deepseek-ai/DeepSeek-V3` (arXiv:2412.19437), `moonshotai/Kimi-K2-Instruct-0905`
(arXiv:2507.20534) and `moonshotai/Moonlight-16B-A3B` (arXiv:2502.16982) on Hugging Face, without the layer that predicts a
further token; `--fdl.set=task.model.lm_tpl.spec.mtp_layers=1` adds it. To train on other data, subclass one and override
`datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import LatentSpec, MoeSpec, RotaryScaling


class DeepSeek(SyntheticDecoder):
    """Base of all sizes: a head has 128 dimensions without and 64 with rotary embeddings; router biases balance the experts."""

    HEAD_DIMS, ROTARY_DIMS, ROTARY_PAIRS_ADJACENT = 192, 64, True


@experiment_registry.register
class DeepSeekV3(DeepSeek):
    """DeepSeek V3: 671B, 8 of 256 experts per token, on 2048 chips."""

    VOCAB_SIZE = 129_280
    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 61, 7168, 18_432, 128, 128
    MAX_POSITIONS = 163_840
    ROTARY_SCALING = RotaryScaling("yarn", 40.0, original_max_positions=4096, mscale=1.0, mscale_all_dim=1.0)
    QUERY_SCALE = ROTARY_SCALING.query_scale(192)
    LATENT = LatentSpec(query_dims=1536, key_value_dims=512, value_dims=128)
    MOE = MoeSpec(
        num_experts=256,
        num_experts_per_token=8,
        hidden_dims=2048,
        dense_layers=3,
        score="sigmoid",
        scaling_factor=2.5,
        num_groups=8,
        num_chosen_groups=4,
        shared_dims=2048,
        choice_bias=True,
    )
    ICI_MESH_SHAPE = (1, 256, 8)


@experiment_registry.register
class KimiK2(DeepSeek):
    """Kimi K2: 1.03T, 8 of 384 experts per token, on 2048 chips."""

    VOCAB_SIZE = 163_840
    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 61, 7168, 18_432, 64, 64
    MAX_POSITIONS = 262_144
    ROTARY_BASE = 50_000.0
    ROTARY_SCALING = RotaryScaling(
        "yarn", 64.0, original_max_positions=4096, beta_fast=1.0, beta_slow=1.0, mscale=1.0, mscale_all_dim=1.0
    )
    QUERY_SCALE = ROTARY_SCALING.query_scale(192)
    LATENT = LatentSpec(query_dims=1536, key_value_dims=512, value_dims=128)
    MOE = MoeSpec(
        num_experts=384,
        num_experts_per_token=8,
        hidden_dims=2048,
        dense_layers=1,
        score="sigmoid",
        scaling_factor=2.827,
        shared_dims=2048,
        choice_bias=True,
    )
    ICI_MESH_SHAPE = (1, 256, 8)


@experiment_registry.register
class Moonlight16B(DeepSeek):
    """Moonlight: 16B, 6 of 64 experts per token, on 32 chips; queries are computed directly from the residual stream."""

    VOCAB_SIZE = 163_840
    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 27, 2048, 11_264, 16, 16
    MAX_POSITIONS = 8192
    NORM_EPSILON = 1e-5
    ROTARY_BASE = 50_000.0
    LATENT = LatentSpec(key_value_dims=512, value_dims=128)
    MOE = MoeSpec(
        num_experts=64,
        num_experts_per_token=6,
        hidden_dims=1408,
        dense_layers=1,
        score="sigmoid",
        scaling_factor=2.446,
        shared_dims=2816,
        choice_bias=True,
    )
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register(tags=["tiny"])
class TinyDeepSeek(TinySizes, DeepSeekV3):
    """DeepSeek V3's structure with 2 of 6 experts per token, chosen from 1 of 3 groups, after one layer without experts."""

    NUM_LAYERS, NUM_KV_HEADS = 3, 3
    HEAD_DIMS, ROTARY_DIMS = 10, 4
    ROTARY_SCALING = None
    QUERY_SCALE = None
    LATENT = LatentSpec(query_dims=11, key_value_dims=9, value_dims=7)
    MOE = MoeSpec(
        num_experts=6,
        num_experts_per_token=2,
        hidden_dims=7,
        dense_layers=1,
        score="sigmoid",
        scaling_factor=2.5,
        num_groups=3,
        shared_dims=5,
        choice_bias=True,
    )


@experiment_registry.register(tags=["tiny"])
class TinyDeepSeekMtp(TinyDeepSeek):
    """TinyDeepSeek with two layers that predict further tokens."""

    MTP_LAYERS, MTP_WEIGHT = 2, 0.5
