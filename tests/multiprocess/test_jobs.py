"""Two real processes on loopback: the same numbers as one process, and clean ends after SIGTERM and SIGKILL."""

from __future__ import annotations

import json
import pathlib
import re
import shutil
import signal
import types

import pytest
from etils import epath
from facts import assert_names
from job_helpers import (
    FIELDS,
    STATUS_LOST_PROCESS,
    STATUS_USER_ERROR,
    STEPS,
    TINY,
    Settings,
    Uneven,
    losses,
    records,
    run,
    started,
    steps_on_disk,
)

from spmd_trainer.cli import distributed
from spmd_trainer.errors import UserError

# All on one pytest-xdist worker, so that the compilation cache and the job of one process are made once.
pytestmark = pytest.mark.xdist_group("multiprocess")
ROOT = pathlib.Path(__file__).parents[2]
# Across processes, sums over the mesh are added in another order.
TOLERANCE = 1e-5
FLAGS = {
    "distributed": None,
    "coordinator_address": None,
    "coordinator_bind_address": None,
    "num_processes": None,
    "process_id": None,
    "heartbeat_seconds": 30,
}
WITHOUT_END = FIELDS | {"num_train_steps": 100_000, "save_interval_steps": 50, "eval_interval_steps": 0}


@pytest.fixture(scope="module")
def two_processes(tmp_path_factory, cache):
    """A finished, uninterrupted job of two processes."""
    return run(Settings(tmp_path_factory.mktemp("two") / "run", 2, cache, FIELDS))


def test_two_processes_give_the_numbers_of_one(one_process, two_processes):
    job, directory = two_processes, two_processes.settings.directory
    reference = one_process.settings.directory
    assert losses(directory) == pytest.approx(losses(reference), rel=TOLERANCE)
    assert list(losses(directory)) == list(range(1, STEPS + 1))
    assert list(records(directory, "eval_heldout")) == [5, 10, STEPS]
    for step in (5, 10, STEPS):
        got, want = (records(path, "eval_heldout")[step] for path in (directory, reference))
        # 19 windows of 32 bytes: each is counted once, whichever process reads it.
        assert got["num_predictions"] == want["num_predictions"] == 19 * 32
        assert got["avg_xent"] == pytest.approx(want["avg_xent"], rel=TOLERANCE)
    written = (directory / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
    assert len(written) == STEPS
    assert "step 1/" in job.logs[0]
    assert "step 1/" not in job.logs[1]
    for line in ("first step done: loss", f"saved step {STEPS} in", f"finished: step {STEPS} of {STEPS} in"):
        assert line in job.logs[0]
        assert line not in job.logs[1]
    mesh = json.loads((directory / "checkpoints" / str(STEPS) / "record" / "record.json").read_text())["mesh"]
    assert mesh["processes"] == 2


@pytest.mark.full
def test_two_processes_decode_the_same_as_one(one_process, cache, tmp_path):
    checkpoints = one_process.settings.directory / "checkpoints"
    flags = ("--mode=decode_once", f"--restore_checkpoint_dir={checkpoints}")
    decoded = []
    for processes in (1, 2):
        directory = tmp_path / str(processes)
        run(Settings(directory, processes, cache, FIELDS, flags=flags))
        lines = (directory / "decode_out" / "heldout_prompts" / f"step_{STEPS}.jsonl").read_text().splitlines()
        decoded.append([json.loads(line) for line in lines])
    alone, together = decoded
    assert [record["index"] for record in together] == list(range(len(alone)))
    for ours, theirs in zip(together, alone, strict=True):
        assert (ours["prompt"], ours["ids"]) == (theirs["prompt"], theirs["ids"])
        assert ours["scores"] == pytest.approx(theirs["scores"], rel=1e-4)


@pytest.mark.full
def test_one_process_resumes_after_sigterm_and_sigkill_to_one_of_two(one_process, cache, tmp_path):
    directory = tmp_path / "run"
    with started(Settings(directory, 2, cache, WITHOUT_END)) as job:
        job.wait_for_line("training from step 0")
        job.send(signal.SIGTERM, 1)
        assert job.finish() == [0, 0], job.log()
    (saved,) = [step for step in steps_on_disk(directory) if step % 50] or steps_on_disk(directory)[-1:]
    assert f"stopped at step {saved} of" in job.logs[0]
    assert re.search(r"process 1: .*signal.* 2 processes save .*step", job.logs[1]), job.log()

    with started(Settings(directory, 2, cache, WITHOUT_END | {"save_interval_steps": 5})) as job:
        job.wait_for_line("saving step")
        job.send(signal.SIGKILL, 1)
        # Long before JAX's heartbeats would notice the loss.
        assert job.finish(seconds=60) == [STATUS_LOST_PROCESS, -signal.SIGKILL], job.log()
    assert f"restored step {saved} from" in job.logs[0]
    assert "process 0 exits because process 1 (" in job.logs[0]

    newest = steps_on_disk(directory)[-1]
    last = {"num_train_steps": max(newest, saved, STEPS) + 6}
    job = run(Settings(directory, 1, cache, FIELDS | last))
    assert f"restored step {newest} from" in job.logs[0]
    assert list(losses(directory)) == list(range(1, last["num_train_steps"] + 1))
    early = {step: loss for step, loss in losses(directory).items() if step <= STEPS}
    assert early == pytest.approx(losses(one_process.settings.directory), rel=TOLERANCE)


@pytest.mark.full
def test_two_processes_convert_moments_as_one_does(one_process, cache, tmp_path):
    small = {"learner.opt_state_dtype": "'8bit'", "num_train_steps": STEPS + 3}
    found = []
    for processes in (1, 2):
        directory = epath.Path(shutil.copytree(one_process.settings.directory, tmp_path / str(processes)))
        job = run(Settings(directory, processes, cache, FIELDS | small))
        assert_names(job.logs[0], f"restored step {STEPS}", "converted: saved in float32, now kept in 8bit")
        found.append({step: loss for step, loss in losses(directory).items() if step > STEPS})
    alone, together = found
    assert list(alone) == list(range(STEPS + 1, STEPS + 4))
    # Moments whose last bits differ may be rounded to other levels.
    assert together == pytest.approx(alone, rel=1e-4)


class OwnFolders(Uneven):
    """Each process sees another folder as the job's directory. The run of process 1 has a record that can't be read."""

    def trainer_flags(self) -> list[str]:
        """Returns the flags that are the same for every process, without --exp if `exp` is ''."""
        flags = Settings.trainer_flags(self)
        return flags if self.exp else flags[1:]


@pytest.mark.full
@pytest.mark.parametrize("exp", ["", TINY])
@pytest.mark.parametrize("mode", ["train", "eval"])
def test_both_say_that_one_cannot_read_the_runs_directory(one_process, cache, tmp_path, exp, mode):
    folders = [tmp_path / "0", tmp_path / "1"]
    for folder in folders:
        shutil.copytree(one_process.settings.directory, folder / "run")
    record = folders[1] / "run" / "run.json"
    record.unlink()
    record.mkdir()
    settings = OwnFolders(
        "/proc/self/cwd/run",
        2,
        cache,
        FIELDS,
        flags=(f"--mode={mode}",),
        env={"PYTHONPATH": str(ROOT)},
        exp=exp,
        prefixes={index: ("env", "-C", str(folder)) for index, folder in enumerate(folders)},
    )
    with started(settings) as job:
        assert job.finish() == [STATUS_LOST_PROCESS, STATUS_USER_ERROR], job.log()
    for log in job.logs:
        assert_names(log, "/proc/self/cwd/run", "Is a directory")
        assert "Traceback" not in log


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_processes": 2}, "--coordinator_address, --process_id must be given too"),
        ({"coordinator_address": "a:1", "num_processes": 2, "process_id": 2}, "ids go from 0 to 1"),
        ({"coordinator_address": "a", "num_processes": 2, "process_id": 0}, "host:port"),
        (
            {"coordinator_address": "a:99999", "num_processes": 2, "process_id": 0},
            "port 99999 is not between 1 and 65535",
        ),
        ({"coordinator_address": "a:0", "num_processes": 2, "process_id": 0}, "port 0 is not between 1 and 65535"),
        ({"distributed": "auto", "process_id": 0}, "--distributed=auto detects --process_id itself"),
    ],
)
def test_inconsistent_flags_are_refused(flags, words):
    with pytest.raises(UserError, match=words):
        distributed.cluster_from_flags(types.SimpleNamespace(**FLAGS | flags))


def test_one_process_needs_no_cluster():
    assert distributed.cluster_from_flags(types.SimpleNamespace(**FLAGS)) is None
    alone = {"coordinator_address": "a:1", "num_processes": 1, "process_id": 0}
    assert distributed.cluster_from_flags(types.SimpleNamespace(**FLAGS | alone)) is None


def test_the_accelerators_that_the_environment_gives_a_process_are_its_own(monkeypatch):
    cluster = distributed.Cluster("a:1", 2, 1)
    monkeypatch.delenv("JAX_LOCAL_DEVICE_IDS", raising=False)
    assert distributed._located(cluster)[-1] is None
    monkeypatch.setenv("JAX_LOCAL_DEVICE_IDS", "2,3")
    assert distributed._located(cluster)[-1] == [2, 3]


def test_every_process_refuses_a_mesh_that_the_processes_do_not_divide(cache, tmp_path):
    with started(Settings(tmp_path / "run", 2, cache, mesh="replica:1,data:3,mdl:1")) as job:
        assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    assert_names(job.logs[0], "2 processes", "3 devices", "evenly")
