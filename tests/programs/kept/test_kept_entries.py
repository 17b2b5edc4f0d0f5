"""Kept steps on disk: whole or not at all, and not too many."""

import contextlib

import pytest
from etils import epath
from facts import assert_names

from spmd_trainer.programs.kept import entries
from spmd_trainer.programs.kept.entries import Entries

MADE_FROM = {"settings": {"a": "1"}, "reads": {}}


def read(kept, key):
    """What is whole under a key, the newest first."""
    found = []
    for description, content in kept.read(key):
        with contextlib.suppress(OSError, ValueError):
            found.append((description, content()))
    return found


@pytest.fixture
def kept(tmp_path):
    return Entries(epath.Path(tmp_path), "my.Exp", process=0)


def test_what_was_kept_is_read_back(kept):
    kept.write("k", MADE_FROM, b"step")
    assert read(kept, "k") == [(MADE_FROM, b"step")]
    assert kept.newest()["settings"] == MADE_FROM["settings"]


def test_nothing_kept(kept):
    assert read(kept, "k") == []
    assert kept.newest() is None


def test_steps_of_the_same_settings_and_other_code_stand_side_by_side(kept):
    kept.write("k", {**MADE_FROM, "reads": {"files": {"a": "1"}}}, b"old")
    kept.write("k", MADE_FROM, b"new")
    assert sorted(content for _, content in read(kept, "k")) == [b"new", b"old"]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "description", "other JSON", "no parts"])
def test_a_damaged_step_is_none(kept, tmp_path, damage):
    kept.write("k", MADE_FROM, b"a whole step")
    (step,), (description,) = (list((tmp_path / "my.Exp").glob(f"*.{kind}")) for kind in ("step", "json"))
    if damage == "cut":
        step.write_bytes(b"a whole")
    elif damage == "changed":
        step.write_bytes(b"a whole Step")
    elif damage == "gone":
        step.unlink()
    else:
        texts = {"description": description.read_text()[:5], "other JSON": "[]", "no parts": "{}"}
        description.write_text(texts[damage])
    assert read(kept, "k") == []


def test_each_process_has_its_own(kept, tmp_path):
    kept.write("k", MADE_FROM, b"step")
    assert Entries(epath.Path(tmp_path), "my.Exp", process=1).newest() is None


def test_the_step_that_was_not_used_for_longest_leaves(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "MOST_BYTES", 25)
    kept.write("old", MADE_FROM, bytes(10))
    kept.write("older", MADE_FROM, bytes(10))
    assert read(kept, "old")  # used: now `older` is the oldest
    Entries(epath.Path(tmp_path), "other.Exp", process=1).write("of_another_process", MADE_FROM, bytes(20))
    Entries(epath.Path(tmp_path), "other.Exp", process=0).write("new", MADE_FROM, bytes(10))
    assert read(kept, "old")
    assert not read(kept, "older")
    assert len(list((tmp_path / "my.Exp").iterdir())) == 2


def test_a_folder_that_others_can_write_into_is_refused(kept, tmp_path):
    kept.write("k", MADE_FROM, b"step")
    tmp_path.chmod(0o700)
    assert kept.refusal() == ""
    (tmp_path / "my.Exp").chmod(0o777)
    assert_names(kept.refusal(), "write", tmp_path / "my.Exp")
