"""Where a run begins when its own checkpoints are damaged, or its disk is nearly full."""

from __future__ import annotations

import shutil

import pytest
from trained_helpers import make_job, trained

from spmd_trainer.checkpointing import Checkpointer, CheckpointNotFoundError
from spmd_trainer.training import start_up


@pytest.fixture
def run(tmp_path):
    """A copy of a run with checkpoints of steps 0, 4, 8 and 12."""
    shutil.copytree(trained(), tmp_path / "run")
    return tmp_path / "run"


def names_in(directory):
    return sorted(path.name for path in directory.iterdir())


def test_a_run_whose_checkpoints_are_all_damaged_does_not_start_over(run):
    """Before, the variables were initialised again, training began at step 0, and the steps were renamed."""
    for manifest in run.glob("checkpoints/*/manifest.json"):
        manifest.write_text(manifest.read_text()[:50])
    with (
        Checkpointer(run / "checkpoints") as checkpoints,
        pytest.raises(CheckpointNotFoundError, match=r"(?s)step 12 is refused.*step 4 is refused.*move these steps"),
    ):
        start_up.first_state(make_job(run), checkpoints)
    assert names_in(run / "checkpoints") == ["0", "12", "4", "8"]


@pytest.mark.full
def test_a_run_on_a_full_disk_resumes_if_another_checkpoint_fits(run, monkeypatch):
    """Five checkpoints are kept and three are there: before, room for six more was asked for at every start."""
    size = sum(path.stat().st_size for path in (run / "checkpoints" / "12").rglob("*") if path.is_file())
    usage = shutil.disk_usage(run)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=2 * size))
    with Checkpointer(run / "checkpoints") as checkpoints:
        state, position, _ = start_up.first_state(make_job(run), checkpoints)
    assert int(state.step) == 12
    assert position is not None
