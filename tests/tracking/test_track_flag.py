"""`--track`: what it takes, and what it says before training begins."""

import importlib.util
import subprocess
import sys

import pytest
from absl import flags
from facts import assert_names, raises_naming

import spmd_trainer
from spmd_trainer import main  # noqa: F401  # defines the flags
from spmd_trainer.cli import flag_parsing
from spmd_trainer.errors import UserError
from spmd_trainer.settings import names
from spmd_trainer.watch.tracking import base
from spmd_trainer.watch.tracking.tracking import Tracking

TINY = "lm.stdlib.StdlibBytesTiny"


def command(*arguments, directory):
    program = [sys.executable, "-m", "spmd_trainer.main", f"--exp={TINY}", f"--job_log_dir={directory}", *arguments]
    return subprocess.run(program, capture_output=True, text=True)


def test_an_unknown_name_ends_with_status_2(tmp_path):
    result = command("--track=wandb,mlfow", directory=tmp_path / "run")
    assert result.returncode == 2
    (line,) = result.stderr.strip().splitlines()
    assert_names(line, "spmd-trainer: --track:", "tracker 'mlfow'", "mlflow?")
    assert not (tmp_path / "run").exists()


@pytest.mark.full
def test_only_training_is_tracked(tmp_path):
    result = command("--track=wandb", "--mode=eval", directory=tmp_path / "run")
    assert result.returncode == 2
    assert "--track goes with --mode=train" in result.stderr


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with raises_naming(UserError, "--track", "package mlflow", "pip install 'spmd-trainer[mlflow]'"):
        base.check(["tensorboard", "mlflow"], "--track")
    with raises_naming(UserError, "Tracking:", "tracker wandb", "pip install 'spmd-trainer[wandb]'"):
        Tracking(["wandb"])


def test_names_are_separated_by_commas_or_given_several_times():
    assert names("--track", ["wandb, mlflow", "trackio", ""]) == ("wandb", "mlflow", "trackio")
    values = flags.FLAGS
    assert "track" in values
    assert "--track=NAME,..." in flag_parsing.help_page("train")


def test_python_takes_a_list(tmp_path):
    with raises_naming(UserError, "track='wandb'", "list", "track=['wandb']"):
        spmd_trainer.train(TINY, tmp_path / "run", track="wandb")
    with raises_naming(UserError, "tracker 'aim'", "mlflow", "tensorboard", "trackio", "wandb"):
        spmd_trainer.train(TINY, tmp_path / "run", track=["aim"])


@pytest.mark.full
def test_trackers_are_imported_only_when_asked_for():
    program = """
import sys
import spmd_trainer.main, spmd_trainer.training.train, spmd_trainer.cli.launch
from spmd_trainer.watch.tracking.tracking import Tracking
Tracking(["wandb", "mlflow", "trackio", "tensorboard"])
print([name for name in ("wandb", "mlflow", "trackio", "pandas", "tensorboard.plugins.hparams") if name in sys.modules])
"""
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.stdout == "[]\n", result.stderr


@pytest.mark.parametrize("name", base.TRACKERS)
def test_every_tracker_can_be_made(name):
    assert base.make(name).where == ""
