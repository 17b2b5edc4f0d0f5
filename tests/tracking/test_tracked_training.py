"""Training that is tracked: the same numbers with any tracker, and a history in each of them."""

import json
import logging
import os
import signal
import types

import jax
import numpy as np
import pytest
from facts import missing_facts, raises_naming
from praxis import pax_fiddle
from tensorboard.backend.event_processing import event_accumulator
from test_feed import Recorder
from tracking_helpers import wandb_history, wandb_records
from trained_helpers import make_job, restored

from spmd_trainer.callbacks import Callback, CallbackError
from spmd_trainer.errors import UserError
from spmd_trainer.training import train
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.summaries import Summaries
from spmd_trainer.watch import run as watch_run
from spmd_trainer.watch.tracking import tracking as tracking_lib
from spmd_trainer.watch.tracking.tracking import Tracking, VariableHistograms, of_run

# One worker: what these tests share is compiled once.
pytestmark = pytest.mark.xdist_group("trained")

FIELDS = (
    "task.train.num_train_steps=6",
    "task.train.save_interval_steps=2",
    "task.train.eval_interval_steps=3",
    "task.train.decode_interval_steps=6",
    "task.train.summary_interval_steps=1",
    "eval_datasets[0].max_windows=4",
)


class Killed(Callback):
    """Ends the run after step 5, with step 4 as its last checkpoint."""

    def asks_for_pause(self, run, step):
        if step == 5:
            raise RuntimeError("killed")
        return False


def trained(directory, *callbacks, fields=(), customize=lambda config: None, **settings):
    job = make_job(
        directory, mesh=(1, 1, 1), fields=(*FIELDS, *fields), customize=customize, callbacks=callbacks, **settings
    )
    return train.train(job)


@pytest.fixture(scope="module")
def plain(tmp_path_factory):
    return trained(tmp_path_factory.mktemp("plain"))


@pytest.fixture(scope="module")
def tracked(tmp_path_factory):
    """The directory of a run with all trackers that was killed after step 5 and continued from its checkpoint of step 4."""
    directory = tmp_path_factory.mktemp("parent") / "tracked"
    settings = {"track": ("wandb", "mlflow", "trackio", "tensorboard"), "decode_during_train": True}
    with pytest.raises(CallbackError):
        trained(directory, Killed(), **settings)
    result = trained(directory, **settings)
    return directory, result


def same(result, other):
    assert result.step == other.step
    names = [name for name in other.metrics if not name.endswith("_seconds")]
    assert {name: result.metrics[name] for name in names} == {name: other.metrics[name] for name in names}
    for x, y in zip(jax.tree.leaves(result.state.mdl_vars), jax.tree.leaves(other.state.mdl_vars), strict=True):
        np.testing.assert_array_equal(x, y)


def steps_with(history, key):
    return [entry["trainer/step"] for entry in history if key in entry]


@pytest.mark.full
def test_wandb_has_the_history_of_both_starts(tracked):
    records = wandb_records(tracked[0])
    assert [entry["exit"]["exit_code"] for part in records for entry in part if entry["type"] == "exit"] == [1, 0]
    first, second = map(wandb_history, records)
    assert steps_with(first, "train/loss")[:4] == [1, 2, 3, 4]
    assert steps_with(second, "train/loss") == [5, 6]
    assert steps_with(first, "eval_heldout/log_pplx") == [3]
    assert steps_with(second, "eval_heldout/log_pplx") == [6]
    assert second[-1]["trainer/step"] == 6
    config = next(entry["run"] for entry in records[1] if entry["type"] == "run")["config"]["update"]
    assert config["task"]["train"]["num_train_steps"] == 6
    assert config["run"]["mesh"] == "replica=1, data=1, mdl=1"
    assert config["run"]["jax"] == jax.__version__


@pytest.mark.full
def test_mlflow_has_it(tracked):
    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{tracked[0]}/mlruns/mlflow.db")
    run = client.get_run(json.loads((tracked[0] / "tracking.json").read_text())["mlflow"])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "tracked"
    steps = {metric.step for metric in client.get_metric_history(run.info.run_id, "train/loss")}
    assert steps == {1, 2, 3, 4, 5, 6}
    assert run.data.metrics["train/loss"] == pytest.approx(tracked[1].metrics["loss"])
    assert run.data.metrics["eval_heldout/log_pplx"] == pytest.approx(tracked[1].metrics["heldout/log_pplx"])
    assert run.data.params["task.train.num_train_steps"] == "6"
    assert "samples/heldout_prompts.json" in [file.path for file in client.list_artifacts(run.info.run_id, "samples")]


@pytest.mark.full
def test_trackio_has_it(tracked):
    from trackio.sqlite_storage import SQLiteStorage

    logs = SQLiteStorage.get_logs("lm.stdlib.StdlibBytesTiny", "tracked")
    assert {log["step"] for log in logs if "train/loss" in log} == {1, 2, 3, 4, 5, 6}
    (samples,) = (log["samples/heldout_prompts"] for log in logs if "samples/heldout_prompts" in log)
    assert {"prompt", "output", "score", "index"} == set(samples["_value"][0])


@pytest.mark.full
def test_tensorboard_has_each_step_once(tracked):
    accumulator = event_accumulator.EventAccumulator(str(tracked[0] / "summaries/train"))
    accumulator.Reload()
    assert [event.step for event in accumulator.Tensors("loss")] == [1, 2, 3, 4, 5, 6]
    assert {"config", "loss"} <= set(accumulator.Tags()["tensors"])


@pytest.mark.full
def test_samples_are_those_of_the_decode(tracked):
    directory = tracked[0]
    records = [
        json.loads(line) for line in (directory / "decode_out/heldout_prompts/step_6.jsonl").read_text().splitlines()
    ]
    (path,) = directory.glob("wandb/offline-run-*/files/media/table/samples/*.json")
    table = json.loads(path.read_text())
    assert [row[1] for row in table["data"]] == [record["prompt"] for record in records]


@pytest.mark.full
def test_tracking_changes_no_number(tracked, plain):
    same(tracked[1], plain)


METHODS = ("open", "scalars", "samples", "histograms", "page", "close")


def named(name, **settings):
    """A tracker with a name of its own."""
    return type(name, (Recorder,), {})(**settings)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.full
def test_trackers_that_raise_change_nothing(tmp_path, plain, caplog):
    bad = [named(f"No{method.title()}", fails=[method]) for method in METHODS]
    good = named("Good")

    class Page(Callback):
        def before_save(self, run, step):
            (run.job_log_dir / "run.html").write_text("page")

    callback = Tracking([*bad, good], histogram_interval_steps=3)
    same(trained(tmp_path / "run", Page(), callback, decode_during_train=True), plain)
    assert good.calls[-1] == ("close", "finished")
    assert set(METHODS) == {call[0] for call in good.calls}
    for method in METHODS:
        first, *rest = [text for text in warnings(caplog) if f"tracker No{method.title()} " in text]
        assert f"failed in {method}: RuntimeError: no {method} today" in first
        assert all("records: " in text for text in rest)
    assert not any("tracker Good" in text for text in warnings(caplog))


@pytest.mark.full
def test_trackers_that_hang_change_nothing(tmp_path, plain, monkeypatch, caplog):
    monkeypatch.setattr(tracking_lib, "CLOSE_SECONDS", 0.1)
    bad = [named(f"Slow{method.title()}", waits=[method]) for method in ("open", "scalars", "close")]
    try:
        same(trained(tmp_path / "run", Tracking(bad)), plain)
        for method in ("open", "scalars", "close"):
            tracker = f"tracker Slow{method.title()}"
            assert any(not missing_facts(text, tracker, f"hangs in {method}") for text in warnings(caplog))
    finally:
        for tracker in bad:
            tracker.go.set()


@pytest.mark.full
def test_a_signal_stops_a_run(tmp_path):
    class Leaves(Callback):
        def after_step(self, run, step, scalars):
            if step == 2:
                os.kill(os.getpid(), signal.SIGTERM)

    tracker = Recorder()
    trained(tmp_path / "run", Leaves(), Tracking([tracker]))
    assert tracker.calls[-1] == ("close", "stopped")


def test_other_processes_track_nothing(monkeypatch):
    tracker = Recorder()
    callback = Tracking([tracker])
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    run = types.SimpleNamespace(step=1, num_steps=1, end=lambda: "finished")
    for hook in (callback.on_open, callback.on_start, callback.on_end):
        hook(run)
    assert not tracker.calls


@pytest.mark.full
def test_trackers_come_last_whatever_their_place(tmp_path):
    tracker = Recorder()

    class Page(Callback):
        def on_end(self, run):
            (run.job_log_dir / "run.html").write_text("written at the end")

    def customize(config):
        config.task.train.callbacks = [pax_fiddle.Config(Tracking, trackers=[tracker])]

    trained(tmp_path / "run", Page(), customize=customize)
    assert ("page", "run.html") in tracker.calls


@pytest.mark.full
def test_every_tracker_has_one_name(tmp_path):
    with raises_naming(UserError, "Recorder twice"):
        trained(tmp_path / "run", Tracking([Recorder()]), Tracking([Recorder()]))


def test_a_wrong_name_in_the_config_ends_the_run(tmp_path):
    def customize(config):
        config.task.train.callbacks = [pax_fiddle.Config(Tracking, trackers=["wandbb"])]

    with raises_naming(UserError, "tracker 'wandbb'", "wandb?"):
        trained(tmp_path / "run", customize=customize)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"trackers": "wandb"}, r"a list.*\['wandb'\]"),
        ({"trackers": [3]}, "trackers has 3"),
        ({"trackers": ["mlflow", "mlflow"]}, "names 'mlflow' twice"),
        ({"trackers": [], "histogram_interval_steps": 0}, "histogram_interval_steps=0; give 1 or more"),
    ],
)
def test_wrong_arguments(arguments, message):
    with pytest.raises(UserError, match=message):
        Tracking(**arguments)


def test_the_flag_opens_no_tracker_twice():
    own = Tracking(["wandb"], project="mine")
    assert [callback.names for callback in of_run([own, Killed()], ["mlflow", "wandb"])] == [("mlflow",)]
    assert of_run([own], ["wandb"]) == []
    assert of_run([], []) == []


def test_trackers_come_after_what_writes_wherever_they_are_given(tmp_path):
    own = Tracking(["tensorboard"])
    others = [own, Killed(), *watch_run.of_run(make_job(tmp_path))]
    after = CallbackList([Summaries(), *others, *of_run(others, ["mlflow"])]).callbacks
    names = [type(callback).__name__ for callback in after]
    assert names[:2] == ["Watchdog", "InvalidBatches"]
    assert names.index("Killed") < names.index("Summaries")
    assert names[-6:] == ["Summaries", "TimeRecord", "RunPage", "Tracking", "Tracking", "LastTimes"]
    assert after[-3] is own


@pytest.mark.full
def test_histograms_of_variables():
    job, state = restored()
    metadata = job.partitioner.layout.without_opt_states()
    found = VariableHistograms(metadata)(state)
    logical = jax.tree_util.tree_leaves_with_path(
        jax.tree.map(
            lambda x, v: np.asarray(x)[tuple(map(slice, v.logical_shape))], state.mdl_vars, metadata.variables.mdl_vars
        )
    )
    assert len(found) == len(logical) == 15
    for path, values in logical:
        histogram = found[jax.tree_util.keystr(path, simple=True, separator="/")]
        counts, edges = np.histogram(values, bins=histogram.edges)
        assert histogram.counts.sum() == values.size
        assert abs(histogram.counts - counts).sum() <= 4  # a value at an edge may be in the bin on either side
        np.testing.assert_allclose([edges[0], edges[-1]], [values.min(), values.max()], atol=0.51)


@pytest.mark.full
def test_callbacks_get_what_was_decoded(tracked, tmp_path):
    class Listens(Callback):
        def after_decode(self, run, step, dataset, samples):
            heard.append((step, dataset, samples))

    heard = []
    trained(tracked[0], Listens(), decode_during_train=True)  # there is nothing to train or to decode any more
    path = tracked[0] / "decode_out/heldout_prompts/step_6.jsonl"
    assert heard == [(6, "heldout_prompts", [json.loads(line) for line in path.read_text().splitlines()])]
