"""MLflow's store, an SQLite file and a local server, read back by MLflow's own client."""

import json
import math
import os
import pathlib
import re
import socket
import subprocess
import sys
import time
import urllib.request

import numpy as np
import pytest
from etils import epath
from tracking_helpers import PICTURES, TEXTS, facts, page, record

from spmd_trainer.errors import UserError
from spmd_trainer.watch.tracking import mlflow as mlflow_lib
from spmd_trainer.watch.tracking.mlflow import MlflowTracker
from spmd_trainer.watch.tracking.settings import nested


def track(directory):
    """A run that was started again from an older step, with another learning rate. Returns its id and both trackers."""
    settings = nested(
        ["task.lr: 0.1", "task.long: " + repr("x" * 7000), "train_datasets[0].files: 'a b'", "task.none: None"]
    )
    first = MlflowTracker()
    run_id = first.open(facts(directory, settings=settings))
    first.scalars([record(1, loss=3.0), record(2, loss=2.0, **{"odd[0]=": 1.0}), record(3, loss=float("nan"))])
    first.samples(3, "prompts", TEXTS)
    first.samples(4, "prompts", TEXTS)
    first.samples(3, "pictures", PICTURES)
    first.close("stopped")
    second = MlflowTracker()
    changed = nested(["task.lr: 0.2", "task.new: 1"])
    assert second.open(facts(directory, settings=changed, resume_id=run_id, config_text="lr: 0.2\n")) == run_id
    second.scalars([record(3, loss=1.5), record(4, loss=1.0)])
    second.page(page(directory))
    second.close("finished")
    return run_id, first, second


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """A run in its own directory: the directory, the run as MLflow has it, and a client."""
    from mlflow.tracking import MlflowClient

    directory = tmp_path_factory.mktemp("run")
    run_id, _, _ = track(directory)
    client = MlflowClient(tracking_uri=f"sqlite:///{directory}/mlruns/mlflow.db")
    return directory, client.get_run(run_id), client


def artifact(client, run, path, directory):
    return pathlib.Path(client.download_artifacts(run.info.run_id, path, str(directory)))


def check_history(client, run):
    history = client.get_metric_history(run.info.run_id, "train/loss")
    assert sorted(metric.step for metric in history) == [1, 2, 3, 3, 4]
    assert {metric.step: metric.value for metric in history}[1] == 3.0
    assert any(math.isnan(metric.value) for metric in history if metric.step == 3)
    # The last value is that of the last step, not of the latest request.
    assert run.data.metrics["train/loss"] == 1.0


def test_metrics_of_both_starts_are_there(tracked):
    _, run, client = tracked
    check_history(client, run)
    assert run.data.metrics["train/odd.0_"] == 1.0


def test_run(tracked):
    _, run, client = tracked
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "mine"
    assert client.get_experiment(run.info.experiment_id).name == "proj.ect"
    assert {"first", "second"} <= set(run.data.tags)


@pytest.mark.full
def test_parameters_keep_their_first_value_and_changes_are_tags(tracked):
    directory, run, client = tracked
    params = run.data.params
    assert (params["task.lr"], params["task.none"], params["task.new"]) == ("0.1", "None", "1")
    assert run.data.tags["changed/task.lr"] == "0.2"
    assert params["train_datasets.0.files"] == "a b"
    assert artifact(client, run, "config.txt", directory).read_text() == "lr: 0.2\n"


def test_a_long_value_says_that_it_is_cut(tracked):
    value = tracked[1].data.params["task.long"]
    assert len(value) == 6000
    assert value.endswith("... 7000 characters")


def test_long_names_stay_apart():
    names = {mlflow_lib._name("layer/" * 100 + last) for last in "ab"}
    assert len(names) == 2
    assert {len(name) for name in names} == {250}


def test_samples_are_a_table(tracked, tmp_path):
    _, run, client = tracked
    table = json.loads(artifact(client, run, "samples/prompts.json", tmp_path).read_text())
    assert table["columns"] == ["step", "index", "prompt", "output", "score"]
    assert [row[0] for row in table["data"]] == [3, 3, 4, 4]
    assert table["data"][0][2:4] == ["a|b", "<b>`*x*`\nü"]


def test_pictures_and_page(tracked, tmp_path):
    from PIL import Image

    _, run, client = tracked
    (path,) = (file.path for file in client.list_artifacts(run.info.run_id, "images") if file.path.endswith(".png"))
    assert re.search(r"samples.pictures.image.7\Wstep\W3\W", path)
    assert np.asarray(Image.open(artifact(client, run, path, tmp_path)))[0, 1].tolist() == [255, 255, 255]
    assert "my run" in artifact(client, run, "run.html", tmp_path).read_text()


def test_a_run_that_is_gone_begins_anew(tracked, tmp_path):
    directory, run, client = tracked
    tracker = MlflowTracker()
    first = tracker.open(facts(directory, resume_id="0" * 32))
    assert first != run.info.run_id
    client.delete_run(first)
    assert tracker.open(facts(directory, resume_id=first)) != first


def test_a_bucket_needs_a_server(monkeypatch):
    monkeypatch.delenv(mlflow_lib.URI, raising=False)
    with pytest.raises(UserError, match=r"set MLFLOW_TRACKING_URI.*gs://bucket/run"):
        MlflowTracker().check(epath.Path("gs://bucket/run"))
    monkeypatch.setenv(mlflow_lib.URI, "http://localhost:1")
    MlflowTracker().check(epath.Path("gs://bucket/run"))


@pytest.fixture
def server(tmp_path):
    """The address of an MLflow server of its own."""
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    command = [
        sys.executable, "-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1",
        "--backend-store-uri", f"sqlite:///{tmp_path}/server.db", "--artifacts-destination", str(tmp_path / "artifacts"),
    ]  # fmt: skip
    process = subprocess.Popen(
        command, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    address = f"http://127.0.0.1:{port}"
    try:
        while True:
            try:
                with urllib.request.urlopen(f"{address}/health", timeout=5):
                    break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.2)
        yield address
    finally:
        os.killpg(process.pid, 15)
        process.wait()


@pytest.mark.slow  # the server takes 15 s to start
def test_a_server(server, tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv(mlflow_lib.URI, server)
    (tmp_path / "run").mkdir()
    run_id, tracker, _ = track(tmp_path / "run")
    assert server in tracker.where
    client = MlflowClient(tracking_uri=server)
    run = client.get_run(run_id)
    check_history(client, run)
    assert run.info.status == "FINISHED"
    assert artifact(client, run, "config.txt", tmp_path).read_text() == "lr: 0.2\n"
    assert not (tmp_path / "run" / "mlruns").exists()
