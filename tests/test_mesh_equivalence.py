"""Mesh equivalence: N steps on any mesh give the numbers of N steps on one device, for every registered tiny experiment.

`spmd-trainer --mode=verify --exp=NAME` checks the same for an experiment of your own.
"""

import functools
import os
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import random_nets
from flax.errors import ScopeParamShapeError
from praxis import pax_fiddle

from spmd_trainer import experiment_modules, experiment_registry, sharding, tasks_lib
from spmd_trainer.step import pjit
from spmd_trainer.step.layout import Layout
from spmd_trainer.training import experiment_config, verify

MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]
# `make test` takes IN_SHORT on the mesh that splits all axes; `make test-all` all experiments on the mixed meshes, and one of
# each kind of partitioner, task and schedule on all; `make interop` the rest.
MIXED_MESHES = [(1, 4, 2), (2, 2, 2)]
OF_EACH_KIND = (
    "lm.cloud.LmCloudSpmdAdamTiny",
    "lm.llama.TinyLlama",
    "lm.mistral.TinyMixtral",
    "lm.stdlib.StdlibBytesTiny",
    "synthetic.shard_map.ShardMapDataParallelTiny",
    "synthetic.shard_map.ShardMapFsdpTiny",
    "synthetic.structures.TinyBFloat16",
    "synthetic.structures.TinyLm",
    "synthetic.structures.TinyMixtureOfExperts",
    "synthetic.structures.TinyPipeline",
    "vision.digits.DigitsNnxTiny",
)
IN_SHORT = (
    "lm.llama.TinyLlama",
    "synthetic.shard_map.ShardMapFsdpTiny",
    "synthetic.structures.TinyLm",
    "synthetic.structures.TinyMixtureOfExperts",
    "synthetic.structures.TinyPipeline",
    "vision.digits.DigitsNnxTiny",
)
# Random nets: how many in `make test`, always the same, and how many more in `make test-all`, from a seed that is new each time.
NETS, MORE_NETS = 20, 200
FIRST_SEED = int(os.environ.get("SPMD_TEST_SEED", time.time_ns() // 10**9))
STEPS = 5
KEY = jax.random.key(1)

experiment_modules.import_package(experiment_registry.EXPERIMENTS_PACKAGE)
EXPERIMENTS = sorted(
    experiment_registry.short_name(name)
    for name in experiment_registry.get_all()
    if "tiny" in experiment_registry.get_registry_tags(name)
)


class Reference:
    """An experiment's run on one device."""

    def __init__(self, name):
        resolved = experiment_config.resolve(name)
        self.experiment = resolved.experiment
        self.task = tasks_lib.build_task(resolved.task_p)
        source = pax_fiddle.build(resolved.config.train_datasets[0])
        self.batches = [source.get_next_padded() for _ in range(STEPS)]
        self.shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), self.batches[0])
        partitioner = verify.single_device_partitioner(self.task, self.shapes)
        self.snapshots = list(verify.run_steps(partitioner, self.batches, KEY))
        first = self.snapshots[0].variables
        self.initial = jax.tree.map(lambda v: first[v.path], partitioner.metadata.variables)

    def on(self, sizes):
        """Runs the same steps from the same initial values on a mesh of these sizes; returns a comparison per step."""
        names = self.task.model.mesh_axis_names
        if len(names) == 4:  # Pax's pipelines: (stage, replica, data, mdl)
            sizes = (sizes[0], 1, *sizes[1:])
        axes = list(zip(names, sizes, strict=True))
        partitioner = self.experiment.partitioner() or pjit.PjitPartitioner()
        partitioner.use_mesh(sharding.create_device_mesh(axes, devices=jax.devices()[: int(np.prod(sizes))]))
        partitioner.setup(self.task, self.shapes)
        run = verify.run_steps(partitioner, self.batches, KEY, self.initial)
        tolerance = verify.Tolerance.for_task(self.task)
        return [verify.compare(ours, theirs, tolerance) for ours, theirs in zip(self.snapshots, run, strict=True)]


@functools.lru_cache(maxsize=1)
def reference(name):
    return Reference(name)


def case(name, sizes):
    of_each_kind = name in OF_EACH_KIND
    marks = [pytest.mark.xdist_group(name)]
    if not of_each_kind and sizes not in MIXED_MESHES:
        marks.append(pytest.mark.slow)
    elif not (name in IN_SHORT and sizes == (2, 2, 2)):
        marks.append(pytest.mark.full)
    return pytest.param(name, sizes, marks=marks)


@pytest.mark.parametrize(("name", "sizes"), [case(name, sizes) for name in EXPERIMENTS for sizes in MESHES], ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(name, sizes):
    for step in reference(name).on(sizes):
        assert step.passed, (name, sizes, step)


# The last two have products whose operands or results XLA splits in ways that nothing in the program states.
@pytest.mark.parametrize(
    "seeds", [*(range(first, first + 5) for first in range(0, NETS, 5)), (1795566942, 1795567097)], ids=str
)
def test_random_nets_train_as_in_plain_jax(seeds):
    assert not [net.text for net in map(random_nets.draw, seeds) if not random_nets.agrees(net)]


@pytest.mark.full
@pytest.mark.parametrize("number", range(0, MORE_NETS, 10))
def test_more_random_nets_train_as_in_plain_jax(number):
    seeds = range(FIRST_SEED + number, FIRST_SEED + number + 10)
    assert not [net.text for net in map(random_nets.draw, seeds) if not random_nets.agrees(net)]


def test_the_experiments_cover_every_structure():
    assert len(EXPERIMENTS) >= 15
    assert set(OF_EACH_KIND) <= set(EXPERIMENTS)
    for part in ("Pipeline", "PipelineStreaming", "MixtureOfExperts", "Dropout", "Adafactor", "Accumulation", "Ema"):
        assert f"synthetic.structures.Tiny{part}" in EXPERIMENTS
    losses = [step.loss for step in reference("synthetic.structures.TinyLm").snapshots[1:]]
    assert np.isfinite(losses).all()
    assert len(set(losses)) == STEPS


def failing_steps(name, sizes):
    return [step for step in Reference(name).on(sizes) if not step.passed]


def test_a_missing_slice_is_caught(monkeypatch):
    """Without the slice, a layer that declares 61 classes gets 62 and raises."""
    monkeypatch.setattr(Layout, "slice", lambda self, state: state)
    with pytest.raises(ScopeParamShapeError, match=r"\(16, 61\).*\(16, 62\)"):
        failing_steps("synthetic.structures.TinyLm", (1, 4, 2))


@pytest.mark.full
def test_a_slice_from_the_wrong_end_is_caught(monkeypatch):
    def last_rows(self, state):
        return jax.tree.map(lambda v, x: x[tuple(slice(-n, None) for n in v.logical_shape)], self.variables, state)

    monkeypatch.setattr(Layout, "slice", last_rows)
    assert failing_steps("synthetic.structures.TinyLm", (1, 4, 2))


@pytest.mark.full
def test_padding_rows_with_weight_in_the_loss_are_caught(monkeypatch):
    """The batch of six rows is padded to eight with copies of the last row, which keep their weight."""
    put = Layout.put

    def with_weight(self, batch):
        missing = -len(batch.ids) % self.mesh.size
        padded = jax.tree.map(lambda x: np.pad(x, [(0, missing)] + [(0, 0)] * (x.ndim - 1), mode="edge"), batch)
        return put(self, padded)

    pad = Layout.pad_inputs_shape_dtype
    monkeypatch.setattr(Layout, "put", with_weight)
    partition = pjit.PjitPartitioner.partition

    def without_slice(self, step_fn, shapes, is_eval):
        return partition(self, step_fn, pad(self.layout, shapes), is_eval)

    monkeypatch.setattr(pjit.PjitPartitioner, "partition", without_slice)
    assert failing_steps("synthetic.structures.TinyLm", (1, 4, 2))


@pytest.mark.full
def test_the_same_dropout_mask_on_every_shard_is_caught(monkeypatch):
    """Every shard draws its mask from the same key."""
    uniform = jax.random.uniform

    def same_for_every_shard(key, shape=(), *args, **kwargs):
        shards = 2
        if jax.sharding.get_abstract_mesh().size == 1 or not shape or shape[0] % shards:
            return uniform(key, shape, *args, **kwargs)
        mask = uniform(key, (shape[0] // shards, *shape[1:]), *args, **kwargs)
        return jnp.tile(mask, (shards, *[1] * (len(shape) - 1)))

    monkeypatch.setattr(jax.random, "uniform", same_for_every_shard)
    assert failing_steps("synthetic.structures.TinyDropout", (1, 4, 2))
