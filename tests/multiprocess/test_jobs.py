"""Two real processes on loopback: the same numbers as one process, and clean ends after SIGTERM and SIGKILL."""

from __future__ import annotations

import json
import re
import signal
import types

import pytest
from facts import assert_names
from job_helpers import (
    FIELDS,
    STATUS_LOST_PROCESS,
    STATUS_USER_ERROR,
    STEPS,
    Settings,
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
