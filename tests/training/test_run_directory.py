"""What a run's directory says of the run, also when a process was killed, or a disk full, while it was written."""

import json
import os
import pathlib

import jax
import pytest
from etils import epath
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.training import run_directory

EXPERIMENT = "my.experiments.Exp"


def describe(directory):
    run_directory.describe(directory, {"experiment": EXPERIMENT, "versions": {"jax": "1"}}, ["a: 1"])


def begin(directory, *overrides, **settings):
    run_directory.mark_begin_of_training(directory, overrides, settings)


def test_a_start_after_the_end_changes_nothing_of_how_the_run_was_asked_for(directory):
    begin(directory, "a=1", mesh="data:8")
    before = json.loads((directory / "run.json").read_text())
    run_directory.mark_begin_of_training(directory, ["a=2"], {}, trains=False)
    after = json.loads((directory / "run.json").read_text())
    assert (
        (after["overrides"], after["settings"])
        == (["a=1"], {"mesh": "data:8"})
        == (before["overrides"], before["settings"])
    )


def cut_short(text, keep):
    return text[: len(text) * keep // 4]


@pytest.fixture
def directory(tmp_path):
    path = epath.Path(tmp_path) / "run"
    describe(path)
    return path


@pytest.mark.parametrize("keep", [0, 1, 3])
def test_an_unreadable_record_is_written_again(directory, keep, caplog):
    record = directory / "run.json"
    whole = record.read_text()
    record.write_text(cut_short(whole, keep))
    (directory / "checkpoints").mkdir()
    for trains in (False, True):
        run_directory.check_directory(directory, EXPERIMENT, trains=trains)
    assert_names(caplog.text, directory, "run.json can't be read", "neither ended nor failed")
    describe(directory)
    assert record.read_text() == whole


def test_a_record_that_is_a_device_is_one_that_cannot_be_read(directory, caplog):
    record = directory / "run.json"
    record.unlink()
    os.symlink("/dev/full", record)
    run_directory.check_directory(directory, EXPERIMENT, trains=False)
    assert_names(caplog.text, directory, "run.json can't be read", "device")


def test_a_directory_where_a_start_was_killed_can_be_used(tmp_path):
    directory = epath.Path(tmp_path)
    for name in ("logs", "lock"):
        (directory / name).mkdir()
    (directory / ".run.json.123.writing").write_text("{")
    run_directory.check_directory(directory, EXPERIMENT, trains=True)


def test_a_directory_that_was_only_looked_at_can_be_used(tmp_path):
    for name in ("sharding_report.html", "sharding_report.json", "plan.html", "plan_search.json", "data.html"):
        (tmp_path / name).write_text("")
    run_directory.check_directory(epath.Path(tmp_path), "mine", trains=True)


def test_what_is_no_run_is_left_alone(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine")
    (tmp_path / "run.json").write_text('{"laps": 12}')
    with raises_naming(UserError, f"--job_log_dir={tmp_path}", "not empty", "no run of"):
        run_directory.check_directory(epath.Path(tmp_path), EXPERIMENT, trains=True)


@pytest.mark.parametrize("step", ["1e400", "-1e400", "2.5", "true", '"7"', "-1", "9" * 5000])
def test_a_last_step_that_is_no_step(directory, step, caplog):
    (directory / "run.json").write_text(f'{{"experiment": "{EXPERIMENT}", "status": "finished", "last_step": {step}}}')
    assert run_directory.end_of_training(directory) is None
    assert_names(caplog.text, directory, "run.json can't be read", "last_step")


@pytest.mark.parametrize("name", ["run.json", "end_of_training.json", "failure.json", "failure_3.json"])
@pytest.mark.parametrize("text", ["[" * 200_000, '{"step": 1e400, "last_step": 1e400}'])
def test_markers_that_are_absurd_json(directory, name, text, caplog):
    (directory / "run.json").write_text(json.dumps({"experiment": EXPERIMENT}))
    (directory / "experiment.json").write_text(json.dumps({"experiment": EXPERIMENT}))
    (directory / name).write_text(text)
    run_directory.check_directory(directory, EXPERIMENT, trains=True)
    assert run_directory.end_of_training(directory) is None
    assert_names(caplog.text, directory, f"{name} can't be read")


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


def status_in(directory):
    return json.loads((directory / "run.json").read_text())["status"]


def test_the_record_follows_the_run(directory):
    assert status_in(directory) == "running"
    run_directory.mark_end_of_training(directory, 7, complete=False)
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("stopped", None)
    run_directory.mark_end_of_training(directory, 7, complete=True)
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("finished", 7)
    # What fails after the end, such as a tracker, doesn't make training go on.
    run_directory.mark_failure(directory, 7, ValueError("x"))
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("failed", 7)
    assert run_directory.failure(directory) == run_directory.Failure(7, 0, "ValueError: x")
    describe(directory)
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("finished", 7)
    assert run_directory.failure(directory) is None
    begin(directory)
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("running", None)
    assert json.loads((directory / "run.json").read_text())["versions"] == {"jax": "1"}


def test_only_a_start_that_has_begun_says_how_it_was_asked_for(directory):
    def asked():
        record = json.loads((directory / "run.json").read_text())
        return record.get("overrides"), record.get("settings"), record.get("working_directory")

    run_directory.mark_failure(directory, 0, ValueError("the data are missing"))
    assert asked() == (None, None, None)
    begin(directory, "A=1", mesh="data:2")
    first = (["A=1"], {"mesh": "data:2"}, os.getcwd())
    for mark in (lambda: None, lambda: run_directory.mark_failure(directory, 0, ValueError("of the second start"))):
        describe(directory)
        mark()
        assert asked() == first
    run_directory.mark_end_of_training(directory, 7, complete=True)
    begin(directory)
    assert asked() == ([], {}, os.getcwd())
    assert json.loads((directory / "run.json").read_text())["versions"] == {"jax": "1"}


def test_runs_of_earlier_versions_have_a_status(tmp_path):
    directory = epath.Path(tmp_path)
    (directory / "experiment.json").write_text(json.dumps({"experiment": EXPERIMENT}))
    (directory / "run.json").write_text(json.dumps({"experiment": EXPERIMENT, "parameters": 3}))
    run_directory.check_directory(directory, EXPERIMENT, trains=True)
    with raises_naming(UserError, "run of my.experiments.Exp"):
        run_directory.check_directory(directory, "my.experiments.Other", trains=True)
    (directory / "end_of_training.json").write_text('{"step": 8}')
    assert run_directory.end_of_training(directory) == 8
    (directory / "failure.json").write_text('{"step": 9, "process": 1, "reason": "disk full"}')
    assert run_directory.failure(directory) == run_directory.Failure(9, 1, "disk full")
    describe(directory)
    assert (status_in(directory), run_directory.end_of_training(directory)) == ("finished", 8)
    begin(directory)
    assert (run_directory.end_of_training(directory), run_directory.failure(directory)) == (None, None)


OLD = {
    "experiment.json": {"experiment": EXPERIMENT},
    "run.json": {"experiment": EXPERIMENT, "parameters": 3},
    "end_of_training.json": {"step": 8},
    "failure.json": {"step": 9, "process": 1, "reason": "disk full"},
}


@pytest.mark.parametrize("damaged", OLD)
def test_an_unreadable_file_of_an_earlier_version_hides_no_other(tmp_path, damaged, caplog):
    for name, content in OLD.items():
        (tmp_path / name).write_text("{" if name == damaged else json.dumps(content))
    directory = epath.Path(tmp_path)
    with raises_naming(UserError, f"run of {EXPERIMENT}"):
        run_directory.check_directory(directory, "my.experiments.Other", trains=True)
    assert run_directory.end_of_training(directory) == (None if damaged == "end_of_training.json" else 8)
    failure = None if damaged == "failure.json" else run_directory.Failure(9, 1, "disk full")
    assert run_directory.failure(directory) == failure
    assert_names(caplog.text, directory, damaged)


def test_an_unreadable_failure_hides_neither_the_record_nor_another(directory, as_process):
    (directory / "failure_1.json").write_text("{")
    assert run_directory.read_record(directory)["experiment"] == EXPERIMENT
    fail_as(as_process, 2, directory)
    assert run_directory.failure(directory).process == 2


UNREADABLE = ["", '{"st', "{}", "[]", "null", '{"status": "failed", "last_step": "x", "failure": 5}']


@pytest.mark.parametrize("content", UNREADABLE)
def test_an_unreadable_record_says_neither_end_nor_failure(directory, content):
    run_directory.mark_end_of_training(directory, 7, complete=True)
    run_directory.mark_failure(directory, 7, ValueError("x"))
    (directory / "run.json").write_text(content)
    assert (run_directory.end_of_training(directory), run_directory.failure(directory)) == (None, None)
    run_directory.mark_end_of_training(directory, 8, complete=True)
    assert run_directory.end_of_training(directory) == 8


@pytest.fixture
def as_process(monkeypatch):
    """A function that runs the rest of a test as one of two processes."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    return lambda index: monkeypatch.setattr(jax, "process_index", lambda: index)


def fail_as(as_process, process, directory):
    as_process(process)
    run_directory.mark_failure(directory, 7, ValueError(f"of {process}"))
    as_process(0)


def test_another_processs_failure_is_kept_beside_what_process_0_writes(directory, as_process, monkeypatch):
    read = run_directory.read_record

    def read_then_process_1_fails(path):
        found = read(path)
        monkeypatch.setattr(run_directory, "read_record", read)
        fail_as(as_process, 1, path)
        return found

    monkeypatch.setattr(run_directory, "read_record", read_then_process_1_fails)
    run_directory.mark_end_of_training(directory, 7, complete=False)
    assert run_directory.failure(directory) == run_directory.Failure(7, 1, "ValueError: of 1")
    assert read(directory)["status"] == "failed"
    fail_as(as_process, 0, directory)
    assert run_directory.failure(directory).process == 0


@pytest.mark.parametrize("process", [0, 1])
def test_a_stop_after_a_failure_keeps_what_failed(directory, as_process, process):
    fail_as(as_process, process, directory)
    run_directory.mark_end_of_training(directory, 8, complete=False)
    assert status_in(directory) == "failed"
    assert run_directory.failure(directory) == run_directory.Failure(7, process, f"ValueError: of {process}")


def test_a_complete_end_has_no_older_failure_of_process_0(directory, as_process):
    fail_as(as_process, 0, directory)
    run_directory.mark_end_of_training(directory, 8, complete=True)
    assert (status_in(directory), run_directory.failure(directory)) == ("finished", None)


def test_a_start_has_no_older_failure(directory, as_process):
    run_directory.mark_end_of_training(directory, 7, complete=True)
    fail_as(as_process, 3, directory)  # of a larger job
    fail_as(as_process, 2, directory)
    describe(directory)
    assert run_directory.failure(directory).process == 3  # that may be of process 1 of this start
    as_process(1)
    describe(directory)
    assert run_directory.failure(directory) is None
    fail_as(as_process, 0, directory)
    begin(directory)
    assert (status_in(directory), run_directory.failure(directory)) == ("running", None)


def test_of_a_status_that_cannot_be_written_only_a_complete_end_fails(directory, caplog):
    (directory / "run.json").unlink()
    (directory / "run.json").mkdir()
    run_directory.mark_end_of_training(directory, 7, complete=False)
    assert_names(caplog.text, directory, "IsADirectoryError")
    caplog.clear()
    run_directory.mark_failure(directory, 7, ValueError("x"))
    assert_names(caplog.text, directory, "IsADirectoryError")
    with pytest.raises(IsADirectoryError):
        run_directory.mark_end_of_training(directory, 7, complete=True)
