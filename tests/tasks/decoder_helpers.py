"""Builds small decoders for the tests of `spmd_trainer.decoder`."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
from praxis import base_layer
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer.decoder import lm
from spmd_trainer.models.decoder_spec import DecoderSpec, DeltaSpec

SMALL = {
    "vocab_size": 31,
    "model_dims": 12,
    "hidden_dims": 10,
    "num_layers": 2,
    "num_heads": 6,
    "num_kv_heads": 2,
    "head_dims": 4,
    "initializer_range": 0.5,
}


# Layers of linear attention, and between them one of softmax attention, whose output has a gate.
LINEAR = {
    "layer_pattern": ("linear", "global"),
    "num_layers": 3,
    "delta": Config(DeltaSpec, num_heads=3, values_per_head=2, key_dims=5, value_dims=4, conv_width=3),
    "gated_attention": True,
    "norm_scale_offset": 1.0,
    "norm_epsilon": 1e-2,  # with less, the norms of small states enlarge rounding errors
}


def small_spec(**fields):
    """Returns the config of a small DecoderSpec with these fields."""
    return Config(DecoderSpec, **{**SMALL, **fields})


@contextlib.contextmanager
def evaluating(do_eval=True):
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=do_eval)):
        yield


class Decoder:
    """A DecoderLm with random variables, among them scales and biases.

    Attributes:
      spec: its DecoderSpec.
      layer: the praxis layer.
      variables: {"params": ...}, and "non_trainable" if the model has such.
    """

    def __init__(self, spec_p, **fields):
        self.layer = base_layer.instantiate(Config(lm.DecoderLm, name="lm", spec=spec_p, **fields))
        self.spec = self.layer.spec
        ids = jnp.zeros((1, 2), jnp.int32)
        with evaluating():
            variables = jax.jit(self.layer.init)(jax.random.key(0), ids, jnp.zeros(ids.shape))
        kept = [name for name in variables if name in (base_layer.PARAMS, base_layer.NON_TRAINABLE)]
        leaves, treedef = jax.tree.flatten({name: variables[name] for name in kept})
        rng = np.random.default_rng(1)
        moved = [x + 0.2 * rng.normal(size=x.shape).astype(np.float32) for x in leaves]
        self.variables = jax.tree.unflatten(treedef, moved)

    def __call__(self, ids, *, paddings=None, labels=None, train=False, **inputs):
        """Returns the outputs for ids [batch, time]."""
        paddings = np.zeros(ids.shape, np.float32) if paddings is None else paddings
        with evaluating(not train):
            outputs, _ = self.layer.apply(
                self.variables,
                ids,
                paddings,
                labels,
                **inputs,
                mutable=[base_layer.AUX_LOSS],
                rngs={base_layer.RANDOM: jax.random.key(2)},
            )
        return outputs

    def decode(self, fn):
        """Runs `fn(layer)` with a decode cache; returns its result and the cache."""
        with evaluating():
            run = jax.jit(functools.partial(self.layer.apply, method=fn, mutable=[base_layer.DECODE_CACHE]))
            result, cache = run(self.variables)
        return result, cache[base_layer.DECODE_CACHE]


def random_ids(shape, seed=0):
    return np.random.default_rng(seed).integers(0, SMALL["vocab_size"], shape).astype(np.int32)


def next_token_labels(ids, weights=None):
    """Returns labels: each token's successor, and a weight of 0 for the last."""
    weights = np.ones(ids.shape, np.float32) if weights is None else weights
    return NestedMap(class_ids=np.roll(ids, -1, 1), class_weights=weights)
