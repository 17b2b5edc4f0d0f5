"""`config.txt` of a run's directory: what changed since the last run is told, and the earlier settings are kept."""

import logging
import os
from types import SimpleNamespace

import jax
import pytest
from etils import epath
from facts import assert_names
from trained_helpers import make_job

from spmd_trainer.models import config_lines
from spmd_trainer.training import run_directory
from spmd_trainer.training.job import Job

LINES = ["task.train.learner.optimizer: Adam", "task.train.learner.optimizer.learning_rate: 0.002", "task.name: 'lm'"]


def with_rate(rate):
    return [line.replace("0.002", str(rate)) for line in LINES]


@pytest.fixture
def warnings(caplog):
    """Messages of the log's warnings so far."""
    return lambda: [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def files(directory):
    return {path.name: path.read_text() for path in sorted(directory.iterdir())}


def text(lines):
    return "\n".join(lines) + "\n"


def test_a_new_directory_gets_its_settings_and_no_warning(tmp_path, warnings):
    directory = epath.Path(tmp_path) / "run"
    assert run_directory.write_config(directory, LINES) == []
    assert files(directory) == {"config.txt": text(LINES)}
    assert not warnings()


def test_a_changed_setting_is_told_and_the_earlier_ones_are_kept(tmp_path, warnings):
    directory = epath.Path(tmp_path)
    for rate in (0.002, 0.5, 0.1):
        run_directory.write_config(directory, with_rate(rate))
    assert files(directory) == {
        "config.0001.txt": text(LINES),
        "config.0002.txt": text(with_rate(0.5)),
        "config.txt": text(with_rate(0.1)),
    }
    first, second = warnings()
    assert_names(first.splitlines()[0], "1 setting", "changed")
    assert "task.train.learner.optimizer.learning_rate was 0.002, is now 0.5" in first
    assert f"diff {directory / 'config.0001.txt'} {directory / 'config.txt'}" in first
    assert "task.train.learner.optimizer.learning_rate was 0.5, is now 0.1" in second
    assert "0.002" not in second


def test_the_same_settings_write_nothing(tmp_path, warnings):
    directory = epath.Path(tmp_path)
    lines = [*LINES, "task.metrics: <Metrics object at 0x7f12ab34cd>"]
    run_directory.write_config(directory, lines)
    before = os.stat(directory / "config.txt")
    assert run_directory.write_config(directory, [*LINES, "task.metrics: <Metrics object at 0x7fffffff00>"]) == []
    assert os.stat(directory / "config.txt").st_mtime_ns == before.st_mtime_ns
    assert list(files(directory)) == ["config.txt"]
    assert not warnings()


def test_settings_that_come_and_go_are_told_as_that(tmp_path):
    directory = epath.Path(tmp_path)
    run_directory.write_config(directory, ["a: 1", "b: 2"])
    removed, new = run_directory.write_config(directory, ["b: 2", "c: 3"])
    assert_names(removed, "a was removed", "1")
    assert_names(new, "c is new", "3")


def test_flags_that_an_earlier_version_did_not_note_are_no_changes(tmp_path, warnings):
    directory = epath.Path(tmp_path)
    run_directory.write_config(directory, LINES)
    noted = [*LINES, "--hang_seconds: 900.0"]
    assert run_directory.write_config(directory, noted) == []
    assert files(directory) == {"config.txt": text(noted)}
    assert not warnings()
    (change,) = run_directory.write_config(directory, [*LINES, "--hang_seconds: 0.0"])
    assert_names(change, "--hang_seconds", "900.0", "0.0")


def test_of_many_changes_ten_are_told_and_the_rest_counted(tmp_path, warnings):
    directory = epath.Path(tmp_path)
    run_directory.write_config(directory, [f"field{i:02}: 0" for i in range(13)])
    run_directory.write_config(directory, [f"field{i:02}: 1" for i in range(13)])
    (message,) = warnings()
    assert_names(message.splitlines()[0], "13 settings", "changed")
    assert message.count(" was 0, is now 1") == 10
    assert "and 3 more" in message


@pytest.mark.parametrize("content", [b"", b"\n", b"\xff\xfe\x00broken: \xff"])
def test_an_unreadable_file_is_as_good_as_none_and_told(tmp_path, warnings, content):
    directory = epath.Path(tmp_path)
    (directory / "config.txt").write_bytes(content)
    assert run_directory.write_config(directory, LINES) == []
    assert files(directory) == {"config.txt": text(LINES)}
    (message,) = warnings()
    assert str(directory / "config.txt") in message


def test_a_start_that_was_killed_between_the_two_files_keeps_one_copy(tmp_path):
    directory = epath.Path(tmp_path)
    run_directory.write_config(directory, LINES)
    (directory / "config.0001.txt").write_text(text(LINES))  # What such a start leaves.
    run_directory.write_config(directory, with_rate(0.5))
    assert list(files(directory)) == ["config.0001.txt", "config.txt"]


def test_values_of_several_lines_are_one_setting(tmp_path):
    directory = epath.Path(tmp_path)
    (directory / "config.txt").write_text("a: [[1 2]\n [3 4]]\nb: 5\n")  # As it used to be written.
    assert run_directory.write_config(directory, ["a: [[1 2]\n [3 4]]", "b: 5"]) == []
    (change,) = run_directory.write_config(directory, ["a: [[1 2]\n [3 5]]", "b: 5"])
    assert str(change) == "a was [[1 2] [3 4]], is now [[1 2] [3 5]]"
    assert (directory / "config.txt").read_text() == "a: [[1 2] [3 5]]\nb: 5\n"


def test_a_long_value_is_shown_where_it_changed():
    before, now = (f"a: {list(range(200))}{end}" for end in ("x", "y"))
    (change,) = config_lines.changes([before], [now])
    assert str(change).startswith("a was ...")
    assert "199]x, is now ..." in str(change)
    assert str(change).endswith("199]y")
    assert len(str(change)) < 300


def settings_lines(mesh_shape, rows, minibatches):
    """The lines of a job on this mesh."""
    config = SimpleNamespace(experiment=SimpleNamespace(lines=lambda: LINES), noted_lines=lambda: [])
    partitioner = SimpleNamespace(mesh_shape=lambda: mesh_shape, num_minibatches=minibatches)
    return Job.settings_lines(SimpleNamespace(config=config, partitioner=partitioner, num_rows=rows))


def test_the_mesh_the_processes_and_the_batch_are_told_as_such(tmp_path, warnings, monkeypatch):
    directory = epath.Path(tmp_path)
    run_directory.write_config(directory, settings_lines({"data": 4, "mdl": 2}, 8, 1))
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    run_directory.write_config(directory, settings_lines({"data": 2, "mdl": 2}, 16, 4))
    (message,) = warnings()
    for words in (
        "mesh was (data=4, mdl=2), is now (data=2, mdl=2)",
        "processes was 1, is now 2",
        "global batch rows was 8, is now 16",
        "minibatches was 1, is now 4",
    ):
        assert words in message


def describe(job):
    """Writes what a training run writes into its directory when it starts."""
    config = job.config
    run_directory.describe(config.job_log_dir, {"experiment": config.experiment.name}, job.settings_lines())


@pytest.mark.full
def test_a_training_run_in_a_used_directory_tells_what_changed(tmp_path, warnings):
    rate = "task.train.learner.optimizer.learning_rate"
    describe(make_job(tmp_path))
    describe(make_job(tmp_path, fields=(f"{rate}=0.5",), mesh=(1, 2, 2)))
    (message,) = [message for message in warnings() if "changed since" in message]
    assert f"{rate} was 0.005, is now 0.5" in message
    assert "mesh was (replica=1, data=4, mdl=2), is now (replica=1, data=2, mdl=2)" in message
    assert f"{rate}: 0.005" in (tmp_path / "config.0001.txt").read_text().splitlines()
    assert f"{rate}: 0.5" in (tmp_path / "config.txt").read_text().splitlines()


@pytest.mark.full
def test_two_jobs_of_the_same_settings_have_the_same_lines(tmp_path):
    """Nothing that a process makes up anew may look like a changed setting."""
    one, other = (make_job(tmp_path).config.experiment.lines() for _ in range(2))
    assert config_lines.changes(one, other) == []
    longer = make_job(tmp_path, fields=("task.train.num_train_steps=99",)).config.experiment.lines()
    assert [str(change) for change in config_lines.changes(one, longer)] == [
        "task.train.num_train_steps was 12, is now 99"
    ]
