"""Biases that balance experts: moved once for each step by the load of the whole batch, on any mesh and in minibatches."""

import functools

import jax
import numpy as np
import pytest
from facts import raises_naming
from praxis import pax_fiddle

import spmd_trainer as st
from spmd_trainer import sharding, tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.models.decoder_spec import MoeSpec
from spmd_trainer.step import masks, step_fns
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import experiment_config
from spmd_trainer.training.summary_writers import read_metrics

pytestmark = pytest.mark.xdist_group("choice_bias")

KEY = jax.random.key(1)
RATE = 0.01
ROUTER = "layers/sub/layer_0/moe/router"
MOE = MoeSpec(
    num_experts=5,
    num_experts_per_token=2,
    hidden_dims=7,
    shared_dims=3,
    score="sigmoid",
    choice_bias=True,
    choice_bias_rate=RATE,
    z_loss_weight=0.01,
)


def partitioned(sizes, partitioner_cls=PjitPartitioner, moe=MOE, written=None, **settings):
    """A partitioner with a model of two repeated layers, its step and a batch with padding."""
    resolved = experiment_config.resolve("lm.qwen.TinyQwen3Moe")
    task_p = resolved.task_p
    task_p.model.lm_tpl.spec.moe = pax_fiddle.Config(MoeSpec, **vars(moe))
    if written is not None:
        task_p.train.apply_mutable_list = written
    task = tasks_lib.build_task(task_p)
    batch = pax_fiddle.build(resolved.config.train_datasets[0]).get_next_padded()
    batch.segment_ids = batch.segment_ids * (np.arange(batch.segment_ids.shape[1]) < 9)
    names = task.model.mesh_axis_names
    devices = jax.devices()[: int(np.prod(sizes))]
    mesh = sharding.create_device_mesh(list(zip(names, sizes, strict=True)), devices=devices)
    partitioner = partitioner_cls(mesh=mesh, **settings)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    partitioner.setup(task, shapes)
    return partitioner, partitioner.partition(step_fns.train_step, shapes, is_eval=False), batch


def steps(partitioner, step, batch, count, start=0.0):
    """Yields of each step: the router's biases after it and the tokens of each expert, [layers, experts], and the loss."""
    state = partitioner.initialize_train_state(KEY)
    leaves = [x + start if path.endswith("choice_bias") else x for path, x in masks.with_paths(state.mdl_vars)]
    state = state.replace(mdl_vars=jax.tree.unflatten(jax.tree.structure(state.mdl_vars), leaves))
    for _ in range(count):
        state, output = step(state, KEY, partitioner.layout.put(batch))
        variables = dict(masks.with_paths(state.mdl_vars["non_trainable"]))
        load = np.asarray(output.summary_tensors[f"lm/{ROUTER}/expert_load_histogram"])
        yield np.asarray(variables[f"lm/{ROUTER}/choice_bias"]), load, float(output.loss)


@functools.cache
def on_one_device(count=3):
    return list(steps(*partitioned((1, 1, 1)), count))


@pytest.mark.full
def test_a_training_step_moves_the_biases_of_each_layer():
    partitioner, step, batch = partitioned((1, 1, 1))
    start = np.array([0.3, 0.0, 0.0, -0.2, 0.0], np.float32)
    before, tokens, unevenness = start, np.sum(batch.segment_ids > 0), []
    for bias, load, _ in steps(partitioner, step, batch, 60, start):
        assert (load.sum(axis=1) == 2 * tokens).all()
        np.testing.assert_allclose(bias - before, RATE * np.sign(load.mean(axis=1, keepdims=True) - load), atol=1e-6)
        before = bias
        unevenness.append(load.max(axis=1) / load.mean(axis=1))
    assert (unevenness[0] > 1.5).all()
    assert (np.mean(unevenness[-10:], axis=0) < 1.25).all()


@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((1, 3, 2), {"num_minibatches": 2}),
        pytest.param((2, 2, 2), {}, marks=pytest.mark.full),
        pytest.param((1, 1, 3), {"num_minibatches": 3}, marks=pytest.mark.full),
        pytest.param((1, 5, 1), {}, marks=pytest.mark.full),
        pytest.param((1, 3, 1), {"partitioner_cls": ShardMapPartitioner, "sharding": "fsdp"}, marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_the_load_is_that_of_the_whole_batch_on_any_mesh(sizes, settings):
    found = steps(*partitioned(sizes, **settings), 3)
    for (bias, load, loss), (one_bias, one_load, one_loss) in zip(found, on_one_device(), strict=True):
        assert loss == pytest.approx(one_loss, rel=1e-4)
        np.testing.assert_allclose(load / load.sum(), one_load / one_load.sum(), atol=1e-6)
        np.testing.assert_allclose(bias, one_bias, atol=1e-6)


@pytest.mark.full
@pytest.mark.parametrize("written", [["aux_loss", "non_trainable"], ["aux_loss", "summaries"]])
def test_a_step_that_may_not_write_what_moves_the_biases_is_refused(written):
    facts = f"{ROUTER}/choice_bias", "task.train.apply_mutable_list", "summaries", "non_trainable"
    with raises_naming(UserError, *facts):
        next(steps(*partitioned((1, 1, 1), written=written), 1))


@pytest.mark.full
def test_a_skipped_step_moves_no_bias():
    partitioner, step, batch = partitioned((1, 1, 1))
    state = partitioner.initialize_train_state(KEY)
    leaves = [x * np.nan if path.endswith("final_norm/scale") else x for path, x in masks.with_paths(state.mdl_vars)]
    state = state.replace(mdl_vars=jax.tree.unflatten(jax.tree.structure(state.mdl_vars), leaves))
    before = jax.tree.map(np.asarray, state.mdl_vars)
    state, output = step(state, KEY, partitioner.layout.put(batch))
    assert float(output.summary_tensors["learning/is_valid_step_aggregate_scalar"]) == 0
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.map(np.asarray, state.mdl_vars))


@pytest.mark.full
def test_a_resumed_run_has_the_same_biases_and_loads(tmp_path):
    def run(name, steps):
        fields = (
            f"num_train_steps={steps}",
            "summary_interval_steps=1",
            "eval_interval_steps=0",
            "save_interval_steps=3",
        )
        return st.train("lm.glm.TinyGlm4", tmp_path / name, overrides=[f"task.train.{field}" for field in fields])

    whole, _, resumed = run("whole", 6), run("part", 3), run("part", 6)
    pairs = zip(*(masks.with_paths(result.state.mdl_vars) for result in (whole, resumed)), strict=True)
    biases = 0
    for (path, one), (_, other) in pairs:
        np.testing.assert_array_equal(one, other, err_msg=path)
        biases += path.endswith("choice_bias") and np.asarray(one).any()
    assert biases == 1
    found = [read_metrics(tmp_path / name, "experts") for name in ("whole", "part")]
    assert found[0] == found[1]
    assert len(found[0]) == 6
    assert len(found[0][6][f"lm/{ROUTER}/1/load"].split()) == 5
