"""Flax modules under the partitioner with written-out collectives: stacked layers, batch norm, dropout."""

import functools

import jax
import numpy as np
import pytest
from facts import assert_names
from flax import linen as nn
from flax import nnx
from model_helpers import KEY, Config, Net, batch, failing_steps, nnx_task, shapes_of, snapshots, task

from spmd_trainer import models
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step import step_fns
from spmd_trainer.training import verify

LAYERS = 8  # as many as devices: the dimension of the layers needs the least padding


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return nn.tanh(nn.Dense(x.shape[-1], name="dense")(x)), None


class LinenStack(nn.Module):
    """A scan over layers, each rematerialised or not, between two layers of width 6."""

    remat: bool = False

    @nn.compact
    def __call__(self, x):
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        scan = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
        x, _ = scan(name="layers")(nn.Dense(6, name="up")(x), None)
        return nn.Dense(8, name="down")(x)


class NnxStack(nnx.Module):
    def __init__(self, *, rngs):
        self.up, self.down = nnx.Linear(8, 6, rngs=rngs), nnx.Linear(6, 8, rngs=rngs)
        self.layers = nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs))(rngs.split(LAYERS))

    def __call__(self, x):
        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        @nnx.remat
        def run(layer, x):
            return nnx.tanh(layer(x))

        return self.down(run(self.layers, self.up(x)))


def stack(kind, **fields):
    model, module = {"linen": (models.LinenModel, LinenStack), "nnx": (models.NnxModel, NnxStack)}[kind]
    return task(Config(model, module=Config(module, **fields)), strategy=None)


def partitioner(strategy, **settings):
    size = {} if strategy == "dp" else {"min_weight_size": 1}
    return functools.partial(ShardMapPartitioner, strategy, **size, **settings)


def records(built, make):
    found = make()
    found.setup(built, shapes_of(batch()))
    return {v.path.removeprefix("mdl_vars/params/"): v for v in found.metadata.records() if "params/" in v.path}


@pytest.mark.parametrize("num_minibatches", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(
    ("kind", "fields"), [pytest.param("linen", {}, marks=pytest.mark.full), ("linen", {"remat": True}), ("nnx", {})]
)
@pytest.mark.full
def test_stacked_layers(kind, fields, num_minibatches):
    make = partitioner("fsdp", num_minibatches=num_minibatches)
    assert not failing_steps(stack(kind, **fields), make=make)


@pytest.mark.full
def test_stacked_layers_in_evaluation():
    built = stack("linen")
    found = []
    for make in (partitioner("dp"), partitioner("fsdp"), partitioner("fsdp", gather="step")):
        part = make()
        part.setup(built, shapes_of(batch()))
        step = part.partition(step_fns.eval_step, shapes_of(batch()), is_eval=True)
        state = part.initialize_train_state(KEY).to_eval_state()
        _, output = step(state, KEY, part.layout.put(batch()))
        found.append(float(output.loss))
    np.testing.assert_allclose(found, found[:1] * 3, rtol=1e-5)


def test_the_report_says_when_parameters_are_gathered():
    linen, nnx_found = records(stack("linen"), partitioner("fsdp")), records(stack("nnx"), partitioner("fsdp"))
    assert linen["layers/dense/kernel"].spec == jax.sharding.PartitionSpec(None, ("data", "mdl"), None)
    assert linen["layers/dense/kernel"].reason.startswith("fsdp: dimension 1 over ('data', 'mdl')")
    assert not any("gathered" in v.reason for v in linen.values())
    assert_names(nnx_found["layers/kernel"].reason, "fsdp", "dimension 0", "('data', 'mdl')", "gathered")
    whole = records(stack("nnx"), functools.partial(ShardMapPartitioner, "fsdp"))["layers/kernel"].reason
    assert_names(whole, "replicated", "288 elements", "min_weight_size")


@pytest.mark.parametrize("strategy", ["dp", pytest.param("fsdp", marks=pytest.mark.full)])
@pytest.mark.full
def test_batch_norm_keeps_the_mean_of_the_devices_statistics(strategy):
    built = nnx_task()
    (start, first, *_), _ = snapshots(built, (4, 2), make=partitioner(strategy))
    rows = batch(0)["x"] @ start.variables["mdl_vars/params/first/kernel"]
    by_device = rows.reshape(8, 2, -1)
    for name, one, now in (("mean", 0.0, by_device.mean(1)), ("var", 1.0, by_device.var(1))):
        found = first.variables[f"mdl_vars/non_trainable/norm/{name}"]
        np.testing.assert_allclose(found, 0.9 * one + 0.1 * now.mean(0), rtol=1e-5, atol=1e-6)


class OnlyDrops(nnx.Module):
    def __init__(self, *, rngs):
        self.scale = nnx.Param(jax.numpy.ones(8))
        self.drop = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        return self.drop(jax.numpy.ones_like(x)) * self.scale


@pytest.mark.parametrize("strategy", ["dp", "fsdp"])
def test_every_row_has_dropout_of_its_own(strategy):
    """Two shards with the same mask would have the same rows."""
    built = nnx_task(Config(OnlyDrops))
    built.model.per_example = lambda outputs, batch: {"outputs": outputs}
    part = partitioner(strategy)()
    part.setup(built, shapes_of(batch()))
    step = part.partition(step_fns.train_step, shapes_of(batch()), is_eval=False)
    inputs = part.layout.put(batch())
    _, output = step(part.initialize_train_state(KEY), KEY, inputs)
    rows = np.asarray(output.per_example_out["outputs"])
    assert set(np.unique(rows)) == {0.0, 2.0}
    by_device = {rows.reshape(8, 2, 8)[device].tobytes() for device in range(8)}
    assert len(by_device) == 8


@pytest.mark.full
def test_a_run_repeats_itself_with_dropout():
    """A resumed run draws what an uninterrupted one does: the same states from the same key."""
    built = nnx_task(Config(Net, width=7, rate=0.5))
    first, _ = snapshots(built, (4, 2), make=partitioner("fsdp"))
    second, _ = snapshots(built, (4, 2), make=partitioner("fsdp"))
    compared = [verify.compare(one, two, verify.Tolerance(0, 0)) for one, two in zip(first, second, strict=True)]
    assert all(step.passed for step in compared)
