"""Checkpoints in object stores: damage is found by one listing, interrupted work is finished, writes are repeated."""

import random

import pytest
from etils import epath
from facts import raises_naming
from proxy import Proxy, some_fail
from tiny_steps import restored, save

from spmd_trainer.checkpointing import (
    Checkpointer,
    CheckpointError,
    DamagedCheckpointError,
    NoWholeCheckpointError,
    manifest,
    steps,
)

COMMIT = "commit_success.txt"


def names(path):
    return sorted(entry.name for entry in path.iterdir())


def data_file(step_dir):
    """The largest file of a step: it holds the array."""
    return max((step_dir / "state" / "d").iterdir(), key=lambda path: path.stat().length)


@pytest.fixture
def saved(remote):
    """A directory with steps 1, 2 and 3."""
    with Checkpointer(remote) as checkpoints:
        save(checkpoints, 1, 2, 3)
    return remote


def delete_one(step_dir):
    data_file(step_dir).unlink()


def cut_short(step_dir):
    path = data_file(step_dir)
    path.write_bytes(path.read_bytes()[:-1])


def delete_manifest(step_dir):
    (step_dir / "manifest.json").unlink()


on_one_store = pytest.mark.parametrize("remote", ["gs", pytest.param("s3", marks=pytest.mark.full)], indirect=True)


@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(delete_one, marks=pytest.mark.full),
        cut_short,
        pytest.param(delete_manifest, marks=pytest.mark.full),
    ],
)
def test_damage_is_found_by_names_and_sizes(saved, damage):
    damage(saved / "3")
    with Checkpointer(saved) as checkpoints:
        assert checkpoints.all_steps() == [1, 2]
        assert checkpoints.latest_step() == 2
        with pytest.raises(DamagedCheckpointError) as raised:
            restored(checkpoints, step=3)
        assert raised.value.exit_status == 5
        assert restored(checkpoints) == 2
        save(checkpoints, 3)
        assert restored(checkpoints) == 3
    assert names(saved) == ["1", "2", "3", "refused-3"]


@pytest.mark.full
def test_files_that_others_add_are_no_damage(saved):
    (saved / "3" / "notes.txt").write_text("the best one")
    assert Checkpointer(saved).all_steps() == [1, 2, 3]
    assert restored(Checkpointer(saved, read_only=True)) == 3


@pytest.mark.full
def test_steps_without_a_digest_are_judged_by_their_manifests(saved):
    """As earlier versions wrote them."""
    for step in (1, 2, 3):
        next(path for path in (saved / str(step)).iterdir() if path.name.startswith("sizes-")).unlink()
    delete_one(saved / "2")
    assert Checkpointer(saved).all_steps() == [1, 3]
    assert steps.problems(saved)[2].endswith("is missing")


@pytest.mark.full
def test_a_listing_that_lags_behind_is_no_damage(saved, monkeypatch):
    """Some S3 servers list what was written with a delay. The objects themselves are asked for before a step is refused."""
    listed = manifest.sizes_below

    def lagging(directory):
        sizes = listed(directory)
        del sizes[str(data_file(directory).relative_to(directory))]
        return sizes

    monkeypatch.setattr(manifest, "sizes_below", lagging)
    assert manifest.quick_problem(saved / "3", 3) is None
    assert restored(Checkpointer(saved, read_only=True)) == 3


@pytest.mark.full
def test_none_whole_ends_with_a_status_of_its_own_and_changes_nothing(saved):
    for step in (1, 2, 3):
        delete_one(saved / str(step))
    with Checkpointer(saved) as checkpoints:
        for call in (lambda: restored(checkpoints), lambda: save(checkpoints, 4)):
            with pytest.raises(NoWholeCheckpointError, match="step 2 is refused") as raised:
                call()
            assert raised.value.exit_status == 5
    assert names(saved) == ["1", "2", "3"]


@on_one_store
def test_a_save_that_was_killed_before_its_commit_is_committed(saved):
    """All its files are there: a run that resumes from it must find it again."""
    (saved / "3" / COMMIT).unlink()
    with Checkpointer(saved) as checkpoints:
        assert restored(checkpoints) == 3
        save(checkpoints, 4)
    assert (saved / "3" / COMMIT).exists()
    assert Checkpointer(saved).all_steps() == [1, 2, 3, 4]


@pytest.mark.full
def test_what_a_killed_save_left_is_deleted_at_the_next_save(saved):
    for name in (COMMIT, "manifest.json"):
        (saved / "3" / name).unlink()
    # A refused step is nobody's to delete, with or without a commit file.
    (saved / "refused-7" / "x").write_text("kept")
    with Checkpointer(saved) as checkpoints:
        assert checkpoints.all_steps() == [1, 2]
        assert restored(checkpoints) == 2
        save(checkpoints, 4)
    assert names(saved) == ["1", "2", "4", "refused-7"]


@pytest.mark.full
def test_a_deletion_that_was_killed_is_finished(saved):
    (saved / "deleting-1").write_text("")
    (saved / "1" / "manifest.json").unlink()
    with Checkpointer(saved) as checkpoints:
        assert checkpoints.all_steps() == [2, 3]
        save(checkpoints, 4)
    assert names(saved) == ["2", "3", "4"]


WRITES = ("POST", "PUT", "PATCH")


def through(proxy, scheme, use):
    use(scheme, proxy.address)
    return epath.Path(f"{scheme}://bkt/{random.randrange(2**60):x}")


@pytest.mark.full
@pytest.mark.parametrize("scheme", ["gs", "s3"])
def test_a_tenth_of_all_writes_fail_and_no_save_does(scheme, address_of, use):
    """Orbax' and TensorStore's writes too; an answer that is lost after the write counts as a failure."""
    fails = some_fail(0.1, faults=(503, 500, 429, "cut", "cut answer"), seed=3)
    with Proxy(address_of(scheme)) as proxy:
        directory = through(proxy, scheme, use)
        proxy.fault = lambda method, path: fails(method, path) if method in WRITES else None
        with Checkpointer(directory, save_max_to_keep=2, save_keep_interval_duration=None) as checkpoints:
            save(checkpoints, 1, 2, 3)
        assert proxy.failed >= 3
        proxy.fault = lambda method, path: None
        assert Checkpointer(directory).all_steps() == [2, 3]
        assert restored(Checkpointer(directory, read_only=True)) == 3


@pytest.mark.parametrize("scheme", ["gs", pytest.param("s3", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    "written", [pytest.param(0, marks=pytest.mark.full), 4, pytest.param(11, marks=pytest.mark.full)]
)
@pytest.mark.full
def test_a_save_that_fails_loses_no_step_and_the_next_run_goes_on(scheme, written, address_of, use):
    """Writing is refused for good from some write on: before the first array, among the arrays, at the manifest."""
    with Proxy(address_of(scheme)) as proxy:
        directory = through(proxy, scheme, use)
        count = 0

        def refuse(method, path):
            nonlocal count
            count += method in WRITES
            return 403 if method in WRITES and count > written else None

        checkpoints = Checkpointer(directory)
        save(checkpoints, 1, 2)
        proxy.fault = refuse
        with raises_naming(CheckpointError, "step 3", directory, "failed", "whole step is 2"):
            save(checkpoints, 3)
        proxy.fault = lambda method, path: None
        with pytest.raises(CheckpointError, match="step 3"):
            checkpoints.close()
        with Checkpointer(directory) as again:
            assert again.all_steps() == [1, 2]
            assert restored(again) == 2
            save(again, 3)
            assert again.all_steps() == [1, 2, 3]


@pytest.mark.full
def test_a_manifest_alone_is_no_step(saved):
    """A save that was killed between its manifest and its commit: nobody reads it, and its number can be used again."""
    for path in list((saved / "3").iterdir()):
        if path.name == COMMIT or path.name.startswith("sizes-"):
            path.unlink()
    assert steps.newest_whole(saved) == 2
    assert not steps.is_whole(saved, 3)
    with Checkpointer(saved) as checkpoints:
        assert restored(checkpoints) == 2
        save(checkpoints, 3)
        assert restored(checkpoints) == 3


@pytest.mark.full
def test_a_number_with_objects_that_cannot_be_deleted_is_not_saved_again(saved, monkeypatch):
    """A marker that stays would delete the new step, and old objects would be mixed into it."""
    (saved / "deleting-4").write_text("The step of this number is being deleted.")
    (saved / "4" / "state").mkdir(parents=True)
    (saved / "4" / "state" / "left").write_text("x")

    def refuse(doomed):
        raise OSError(5, "refused", str(doomed))

    monkeypatch.setattr(steps, "_finish_deletion", refuse)
    with Checkpointer(saved) as checkpoints, raises_naming(CheckpointError, "step 4", "cannot be saved", "objects"):
        save(checkpoints, 4)
    assert (saved / "4" / "state" / "left").exists()
