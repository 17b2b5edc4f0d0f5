"""GPT-2 in the sizes that OpenAI published, on synthetic text.

Sizes are from the config.json of the `openai-community` models on Hugging Face. To train on other data, subclass one
and override `datasets`.
"""

from __future__ import annotations

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm.synthetic_decoder import SyntheticDecoder, TinySizes


class Gpt2(SyntheticDecoder):
    """GPT-2 (Radford et al. 2019): learned positions, layer norm, biases everywhere. No dropout; OpenAI used 0.1."""

    VOCAB_SIZE = 50_257
    HEAD_DIMS = 64
    MAX_POSITIONS = 1024
    POSITIONS = "learned"
    NORM = "layer"
    NORM_EPSILON = 1e-5
    ACTIVATION = "gelu_tanh"
    GATED = False
    QKV_BIAS = True
    OUTPUT_BIAS = True
    MLP_BIAS = True
    TIED_EMBEDDINGS = True
    MAX_SEQ_LEN = 1024


@experiment_registry.register
class Gpt2Small(Gpt2):
    """GPT-2, 124M parameters, on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 12, 768, 3072, 12, 12
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gpt2Medium(Gpt2):
    """GPT-2 medium, 355M parameters, on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 24, 1024, 4096, 16, 16
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gpt2Large(Gpt2):
    """GPT-2 large, 774M parameters, on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 36, 1280, 5120, 20, 20
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register
class Gpt2Xl(Gpt2):
    """GPT-2 XL, 1.6B parameters, on 8 chips."""

    NUM_LAYERS, MODEL_DIMS, HIDDEN_DIMS, NUM_HEADS, NUM_KV_HEADS = 48, 1600, 6400, 25, 25
    ICI_MESH_SHAPE = (1, 8, 1)


@experiment_registry.register(tags=["tiny"])
class TinyGpt2(TinySizes, Gpt2):
    """GPT-2's structure in tiny sizes, with dropout."""

    # Without rotary embeddings, key biases shift all logits of a query alike: their gradient is rounding noise, unless a cap
    # bends the logits.
    ATTENTION_SOFTCAP = 1.0
    NUM_KV_HEADS = 3
    DROPOUT = 0.1
    ATTENTION_DROPOUT = 0.1
