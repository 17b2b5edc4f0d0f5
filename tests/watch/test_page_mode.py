"""`--mode=page`, and the page and the times that training leaves behind."""

import json
import os
import re
import time

import pytest
from etils import epath
from facts import assert_names, raises_naming
from made_up_run import make_run
from trained_helpers import ONE_DEVICE, make_job

from spmd_trainer.callbacks import Callback, CallbackError
from spmd_trainer.errors import UserError
from spmd_trainer.training import phases, train
from spmd_trainer.training.mode_configs import PageConfig
from spmd_trainer.watch.pages import page_mode
from spmd_trainer.watch.pages import run_page as pages
from spmd_trainer.watch.run_times import goodput, read_run_times
from spmd_trainer.watch.tracking.tracking import Tracking

# One worker: what these tests share is compiled once.
pytestmark = pytest.mark.xdist_group("trained")

FIELDS = (
    "task.train.num_train_steps=4",
    "task.train.save_interval_steps=2",
    "task.train.eval_interval_steps=2",
    "task.train.decode_interval_steps=2",
    "task.train.summary_interval_steps=1",
    "eval_datasets[0].max_windows=4",
)


def data_of(path):
    return json.loads(re.search(r'id="data">(.*?)</script>', path.read_text(encoding="utf-8"))[1])


class FailAt(Callback):
    def __init__(self, step):
        self.step = step

    def after_step(self, run, step, scalars):
        if step == self.step:
            raise RuntimeError("no <b>more</b>")


@pytest.mark.full
def test_training_leaves_its_page_and_its_times(tmp_path):
    directory = epath.Path(tmp_path) / "run"
    first = make_job(directory, mesh=ONE_DEVICE, fields=FIELDS, decode_during_train=True, callbacks=[FailAt(4)])
    with pytest.raises(CallbackError):
        train.train(first)
    (run,) = data_of(directory / "run.html")["runs"]
    assert (run["state"]["text"], run["state"]["tone"]) == ("failed at step 4 of 4", "bad")
    assert "no <b>more</b>" in run["state"]["note"]

    train.train(make_job(directory, mesh=ONE_DEVICE, fields=FIELDS, decode_during_train=True))
    data = data_of(directory / "run.html")
    (run,) = data["runs"]
    assert (run["state"]["text"], run["notes"]) == ("finished at step 4 of 4", [])
    assert set(FIELDS) <= set(run["overrides"])
    assert run["restarts"] == [2]
    assert [one["step"] for one in run["samples"]["decode_out/heldout_prompts"]["steps"]] == [2, 4]
    assert run["report"]["axes"] == [["replica", 1], ["data", 1], ["mdl", 1]]
    assert {"jax", "praxis", "python"} <= set(json.loads((directory / "run.json").read_text())["versions"])
    titles = [chart["title"] for chart in data["charts"] if chart["main"]]
    assert titles[0] == "Training loss"
    assert {"Learning rate", "Gradient norm", "Tokens per second"} <= set(titles)

    starts = read_run_times(directory)
    assert [(start.first_step, start.step, start.ended) for start in starts] == [(0, 4, "failed"), (2, 4, "finished")]
    for start in starts:
        for part in ("start", "input", "step", "save", "evaluation", "decode"):
            assert start.seconds[part] > 0, part
    assert goodput(starts).redone_steps == 2


class AtTheEnd(Tracking):
    """Looks at the run where trackers are told of its end, and takes its time. Then Ctrl-C is pressed, if it asks for that."""

    def __init__(self, interrupts=False):
        super().__init__()
        self.interrupts = interrupts

    def on_open(self, run):
        self.times = read_run_times(run.job_log_dir)

    def on_end(self, run):
        assert phases._current.get() is None, "nothing else is said to be waited for"
        assert json.loads((run.job_log_dir / "run.json").read_text())["status"] == "finished"
        (self.before,) = [one for one in read_run_times(run.job_log_dir) if one.ended][-1:]
        time.sleep(0.05)
        if self.interrupts:
            raise KeyboardInterrupt


@pytest.mark.full
def test_the_end_is_noted_before_trackers_are_waited_for_and_their_time_counts(tmp_path):
    directory = epath.Path(tmp_path) / "run"
    fields = ("task.train.num_train_steps=1", "task.train.summary_interval_steps=1")
    at_the_end = AtTheEnd(interrupts=True)
    with pytest.raises(KeyboardInterrupt):
        train.train(make_job(directory, mesh=ONE_DEVICE, fields=fields, callbacks=[at_the_end]))
    assert at_the_end.times == []
    (start,) = read_run_times(directory)
    assert (start.ended, at_the_end.before.ended) == ("finished", "finished")
    assert start.seconds["other"] >= at_the_end.before.seconds["other"] + 0.05

    again = AtTheEnd()
    train.train(make_job(directory, mesh=ONE_DEVICE, fields=fields, callbacks=[again]))
    assert [(one.starting, one.ended, one.step) for one in again.times] == [(False, "finished", 1), (True, "", 1)]
    second = read_run_times(directory)[1]
    assert (second.starting, second.ended, second.first_step, second.step) == (False, "finished", 1, 1)
    assert second.seconds["other"] >= again.before.seconds["other"] + 0.05


class Interrupts(Callback):
    def on_start(self, run):
        raise KeyboardInterrupt


@pytest.mark.full
def test_ctrl_c_in_a_later_start_is_no_failure(tmp_path):
    directory = epath.Path(tmp_path) / "run"
    fields = ("task.train.num_train_steps=1", "task.train.summary_interval_steps=1")
    for number in (0, 1):
        with pytest.raises(KeyboardInterrupt):
            train.train(make_job(directory, mesh=ONE_DEVICE, fields=fields, callbacks=[Interrupts()]))
        assert [one.ended for one in read_run_times(directory)] == ["stopped"] * number


@pytest.mark.full
def test_a_page_that_cannot_be_written_ends_no_run(tmp_path, monkeypatch, caplog):
    def fail(*args):
        raise OSError("no space")

    monkeypatch.setattr(pages, "write_page", fail)
    fields = ("task.train.num_train_steps=1", "task.train.summary_interval_steps=1")
    result = train.train(make_job(tmp_path / "run", mesh=ONE_DEVICE, fields=fields, enable_checkpoint_saving=False))
    assert result.step == 1
    assert_names(caplog.text, tmp_path / "run" / "run.html", "not be written", "OSError: no space")


def test_where_the_page_is_written(tmp_path, capsys):
    one, other = make_run(tmp_path / "one"), make_run(tmp_path / "other")
    page_mode.show(PageConfig([str(one)]))
    assert capsys.readouterr().out == f"{one / 'run.html'}\n"
    before = (one / "run.html").read_text()
    page_mode.show(PageConfig([str(one), str(other)]))
    assert capsys.readouterr().out == f"{one / 'compare.html'}\n"
    assert (one / "run.html").read_text() == before
    assert len(data_of(one / "compare.html")["runs"]) == 2
    page_mode.show(PageConfig([str(one)], page_file=str(tmp_path / "mine.html")))
    assert (tmp_path / "mine.html").exists()


def test_a_page_replaces_no_device_and_makes_no_directory(tmp_path):
    run = make_run(tmp_path / "one")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with raises_naming(UserError, str(pipe), "named pipe"):
        page_mode.show(PageConfig([str(run)], page_file=str(pipe)))
    assert pipe.is_fifo()
    with raises_naming(UserError, "--page_file", str(tmp_path / "new")):
        page_mode.show(PageConfig([str(run)], page_file=str(tmp_path / "new" / "mine.html")))
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("request_of", "facts"),
    [
        (lambda run: PageConfig([]), ("needs --job_log_dir=DIR",)),
        (lambda run: PageConfig([str(run), str(run)]), ("one was given twice",)),
        (lambda run: PageConfig([str(run / "logs")]), ("one/logs", "no run of")),
        (lambda run: PageConfig([str(run)], page_file=str(run)), ("one is a directory", "one/run.html")),
        (
            lambda run: PageConfig([str(run)], page_file=str(run / "run.json" / "x.html")),
            ("run.json", "can't be written"),
        ),
    ],
)
def test_what_cannot_be_shown_is_refused(tmp_path, request_of, facts):
    run = make_run(tmp_path / "one")
    with raises_naming(UserError, *facts):
        page_mode.show(request_of(run))
