"""A run that loses devices and gets them back: it goes on without a checkpoint, with the losses of one that kept them."""

import dataclasses
import json
import types
from typing import ClassVar

import jax
import numpy as np
import pytest
from etils import epath
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.step import pjit
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import elastic, experiment_config, train
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.training.summary_writers import read_metrics

# One worker: what these tests share is made once.
pytestmark = pytest.mark.xdist_group("elastic")

TINY = "lm.stdlib.StdlibBytesTiny"
STEPS = 6


class LosesDevices(StdlibBytesTiny):
    """From 8 devices to 4 after two steps, back to 8 after four."""

    PLAN: ClassVar[dict[int, int]] = {2: 4, 4: 8}

    BATCH: ClassVar[str] = "whole"

    def partitioner(self):
        return pjit.PjitPartitioner(elastic=True, elastic_batch=self.BATCH)

    def available_devices(self, step):
        return jax.devices()[: self.PLAN[step]] if step in self.PLAN else None


class Accumulates(LosesDevices):
    BATCH = "accumulate"


class Scales(LosesDevices):
    """Back after one step of half a batch: the whole batches then begin in the middle of one of a run that stayed."""

    PLAN: ClassVar[dict[int, int]] = {2: 4, 3: 8}
    BATCH = "scale"


def job(directory, experiment=None, fields=()):
    overrides = [
        f"task.train.num_train_steps={STEPS}",
        "task.train.summary_interval_steps=1",
        "task.train.eval_interval_steps=5",
        *fields,
    ]
    resolved = experiment_config.resolve(TINY, overrides)
    if experiment is not None:
        resolved = dataclasses.replace(resolved, experiment=experiment)
    return Job.build(TrainConfig(resolved, epath.Path(directory), enable_checkpoint_saving=False))


def records(directory):
    return [json.loads(line) for line in (directory / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()]


def losses(directory):
    return {record["step"]: record["loss"] for record in records(directory)}


@pytest.fixture(scope="module")
def stayed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("stays")
    train.train(job(directory))
    return losses(directory)


@pytest.mark.full
@pytest.mark.parametrize(
    ("experiment", "minibatches"),
    [(LosesDevices, [(), ()]), (Accumulates, [("in 2 minibatches",), ("in 1 minibatches",)])],
)
def test_from_8_devices_to_4_to_8_the_losses_are_those_of_a_run_that_stayed(
    tmp_path, caplog, stayed, experiment, minibatches
):
    with caplog.at_level("WARNING"):
        train.train(job(tmp_path, experiment()))
    moved = losses(tmp_path)
    assert list(stayed) == list(moved) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(moved.values()), list(stayed.values()), rtol=1e-5)
    changes = [record.getMessage() for record in caplog.records if "devices changed" in record.getMessage()]
    meshes = ["replica=1, data=2, mdl=2", "replica=1, data=4, mdl=2"]
    for change, mesh, number in zip(changes, meshes, minibatches, strict=True):
        assert_names(change.split("to ", 1)[1], f"{mesh};", "8 rows stays", *number)
        assert ("minibatches" in change) == bool(number)
    assert not (tmp_path / "checkpoints").exists() or not any((tmp_path / "checkpoints").iterdir())


@pytest.mark.full
def test_an_evaluation_right_after_a_change_takes_the_next_training_batch_and_leaves_it_to_its_step(tmp_path, stayed):
    fields = ("task.train.eval_interval_steps=2", "task.train.eval_skip_train=False")
    run = job(tmp_path, LosesDevices(), fields)
    run.task.early_stopping_fn = EarlyStopping(metric="train/log_pplx", patience=9)
    train.train(run)
    evaluated = read_metrics(tmp_path, "eval_train")
    assert sorted(evaluated) == [2, 4, 6]
    assert losses(tmp_path) == pytest.approx(stayed, rel=1e-5)


@pytest.mark.full
def test_a_scaled_batch_takes_no_example_twice_and_leaves_none_out(tmp_path, caplog, stayed, monkeypatch):
    seen = []
    put = Layout.put
    monkeypatch.setattr(Layout, "put", lambda self, batch: seen.append((self.mesh.size, batch.ids)) or put(self, batch))
    with caplog.at_level("WARNING"):
        train.train(job(tmp_path, Scales()))
    assert [losses(tmp_path)[step] for step in (1, 2)] == pytest.approx([stayed[1], stayed[2]], rel=1e-5)
    changes = [record.getMessage() for record in caplog.records if "devices changed" in record.getMessage()]
    assert_names(changes[0], "global batch", "8 rows to 4", "learning rate stays")
    assert_names(changes[1], "global batch", "4 rows to 8", "learning rate stays")
    source = job(tmp_path).build_train_input()
    order = np.concatenate([source.get_next().ids for _ in range(STEPS)])
    first_half = next(i for i, (devices, _) in enumerate(seen) if devices == 4)
    back = next(i for i, (devices, _) in enumerate(seen) if i > first_half and devices == 8)
    # Batches that were ready when the devices changed are made anew.
    np.testing.assert_array_equal(seen[first_half][1], order[16:20])
    np.testing.assert_array_equal(np.concatenate([ids for _, ids in seen[back : back + 3]]), order[20:44])


def test_a_batch_that_can_not_be_scaled_is_refused(tmp_path):
    class SixRows(Scales):
        GLOBAL_BATCH_SIZE = 6

    run = job(tmp_path, SixRows())
    with raises_naming(UserError, "elastic_batch='scale'", "6 rows", "3/2", "2 devices"):
        elastic.rebuild(run, jax.devices()[:2], None)


@pytest.mark.parametrize(("batch", "rows"), [pytest.param("whole", 16, marks=pytest.mark.full), ("scale", 8)])
def test_a_batch_size_that_is_worked_out_moves_too(tmp_path, batch, rows):
    resolved = experiment_config.resolve("lm.cloud.LmCloudSpmdAdamTiny", [])
    size = resolved.config.train_datasets[0].batch_size.global_batch_size
    run = Job.build(TrainConfig(resolved, epath.Path(tmp_path), enable_checkpoint_saving=False))
    run.partitioner.elastic_batch = batch
    run = dataclasses.replace(run, batch=elastic.batch_settings(run, 4))
    assert len(run.build_train_input().get_next().ids) == size * rows // 16


def test_each_device_divides_its_own_rows_under_shard_map(tmp_path):
    class Mapped(LosesDevices):
        GLOBAL_BATCH_SIZE = 12

        def partitioner(self):
            return ShardMapPartitioner("dp", elastic=True, elastic_batch="accumulate")

    # 12 rows on 8 devices are 2 on each; on 4 they are 3, in 3 minibatches: 2 don't divide them.
    assert elastic.batch_settings(job(tmp_path, Mapped()), 4).num_minibatches == 3


def test_devices_that_the_rule_has_no_mesh_for_are_refused_with_the_way_out(tmp_path):
    run = job(tmp_path, LosesDevices())
    with raises_naming(UserError, "7 devices", "mesh_for_devices", "LosesDevices"):
        elastic.rebuild(run, jax.devices()[:7], None)


def test_devices_of_several_slices_are_divided_over_the_outermost_axis(tmp_path):
    run = job(tmp_path, LosesDevices())
    devices = [types.SimpleNamespace(platform="tpu", slice_index=n // 3) for n in range(6)]
    with raises_naming(UserError, "--mesh=", "2 slices", "'data' has size 3", "multiple of 2"):
        elastic.rebuild(run, devices, None)


def test_a_run_that_is_not_elastic_asks_nobody(tmp_path):
    assert elastic.changed_devices(job(tmp_path), 2) is None
