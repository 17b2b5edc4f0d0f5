"""Llama 2, 3, 3.1 and 3.2 in the sizes that Meta published, on synthetic text.

Sizes are from the config.json of the `meta-llama` models on Hugging Face. Llama 3.3 has the sizes of Llama 3.1. To
train on other data, subclass one and override `datasets`.
"""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.experiments.lm.adapters import WithAdapters
from spmd_trainer.experiments.lm.synthetic_decoder import LongRows, SyntheticDecoder, TinySizes
from spmd_trainer.models.decoder_spec import RotaryScaling


class Llama(SyntheticDecoder):
    """Base of all sizes."""

    HEAD_DIMS = 128
    NORM_EPSILON = 1e-5


class Llama2(Llama):
    """Llama 2 (arXiv:2307.09288)."""

    VOCAB_SIZE = 32_000
    MAX_POSITIONS = 4096


@experiment_registry.register
class Llama2_7B(Llama2):
    """Llama 2 7B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 11_008, 32, 32
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Llama2_13B(Llama2):
    """Llama 2 13B on 64 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 40, 5120, 13_824, 40, 40
    ICI_MESH_SHAPE = (1, 32, 2)


@experiment_registry.register
class Llama2_70B(Llama2):
    """Llama 2 70B on 512 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 80, 8192, 28_672, 64, 8
    ICI_MESH_SHAPE = (1, 64, 8)


class Llama3(Llama):
    """Llama 3 (arXiv:2407.21783)."""

    VOCAB_SIZE = 128_256
    MAX_POSITIONS = 8192
    ROTARY_BASE = 500_000.0


@experiment_registry.register
class Llama3_8B(Llama3):
    """Llama 3 8B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 14_336, 32, 8
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Llama3_70B(Llama3):
    """Llama 3 70B on 512 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 80, 8192, 28_672, 64, 8
    ICI_MESH_SHAPE = (1, 64, 8)


class Llama3_1(Llama3):
    """Llama 3.1: up to 131,072 tokens per row, by scaled rotary frequencies."""

    MAX_POSITIONS = 131_072
    ROTARY_SCALING = RotaryScaling(
        "llama3", 8.0, original_max_positions=8192, low_freq_factor=1.0, high_freq_factor=4.0
    )


@experiment_registry.register
class Llama3_1_8B(Llama3_1):
    """Llama 3.1 8B on 32 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 32, 4096, 14_336, 32, 8
    ICI_MESH_SHAPE = (1, 8, 4)


@experiment_registry.register
class Llama3_1_70B(Llama3_1):
    """Llama 3.1 70B on 512 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 80, 8192, 28_672, 64, 8
    ICI_MESH_SHAPE = (1, 64, 8)


@experiment_registry.register
class Llama3_1_8BLong(LongRows, Llama3_1_8B):
    """Llama 3.1 8B on rows of 131,072 tokens, each split over 16 chips."""

    MAX_SEQ_LEN = 131_072
    ICI_MESH_SHAPE = (1, 1, 16, 1)
    PERCORE_BATCH_SIZE = 1 / 16


class Lora(WithAdapters):
    """LoRA adapters on all linear layers of a model that is frozen in bfloat16."""

    LORA_TARGETS = "all-linear"
    LORA_RANK_AXIS = ("data", "mdl")

    def model(self) -> Config[DecoderLanguageModel]:
        return super().model().set(dtype=jnp.bfloat16)


@experiment_registry.register
class Llama3_1_8BLora(Lora, Llama3_1_8B):
    """Llama 3.1 8B with LoRA adapters on 8 chips."""

    ICI_MESH_SHAPE = (1, 4, 2)


@experiment_registry.register
class Llama3_1_70BLora(Lora, Llama3_1_70B):
    """Llama 3.1 70B with LoRA adapters on 64 chips."""

    ICI_MESH_SHAPE = (1, 8, 8)


class Llama3_2(Llama3_1):
    """Llama 3.2: as Llama 3.1, with another scale of the rotary frequencies and tied embeddings."""

    ROTARY_SCALING = dataclasses.replace(Llama3_1.ROTARY_SCALING, factor=32.0)
    TIED_EMBEDDINGS = True


@experiment_registry.register
class Llama3_2_1B(Llama3_2):
    """Llama 3.2 1B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 16, 2048, 8192, 32, 8
    HEAD_DIMS = 64
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Llama3_2_3B(Llama3_2):
    """Llama 3.2 3B on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 28, 3072, 8192, 24, 8
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register(tags=["tiny"])
class TinyLlama(TinySizes, Llama3_1):
    """Llama 3.1's structure in tiny sizes; rotary scaling takes effect within rows of 12 tokens."""

    ROTARY_SCALING = dataclasses.replace(Llama3_1.ROTARY_SCALING, original_max_positions=8)


@experiment_registry.register(tags=["tiny"])
class TinyLlamaLong(LongRows, TinyLlama):
    """TinyLlama with rows split over 2 devices; every second layer attends within a window of 5 tokens."""

    LAYER_PATTERN = ("local", "global")
    WINDOW = 5
    MAX_SEQ_LEN = 13
    ICI_MESH_SHAPE = (1, 2, 2, 2)
