"""Rows that a mesh does not divide, and a model's own constraints: the losses of one device."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec
from praxis import pax_fiddle

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import verify

ROWS_OVER_DATA = {"map_1d": ("data",), "map_2d": ("data", None)}
WIDTH, TOKENS, STEPS = 8, 11, 5


def init(key):
    table, w, out = jax.random.split(key, 3)
    return {
        "table": jax.random.normal(table, (TOKENS, WIDTH)),
        "w": jax.random.normal(w, (WIDTH, WIDTH)),
        "out": jax.random.normal(out, (WIDTH, WIDTH)),
    }


def apply(params, ids, own=False):
    """Looks ids up, normalises over the rows, and multiplies twice; `own` adds constraints."""

    def split(x):
        on_a_mesh = own and jax.sharding.get_abstract_mesh().size > 1
        spec = PartitionSpec(("replica", "data"), "mdl")
        return jax.lax.with_sharding_constraint(x, spec) if on_a_mesh else x

    h = params["table"][ids]
    h = split((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5))
    return split(jnp.tanh(h @ params["w"])) @ params["out"]


def losses(partitioner, task, batches, initial=None):
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    partitioner.setup(task, shapes)
    steps = list(verify.run_steps(partitioner, batches, jax.random.key(1), initial))
    first = steps[0].variables
    return [s.loss for s in steps[1:]], jax.tree.map(lambda v: first[v.path], partitioner.metadata.variables)


@pytest.mark.parametrize(
    ("rows", "sizes", "own"),
    [
        (17, {"data": 4, "mdl": 2}, False),
        pytest.param(16, {"data": 3, "mdl": 2}, False, marks=pytest.mark.full),
        pytest.param(13, {"data": 4, "mdl": 2}, False, marks=pytest.mark.full),
        (16, {"replica": 2, "data": 2, "mdl": 2}, True),
        pytest.param(17, {"replica": 2, "data": 2, "mdl": 2}, True, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_five_steps_have_the_losses_of_one_device(rows, sizes, own):
    model_p = pax_fiddle.Config(
        models.FunctionModel,
        init=init,
        apply=lambda params, ids: apply(params, ids, own),
        loss=lambda out, batch: {"loss": (jnp.mean((out - batch["y"]) ** 2), jnp.ones(()))},
        inputs="ids",
        mesh_axis_names=list(sizes),
        ici_mesh_shape=list(sizes.values()),
    )
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="t", model=model_p)
    task_p.train.learner.loss_name, task_p.train.learner.optimizer = "loss", optax.sgd(0.3)
    task_p.train.inputs_split_mapping = ROWS_OVER_DATA
    if own:  # the weight's own layout is part of the fault
        task_p.train.sharding_strategy = [("w$", lambda *spec_mesh_path_leaf: PartitionSpec("mdl", "data"))]
    task, rng = tasks_lib.build_task(task_p), np.random.default_rng(0)
    batches = [
        {
            "ids": rng.integers(0, TOKENS, rows).astype(np.int32),
            "y": rng.normal(size=(rows, WIDTH)).astype(np.float32),
        }
        for _ in range(STEPS)
    ]
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batches[0])
    wanted, initial = losses(verify.single_device_partitioner(task, shapes), task, batches)
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    mesh = sharding.create_device_mesh(list(sizes.items()), devices=devices)
    found, _ = losses(PjitPartitioner(mesh=mesh), task, batches, initial)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
