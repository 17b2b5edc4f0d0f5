"""What a run says at its start about a batch that the mesh does not divide."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import assert_names
from jax.sharding import PartitionSpec
from praxis import pax_fiddle

from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.sharding import report_data
from spmd_trainer.step import partitioner, step_fns
from spmd_trainer.step.pjit import PjitPartitioner

SIZES = {"data": 4, "mdl": 2}


def notes(shapes, specs):
    return partitioner.batch_notes({k: jax.ShapeDtypeStruct(v, jnp.float32) for k, v in shapes.items()}, specs, SIZES)


def test_rows_are_named_once_with_the_cost_and_the_sizes_that_cost_nothing():
    (note,) = notes({"x": (17, 3), "y": (17,)}, {"x": PartitionSpec("data"), "y": PartitionSpec("data")})
    assert_names(note, "17 rows", "data=4", 20, "17.6%", "16 or 20")


def test_fewer_rows_than_devices():
    (note,) = notes({"x": (3, 3)}, {"x": PartitionSpec(("data", "mdl"))})
    assert_names(note, "3 rows", "data=4 x mdl=2 (8)", 8)
    assert "0 or" not in note


def test_another_dimension_is_named_with_its_input_and_the_devices_that_have_nothing_of_it():
    shapes, specs = {"images": (8, 2, 2, 3)}, {"images": PartitionSpec("mdl", "data")}
    (note,) = notes(shapes, specs)
    assert_names(note, "'images'", "dimension 1", "size 2", "data=4", 4, "2 of 4 parts", "padding")
    structs = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    layout = report_data.InputLayout("train", "mine", "C", structs, structs, specs, specs)
    (field,) = report_data.input_data(layout, SIZES)["fields"]
    assert field["shape_in_step"] == (8, 4, 2, 3)
    assert "(8, 4, 2, 3)" in field["in_step_text"]


def test_what_divides_is_not_named():
    assert not notes({"x": (8, 4)}, {"x": PartitionSpec("data", "mdl")})


@pytest.mark.parametrize("own", [False, True])
def test_a_step_names_its_own_constraints_and_recommends_verify(own, caplog):
    def apply(params, x):
        y = x @ params["w"]
        if own and not jax.sharding.get_abstract_mesh().empty:
            y = jax.lax.with_sharding_constraint(y, PartitionSpec("data", "mdl"))
        return y

    model_p = pax_fiddle.Config(
        models.FunctionModel,
        init=lambda key: {"w": jax.random.normal(key, (3, 3))},
        apply=apply,
        loss=lambda y, batch: {"loss": (jnp.mean(y**2), jnp.ones(()))},
        inputs="x",
        mesh_axis_names=list(SIZES),
        ici_mesh_shape=list(SIZES.values()),
    )
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="t", model=model_p)
    task_p.train.learner.loss_name, task_p.train.learner.optimizer = "loss", optax.sgd(0.1)
    shapes = {"x": jax.ShapeDtypeStruct((8, 3), np.float32)}
    partitioner = PjitPartitioner(sharding.create_device_mesh(list(SIZES.items())))
    partitioner.setup(tasks_lib.build_task(task_p), shapes)
    step = partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    with caplog.at_level(logging.INFO):
        step.trace(jax.random.key(0))
    if own:
        assert_names(caplog.text, f"{__file__}:{apply.__code__.co_firstlineno + 3}", "--mode=verify", "mdl=2", 4)
    else:
        assert "--mode=verify" not in caplog.text
