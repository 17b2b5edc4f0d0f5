"""Two real processes, one of which meets a fault: both end in the same way, at once, and the good steps stay."""

from __future__ import annotations

from pathlib import Path

import pytest
from facts import assert_names
from process_helpers import lines, run_processes

SETUP = """
import errno, os, resource, shutil
from pathlib import Path
import numpy as np
from absl import logging
from checkpoint_helpers import make_mesh, place, specs_for
from jax.sharding import PartitionSpec as P
from spmd_trainer import multihost
from spmd_trainer.checkpointing import Checkpointer, CheckpointError, check_storage, manifest, steps, step_files
from spmd_trainer.storage import reading, retry

directory = Path(arguments[0])
mesh = make_mesh(count, 1, 1)
size = (1 << 19) * 2  # 2 MiB for each of two processes
logical = {"w": np.random.default_rng(0).standard_normal(size).astype(np.float32)}
variables = specs_for(logical, {"w": P("replica")}, mesh)
state = place(logical, variables, mesh)

def save(checkpoints, step):
    started = checkpoints.save(step, state, variables, input_state=None, metadata={})
    checkpoints.wait_until_finished()
    return started

def tell(call):
    try:
        print("returned", call(), flush=True)
    except Exception as error:
        print(type(error).__name__, str(error).replace(chr(10), " "), flush=True)
"""

FAILED_COMMIT = """
def disk_full(*args):
    raise OSError(errno.ENOSPC, "No space left on device")

checkpoints = Checkpointer(directory, save_max_to_keep=1, save_keep_interval_duration=None)
save(checkpoints, 1)
if index == 0:
    manifest.write = disk_full
tell(lambda: save(checkpoints, 2))
tell(checkpoints.close)
"""

FAILED_WRITE = """
checkpoints = Checkpointer(directory, save_max_to_keep=1, save_keep_interval_duration=None)
save(checkpoints, 1)
if index == 1:
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
tell(lambda: save(checkpoints, 2))
tell(checkpoints.close)
"""

# Process 0 makes the directories. Here no directory can be made below what has become a file.
NO_DIRECTORY = """
checkpoints = Checkpointer(directory)
save(checkpoints, 1)
multihost.barrier("saved", timeout=60)
if index == 0:
    directory.rename(directory.with_name("moved"))
    directory.touch()
multihost.barrier("moved", timeout=60)
tell(lambda: save(checkpoints, 2))
"""

# Process 1 sees neither the manifest of step 2 nor, later, step 3: a network file system that lags behind.
OTHER_VIEW = """
with Checkpointer(directory, save_interval_steps=1) as checkpoints:
    save(checkpoints, 1)
    save(checkpoints, 2)
seen = steps.present
if index == 1:
    steps.present = lambda directory: []
    steps.is_whole = lambda directory, step: False
with Checkpointer(directory, save_interval_steps=1) as checkpoints:
    tell(checkpoints.holds_steps)
    tell(lambda: checkpoints.should_save(2))
    tell(lambda: checkpoints.save(2, state, variables, input_state=None, metadata={}))
    tell(lambda: save(checkpoints, 3))
    tell(lambda: checkpoints.should_save(3))
"""

FAILED_READ = """
with Checkpointer(directory) as checkpoints:
    save(checkpoints, 1)
    save(checkpoints, 2)
retry.time.sleep = lambda seconds: None
kind = type(checkpoints.directory)
readers = {
    (owner, name): getattr(owner, name) for owner, name in ((kind, "read_bytes"), (kind, "read_text"), (reading, "read"))
}

def failing(read):
    def io_error(path, *args, **kwargs):
        if index == 1 and str(path).endswith("/manifest.json"):
            raise OSError(errno.EIO, "Input/output error")
        return read(path, *args, **kwargs)
    return io_error

for (owner, name), read in readers.items():
    setattr(owner, name, failing(read))
checkpoints = Checkpointer(directory)
tell(lambda: checkpoints.restore(variables, mesh))
for (owner, name), read in readers.items():
    setattr(owner, name, read)
tell(lambda: checkpoints.restore(variables, mesh).step)
"""

NO_ROOM = """
usage = shutil.disk_usage("/")
shutil.disk_usage = lambda path: usage._replace(free=10 if index == 0 else 1 << 40)
tell(lambda: check_storage(directory, 1000, 1))
"""

# Each process has a disk of its own under the same name.
NOT_SHARED = """
from spmd_trainer.checkpointing import saving
saving._VISIBLE_SECONDS = 1.0
tell(lambda: check_storage(directory / f"host_{index}", 1000, 1))
tell(lambda: check_storage(directory / "shared", 1000, 1))
print(sorted(path.name for path in (directory / "shared").iterdir()))
"""


def outcomes(program: str, *arguments: object, count: int = 2) -> list[list[str]]:
    told = lines(run_processes(SETUP + program, *arguments, count=count))
    return [[line for line in output if not line.startswith("[Gloo]")] for output in told]


def steps_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


@pytest.mark.parametrize(
    ("program", "failing", "reason"),
    [
        pytest.param(FAILED_COMMIT, 0, "No space left on device", marks=pytest.mark.full),
        (FAILED_WRITE, 1, "File too large"),
    ],
)
def test_a_save_that_fails_on_one_process_fails_on_both(tmp_path, program, failing, reason):
    """Before, both waited for 20 minutes at Orbax' barriers. The old step is kept although one step was to be kept."""
    told = outcomes(program, tmp_path / "checkpoints")
    for process, (first, second) in enumerate(told):
        assert first.startswith("CheckpointError ")
        assert_names(first, "checkpoint step 2", reason, "whole step is 1")
        assert (f"process {failing} could not write" in first) == (process != failing)
        assert second.startswith("CheckpointError ")
        assert_names(second, "checkpoint step 2")
    assert steps_in(tmp_path / "checkpoints") == ["1"]


@pytest.mark.full
def test_a_directory_that_process_0_cannot_make_ends_the_save_on_both(tmp_path):
    """Before, threads of both waited 300 s for it."""
    for (failed,) in outcomes(NO_DIRECTORY, tmp_path / "checkpoints"):
        assert failed.startswith("CheckpointError ")
        assert_names(failed, "checkpoint step 2", "Not a directory")


@pytest.mark.full
def test_what_is_due_is_what_process_0_sees(tmp_path):
    """Before, process 1 began a save of step 2 alone, and waited in it for the other."""
    told = outcomes(OTHER_VIEW, tmp_path / "checkpoints")
    assert told == [["returned True", "returned False", "returned False", "returned True", "returned False"]] * 2
    assert steps_in(tmp_path / "checkpoints") == ["1", "2", "3"]


@pytest.mark.full
def test_a_step_that_one_process_cannot_read_is_refused_by_none(tmp_path):
    """Before, both renamed the good step 2."""
    told = outcomes(FAILED_READ, tmp_path / "checkpoints")
    for failed, then in told:
        assert failed.startswith("CheckpointReadError reading ")
        assert "Input/output error" in failed
        assert then == "returned 2"
    assert steps_in(tmp_path / "checkpoints") == ["1", "2"]


@pytest.mark.full
def test_process_0_alone_measures_the_room(tmp_path):
    first, second = outcomes(NO_ROOM, tmp_path / "checkpoints")
    assert first == second
    assert first[0].startswith("CheckpointError ")
    assert_names(first[0], tmp_path / "checkpoints", "free", "--job_log_dir", "task.train.save_max_to_keep")


# The same text for all in step 1; in step 2 a stream's own position on each process.
OWN_POSITIONS = """
if arguments[1] == "save":
    with Checkpointer(directory) as checkpoints:
        checkpoints.save(1, state, variables, input_state={"state": b"all"}, metadata={})
        checkpoints.save(2, state, variables, input_state={"state": bytes([index, 255])}, metadata={})
        checkpoints.wait_until_finished()
        tell(lambda: checkpoints.save(3, state, variables, input_state={"state": object() if index else 1}, metadata={}))
with Checkpointer(directory, read_only=True) as checkpoints:
    tell(lambda: checkpoints.restore(variables, mesh, step=1).input_state)
    tell(lambda: checkpoints.restore(variables, mesh, step=2).input_state)
    tell(lambda: checkpoints.restore(variables, mesh, step=2, with_input=False).input_state)
"""


@pytest.mark.full
def test_every_process_resumes_from_its_own_position(tmp_path):
    """Before, every process got the position of process 0. Another number of processes is refused only if they differ."""
    told = outcomes(OWN_POSITIONS, tmp_path / "checkpoints", "save")
    for process, lines_of_one in enumerate(told):
        unsavable = lines_of_one.pop(0)
        assert unsavable.startswith("CheckpointError")
        assert_names(unsavable, "position", "cannot be saved", "object")
        own = bytes([process, 255])
        assert lines_of_one == ["returned {'state': b'all'}", f"returned {{'state': {own!r}}}", "returned None"]
    for count in (1, 3):
        for all_same, refused, without in outcomes(OWN_POSITIONS, tmp_path / "checkpoints", "restore", count=count):
            assert all_same == "returned {'state': b'all'}"
            assert refused.startswith("CheckpointMismatchError Checkpoint step 2")
            assert_names(refused, "2 positions", "training input", "2 processes")
            assert f"this job has {count}" in refused
            assert without == "returned None"
    assert not (tmp_path / "checkpoints" / "1" / "input_states").exists()


@pytest.mark.full
def test_a_directory_that_processes_do_not_share_is_refused(tmp_path):
    """Before, every host wrote its part of the checkpoints to its own disk."""
    for refused, shared, left in outcomes(NOT_SHARED, tmp_path):
        assert refused.startswith("CheckpointError process 1 ")
        assert_names(refused, "process 0", "not shared")
        assert (shared, left) == ("returned None", "[]")
