"""A vocabulary that the devices don't divide: its padding stays in the step, costs no exchange, and holds zeros."""

import collections

import jax
import jax.numpy as jnp
import numpy as np

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.synthetic import structures
from spmd_trainer.inputs import batches
from spmd_trainer.planner import hlo_collectives
from spmd_trainer.step import pjit, step_fns

SHAPES = batches.lm_input_specs(6, 12)
KEY = jax.random.key(2)


def partitioner(vocab_size=61):
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    result = pjit.PjitPartitioner(mesh)
    task_p = structures.TinyLm().task()
    task_p.model.lm_tpl.vocab_size = vocab_size
    result.setup(tasks_lib.build_task(task_p), SHAPES)
    return result


def test_a_padded_vocabulary_needs_no_more_exchanges():
    """Neither for its logits nor for the gradient of its lookup, a product with one-hot vectors of logical size."""

    def exchanges(vocab_size):
        program = partitioner(vocab_size).partition(step_fns.train_step, SHAPES, is_eval=False).lower(KEY).compile()
        found = hlo_collectives.find_collectives(program.as_text())
        return collections.Counter(exchange.kind for exchange in found)

    uneven, even = exchanges(61), exchanges(62)
    assert uneven["collective-permute"] == even["collective-permute"] == 0
    assert uneven["all-to-all"] == even["all-to-all"] == 0
    assert uneven["all-reduce"] == even["all-reduce"]


def test_padding_is_zero_after_a_step_that_wrote_to_it():
    it = partitioner()

    def spoil(layout, state, key, inputs):
        return jax.tree.map(lambda x: jnp.full_like(x, 7), state), {}

    step = it.partition(spoil, SHAPES, is_eval=False)
    inputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), SHAPES)
    state, _ = step(it.initialize_train_state(KEY), KEY, it.layout.put(inputs))
    for variable, x in zip(it.metadata.records(), jax.tree.leaves(state), strict=True):
        x = np.array(x)
        logical = tuple(slice(size) for size in variable.logical_shape)
        assert (x[logical] == 7).all()
        x[logical] = 0
        assert not x.any(), variable.path
