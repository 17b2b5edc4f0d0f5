"""The protocol of all partitioners: both implement it, and so can one that shares no code with them."""

import inspect

import jax
import numpy as np
import pytest

from spmd_trainer import sharding
from spmd_trainer import step as partitioning
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.partitioner import PartitionedStep
from spmd_trainer.step.shard_map import ShardMapPartitioner
from tests.step.test_partitioning import KEY, LENGTH, ROWS, make_batch, make_partitioner, make_task, run_steps

# One worker: the partitioner of one device is compiled once for these and those of test_partitioning.py.
pytestmark = pytest.mark.xdist_group("partitioning")

SHAPES = batches.lm_input_specs(ROWS, LENGTH)


class OnOneDevice:
    """Implements the protocol by composition, with `jax.jit` and without any base class: everything is on one device."""

    num_minibatches = 1
    elastic = False
    elastic_batch = "whole"
    has_own_mesh = True

    def __init__(self):
        self.mesh = sharding.create_device_mesh([("replica", 1), ("data", 1), ("mdl", 1)], devices=jax.devices()[:1])
        self._layout = pjit.PjitPartitioner(self.mesh)
        self.batches_placed = 0

    def use_mesh(self, mesh):
        raise ValueError("this partitioner runs on one device")

    def setup(self, task, inputs_shape_dtype):
        self._layout.setup(task, inputs_shape_dtype)
        self.task, self.metadata = task, self._layout.metadata

    def eval_metadata(self):
        return self.metadata.without_opt_states()

    def mesh_shape(self):
        return dict(self.mesh.shape)

    def init_fn(self, *, with_opt_states=True):
        return self._layout.init_fn(with_opt_states=with_opt_states)

    def initialize_train_state(self, prng_key, *, with_opt_states=True):
        return self.init_fn(with_opt_states=with_opt_states)(prng_key)

    def pad_inputs_shape_dtype(self, inputs_shape_dtype):
        return inputs_shape_dtype

    def inputs_partition_spec(self, inputs_shape_dtype):
        return jax.tree.map(lambda _: jax.P(), inputs_shape_dtype)

    def preprocess_inputs(self, batch, specs):
        self.batches_placed += 1
        return jax.tree.map(lambda x, spec: jax.device_put(x, jax.NamedSharding(self.mesh, spec)), batch, specs)

    def partition(self, step_fn, inputs_shape_dtype, is_eval):
        hparams = self.metadata.var_weight_hparams

        def gradients(*args):
            output, forward_vars, grads = step_fns.gradients(*args)
            return output, forward_vars, jax.tree.map(lambda g: 0 * g, grads)

        def step(state, key, inputs):
            return step_fn(self.task, state, key, inputs, hparams, *([] if is_eval else [gradients]))

        return PartitionedStep(jax.jit(step), self.inputs_partition_spec(inputs_shape_dtype), inputs_shape_dtype)

    def abstract_state(self, *, with_opt_states=True):
        return (self.metadata if with_opt_states else self.eval_metadata()).padded_shapes

    def abstract_inputs(self, step):
        return step.inputs_shape_dtype

    def rows_to_split(self, num_rows, num_devices):
        return num_rows


def test_both_partitioners_and_one_of_a_user_satisfy_the_protocol():
    mapped = ShardMapPartitioner("dp")
    mapped.setup(make_task(), SHAPES)
    composed = OnOneDevice()
    composed.setup(make_task(), SHAPES)
    for partitioner in (make_partitioner((1, 4, 2)), mapped, composed):
        assert isinstance(partitioner, partitioning.Partitioner)
        for name, method in inspect.getmembers(partitioning.Partitioner, inspect.isfunction):
            if not name.startswith("_"):
                wanted, found = inspect.signature(method), inspect.signature(getattr(type(partitioner), name))
                assert list(wanted.parameters) == list(found.parameters), name


def test_neither_partitioner_is_derived_from_the_other():
    assert not issubclass(ShardMapPartitioner, pjit.PjitPartitioner)
    assert not issubclass(pjit.PjitPartitioner, ShardMapPartitioner)


def test_a_partitioner_without_one_of_the_methods_can_not_be_made():
    class Incomplete(partitioning.Partitioner):
        """Has no methods."""

    with pytest.raises(TypeError, match="rows_to_split"):
        Incomplete()


@pytest.mark.full
def test_a_partitioner_by_composition_trains_a_step_with_a_gradient_function_of_its_own():
    partitioner = OnOneDevice()
    partitioner.setup(make_task(), SHAPES)
    initial = jax.tree.map(np.asarray, partitioner.initialize_train_state(KEY))
    state, _, losses = run_steps(partitioner, make_batch(), count=2)
    _, _, expected = run_steps(make_partitioner((1, 1, 1)), make_batch(), count=1)
    assert partitioner.batches_placed == int(state.step) == 2
    assert losses[0] == pytest.approx(expected[0], rel=1e-5)
    # Its gradients are zero, so its variables stay.
    jax.tree.map(np.testing.assert_array_equal, initial.mdl_vars, state.mdl_vars)


@pytest.mark.parametrize(("make", "rows"), [(pjit.PjitPartitioner, 12), (ShardMapPartitioner, 2)])
def test_minibatches_divide_the_global_batch_or_each_devices_rows(make, rows):
    assert make().rows_to_split(12, 8) == rows


@pytest.mark.parametrize("make", [pjit.PjitPartitioner, ShardMapPartitioner])
def test_a_batch_rule_that_does_not_exist_is_refused(make):
    with pytest.raises(
        ValueError, match=rf"{make.__name__}: elastic_batch is 'half'; .*'whole', 'accumulate', 'scale'"
    ):
        make(elastic_batch="half")
