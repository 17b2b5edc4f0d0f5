"""A run that loses devices and gets them back: it goes on without a checkpoint, with the losses of one that kept them."""

import dataclasses
import json
from typing import ClassVar

import jax
import numpy as np
import pytest
from etils import epath

from experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer import experiment_config, partitioning
from spmd_trainer.errors import UserError
from spmd_trainer.programs import elastic, train
from spmd_trainer.programs.job import Job, JobSettings

TINY = "lm.stdlib.StdlibBytesTiny"
STEPS = 6


class LosesDevices(StdlibBytesTiny):
    """From 8 devices to 4 after two steps, back to 8 after four."""

    PLAN: ClassVar[dict[int, int]] = {2: 4, 4: 8}

    def partitioner(self):
        return partitioning.PjitPartitioner(elastic=True)

    def available_devices(self, step):
        return jax.devices()[: self.PLAN[step]] if step in self.PLAN else None


def job(directory, experiment=None):
    overrides = [
        f"task.train.num_train_steps={STEPS}",
        "task.train.summary_interval_steps=1",
        "task.train.eval_interval_steps=5",
    ]
    resolved = experiment_config.resolve(TINY, overrides)
    if experiment is not None:
        resolved = dataclasses.replace(resolved, experiment=experiment)
    settings = JobSettings(exp=TINY, job_log_dir=epath.Path(directory), enable_checkpoint_saving=False)
    return Job(settings, resolved)


def losses(directory):
    lines = (directory / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
    return {record["step"]: record["loss"] for record in map(json.loads, lines)}


def test_from_8_devices_to_4_to_8_the_losses_are_those_of_a_run_that_stayed(tmp_path, caplog):
    train.train(job(tmp_path / "stays"))
    with caplog.at_level("WARNING"):
        train.train(job(tmp_path / "moves", LosesDevices()))
    stayed, moved = losses(tmp_path / "stays"), losses(tmp_path / "moves")
    assert list(stayed) == list(moved) == list(range(1, STEPS + 1))
    np.testing.assert_allclose(list(moved.values()), list(stayed.values()), rtol=1e-5)
    changes = [record.getMessage() for record in caplog.records if "devices changed" in record.getMessage()]
    assert [change.split("to ")[1] for change in changes] == ["replica=1, data=2, mdl=2", "replica=1, data=4, mdl=2"]
    assert not (tmp_path / "moves" / "checkpoints").exists() or not any((tmp_path / "moves" / "checkpoints").iterdir())


def test_devices_that_the_rule_has_no_mesh_for_are_refused_with_the_way_out(tmp_path):
    run = job(tmp_path, LosesDevices())
    with pytest.raises(UserError, match=r"7 devices can't carry the mesh .*override mesh_for_devices in LosesDevices"):
        elastic.rebuild(run, jax.devices()[:7], None)


def test_a_run_that_is_not_elastic_asks_nobody(tmp_path):
    assert elastic.changed_devices(job(tmp_path), 2) is None
