"""Real processes that hang: every log names who is behind, with phase and stacks; the job ends, and a supervisor goes on."""

from __future__ import annotations

import os
import pathlib
import re
import signal
import time

import hanging_runs
import pytest
from facts import assert_names
from job_helpers import (
    FIELDS,
    STATUS_LOST_PROCESS,
    STEPS,
    TIMEOUT_SECONDS,
    RunningJob,
    Supervised,
    Uneven,
    losses,
    run,
    started,
)

from spmd_trainer.training import run_directory
from spmd_trainer.watch.link import STATUS_HANG
from spmd_trainer.watch.run_times import read_run_times

pytestmark = [pytest.mark.xdist_group("multiprocess"), pytest.mark.usefixtures("importable")]

HANG_FLAGS = ("--watchdog_seconds=6", "--hang_seconds=20")
QUICK = FIELDS | {"eval_interval_steps": 0}
# Sums are added in another order with another number of processes.
TOLERANCE = 1e-4


@pytest.fixture
def asked(tmp_path, monkeypatch):
    """Asks a process to hang, once."""
    path = tmp_path / "ask"
    monkeypatch.setenv(hanging_runs.FILE, str(path))
    return lambda process: path.write_text(str(process))


def check_report(log: str, victim: int) -> None:
    """Checks that a log names the process that is behind, its phase, and the line of the input that it is in."""
    others = ", ".join(str(index) for index in range(4) if index != victim)
    named = rf"behind: process {victim} in training step \d+, input, for .*\. Processes {others} are in training step"
    assert re.search(f"no progress for .*: {named}", log), log
    line = r'.*hanging_runs.py", line \d+ in wait_for_data_that_never_comes'
    assert re.search(rf"Stacks of process {victim}:\n(.*\n)*?{line}", log), log


def check_blocked(job: RunningJob, directory: pathlib.Path, statuses: list[int], victim: int) -> None:
    """Checks statuses, logs and reports of a job of four whose process `victim` waited for its input."""
    lost = STATUS_LOST_PROCESS
    assert statuses == [STATUS_HANG if index == victim else lost for index in range(4)], job.log()
    for index, log in enumerate(job.logs):
        check_report(log, victim)
        last = log.strip().splitlines()[-1]
        assert f"ends with status {statuses[index]}: no progress for" in last, log
        assert f"behind: process {victim} in training step" in last, log
        report = (directory / "logs" / f"stuck.process_{index}.txt").read_text()
        check_report(report, victim)
        assert_names(report, "stacks of this")
    assert f"process {victim} in training step" in run_directory.failure(directory).reason


@pytest.mark.full
def test_a_single_process_that_hangs_says_where_and_ends_with_a_status_of_its_own(cache, tmp_path, asked):
    directory = tmp_path / "run"
    asked(0)
    flags = ("--watchdog_seconds=1", "--hang_seconds=3")
    settings = Uneven(directory, 1, cache, QUICK, flags, exp="hanging_runs.CallbackSleeps")
    with started(settings) as job:
        assert job.finish() == [STATUS_HANG], job.log()
    log = job.logs[0]
    assert re.search(r"no progress for .* \(--watchdog_seconds=1; .*\): training step 7, step, for", log), log
    assert re.search(r"hanging_runs.py\", line \d+ in after_dispatch", log), log
    assert "ends with status 4: no progress for 3 s" in log.strip().splitlines()[-1], log
    assert read_run_times(directory)[-1].ended == "failed"
    assert list(losses(directory)) == list(range(1, max(losses(directory)) + 1))  # what was done by then is written
    assert "--hang_seconds=3" in run_directory.failure(directory).reason
    assert (directory / "run.html").exists()
    job = run(settings)  # it hangs once
    assert "restored step 4 from" in job.logs[0], job.log()


@pytest.mark.slow
@pytest.mark.parametrize("victim", [1, 0])
def test_an_input_that_blocks_is_named_on_all_logs_and_ends_the_job(table, cache, tmp_path, asked, victim):
    directory = tmp_path / "run"
    asked(victim)
    with (
        table.naming("an input blocks", 4),
        started(Uneven(directory, 4, cache, QUICK, HANG_FLAGS, exp="hanging_runs.InputBlocks")) as job,
    ):
        statuses = job.finish()
        check_blocked(job, directory, statuses, victim)


def trainers(supervisor: int) -> list[int]:
    """Returns the processes that a supervisor has started, in their order."""
    return [int(p) for p in pathlib.Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()]


def supervised(directory, cache: str, *flags: str) -> Supervised:
    exp = ("--exp_module=hanging_runs", "--exp=hanging_runs.InputBlocks", "--heartbeat_seconds=10", *flags)
    return Supervised(directory, 4, cache, QUICK, exp)


@pytest.fixture
def whole(cache, tmp_path, asked):
    """Losses of a run that nothing has interrupted."""
    settings = Uneven(tmp_path / "whole", 1, cache, QUICK, exp="hanging_runs.InputBlocks")
    return losses(run(settings).settings.directory)


@pytest.mark.slow
def test_a_supervisor_goes_on_without_the_process_whose_input_blocks(table, cache, tmp_path, asked, whole):
    asked(1)
    with (
        table.naming("an input blocks, supervised: same curve", 4),
        started(supervised(tmp_path / "run", cache, *HANG_FLAGS)) as job,
    ):
        assert job.finish() == [0], job.log()
        log = job.logs[0]
        assert re.search(r"statuses \[3, 4, 3, 3\].* 2 processes", log), log
        assert "restored step 4 from" in log, log
        assert losses(tmp_path / "run") == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
def test_a_process_that_is_stopped_is_named_with_its_phase_and_left_out(table, cache, tmp_path, asked, whole):
    with (
        table.naming("SIGSTOP, supervised: same curve", 4),
        started(supervised(tmp_path / "run", cache)) as job,
    ):
        job.wait_for_line(r"saved step 4")
        victim = trainers(job.processes[0].pid)[1]
        os.kill(victim, signal.SIGSTOP)
        began = time.monotonic()
        assert job.finish() == [0], job.log()
        print(f"from the stop to the end of the next job: {time.monotonic() - began:.0f} s")  # noqa: T201
        log = job.logs[0]
        named = r"exits .*process 1 \(.*\) .*not answered .*1\d s: .* \(.*last beat: [a-z]+ step \d+, .*, \d+ s ago\)"
        assert len(re.findall(named, log)) == 3, log
        assert f"pids {victim}" in log
        assert re.search(r"statuses \[3, -9, 3, 3\].* 2 processes", log), log
        assert list(losses(tmp_path / "run")) == list(range(1, STEPS + 1))
        assert losses(tmp_path / "run") == pytest.approx(whole, rel=TOLERANCE)


@pytest.mark.slow
def test_a_stopped_process_is_found_by_its_beats_alone(table, cache, tmp_path, asked):
    lost = STATUS_LOST_PROCESS
    patient = dict.fromkeys(range(4), ("--heartbeat_seconds=40",))
    settings = Uneven(tmp_path / "run", 4, cache, QUICK | {"num_train_steps": 1000}, HANG_FLAGS, own=patient)
    with table.naming("SIGSTOP, found by beats", 4), started(settings) as job:
        job.wait_for_line(r"step 6/")
        job.send(signal.SIGSTOP, 1)
        began = time.monotonic()
        for index in (0, 2, 3):
            job.processes[index].wait(TIMEOUT_SECONDS)
        print(f"the others ended after {time.monotonic() - began:.0f} s")  # noqa: T201
        job.send(signal.SIGKILL, 1)
        assert job.finish() == [lost, -signal.SIGKILL, lost, lost], job.log()
        for index in (0, 2, 3):
            last = job.logs[index].strip().splitlines()[-1]
            assert re.search(r"no progress for 2\d s .*behind: process 1, .*last beat .*\d+ s ago", last), last
