"""Gemma 2, 3 and 4 (text) in the sizes that Google published, on synthetic text.

Sizes are from the config.json of the `google` models on Hugging Face; those of Gemma 3 are also in transformers'
`convert_gemma3_weights.py`. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from typing import Any

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import HeadSpec, RotaryScaling


class Gemma(SyntheticDecoder):
    """Base of all sizes: scaled embeddings; norms before and after attention and feed-forward layers."""

    HEAD_DIMS = 256
    ACTIVATION = "gelu_tanh"
    NORM_SCALE_OFFSET = 1.0
    NORM_PLACEMENT = "pre_and_post"
    TIED_EMBEDDINGS = True

    def spec(self) -> Any:
        return super().spec().set(embedding_scale=self.MODEL_DIMS**0.5)


class Gemma2(Gemma):
    """Gemma 2 (arXiv:2408.00118): alternating local and global layers; soft caps of the attention logits and final logits."""

    VOCAB_SIZE = 256_000
    MAX_POSITIONS = 8192
    LAYER_PATTERN = ("local", "global")
    WINDOW = 4096
    ATTENTION_SOFTCAP = 50.0
    FINAL_SOFTCAP = 30.0


@experiment_registry.register
class Gemma2_2B(Gemma2):
    """Gemma 2 2B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 26, 2304, 9216, 8, 4
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gemma2_9B(Gemma2):
    """Gemma 2 9B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 42, 3584, 14_336, 16, 8
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Gemma2_27B(Gemma2):
    """Gemma 2 27B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 46, 4608, 36_864, 32, 16
    HEAD_DIMS = 128
    QUERY_SCALE = 144**-0.5
    ICI_MESH_SHAPE = (1, 32, 4)


class Gemma3(Gemma):
    """Gemma 3 (arXiv:2503.19786): five local layers, then a global one; norms of queries and keys."""

    VOCAB_SIZE = 262_208
    MAX_POSITIONS = 131_072
    LAYER_PATTERN = ("local",) * 5 + ("global",)
    WINDOW = 1024
    QUERY_KEY_NORM = "head"
    ROTARY_BASE = 1_000_000.0
    ROTARY_SCALING = RotaryScaling("linear", 8.0)
    LOCAL_ROTARY_BASE = 10_000.0


@experiment_registry.register
class Gemma3_1B(Gemma3):
    """Gemma 3 1B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 26, 1152, 6912, 4, 1
    VOCAB_SIZE = 262_144
    MAX_POSITIONS = 32_768
    WINDOW = 512
    ROTARY_SCALING = None
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gemma3_4B(Gemma3):
    """Gemma 3 4B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 34, 2560, 10_240, 8, 4
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gemma3_12B(Gemma3):
    """Gemma 3 12B on 64 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 48, 3840, 15_360, 16, 8
    ICI_MESH_SHAPE = (1, 32, 2)


@experiment_registry.register
class Gemma3_27B(Gemma3):
    """Gemma 3 27B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 62, 5376, 21_504, 32, 16
    HEAD_DIMS = 128
    QUERY_SCALE = 168**-0.5
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register
class Gemma4_31B(Gemma):
    """Gemma 4 31B on 128 chips: wider heads in the global layers, whose values are their keys."""

    VOCAB_SIZE = 262_144
    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 60, 5376, 21_504, 32, 16
    NORM_SCALE_OFFSET = 0.0
    GLOBAL_HEADS = HeadSpec(num_kv_heads=4, head_dims=512, values_are_keys=True)
    QUERY_SCALE = 1.0
    QUERY_KEY_NORM = "head"
    VALUE_NORM = LAYER_SCALE = True
    MAX_POSITIONS = 262_144
    ROTARY_BASE, LOCAL_ROTARY_BASE = 1_000_000.0, 10_000.0
    ROTARY_SCALING = RotaryScaling("proportional", share=0.25)
    LAYER_PATTERN = ("local",) * 5 + ("global",)
    WINDOW = 1024
    FINAL_SOFTCAP = 30.0
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register(tags=["tiny"])
class TinyGemma4(TinySizes, Gemma4_31B):
    """Gemma 4's structure: two layers with narrow heads and a window of 5 tokens, then one with wide heads."""

    NUM_LAYERS = 4
    GLOBAL_HEADS = HeadSpec(num_kv_heads=3, head_dims=10, values_are_keys=True)
    LAYER_PATTERN = ("local", "local", "global")
    WINDOW = 5


@experiment_registry.register(tags=["tiny"])
class TinyGemma2(TinySizes, Gemma2):
    """Gemma 2's structure: a local layer with a window of 5 tokens and a global one; soft caps that change the logits."""

    WINDOW = 5
    ATTENTION_SOFTCAP = 1.0
    FINAL_SOFTCAP = 2.0


@experiment_registry.register(tags=["tiny"])
class TinyGemma3(TinySizes, Gemma3):
    """Gemma 3's structure: two local layers with a window of 5 tokens, a global one, and a local one after the repeated block."""

    NUM_LAYERS = 4
    LAYER_PATTERN = ("local", "local", "global")
    WINDOW = 5
