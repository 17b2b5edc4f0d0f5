"""Dropout masks, read: other bits in every row of the batch and every step, the same bits on every mesh."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import base_model, layers, optimizers, pax_fiddle, schedules
from praxis.py_utils import NestedMap

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.step import pjit, step_fns

ROWS, WIDTH = 16, 512
AXES = ("replica", "data", "mdl")
Config = pax_fiddle.Config
INPUTS = NestedMap(ones=jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))


class MaskModel(base_model.BaseModel):
    """Its per-example output is what dropout leaves of ones: 0 where it drops, 2 where it keeps."""

    def setup(self) -> None:
        self.create_child("scale", Config(layers.Linear, input_dims=WIDTH, output_dims=1))
        self.create_child("dropout", Config(layers.Dropout, keep_prob=0.5))

    def compute_predictions(self, input_batch):
        return self.dropout(input_batch.ones)

    def compute_loss(self, predictions, input_batch):
        loss = self.scale(predictions).mean()
        return NestedMap(loss=(loss, jnp.ones(()))), NestedMap(mask=predictions)


def masks(sizes, steps=2):
    """Masks of the first steps, [steps, ROWS, WIDTH]."""
    task_p = Config(tasks_lib.SingleTask, name="masks")
    task_p.model = Config(MaskModel, name="m", ici_mesh_shape=list(sizes), mesh_axis_names=list(AXES))
    task_p.train.inputs_split_mapping = {"map_2d": (("replica", "data"), "mdl")}
    task_p.train.learner.loss_name = "loss"
    schedule = Config(schedules.Constant, value=1.0)
    task_p.train.learner.optimizer = Config(optimizers.Sgd, learning_rate=0.0, lr_schedule=schedule)
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = sharding.create_device_mesh(list(zip(AXES, sizes, strict=True)), devices=devices)
    partitioner = pjit.PjitPartitioner(mesh)
    partitioner.setup(tasks_lib.build_task(task_p), INPUTS)
    step = partitioner.partition(step_fns.train_step, INPUTS, is_eval=False)
    key = jax.random.key(5)
    state = partitioner.initialize_train_state(key)
    batch = NestedMap(ones=np.ones((ROWS, WIDTH), np.float32))
    out = []
    for _ in range(steps):
        state, output = step(state, key, partitioner.layout.put(batch))
        out.append(np.asarray(output.per_example_out.mask))
    return np.stack(out)


@pytest.fixture(scope="module")
def on_one_device():
    return masks((1, 1, 1))


def test_half_is_dropped_and_no_two_rows_or_steps_share_a_mask(on_one_device):
    assert set(np.unique(on_one_device)) == {0.0, 2.0}
    assert abs(on_one_device.mean() - 1.0) < 0.05
    rows = on_one_device.reshape(-1, WIDTH)
    assert len({row.tobytes() for row in rows}) == 2 * ROWS


@pytest.mark.parametrize(
    "sizes",
    [pytest.param((1, 8, 1), marks=pytest.mark.full), pytest.param((1, 1, 8), marks=pytest.mark.full), (2, 2, 2)],
)
def test_masks_do_not_depend_on_the_mesh_and_differ_on_every_device(sizes, on_one_device):
    ours = masks(sizes)
    np.testing.assert_array_equal(ours, on_one_device)
    # What each device draws of the first step's mask: its rows and columns as the split mapping gives them.
    batch_parts, column_parts = sizes[0] * sizes[1], sizes[2]
    parts = [part for rows in np.split(ours[0], batch_parts) for part in np.split(rows, column_parts, axis=1)]
    assert len({part.tobytes() for part in parts}) == 8
