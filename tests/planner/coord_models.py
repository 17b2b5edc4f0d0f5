"""Experiments of three kinds of models with muP, narrow at their base."""

from __future__ import annotations

from types import MappingProxyType

import jax.numpy as jnp
import optax
from flax import nnx
from praxis import layers
from praxis.pax_fiddle import Config

import spmd_trainer as st
from spmd_trainer import base_experiment, experiment_registry, models, tasks_lib
from spmd_trainer.decoder import experiment
from spmd_trainer.experiments.lm.cloud import SyntheticText
from spmd_trainer.inputs import synthetic
from spmd_trainer.tasks.lm import model_params

VOCAB, LENGTH = 61, 16


class _Text(SyntheticText):
    """6 rows of 16 tokens."""

    VOCAB_SIZE = VOCAB
    MAX_SEQ_LEN = LENGTH
    PERCORE_BATCH_SIZE = 6
    ICI_MESH_SHAPE = (1, 1, 1)
    DCN_MESH_SHAPE = (1, 1, 1)
    NUM_LAYERS = 2
    MUP = MappingProxyType({"MODEL_DIMS": 64, "HIDDEN_DIMS": 128, "NUM_HEADS": 4})
    MODEL_DIMS = 64
    HIDDEN_DIMS = 128
    NUM_HEADS = 4

    def task(self):
        task_p = super().task()
        task_p.mup = Config(st.Mup, base=dict(self.MUP))
        return task_p


@experiment_registry.register
class Decoder(_Text, experiment.DecoderExperiment):
    """The decoder; heads grow in number."""

    MUP = MappingProxyType({**_Text.MUP, "NUM_KV_HEADS": 4})
    NUM_KV_HEADS = 4
    HEAD_DIMS = 16
    INITIALIZER_RANGE = 0.05
    FPROP_DTYPE = jnp.float32
    LEARNING_RATE = 1e-2


@experiment_registry.register
class Praxis(_Text, model_params.TransformerLmSpmdAdafactor):
    """praxis' TransformerLm: a tied embedding that is multiplied by the root of the width; heads grow in number."""

    MUP = MappingProxyType({"MODEL_DIMS": 64, "HIDDEN_DIMS": 128})
    DIMS_PER_HEAD = 16
    NUM_HEADS = None
    FPROP_DTYPE = jnp.float32
    ACTIVATION_CLS = layers.GELU
    USE_REPEATED_LAYER = True
    COMBINE_QKV = False
    LEARNING_RATE = 1e-2


class Mlp(nnx.Module):
    """An embedding, two hidden layers with a norm, and an output layer, all as Flax initialises them."""

    def __init__(self, width, *, rngs):
        self.embedding = nnx.Embed(VOCAB, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.hidden = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.output = nnx.Linear(width, VOCAB, rngs=rngs)

    def __call__(self, ids):
        x = self.embedding(ids)
        for layer in self.hidden:
            x = x + nnx.gelu(layer(self.norm(x)))
        return self.output(x)


def loss(logits, batch):
    xent = optax.softmax_cross_entropy_with_integer_labels(logits, batch["labels"])
    return jnp.mean(xent), jnp.asarray(xent.shape[0], jnp.float32)


@experiment_registry.register
class Nnx(base_experiment.BaseExperiment):
    """A Flax NNX module with optax' AdamW."""

    WIDTH = 64
    OPTIMIZER = staticmethod(lambda: optax.adamw(1e-2, weight_decay=0.1))

    def datasets(self):
        return [
            Config(
                synthetic.SyntheticLmInput,
                name="train",
                vocab_size=VOCAB,
                seq_len=LENGTH,
                batch_size=6,
                is_training=True,
            )
        ]

    def task(self):
        model_p = Config(models.NnxModel, module=Config(Mlp, width=self.WIDTH), inputs="ids", loss=loss)
        task_p = Config(tasks_lib.SingleTask, name="nnx", model=model_p)
        task_p.train.learner.optimizer = type(self).OPTIMIZER()
        task_p.mup = Config(st.Mup, base={"WIDTH": 64})
        return task_p
