"""What a run's directory says of the run, also when a process was killed, or a disk full, while it was written."""

import pathlib

import pytest
from etils import epath
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.training import run_directory

EXPERIMENT = "my.experiments.Exp"


def describe(directory):
    run_directory.describe(directory, EXPERIMENT, ["a: 1"])


def cut_short(text, keep):
    return text[: len(text) * keep // 4]


@pytest.fixture
def directory(tmp_path):
    path = epath.Path(tmp_path) / "run"
    describe(path)
    return path


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_an_unreadable_marker_is_written_again(directory, keep, caplog):
    marker = directory / run_directory.MARKER
    whole = marker.read_text()
    marker.write_text(cut_short(whole, keep))
    (directory / "checkpoints").mkdir()
    for trains in (False, True):
        run_directory.check_directory(directory, EXPERIMENT, trains=trains)
    assert_names(caplog.text, f"{marker} can't be")
    describe(directory)
    assert marker.read_text() == whole


def test_a_directory_where_a_start_was_killed_can_be_used(tmp_path):
    directory = epath.Path(tmp_path)
    for name in ("logs", "lock"):
        (directory / name).mkdir()
    (directory / ".experiment.json.123.writing").write_text("{")
    run_directory.check_directory(directory, EXPERIMENT, trains=True)


def test_a_directory_that_was_only_looked_at_can_be_used(tmp_path):
    for name in ("sharding_report.html", "sharding_report.json", "plan.html", "plan_search.json", "data.html"):
        (tmp_path / name).write_text("")
    run_directory.check_directory(epath.Path(tmp_path), "mine", trains=True)


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    with raises_naming(UserError, f"--job_log_dir={tmp_path}", "not empty", "no run of"):
        run_directory.check_directory(epath.Path(tmp_path), EXPERIMENT, trains=True)


def test_another_experiments_directory_is_refused(directory):
    with raises_naming(
        UserError, f"--job_log_dir={directory}", "run of my.experiments.Exp", "not of my.experiments.Other"
    ):
        run_directory.check_directory(directory, "my.experiments.Other", trains=True)


def test_nothing_is_written_again_that_has_not_changed(directory):
    def written():
        return {path.name: path.stat().st_mtime_ns for path in pathlib.Path(directory).iterdir()}

    before = written()
    describe(directory)
    assert written() == before


@pytest.mark.parametrize("content", ["", '{"st', "{}", "[]", "null"])
def test_an_unreadable_end_of_training_is_none(directory, content, caplog):
    run_directory.mark_end_of_training(directory, 7)
    assert run_directory.end_of_training(directory) == 7
    (directory / "end_of_training.json").write_text(content)
    assert run_directory.end_of_training(directory) is None
    assert_names(caplog.text, directory / "end_of_training.json", "not ended")
    run_directory.mark_end_of_training(directory, 8)
    assert run_directory.end_of_training(directory) == 8


@pytest.mark.parametrize("content", ["", '{"st', "{}", "[]"])
def test_an_unreadable_failure_is_none(directory, content, caplog):
    run_directory.mark_failure(directory, 7, ValueError("x"))
    assert run_directory.failure(directory).reason == "ValueError: x"
    (directory / "failure.json").write_text(content)
    assert run_directory.failure(directory) is None
    assert_names(caplog.text, directory / "failure.json", "not failed")
