"""Log lines of saves: the beginning, the duration, and no duration for a save that fails."""

import re
import types

import jax
import pytest
from checkpoint_helpers import make_mesh, partition_specs, place, specs_for, train_state

from spmd_trainer.checkpointing import Checkpointer, CheckpointError, manifest, saving


@pytest.mark.parametrize("ends", [("copied", "on disk"), ("on disk", "copied")])
def test_the_line_comes_when_both_times_are_known(ends, caplog, monkeypatch):
    now = iter([0.0, 0.05, 0.42])
    monkeypatch.setattr(saving, "time", types.SimpleNamespace(monotonic=lambda: next(now)))
    with caplog.at_level("INFO", logger="absl"):
        times = saving.SaveTimes("step 200")
        times.mark(ends[0])
        assert not caplog.messages
        times.mark(ends[1])
    waited = "0.05" if ends[0] == "copied" else "0.42"
    assert caplog.messages == [f"saved step 200 in 0.42 s (the loop waited {waited} s)"]


@pytest.fixture
def state():
    mesh, logical = make_mesh(1, 2, 2), train_state()
    variables = specs_for(logical, partition_specs(logical), mesh)
    return variables, place(logical, variables, mesh)


def save(checkpoints, state, step):
    variables, arrays = state
    checkpoints.save(step, jax.tree.map(lambda x: x, arrays), variables, input_state=None, metadata={})


def test_every_save_is_said_when_it_begins_and_when_it_is_on_disk(tmp_path, caplog, state):
    with caplog.at_level("INFO", logger="absl"):
        with Checkpointer(tmp_path, label="best step") as checkpoints:
            save(checkpoints, state, 1)
            save(checkpoints, state, 2)
            save(checkpoints, state, 2)  # is there: nothing is saved, nothing is said
        said = [line for line in caplog.messages if re.match("saving|saved", line)]
    assert said[0] == "saving best step 1"
    assert re.fullmatch(r"saved best step 1 in [\d.]+ s \(the loop waited [\d.]+ s\)", said[1])
    assert said[2] == "saving best step 2"
    assert said[3].startswith("saved best step 2 in ")
    assert len(said) == 4


def test_a_save_that_fails_is_not_said_to_be_saved_and_raises_as_ever(tmp_path, caplog, state, monkeypatch):
    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr(manifest, "write", fail)
    checkpoints = Checkpointer(tmp_path)
    with caplog.at_level("INFO", logger="absl"):
        save(checkpoints, state, 3)
        with pytest.raises(CheckpointError, match=r"step 3 .* failed: .*disk full"):
            checkpoints.wait_until_finished()
    assert "saving step 3" in caplog.messages
    assert not [line for line in caplog.messages if line.startswith("saved")]
