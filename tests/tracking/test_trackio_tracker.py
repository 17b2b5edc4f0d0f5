"""trackio's database, read back by its own API."""

import numpy as np
import pytest
from tracking_helpers import HOME, PICTURES, TEXTS, facts, page, record

from spmd_trainer.watch.tracking.base import Histogram
from spmd_trainer.watch.tracking.trackio import TrackioTracker


def logs(name):
    from trackio.sqlite_storage import SQLiteStorage

    return SQLiteStorage.get_logs("proj.ect", name)


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The name of a run that was started again from an older step, and how its second start called it."""
    directory = tmp_path_factory.mktemp("run")
    first = TrackioTracker()
    name = first.open(facts(directory))
    for step, loss in ((1, 3.0), (2, 2.0), (3, float("inf"))):
        first.scalars([record(step, loss=loss)])
    first.samples(3, "prompts", TEXTS)
    first.samples(3, "pictures", PICTURES)
    first.histograms(3, {"variables/w": Histogram(np.array([1, 2]), np.array([0.0, 0.5, 1.0]))})
    first.close("stopped")
    second = TrackioTracker()
    assert second.open(facts(directory, resume_id=name)) == name
    second.scalars([record(3, loss=1.5), record(4, loss=1.0)])
    second.page(page(directory))
    second.close("finished")
    return name


def test_scalars_of_both_starts_are_there(tracked):
    found = [(log["step"], log["train/loss"]) for log in logs(tracked) if "train/loss" in log]
    assert [step for step, _ in found] == [1, 2, 3, 3, 4]
    assert [loss for _, loss in found[:2]] == [3.0, 2.0]
    assert found[-1][1] == 1.0


def test_config(tracked):
    import trackio

    (run,) = [run for run in trackio.Api().runs("proj.ect") if run.name == tracked]
    assert run.config["task"]["train"] == {"num_train_steps": 200}
    assert run.config["experiment"] == "pkg.mod.Exp"
    assert {alert["title"] for alert in run.alerts()} == {"run stopped", "run finished"}


def test_samples_pictures_histograms_and_page(tracked):
    found = {key: value for log in logs(tracked) for key, value in log.items()}
    assert found["samples/prompts"]["_value"][0] == {
        "index": 0,
        "prompt": "a|b",
        "output": "<b>`*x*`\nü",
        "score": -1.5,
    }
    assert found["variables/w"]["_type"] == "trackio.histogram"
    assert found["samples/pictures/image/7"]["_type"] == "trackio.image"
    assert found["page"]["_type"] == "trackio.html"
    assert (HOME / "trackio").exists()


def test_another_run_of_the_same_name_is_another_run(tracked, tmp_path):
    other = TrackioTracker()
    name = other.open(facts(tmp_path))
    other.scalars([record(1, loss=9.0)])
    other.close("finished")
    assert name != tracked
    assert name.startswith("mine-")
    assert 9.0 not in [log.get("train/loss") for log in logs(tracked)]


def test_it_prints_nothing(tmp_path, capfd):
    tracker = TrackioTracker()
    tracker.open(facts(tmp_path))
    tracker.close("failed")
    assert capfd.readouterr().out == ""
