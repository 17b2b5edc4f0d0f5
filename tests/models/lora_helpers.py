"""Tiny models of every kind with adapters, and what tests ask of them."""

from __future__ import annotations

import zlib

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx
from model_helpers import AXES, EVERYTHING, Config, batch, loss, shapes_of
from praxis import base_layer

from spmd_trainer import models, tasks_lib
from spmd_trainer.decoder import lora
from spmd_trainer.step import masks, state_layout, step_fns

KEY = jax.random.key(5)


def init(key):
    keys = jax.random.split(key, 3)
    return {
        "up": {"w": 0.4 * jax.random.normal(keys[0], (8, 6)), "b": jnp.zeros(6)},
        "stack": {"w": 0.4 * jax.random.normal(keys[1], (2, 6, 6)), "scale": jnp.ones((2, 6))},
        "down": {"w": 0.4 * jax.random.normal(keys[2], (6, 8))},
    }


def apply(params, x):
    x = jnp.tanh(x @ params["up"]["w"] + params["up"]["b"])

    @jax.checkpoint
    def layer(x, own):
        return jnp.tanh(x @ own["w"] * own["scale"]), None

    x, _ = jax.lax.scan(layer, x, params["stack"])
    return x @ params["down"]["w"]


class LinenNet(nn.Module):
    """A scanned stack of rematerialised layers between a projection to heads and one from heads."""

    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        class Layer(nn.Module):
            @nn.compact
            def __call__(self, x, _):
                return nn.tanh(nn.Dense(x.shape[-1], name="dense")(x)), None

        x = nn.DenseGeneral((2, 3), name="heads")(x)
        x = nn.DenseGeneral(6, axis=(-2, -1), name="join")(x)
        scan = nn.scan(
            nn.remat(Layer, prevent_cse=False),
            variable_axes={"params": 0},
            split_rngs={"params": True},
            length=3,
        )
        x, _ = scan(name="layers")(x, None)
        return nn.Dense(8, name="down")(x)


class NnxNet(nnx.Module):
    """A stack of layers under nnx.scan, batch norm, and a product with the first kernel again."""

    def __init__(self, *, rngs):
        self.first = nnx.Linear(8, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.split(3))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return nnx.tanh(layer(x))

        x = run(self.layers, self.norm(self.first(x)))
        return x @ self.first.kernel[...].T


def model_p(kind, **fields):
    """The config of a model: 'function', 'linen' or 'nnx'."""
    if kind == "function":
        return Config(models.FunctionModel, **{"init": init, "apply": apply, **fields})
    kinds = {"linen": (models.LinenModel, LinenNet), "nnx": (models.NnxModel, NnxNet)}
    return Config(kinds[kind][0], module=Config(kinds[kind][1], **fields))


def lora_task(model, *, strategy=EVERYTHING, optimizer=None, learner=(), **settings):
    """The task of a model on the axes ('data', 'mdl') with adapters of these settings."""
    model.inputs, model.mesh_axis_names, model.ici_mesh_shape = "x", list(AXES), [4, 2]
    model.loss = model.loss or loss
    model.per_example = model.per_example or (lambda outputs, batch: {"outputs": outputs})
    task_p = Config(
        tasks_lib.SingleTask, name="t", model=model, lora=Config(lora.Lora, **{"rank": 3, "alpha": 4.0, **settings})
    )
    task_p.train.learner.loss_name = "loss"
    task_p.train.learner.optimizer = optimizer or optax.adam(0.05)
    for name, value in dict(learner).items():
        setattr(task_p.train.learner, name, value)
    task_p.train.sharding_strategy = strategy
    return tasks_lib.build_task(task_p)


def variables(task, inputs=None, *, seed=7):
    """Initial variables, with random numbers in all adapters."""
    shapes = shapes_of(inputs or batch())
    values = base_layer.maybe_unbox_value(state_layout.variables_initialiser(task, shapes)(KEY))

    def drawn(path, x):
        key = jax.random.fold_in(jax.random.key(seed), zlib.crc32(path.encode()))
        return x + 0.2 * jax.random.normal(key, x.shape, x.dtype) if lora.is_adapter(path) else x

    leaves = [drawn(path, x) for path, x in masks.with_paths(values)]
    return jax.tree.unflatten(jax.tree.structure(values), leaves)


def outputs(task, model, mdl_vars, inputs=None, *, do_eval=True, key=KEY, mutable=()):
    """What a model returns for each row."""
    context = step_fns.model_context(task, do_eval=do_eval)

    @jax.jit
    def run(mdl_vars, inputs):
        with base_layer.JaxContext.new_context(hparams=context):
            (_, per_example, *_), written = model.forward(mdl_vars, inputs, key, do_eval=do_eval, mutable=mutable)
        return per_example, written

    return run(mdl_vars, batch() if inputs is None else inputs)
