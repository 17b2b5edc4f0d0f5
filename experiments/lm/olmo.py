"""OLMo 2 and 3 in the sizes that the Allen Institute published, on synthetic text.

Sizes are from the config.json of `allenai/OLMo-2-0425-1B`, `-1124-7B`, `-1124-13B` and `-0325-32B`, `Olmo-3-1025-7B` and
`-1125-32B` on Hugging Face. To train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import RotaryScaling


class Olmo2(SyntheticDecoder):
    """OLMo 2 (arXiv:2501.00656): norms after attention and feed-forward layers; query and key norms over all heads together."""

    VOCAB_SIZE = 100_352
    HEAD_DIMS = 128
    MAX_POSITIONS = 4096
    ROTARY_BASE = 500_000.0
    NORM_PLACEMENT = "post"
    QUERY_KEY_NORM = "all"


@experiment_registry.register
class Olmo2_1B(Olmo2):
    """OLMo 2 1B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 16, 2048, 8192, 16, 16
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Olmo2_7B(Olmo2):
    """OLMo 2 7B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 11_008, 32, 32
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Olmo2_13B(Olmo2):
    """OLMo 2 13B on 64 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 40, 5120, 13_824, 40, 40
    ICI_MESH_SHAPE = (1, 32, 2)


@experiment_registry.register
class Olmo2_32B(Olmo2):
    """OLMo 2 32B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 64, 5120, 27_648, 40, 8
    ICI_MESH_SHAPE = (1, 32, 4)


class Olmo3(Olmo2):
    """OLMo 3 (arXiv:2512.13961): three local layers, then a global one. Only global layers scale their rotary frequencies."""

    VOCAB_SIZE = 100_278
    MAX_POSITIONS = 65_536
    LAYER_PATTERN = ("local",) * 3 + ("global",)
    WINDOW = 4096
    ROTARY_SCALING = RotaryScaling("yarn", 8.0, original_max_positions=8192)
    LOCAL_ROTARY_BASE = 500_000.0


@experiment_registry.register
class Olmo3_7B(Olmo3):
    """OLMo 3 7B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 11_008, 32, 32
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Olmo3_32B(Olmo3):
    """OLMo 3 32B on 128 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 64, 5120, 27_648, 40, 8
    ICI_MESH_SHAPE = (1, 32, 4)


@experiment_registry.register(tags=["tiny"])
class TinyOlmo2(TinySizes, Olmo2):
    """OLMo 2's structure in tiny sizes."""


@experiment_registry.register(tags=["tiny"])
class TinyOlmo3(TinySizes, Olmo3):
    """OLMo 3's structure: two local layers with a window of 5 tokens, a global one, and a local one after the repeated block."""

    NUM_LAYERS = 4
    LAYER_PATTERN = ("local", "local", "global")
    WINDOW = 5
    ROTARY_SCALING = RotaryScaling("yarn", 8.0, original_max_positions=8, beta_fast=1.0, beta_slow=0.1)
