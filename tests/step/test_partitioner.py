"""What all partitioners share, and a partitioner of a user."""

import dataclasses

import jax
import numpy as np
import pytest

from spmd_trainer import partitioning, sharding
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.compiled_step import CompiledStep
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.shard_map import ShardMapPartitioner
from tests.step.test_partitioning import KEY, LENGTH, ROWS, make_batch, make_partitioner, make_task, run_steps

# One worker: the partitioner of one device is compiled once for these and those of test_partitioning.py.
pytestmark = pytest.mark.xdist_group("partitioning")

SHAPES = batches.lm_input_specs(ROWS, LENGTH)


class CountingLayout(Layout):
    """Counts the batches that it puts on the devices."""

    placed = 0

    def put(self, batch):
        CountingLayout.placed += 1
        return super().put(batch)


class OnOneDevice(partitioning.Partitioner):
    """Derived from the base class alone, with `jax.jit`: everything is on one device."""

    def __init__(self):
        super().__init__(
            sharding.create_device_mesh([("replica", 1), ("data", 1), ("mdl", 1)], devices=jax.devices()[:1])
        )

    def setup(self, task, inputs_shape_dtype):
        layout = self.make_layout(task, inputs_shape_dtype, "constant")
        self.layout = CountingLayout(
            **{field.name: getattr(layout, field.name) for field in dataclasses.fields(layout)}
        )

    def partition(self, step_fn, inputs_shape_dtype, is_eval):
        layout = self.layout

        def gradients(*args):
            output, forward_vars, grads = step_fns.gradients(layout, *args)
            return output, forward_vars, jax.tree.map(lambda g: 0 * g, grads)

        def step(state, key, inputs):
            return step_fn(layout, state, key, inputs, *([] if is_eval else [gradients]))

        return CompiledStep(jax.jit(step), layout, inputs_shape_dtype)

    def rows_to_split(self, num_rows, num_devices):
        return num_rows


def test_a_layout_has_the_names_of_its_partitioner():
    for partitioner in (make_partitioner((1, 4, 2)), ShardMapPartitioner("dp"), OnOneDevice()):
        partitioner.setup(make_task(), SHAPES)
        assert isinstance(partitioner, partitioning.Partitioner)
        assert partitioner.metadata is partitioner.layout
        assert partitioner.mesh is partitioner.layout.mesh
        assert partitioner.task is partitioner.layout.task


def test_neither_partitioner_is_derived_from_the_other():
    assert not issubclass(ShardMapPartitioner, pjit.PjitPartitioner)
    assert not issubclass(pjit.PjitPartitioner, ShardMapPartitioner)


def test_a_partitioner_without_one_of_the_methods_can_not_be_made():
    class Incomplete(partitioning.Partitioner):
        """Has no methods."""

    with pytest.raises(TypeError, match="rows_to_split"):
        Incomplete()


@pytest.mark.full
def test_a_partitioner_of_a_user_trains_a_step_with_a_gradient_function_of_its_own():
    CountingLayout.placed = 0
    partitioner = OnOneDevice()
    partitioner.setup(make_task(), SHAPES)
    initial = jax.tree.map(np.asarray, partitioner.initialize_train_state(KEY))
    state, _, losses = run_steps(partitioner, make_batch(), count=2)
    _, _, expected = run_steps(make_partitioner((1, 1, 1)), make_batch(), count=1)
    assert CountingLayout.placed == int(state.step) == 2
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    # Its gradients are zero, so its variables stay.
    jax.tree.map(np.testing.assert_array_equal, initial.mdl_vars, state.mdl_vars)


@pytest.mark.parametrize(("make", "rows"), [(pjit.PjitPartitioner, 12), (ShardMapPartitioner, 2)])
def test_minibatches_divide_the_global_batch_or_each_devices_rows(make, rows):
    assert make().rows_to_split(12, 8) == rows


@pytest.mark.parametrize("make", [pjit.PjitPartitioner, ShardMapPartitioner])
def test_a_batch_rule_that_does_not_exist_is_refused(make):
    with pytest.raises(ValueError, match=rf"{make.__name__}: elastic_batch='half'; .*'whole', 'accumulate' or 'scale'"):
        make(elastic_batch="half")
