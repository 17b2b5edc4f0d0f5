"""Old steps that cannot be deleted, and saves that cannot begin: neither ends badly."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoint_helpers import make_mesh, place, specs_for
from etils import epath
from facts import assert_names
from jax.sharding import PartitionSpec as P
from test_storage_faults import LOCAL_PATH, names_in

from spmd_trainer.checkpointing import Checkpointer, steps
from spmd_trainer.checkpointing.retired_steps import StepDeleter


def one_variable():
    mesh = make_mesh(1, 1, 1)
    logical = {"w": np.ones(8, np.float32)}
    variables = specs_for(logical, {"w": P()}, mesh)
    return place(logical, variables, mesh), variables


def keeping_one(directory: Path) -> Checkpointer:
    return Checkpointer(directory, save_max_to_keep=1, save_keep_interval_duration=None)


def save(checkpoints: Checkpointer, *numbers: int) -> None:
    state, variables = one_variable()
    for step in numbers:
        checkpoints.save(step, state, variables, input_state=None, metadata={})
        checkpoints.wait_until_finished()


def fail_on(monkeypatch, method: str, step: int) -> None:
    """Lets a method of the paths of this step raise EBUSY, as a network file system does for a file in use."""
    original = getattr(LOCAL_PATH, method)

    def busy(path, *args, **kwargs):
        if path.name in (str(step), f"deleting-{step}"):
            raise OSError(16, "Device or resource busy", str(path))
        return original(path, *args, **kwargs)

    monkeypatch.setattr(LOCAL_PATH, method, busy)


@pytest.mark.parametrize(("method", "left"), [("rename", "1"), ("rmtree", "deleting-1")])
def test_an_old_step_that_cannot_be_deleted_is_tried_again(tmp_path, monkeypatch, caplog, method, left):
    """Before, the error ended the run."""
    with keeping_one(tmp_path) as checkpoints, caplog.at_level("WARNING"):
        save(checkpoints, 1)
        with monkeypatch.context() as patch:
            fail_on(patch, method, 1)
            save(checkpoints, 2)
        assert_names(caplog.text, "delete", "old checkpoint")
        assert names_in(tmp_path) == sorted(["2", left])
        save(checkpoints, 3)
        assert names_in(tmp_path) == ["3"]


def test_what_retention_was_deleting_is_deleted_at_the_next_start(tmp_path, monkeypatch):
    """Before, a step that a killed run had half deleted became refused-N, and stayed for good."""
    with keeping_one(tmp_path) as checkpoints:
        save(checkpoints, 1)
        with monkeypatch.context() as patch:
            fail_on(patch, "rmtree", 1)
            save(checkpoints, 2)
    assert Checkpointer(tmp_path).all_steps() == [2]
    (tmp_path / "deleting-1" / "manifest.json").unlink()
    with Checkpointer(tmp_path) as checkpoints:
        save(checkpoints, 3)
        assert names_in(tmp_path) == ["2", "3"]


def test_no_reader_ever_sees_a_half_deleted_step(tmp_path, monkeypatch):
    """While the files of step 1 go one by one, its number is not a step any more."""
    seen = []
    rmtree = LOCAL_PATH.rmtree

    def watched(path, *args, **kwargs):
        seen.append((path.name, steps.present(epath.Path(tmp_path))))
        return rmtree(path, *args, **kwargs)

    monkeypatch.setattr(LOCAL_PATH, "rmtree", watched)
    with keeping_one(tmp_path) as checkpoints:
        save(checkpoints, 1, 2)
    assert ("deleting-1", [2]) in seen


def test_a_number_that_is_used_again_is_not_deleted(tmp_path, monkeypatch):
    deleter = StepDeleter(epath.Path(tmp_path))
    (tmp_path / "1").mkdir()
    with monkeypatch.context() as patch:
        fail_on(patch, "rename", 1)
        deleter.delete_steps([1])
    deleter.keep(1)
    deleter.delete_steps([])
    assert names_in(tmp_path) == ["1"]
    deleter.delete(1)
    assert names_in(tmp_path) == []


STUCK_AFTER_A_FAILED_SAVE = """
import sys, numpy as np
from pathlib import Path
sys.path[:0] = [sys.argv[2], sys.argv[2] + "/.."]
from test_retention import one_variable, save
from spmd_trainer.checkpointing import Checkpointer, CheckpointError
directory = Path(sys.argv[1])
checkpoints = Checkpointer(directory)
save(checkpoints, 1)
directory.rename(directory.with_name("moved"))
directory.touch()  # No directory can be made below a file.
try:
    save(checkpoints, 2)
except CheckpointError as error:
    print("failed:", error)
"""


@pytest.mark.full
def test_a_process_whose_save_failed_ends(tmp_path):
    """Before, threads of Orbax waited 300 s for a directory that could not be made, and the process with them."""
    here = Path(__file__).parent
    command = [sys.executable, "-c", STUCK_AFTER_A_FAILED_SAVE, str(tmp_path / "checkpoints"), str(here)]
    done = subprocess.run(command, cwd=here.parents[1], capture_output=True, text=True, timeout=100, check=True)
    assert_names(done.stdout, "failed", "checkpoint step 2", "Not a directory")
