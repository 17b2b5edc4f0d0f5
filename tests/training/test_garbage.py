"""The garbage collector rests while a run starts, and works from its first step on."""

import gc
import subprocess
import sys

import pytest

from spmd_trainer.training import garbage


@pytest.fixture(autouse=True)
def collector_as_it_was():
    yield
    garbage.resume()
    gc.unfreeze()
    gc.enable()


def test_it_rests_until_it_resumes():
    garbage.pause()
    assert not gc.isenabled()
    garbage.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count()


def test_a_collector_that_somebody_stopped_stays_stopped():
    gc.disable()
    garbage.pause()
    garbage.resume()
    assert not gc.isenabled()


def test_resuming_without_a_rest_changes_nothing():
    frozen = gc.get_freeze_count()
    garbage.resume()
    assert gc.isenabled()
    assert gc.get_freeze_count() == frozen


@pytest.mark.full
def test_a_training_run_collects_garbage_from_its_first_step(tmp_path):
    program = f"""
import gc, sys
from unittest import mock
from spmd_trainer import main
sys.argv = ["spmd-trainer", "--exp=lm.cloud.LmCloudSpmdAdamTiny", "--job_log_dir={tmp_path}/run",
            "--noenable_checkpoint_saving", "--noeval_on_test", "--fdl.set=task.train.num_train_steps=1"]
from spmd_trainer.training import start_up, train
begin, start, resting = train.Run.begin, start_up.start, []
def watched_begin(self, what, *args):
    if what.startswith("training step"):
        resting.append(not gc.isenabled())
    return begin(self, what, *args)
def watched_start(*args):
    resting.append(not gc.isenabled())
    return start(*args)
with mock.patch.object(train.Run, "begin", watched_begin), mock.patch.object(start_up, "start", watched_start):
    try:
        main.run()
    except SystemExit as end:
        assert not end.code, end
assert resting == [True, False], resting
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)
