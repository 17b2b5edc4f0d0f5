"""A run keeps a checkpoint of step 0, as in Pax."""

import os
import signal

import pytest
from facts import raises_naming
from trained_helpers import make_job

from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.errors import UserError
from spmd_trainer.training import elastic, train

pytestmark = [pytest.mark.xdist_group("trained"), pytest.mark.full]

FIELDS = ("task.train.num_train_steps=20", "task.train.save_interval_steps=8", "task.train.eval_interval_steps=0")


def trained_steps(directory, *fields, **arguments):
    """Trains on one device; returns the steps of the checkpoints."""
    train.train(make_job(directory, mesh=(1, 1, 1), fields=(*FIELDS, *fields), **arguments))
    return Checkpointer(directory / "checkpoints", read_only=True).all_steps()


def test_step_0_every_interval_and_the_last_step_are_kept(tmp_path):
    assert trained_steps(tmp_path) == [0, 8, 16, 20]
    first = (tmp_path / "checkpoints" / "0" / "manifest.json").stat().st_mtime_ns
    # Started again, it has its first checkpoint.
    assert trained_steps(tmp_path, "task.train.num_train_steps=24") == [0, 8, 16, 20, 24]
    assert (tmp_path / "checkpoints" / "0" / "manifest.json").stat().st_mtime_ns == first


def test_retention_keeps_step_0_as_the_first_of_the_steps_kept_by_time(tmp_path):
    assert trained_steps(tmp_path, "task.train.save_max_to_keep=2") == [0, 16, 20]
    newest = ("task.train.save_max_to_keep=2", "task.train.save_keep_interval_duration=None")
    assert trained_steps(tmp_path / "newest", *newest) == [16, 20]


def test_a_signal_at_step_6_keeps_0_and_6_and_the_run_continues_from_6(tmp_path, monkeypatch):
    def changed_devices(job, step):
        if step == 6:
            os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch:
        patch.setattr(elastic, "changed_devices", changed_devices)
        assert trained_steps(tmp_path) == [0, 6]
    assert trained_steps(tmp_path) == [0, 6, 8, 16, 20]


def test_a_run_that_saves_nothing_saves_no_step_0(tmp_path):
    assert trained_steps(tmp_path, "task.train.num_train_steps=2", enable_checkpoint_saving=False) == []


def test_variables_that_begin_with_nan_are_said_to(tmp_path):
    from praxis.base_layer import WeightInit

    def customize(config):
        config.task.model.lm_tpl.params_init = WeightInit.Constant(float("nan"))

    with raises_naming(UserError, "step 0", "not saved: NaN", "initialisers", "init_from_checkpoint_rules"):
        trained_steps(tmp_path, customize=customize)
