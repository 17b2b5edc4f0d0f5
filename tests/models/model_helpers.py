"""Tiny models of every kind, one batch for all, and runs on one device and on meshes."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from praxis import pax_fiddle

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import verify

Config = pax_fiddle.Config
KEY = jax.random.key(3)
AXES = ("data", "mdl")
EVERYTHING = [(".*", 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)')]


class Net(nnx.Module):
    """Batch norm, dropout, a list of layers, and an output layer that is the first kernel again."""

    def __init__(self, width, rate=0.0, *, rngs):
        # No bias: batch norm would remove it, and its gradient would be rounding noise.
        self.first = nnx.Linear(8, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)
        self.layers = nnx.List([nnx.Linear(width, width, rngs=rngs) for _ in range(2)])
        self.tied = self.first.kernel

    def __call__(self, x):
        x = self.drop(nnx.tanh(self.norm(self.first(x))))
        for layer in self.layers:
            x = nnx.tanh(layer(x))
        return x @ self.tied[...].T


def batch(number=0, rows=16):
    x = np.random.default_rng(number).normal(size=(rows, 8)).astype(np.float32)
    return {"x": x, "y": np.tanh(np.roll(x, 1, axis=1))}


def loss(outputs, batch):
    squared = jnp.mean((outputs - batch["y"]) ** 2, axis=-1)
    rows = jnp.asarray(squared.size, jnp.float32)
    return {"loss": (jnp.mean(squared), rows), "largest": (jnp.max(squared), rows)}


def shapes_of(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def task(model_p, *, optimizer=None, strategy=EVERYTHING, **learner):
    """The task of a model on the axes ('data', 'mdl')."""
    model_p.inputs, model_p.mesh_axis_names, model_p.ici_mesh_shape = "x", list(AXES), [4, 2]
    model_p.loss = model_p.loss or loss
    task_p = Config(tasks_lib.SingleTask, name="t", model=model_p)
    task_p.train.learner.loss_name = "loss"
    task_p.train.learner.optimizer = optimizer or optax.sgd(0.1, momentum=0.9)
    for name, value in learner.items():
        setattr(task_p.train.learner, name, value)
    task_p.train.sharding_strategy = strategy
    return tasks_lib.build_task(task_p)


def nnx_task(module=None, **settings):
    return task(Config(models.NnxModel, module=module or Config(Net, width=6)), **settings)


def snapshots(built, sizes, steps=3, initial=None, make=PjitPartitioner):
    """The states of a run on a mesh of these sizes, and the partitioner that `make` returns for the mesh."""
    partitioner = make(
        mesh=sharding.create_device_mesh(
            list(zip(AXES, sizes, strict=True)), devices=jax.devices()[: int(np.prod(sizes))]
        )
    )
    batches = [batch(number) for number in range(steps)]
    partitioner.setup(built, shapes_of(batches[0]))
    return list(verify.run_steps(partitioner, batches, KEY, initial)), partitioner


def failing_steps(built, sizes=(4, 2), make=PjitPartitioner):
    """The steps whose numbers on a mesh differ from those on one device."""
    reference, partitioner = snapshots(built, (1, 1))
    initial = jax.tree.map(lambda v: reference[0].variables[v.path], partitioner.metadata.variables)
    run, _ = snapshots(built, sizes, initial=initial, make=make)
    tolerance = verify.Tolerance.for_task(built)
    compared = [verify.compare(one, many, tolerance) for one, many in zip(reference, run, strict=True)]
    return [step for step in compared if not step.passed]
