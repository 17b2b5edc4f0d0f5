"""Storage that fails for a moment or for good, is full, or refuses a deletion: no good step is renamed or lost."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from checkpoint_helpers import assert_restored, files_problem
from etils import epath
from facts import assert_names, raises_naming
from test_damage import data_file

from spmd_trainer.checkpointing import (
    LOAD_ALL,
    Checkpointer,
    CheckpointError,
    CheckpointLoadingRules,
    CheckpointNotFoundError,
    CheckpointReadError,
    NoWholeCheckpointError,
    check_storage,
    loading_rules,
    manifest,
    orbax_io,
    steps,
)
from spmd_trainer.storage import reading

LOCAL_PATH = type(epath.Path("/"))


@pytest.fixture
def waits(monkeypatch) -> list[float]:
    """Makes retries wait no time; returns how long they would have waited."""
    waited: list[float] = []
    monkeypatch.setattr(time, "sleep", waited.append)
    return waited


def fail_reading(monkeypatch, name: str, times: int) -> list[str]:
    """Lets the first `times` reads of files of this name raise an I/O error; returns the names of those that did."""
    failed: list[str] = []

    def failing(method):
        def read(path, *args, **kwargs):
            if Path(path).name == name and len(failed) < times:
                failed.append(str(path))
                raise OSError(5, "Input/output error", str(path))
            return method(path, *args, **kwargs)

        return read

    for method in ("read_bytes", "read_text", "open", "stat"):
        monkeypatch.setattr(LOCAL_PATH, method, failing(getattr(LOCAL_PATH, method)))
    monkeypatch.setattr(reading, "read", failing(reading.read))
    return failed


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize("name", ["manifest.json", "record.json", "_METADATA", "manifest.ocdbt"])
def test_a_passing_read_error_is_repeated_and_costs_no_step(saved, monkeypatch, waits, name):
    """Before, one I/O error renamed the good step to refused-30 and restored step 20."""
    failed = fail_reading(monkeypatch, name, times=2)
    with Checkpointer(saved.directory) as checkpoints:
        restored = checkpoints.restore(saved.variables, saved.mesh)
        assert restored.step == 30
        assert_restored(restored.state, saved.variables, saved.states[30], saved.mesh)
        assert checkpoints.save(40, restored.state, saved.variables, input_state=None, metadata={})
    assert len(failed) == 2
    assert len(waits) >= 2
    assert names_in(saved.directory) == ["10", "20", "30", "40"]


@pytest.mark.parametrize("name", ["manifest.json", "record.json", "_METADATA"])
def test_storage_that_goes_on_failing_ends_the_restore_and_changes_nothing(saved, monkeypatch, waits, name):
    fail_reading(monkeypatch, name, times=10**9)
    with Checkpointer(saved.directory) as checkpoints:
        with pytest.raises(CheckpointReadError, match="Input/output error"):
            checkpoints.restore(saved.variables, saved.mesh)
        with pytest.raises(CheckpointReadError, match="Input/output error"):
            checkpoints.restore(saved.variables, saved.mesh, step=20)
    assert sum(waits) > 60  # outlasts a minute's outage
    assert names_in(saved.directory) == ["10", "20", "30"]


def test_arrays_that_storage_gives_only_the_second_time_are_read_again(saved, monkeypatch, waits):
    """TensorStore's errors of storage are no damage; its text is all there is to tell them by."""
    read_arrays, calls = orbax_io.read_arrays, []

    def once_unavailable(*args, **kwargs):
        calls.append(1)
        if len(calls) == 1:
            raise ValueError('UNAVAILABLE: Error reading "gs://b/run/30/state/d/1": HTTP response code: 503')
        return read_arrays(*args, **kwargs)

    monkeypatch.setattr(orbax_io, "read_arrays", once_unavailable)
    with Checkpointer(saved.directory) as checkpoints:
        assert checkpoints.restore(saved.variables, saved.mesh).step == 30
    assert names_in(saved.directory) == ["10", "20", "30"]


def test_an_unreadable_step_does_not_begin_a_save(saved, monkeypatch, waits):
    with Checkpointer(saved.directory) as checkpoints:
        state = checkpoints.restore(saved.variables, saved.mesh).state
        fail_reading(monkeypatch, "manifest.json", times=10**9)
        with pytest.raises(CheckpointReadError):
            checkpoints.save(40, state, saved.variables, input_state=None, metadata={}, force=True)
    assert names_in(saved.directory) == ["10", "20", "30"]


def test_warm_starts_repeat_reads_too(saved, monkeypatch, waits):
    fail_reading(monkeypatch, "record.json", times=1)
    rules = {saved.directory: CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    resolved = loading_rules.resolve_rules(saved.variables, rules, check_contents=False)
    assert "step 30 in" in str(resolved.report)


def test_a_step_that_vanishes_while_it_is_read_is_not_renamed(saved, monkeypatch, caplog):
    """Retention of the run that wrote it, or a person, deletes it between the listing and the reading."""
    agreed_newest_first = steps.agreed_newest_first

    def then_deleted(directory):
        listed = agreed_newest_first(directory)
        shutil.rmtree(saved.directory / "30", ignore_errors=True)
        return listed

    monkeypatch.setattr(steps, "agreed_newest_first", then_deleted)
    with Checkpointer(saved.directory) as checkpoints, caplog.at_level("WARNING"):
        assert checkpoints.restore(saved.variables, saved.mesh).step == 20
        with raises_naming(CheckpointNotFoundError, "step 30", "10, 20"):
            checkpoints.restore(saved.variables, saved.mesh, step=30)
    assert names_in(saved.directory) == ["10", "20"]


def test_two_opposite_flips_are_found(saved):
    """Sums of words, the checksum before, did not change when one bit went up and the same bit of another word went down."""
    path = data_file(saved.directory / "30")
    content = np.frombuffer(path.read_bytes()[: path.stat().st_size // 8 * 8], "<u8").copy()
    first, second = next(
        (i, i + 1) for i in range(len(content) - 1) if (content[i] & np.uint64(1)) != (content[i + 1] & np.uint64(1))
    )
    content[[first, second]] ^= np.uint64(1)
    path.write_bytes(content.tobytes() + path.read_bytes()[content.nbytes :])
    problem = files_problem(epath.Path(saved.directory / "30"), 30)
    assert problem is not None
    assert_names(problem, path.relative_to(saved.directory / "30"), "checksum")


def test_manifests_of_the_first_format_can_still_be_read(tmp_path):
    """The numbers are those that the code of format 1 wrote for these files."""
    step_dir = tmp_path / "7"
    (step_dir / "state").mkdir(parents=True)
    (step_dir / "state" / "d").write_bytes(bytes(range(256)) * 40)
    (step_dir / "a").write_bytes(b"checkpoint")
    old = {"format": 1, "step": 7, "whole_up_to": 10250, "samples": 64, "sample_bytes": 1048576}
    files = {"a": [10, 729867624], "state/d": [10240, 2322575262]}
    (step_dir / "manifest.json").write_text(json.dumps({**old, "files": files}))
    assert files_problem(epath.Path(step_dir), 7) is None
    (step_dir / "a").write_bytes(b"checkpoinz")
    assert re.match("a .*checksum", str(files_problem(epath.Path(step_dir), 7)))


def edited(text: str, **changes) -> str:
    return json.dumps({**json.loads(text), **changes})


MALFORMED = {
    "flipped key": lambda text: text.replace('"whole_up_to"', '"whole_up_tn"'),
    "deep nesting": lambda text: "[" * 100_000,
    "an entry of one number": lambda text: edited(text, files={"state/_METADATA": [5]}),
    "an entry of text": lambda text: edited(text, files={"state/_METADATA": ["5", "6"]}),
    "no dictionary": lambda text: "[1, 2]",
    "no files": lambda text: edited(text, files=None),
    "a name with a zero byte": lambda text: edited(text, files={"state/\0": [5, 6]}),
    "a name above the step": lambda text: edited(text, files={"../20/manifest.json": [5, 6]}),
    "an endless name": lambda text: edited(text, files={"x" * 5000: [5, 6]}),
    "a lone surrogate": lambda text: edited(text, files={"\ud800": [5, 6]}),
    "samples of nothing": lambda text: edited(text, samples=1, whole_up_to=0),
    "endless samples": lambda text: edited(text, samples=10**15, whole_up_to=0),
    "large samples": lambda text: edited(text, whole_up_to=0, sample_bytes=10**9),
    "bytes that are no text": lambda text: "\udcff",
}


# Those of `make test`.
SHORT = ("deep nesting", "a name above the step", "endless samples", "bytes that are no text")


@pytest.mark.parametrize("kind", [k if k in SHORT else pytest.param(k, marks=pytest.mark.full) for k in MALFORMED])
def test_a_malformed_manifest_is_damage_of_its_step(saved, kind):
    path = saved.directory / "30" / "manifest.json"
    path.write_text(MALFORMED[kind](path.read_text()), errors="surrogateescape")
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        assert checkpoints.latest_step() == 20
        assert checkpoints.all_steps() == [10, 20]
        assert checkpoints.restore(saved.variables, saved.mesh).step == 20
    assert "manifest.json is malformed" in str(files_problem(epath.Path(saved.directory / "30"), 30))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "{}", '{"format": 1, "step": 30}', '{"format": 1, "step": 30, "variables": {"w": {}}}']
)
def test_a_malformed_record_is_damage_of_its_step(saved, text):
    """Its manifest is made to fit, as if the record had been written like this."""
    (saved.directory / "30" / "record" / "record.json").write_text(text)
    manifest.write(epath.Path(saved.directory / "30"), 30)
    rules = {saved.directory: CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    for check_contents in (False, True):
        resolved = loading_rules.resolve_rules(saved.variables, rules, check_contents=check_contents)
        assert "step 20 in" in str(resolved.report)


def test_a_run_whose_steps_are_all_damaged_saves_nothing_and_renames_nothing(saved):
    """All manifests cut short: before, a run that did not restore began at step 0 and renamed them."""
    with Checkpointer(saved.directory, read_only=True) as checkpoints:
        state = checkpoints.restore(saved.variables, saved.mesh).state
    for step in (10, 20, 30):
        path = saved.directory / str(step) / "manifest.json"
        path.write_text(path.read_text()[:50])
    with Checkpointer(saved.directory) as checkpoints:
        assert checkpoints.holds_steps()
        with pytest.raises(
            NoWholeCheckpointError, match=r"(?s)No whole checkpoint.*step 20 is refused.*move these"
        ) as raised:
            checkpoints.save(40, state, saved.variables, input_state=None, metadata={})
    assert raised.value.exit_status == 5
    assert names_in(saved.directory) == ["10", "20", "30"]


def test_holds_steps_sees_no_step_in_what_other_programs_leave(tmp_path):
    (tmp_path / "refused-3").mkdir()
    (tmp_path / "2.orbax-checkpoint-tmp").mkdir()
    assert not Checkpointer(tmp_path).holds_steps()
    assert not Checkpointer(tmp_path / "nowhere").holds_steps()


def free_space(monkeypatch, free: int) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))


def test_a_restart_on_a_disk_of_the_right_size_is_not_refused(saved, monkeypatch, caplog):
    """Three checkpoints are there, and room for one more: before, room for all four was asked for again."""
    size = manifest.num_bytes(epath.Path(saved.directory / "30"), 30)
    assert size > data_file(saved.directory / "30").stat().st_size
    free_space(monkeypatch, size + size // 2)  # sizes of steps differ by some kB
    with caplog.at_level("WARNING"):
        check_storage(saved.directory, size, keep=3)
    assert caplog.text == ""


def test_the_file_that_tries_the_directory_is_gone_afterwards(tmp_path):
    check_storage(tmp_path / "checkpoints", 1, keep=None)
    assert list((tmp_path / "checkpoints").iterdir()) == []


def test_a_disk_with_room_for_one_checkpoint_is_warned_of(tmp_path, monkeypatch, caplog):
    free_space(monkeypatch, 1 << 30)
    with caplog.at_level("WARNING"):
        check_storage(tmp_path / "checkpoints", 1 << 30, keep=2)
    assert "3 checkpoints need 3.0 GiB" in caplog.text
    assert "only 1.0 GiB are free" in caplog.text
    assert "save_max_to_keep" in caplog.text


def test_a_disk_without_room_for_one_checkpoint_is_refused(tmp_path, monkeypatch):
    free_space(monkeypatch, (1 << 30) - 1)
    with pytest.raises(CheckpointError, match=r"A checkpoint needs 1.00 GiB in .*Free some space"):
        check_storage(tmp_path / "checkpoints", 1 << 30, keep=None)
    file = tmp_path / "file"
    file.touch()
    with raises_naming(CheckpointError, file, "cannot be written"):
        check_storage(file / "checkpoints", 1, keep=None)
