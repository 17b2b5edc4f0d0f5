"""Base classes of the decoder families' experiments: synthetic text, long rows, and the sizes of the tiny experiments."""

from __future__ import annotations

import jax.numpy as jnp
from praxis import layers

from spmd_trainer.decoder import experiment
from spmd_trainer.experiments.lm.cloud import SyntheticText


class SyntheticDecoder(SyntheticText, experiment.DecoderExperiment):
    """A decoder on synthetic text: rows of 4096 tokens, one per device."""

    PERCORE_BATCH_SIZE = 1
    MAX_SEQ_LEN = 4096


class LongRows(SyntheticDecoder):
    """Context parallelism: rows are split over the mesh axis 'seq'. List this class before the family's class.

    The backward pass stores attention's outputs: recomputing them for long rows would take longer than all other
    layers.
    """

    MESH_AXIS_NAMES = ("replica", "data", "seq", "mdl")
    CONTEXT_PARALLEL = "ring"
    CHECKPOINT_POLICY = layers.AutodiffCheckpointType.SAVE_CONTEXT


class TinySizes(SyntheticDecoder):
    """Sizes of the tiny classes. List this class before the family's class.

    No mesh axis divides the vocabulary of 61 tokens, the 3 heads, the feed-forward width of 37 or the batch of 6 rows.
    """

    VOCAB_SIZE = 61
    MODEL_DIMS = 20
    HIDDEN_DIMS = 37
    NUM_LAYERS = 2
    NUM_HEADS = 3
    NUM_KV_HEADS = 1
    HEAD_DIMS = 6
    MAX_POSITIONS = 64
    # So large that attention is far from uniform in these narrow models.
    INITIALIZER_RANGE = 0.3
    FPROP_DTYPE = jnp.float32
    ICI_MESH_SHAPE = (1, 4, 2)
    MAX_SEQ_LEN = 12
    PERCORE_BATCH_SIZE = 0.75
    NUM_EVAL_EXAMPLES = 10
    LEARNING_RATE = 1e-2
    WARMUP_STEPS = 2
    NUM_TRAIN_STEPS = 8
    EVAL_INTERVAL_STEPS = 4
    CHECKPOINT_EVERY_N_STEPS = 4
    # Large enough that rounding noise in a gradient stays small in the update.
    ADAM_EPSILON = 1e-3
