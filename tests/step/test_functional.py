"""A training loop of one's own on `partition_spmd_model`, as the contract gives it."""

import jax
import numpy as np
import pytest
from facts import raises_naming
from jax.sharding import PartitionSpec as P
from praxis import base_layer, pax_fiddle

from spmd_trainer import partitioning, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import batches, synthetic

# One worker: what these tests share is made once.
pytestmark = [pytest.mark.xdist_group("functional"), pytest.mark.full]

ROWS, LENGTH = 6, 16
KEY = jax.random.key(3)
SHAPES = batches.lm_input_specs(ROWS, LENGTH)


def make_batch():
    lm = pax_fiddle.Config(
        synthetic.SyntheticLmInput, name="synthetic", batch_size=ROWS, seq_len=LENGTH, vocab_size=257, is_training=True
    )
    return pax_fiddle.build(lm).get_next()


@pytest.fixture(scope="module")
def model():
    return partitioning.partition_spmd_model(StdlibBytesTiny().task(), KEY, SHAPES)


def test_train_eval_and_decode_with_the_steps_alone(model):
    state, specs, input_specs, train_step, eval_step, num_params = model
    assert jax.tree.structure(state) == jax.tree.structure(specs, is_leaf=lambda x: isinstance(x, P))
    assert set(jax.tree.leaves(input_specs, is_leaf=lambda x: isinstance(x, P))) == {
        P(("replica", "data", "mdl"), None),
        P(("replica", "data", "mdl")),
    }
    batch = make_batch()
    initial, *_ = eval_step(state.mdl_vars, KEY, state.step, batch)
    params = state.mdl_vars[base_layer.PARAMS]
    padded = sum(x.size for x in jax.tree.leaves(params))
    assert 0 < num_params < padded

    losses = []
    for _ in range(3):
        state, loss, metrics, _, summaries = train_step(state, KEY, batch)
        losses.append(float(loss))
    np.testing.assert_allclose(losses[0], float(initial), rtol=1e-5)
    assert losses[-1] < losses[0]
    mean, weight = metrics["avg_xent"]
    assert np.isclose(float(mean), losses[-1], rtol=1e-4)
    assert float(weight) > 0
    assert "learning/raw_grad_norm" in " ".join(summaries)
    assert int(state.step) == 3

    task = tasks_lib.build_task(StdlibBytesTiny().task())
    decode_step, decode_specs = partitioning.get_partitioned_spmd_model_decode_fn(task, KEY, state, specs, SHAPES)
    assert decode_specs == input_specs
    prompts = batch.copy()
    prompts.paddings = np.zeros((ROWS, LENGTH), np.float32)
    _, _, decoded, _ = decode_step(state.mdl_vars, KEY, state.step, prompts)
    assert decoded.output_ids.shape[0] == ROWS


def test_a_state_of_another_layout_is_refused_by_name(model):
    state, specs, *_ = model
    task_p = StdlibBytesTiny().task()
    task_p.model.ici_mesh_shape = [1, 2, 4]
    task = tasks_lib.build_task(task_p)
    with raises_naming(ValueError, "softmax", "train state", "shape"):
        partitioning.get_partitioned_spmd_model_decode_fn(task, KEY, state, specs, SHAPES)
