"""W&B's offline files, read back by wandb's own reader."""

import json
import subprocess
import sys

import numpy as np
import pytest
from facts import assert_names
from tracking_helpers import PICTURES, TEXTS, facts, page, record, wandb_history, wandb_records

from spmd_trainer.errors import UserError
from spmd_trainer.watch.tracking.base import Histogram
from spmd_trainer.watch.tracking.wandb import WandbTracker


def of(records, kind):
    return [entry[kind] for entry in records if entry["type"] == kind]


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The directory and the records of a run that went back from step 3 to step 2, and was then started again at step 4."""
    directory = tmp_path_factory.mktemp("run")
    first = WandbTracker()
    run_id = first.open(facts(directory))
    for step, loss in ((1, 3.0), (2, 2.5), (3, 2.0), (2, 2.25), (3, float("nan"))):
        first.scalars([record(step, loss=loss)])
    first.samples(3, "prompts", TEXTS)
    first.samples(3, "pictures", PICTURES)
    first.histograms(3, {"variables/w": Histogram(np.array([1, 2]), np.array([0.0, 0.5, 1.0]))})
    first.close("failed")
    second = WandbTracker()
    assert second.open(facts(directory, resume_id=run_id)) == run_id
    second.scalars([record(4, loss=1.0)])
    second.page(page(directory))
    second.close("finished")
    assert str(directory) in second.where
    return directory, wandb_records(directory)


@pytest.mark.full
def test_config_name_and_tags(tracked):
    run = of(tracked[1][0], "run")[0]
    assert run["display_name"] == "mine"
    assert run["project"] == "proj.ect"
    assert run["tags"] == ["first", "second"]
    config = run["config"]["update"]
    assert config["experiment"] == "pkg.mod.Exp"
    assert config["task"] == {"train": {"num_train_steps": 200}, "model": {"class": "LanguageModel", "name": "lm"}}


@pytest.mark.full
def test_steps_that_are_done_again_are_kept(tracked):
    history = [entry for entry in wandb_history(tracked[1][0]) if "train/loss" in entry]
    assert [entry["trainer/step"] for entry in history] == [1, 2, 3, 2, 3]
    assert [entry["train/loss"] for entry in history] == [3.0, 2.5, 2.0, 2.25, "NaN"]


@pytest.mark.full
def test_wandbs_own_steps_would_lose_them(tmp_path):
    """Why the training step is a value of its own."""
    import wandb

    run = wandb.init(dir=str(tmp_path), settings=wandb.Settings(console="off", silent=True))
    for step in (1, 2, 3, 2, 3):
        run.log({"loss": float(step)}, step=step)
    run.finish()
    (records,) = wandb_records(tmp_path)
    assert [entry["_step"] for entry in wandb_history(records)] == [1, 2, 3]


@pytest.mark.full
def test_charts_are_drawn_over_the_training_step(tracked):
    metrics = of(tracked[1][0], "metric")
    assert any(metric.get("glob_name") == "*" and metric["step_metric"] == "trainer/step" for metric in metrics)


def test_a_restart_continues_the_same_run(tracked):
    first, second = tracked[1]
    assert of(first, "run")[0]["run_id"] == of(second, "run")[0]["run_id"]
    assert [entry["trainer/step"] for entry in wandb_history(second) if "train/loss" in entry] == [4]


def test_samples_are_a_table(tracked):
    directory, (records, _) = tracked
    values = next(entry for entry in wandb_history(records) if any(key.startswith("samples/prompts") for key in entry))
    assert values["trainer/step"] == 3
    (path,) = directory.glob("wandb/offline-run-*/files/media/table/samples/prompts*.json")
    table = json.loads(path.read_text())
    assert table["columns"] == ["index", "prompt", "output", "score"]
    assert table["data"][0] == [0, "a|b", "<b>`*x*`\nü", -1.5]


@pytest.mark.full
def test_pictures_and_histograms(tracked):
    from PIL import Image

    directory, (records, _) = tracked
    (path,) = directory.glob("wandb/offline-run-*/files/media/images/samples/pictures/image/7*.png")
    assert np.asarray(Image.open(path))[:, :, 0].tolist() == [[0, 255], [128, 0], [64, 255]]
    values = next(entry for entry in wandb_history(records) if any("variables/w" in key for key in entry))
    assert values["variables/w.values"] == [1, 2]


def test_the_page_and_the_config_are_files_of_the_run(tracked):
    directory, (first, second) = tracked
    saved = [entry["path"] for files in of(second, "files") for entry in files["files"]]
    assert "run.html" in saved
    (path,) = directory.glob("wandb/offline-run-*/files/run.html")
    assert "my run" in path.read_text()
    assert "config.txt" in [entry["path"] for files in of(first, "files") for entry in files["files"]]


def test_status(tracked):
    first, second = tracked[1]
    assert [of(records, "exit")[0]["exit_code"] for records in (first, second)] == [1, 0]
    for records, status in ((first, "failed"), (second, "finished")):
        assert {"trainer/status": status} in [entry["update"] for entry in of(records, "summary") if "update" in entry]


def test_nobody_logged_in_ends_a_run_before_it_begins(tmp_path):
    program = """
from etils import epath
from spmd_trainer.errors import UserError
from spmd_trainer.watch.tracking.wandb import WandbTracker
try:
    WandbTracker().check(epath.Path("."))
except UserError as error:
    print(error)
"""
    import os

    env = {**os.environ, "HOME": str(tmp_path), "WANDB_MODE": "online"} | {"NETRC": str(tmp_path / "netrc")}
    env.pop("WANDB_API_KEY", None)
    result = subprocess.run(
        [sys.executable, "-c", program], env=env, capture_output=True, text=True, stdin=subprocess.DEVNULL
    )
    assert_names(result.stdout, "no API key", "`wandb login`")


def test_offline_needs_no_login(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    try:
        WandbTracker().check(facts(tmp_path).job_log_dir)
    except UserError as error:
        pytest.fail(str(error))
