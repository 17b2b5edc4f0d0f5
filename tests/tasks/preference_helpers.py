"""Small models that learn from pairs, and pairs for them."""

import jax
import numpy as np
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.decoder.preferences.model import PreferenceModel
from spmd_trainer.experiments.lm.llama import TinyLlama
from spmd_trainer.step import pjit
from spmd_trainer.training import verify

AXES = ("replica", "data", "mdl")
KEY = jax.random.key(1)


def answers(rng, pairs, length, vocab_size=61):
    """Rows of prompts and answers of many lengths."""
    ids = rng.integers(0, vocab_size, (pairs, length + 1)).astype(np.int32)
    ends = rng.integers(3, length + 1, pairs)
    starts = rng.integers(1, ends - 1)
    position = np.arange(length)
    inside = position < ends[:, None]
    return NestedMap(
        ids=ids[:, :-1] * inside,
        labels=ids[:, 1:] * inside,
        paddings=1 - inside.astype(np.float32),
        weights=(inside & (position >= starts[:, None])).astype(np.float32),
        segment_ids=inside.astype(np.int32),
        segment_pos=(position * inside).astype(np.int32),
    )


def pair_batch(pairs=6, length=10, seed=0, *, weights=None, reference=True):
    """A batch of pairs; with `reference`, log-probabilities as `PreferenceInput` gives them."""
    rng = np.random.default_rng(seed)
    batch = NestedMap(chosen=answers(rng, pairs, length), rejected=answers(rng, pairs, length))
    batch.eval_sample_weights = np.ones(pairs, np.float32) if weights is None else np.array(weights, np.float32)
    if reference:
        for side in (batch.chosen, batch.rejected):
            logps = -4 * side.weights.sum(1) + rng.normal(size=pairs)
            side.reference_logps = logps.astype(np.float32).view(np.int32)
    return batch


def task_of(preference=None, *, lora=None, sizes=None, **fields):
    """The task of a tiny Llama that learns from pairs. `preference` are fields of `PreferenceLoss`, `fields` of the model."""
    task_p = type("Sized", (TinyLlama,), sizes or {})().task()
    model_p = task_p.model
    task_p.model = Config(PreferenceModel, **{name: getattr(model_p, name) for name in model_p.__arguments__})
    task_p.model.preference = Config(PreferenceLoss, **(preference or {}))
    task_p.model.set(**fields)
    if lora is not None:
        task_p.lora = lora
    return tasks_lib.build_task(task_p)


def shapes_of(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def partitioner_on(task, sizes, batch, partitioner=None):
    """The partitioner on a mesh of so many of the eight devices, set up for batches of this shape."""
    partitioner = partitioner or pjit.PjitPartitioner()
    devices = jax.devices()[: int(np.prod(sizes))]
    partitioner.use_mesh(sharding.create_device_mesh(list(zip(AXES, sizes, strict=True)), devices=devices))
    partitioner.setup(task, shapes_of(batch))
    return partitioner


def steps_on_one_device(task, batches):
    """The snapshots of training on one device, and the initial state as numpy arrays."""
    partitioner = verify.single_device_partitioner(task, shapes_of(batches[0]))
    snapshots = list(verify.run_steps(partitioner, batches, KEY))
    first = snapshots[0].variables
    return snapshots, jax.tree.map(lambda v: first[v.path], partitioner.metadata.variables)
