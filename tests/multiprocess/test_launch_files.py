"""The shell scripts of `tools/launch`, run with stand-ins for the trainer and for Slurm: when do they ask for another start?"""

from __future__ import annotations

import os
import pathlib
import re
import signal
import subprocess
import sys

import pytest
import yaml

from spmd_trainer.watch.link import STATUS_HANG
from tools.launch import supervise

ROOT = pathlib.Path(__file__).parents[2]
LAUNCH = ROOT / "tools" / "launch"


@pytest.fixture
def stand_in(tmp_path, monkeypatch):
    """Makes a command that the scripts find first on the PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv(
        "PATH", os.pathsep.join([str(folder), str(pathlib.Path(sys.executable).parent), os.environ["PATH"]])
    )

    def make(name: str, script: str) -> None:
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)

    return make


@pytest.fixture
def run_directory(tmp_path):
    directory = tmp_path / "run"
    directory.mkdir()
    return directory


def end_training(directory: pathlib.Path) -> None:
    (directory / "run.json").write_text('{"status": "finished", "last_step": 3}')


def pod(run_directory: pathlib.Path) -> subprocess.Popen[bytes]:
    """Starts the script of the JobSet's pods."""
    text = (LAUNCH / "jobset.yaml").read_text()
    job = yaml.safe_load(text)["spec"]["replicatedJobs"][0]["template"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    environment |= {"RUN": str(run_directory), "JOB_COMPLETION_INDEX": "1"}
    return subprocess.Popen(
        [*container["command"], *container["args"]], env=os.environ | environment, cwd=ROOT, stdout=subprocess.PIPE
    )


@pytest.mark.parametrize(
    ("trainer", "ended", "status"),
    [(0, False, 75), (0, True, 0), (2, False, 2), (3, True, 3), (4, False, 4), (5, False, 5)],
)
def test_a_pod_succeeds_only_when_training_has_ended(stand_in, run_directory, trainer, ended, status):
    stand_in("spmd-trainer", f"exit {trainer}")
    if ended:
        end_training(run_directory)
    assert pod(run_directory).wait() == status


@pytest.mark.full
def test_a_pod_passes_sigterm_on_and_waits_for_the_save(stand_in, run_directory):
    saved = run_directory / "saved"
    stand_in("spmd-trainer", f"trap 'sleep 0.5; touch {saved}; exit 0' TERM\necho $*\nwhile true; do sleep 0.1; done")
    started = pod(run_directory)
    flags = started.stdout.readline().decode().split()
    assert f"--job_log_dir={run_directory}" in flags
    assert "--process_id=1" in flags
    started.send_signal(signal.SIGTERM)
    assert started.wait() == 75
    assert saved.exists()


@pytest.mark.full
def test_a_pod_passes_a_sigterm_on_that_comes_before_it_knows_the_trainer(stand_in, run_directory):
    # The pod's shell is the parent. It can't tell the trainer's number before `&` has returned.
    stand_in("spmd-trainer", "trap 'exit 0' TERM\nkill -TERM $PPID\nwhile true; do sleep 0.1; done")
    assert pod(run_directory).wait() == 75


@pytest.mark.parametrize(
    ("statuses", "lost"),
    [
        ([3, -9, 3], 1),
        ([-9, 3, -9], 2),
        ([3, STATUS_HANG, 3, 3], 1),  # the others waited for it
        ([STATUS_HANG, STATUS_HANG], 0),  # nobody can be named
        ([STATUS_HANG, -9, 3], 2),
        ([1, 3], 1),
    ],
)
def test_the_supervisor_leaves_out_what_was_lost_or_has_hung(statuses, lost):
    assert supervise._lost(statuses) == lost


def test_the_supervisor_kills_what_has_not_ended_after_the_grace():
    options = supervise.parse(["--processes=3", "--grace_seconds=0.5", "--", "--exp=a"])
    supervisor = supervise.Supervisor(options)
    commands = ("exit 3", "sleep 1000", "trap '' TERM; sleep 0.1; exit 0")
    supervisor._processes = [subprocess.Popen(["sh", "-c", f"{command}; :"]) for command in commands]
    assert supervisor._wait() == [3, -signal.SIGKILL, 0]


@pytest.mark.full
def test_all_launchers_end_a_job_that_hangs(stand_in, run_directory):
    stand_in("spmd-trainer", f'echo "$@" > {run_directory}/flags; exit 0')
    pod(run_directory).wait()
    given = re.findall(r"--hang_seconds=(\d+)", (run_directory / "flags").read_text())
    given += re.findall(r"srun .*--hang_seconds=(\d+) \"\$@\"", (LAUNCH / "slurm.sbatch").read_text())
    assert given == [str(supervise._HANG_SECONDS)] * 2
    assert supervise._HUNG == STATUS_HANG


@pytest.mark.parametrize(
    ("trainer", "ended", "queued"),
    [(0, False, True), (0, True, False), (2, False, False), (3, False, True), (4, False, True), (5, False, False)],
)
def test_slurm_queues_a_job_again_until_training_has_ended(stand_in, run_directory, tmp_path, trainer, ended, queued):
    # The script takes Python from the .venv of the directory that the job was submitted in; a checkout need not have one.
    (tmp_path / ".venv").symlink_to(sys.prefix)
    stand_in("srun", f"exit {trainer}")
    stand_in("scontrol", "echo requeued $2")
    if ended:
        end_training(run_directory)
    command = ["bash", LAUNCH / "slurm.sbatch", "--exp=a", f"--job_log_dir={run_directory}"]
    done = subprocess.run(
        command,
        env=os.environ | {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_JOB_ID": "7"},
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    assert done.returncode == trainer
    assert ("requeued 7" in done.stdout) == queued
