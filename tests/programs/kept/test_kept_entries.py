"""Kept steps on disk: whole or not at all, and not too many."""

import contextlib

import pytest
from etils import epath

from spmd_trainer.programs.kept import entries
from spmd_trainer.programs.kept.entries import Entries


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
    kept.write("k", {"settings": {"a": "1"}}, b"step")
    assert read(kept, "k") == [({"settings": {"a": "1"}}, b"step")]
    assert kept.newest()["settings"] == {"a": "1"}


def test_nothing_kept(kept):
    assert read(kept, "k") == []
    assert kept.newest() is None


def test_steps_of_the_same_settings_and_other_code_stand_side_by_side(kept):
    kept.write("k", {"reads": "old"}, b"old")
    kept.write("k", {"reads": "new"}, b"new")
    assert sorted(content for _, content in read(kept, "k")) == [b"new", b"old"]


@pytest.mark.parametrize("damage", ["cut", "changed", "gone", "description"])
def test_a_damaged_step_is_none(kept, tmp_path, damage):
    kept.write("k", {}, b"a whole step")
    (step,), (description,) = (list((tmp_path / "my.Exp").glob(f"*.{kind}")) for kind in ("step", "json"))
    if damage == "cut":
        step.write_bytes(b"a whole")
    elif damage == "changed":
        step.write_bytes(b"a whole Step")
    elif damage == "gone":
        step.unlink()
    else:
        description.write_text(description.read_text()[:5])
    assert read(kept, "k") == []


def test_each_process_has_its_own(kept, tmp_path):
    kept.write("k", {}, b"step")
    assert Entries(epath.Path(tmp_path), "my.Exp", process=1).newest() is None


def test_the_step_that_was_not_used_for_longest_leaves(kept, tmp_path, monkeypatch):
    monkeypatch.setattr(entries, "MOST_BYTES", 25)
    kept.write("old", {}, bytes(10))
    kept.write("older", {}, bytes(10))
    assert read(kept, "old")  # used: now `older` is the oldest
    Entries(epath.Path(tmp_path), "other.Exp", process=0).write("new", {}, bytes(10))
    assert read(kept, "old")
    assert not read(kept, "older")
    assert len(list((tmp_path / "my.Exp").iterdir())) == 2
