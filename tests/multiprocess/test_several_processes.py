"""`make faults`: jobs of 1, 2, 3, 5 and 8 processes with inputs of their own, in which one process is not like the others.

FAULT_LATE_SECONDS sets how much later than the others a process is started.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import pathlib
import re
import shutil
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence

import pytest
from facts import assert_names
from job_helpers import (
    STATUS_LOST_PROCESS,
    STATUS_USER_ERROR,
    RunningJob,
    Uneven,
    losses,
    run,
    started,
    steps_on_disk,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.xdist_group("multiprocess"),
    pytest.mark.usefixtures("importable"),
]
LATE_SECONDS = float(os.environ.get("FAULT_LATE_SECONDS", "30"))
STEPS = 8
FIELDS = {
    "num_train_steps": STEPS,
    "save_interval_steps": 4,
    "summary_interval_steps": 1,
    "eval_interval_steps": 0,
    "log_train_output_interval_steps": 1,
}
WITHOUT_END = FIELDS | {"num_train_steps": 100_000, "save_interval_steps": 50}
# Seconds in which up to four processes start on two cores; README counts from the moment that all are there.
START_SECONDS = 60
# `--heartbeat_seconds` of these jobs.
HEARTBEAT = 10
several = pytest.mark.parametrize("count", [2, 3, 5, 8])
from_one = pytest.mark.parametrize("count", [1, 2, 3, 5, 8])


def start_seconds(count: int) -> float:
    """Returns what the start of so many processes may take: longer where more than two share a core."""
    return START_SECONDS * max(1.0, count / (2 * (os.cpu_count() or 1)))


class Rows:
    """The table of results."""

    def __init__(self) -> None:
        self._rows = [f"{'fault':42}{'processes':>10}{'seconds':>9}{'at most':>9}  statuses"]

    def add(self, fault: str, seconds: float, limit: float, statuses: Sequence[int]) -> None:
        """Adds a row. `seconds` from the fault to the end of the last process; `limit` by the README of `tools/launch`."""
        self._rows.append(f"{fault:42}{len(statuses):10}{seconds:9.1f}{limit:9.0f}  {' '.join(map(str, statuses))}")
        sys.stdout.write(f"{self._rows[-1]}\n")
        sys.stdout.flush()
        assert seconds <= limit, self._rows[-1]

    def __str__(self) -> str:
        return "\n".join(self._rows)


@pytest.fixture(scope="module")
def rows() -> Iterator[Rows]:
    """The table of results, printed at the end."""
    result = Rows()
    yield result
    sys.stdout.write(f"\n{result}\n")


@pytest.fixture
def streams(tmp_path, cache):
    """A function that returns a job of so many processes, one device each, whose training inputs are streams of their own."""

    def settings(count: int, **changes: object) -> Uneven:
        job = Uneven(tmp_path / "run", count, cache, FIELDS, exp="uneven_inputs.Streams", rows=2 * count)
        return dataclasses.replace(job, mesh=f"replica:1,data:{count},mdl:1", **changes)

    return settings


def finished(settings: Uneven) -> tuple[RunningJob, list[int], float]:
    """Runs a job; returns it with its exit statuses and how long it ran."""
    began = time.monotonic()
    with started(settings) as job:
        statuses = job.finish()
    return job, statuses, time.monotonic() - began


def check_all_refuse(rows: Rows, fault: str, settings: Uneven, message: str) -> None:
    """Runs a job that every process must refuse with this message."""
    job, statuses, seconds = finished(settings)
    assert statuses == [STATUS_USER_ERROR] * len(statuses), job.log()
    assert all(re.search(message, log) for log in job.logs), job.log()
    assert not any("Traceback" in log for log in job.logs), job.log()
    rows.add(fault, seconds, start_seconds(len(statuses)) + 10, statuses)


@from_one
def test_an_input_that_ends_early(rows, streams, count):
    ends = (None,) * (count - 1) + (5,)
    settings = streams(count, flags=(f"--fdl.set=train_datasets[0].ends_after={ends}",))
    job, statuses, seconds = finished(settings)
    assert statuses == [0] * count, job.log()
    assert "finished: step 5 of 8" in job.logs[0], job.log()
    warned = re.search(rf"ended on process {count - 1} after 5 batches", job.logs[0])
    assert (warned is not None) == (count > 1), job.log()
    assert steps_on_disk(settings.directory)[-1] == 5
    rows.add("the last process's input ends early", seconds, start_seconds(count), statuses)


@from_one
def test_an_input_that_is_twice_as_slow(rows, streams, count):
    waits = (0.2,) * (count - 1) + (0.4,)
    settings = streams(count, flags=(f"--fdl.set=train_datasets[0].seconds={waits}",))
    job, statuses, seconds = finished(settings)
    assert statuses == [0] * count, job.log()
    assert steps_on_disk(settings.directory)[-1] == STEPS
    rows.add("the last process's input is 2x slower", seconds, start_seconds(count), statuses)


@several
def test_a_process_that_starts_late(rows, streams, count):
    late = {count - 1: ("sh", "-c", f'sleep {LATE_SECONDS}; exec "$@"', "sh")}
    job, statuses, seconds = finished(streams(count, prefixes=late))
    assert statuses == [0] * count, job.log()
    rows.add(
        f"the last process starts {LATE_SECONDS:.0f} s late", seconds, LATE_SECONDS + start_seconds(count), statuses
    )


@several
def test_another_setting(rows, streams, count):
    settings = streams(count, own={count - 1: ("--fdl.set=task.train.random_seed=7",)})
    message = f"process {count - 1} was started with other settings than process 0: task.train.random_seed is 7 there"
    check_all_refuse(rows, "another setting", settings, message)


@several
def test_another_version_of_the_experiment(rows, streams, count, tmp_path):
    here = pathlib.Path(__file__).parent
    (tmp_path / "code").mkdir()
    module = pathlib.Path(shutil.copy(here / "uneven_inputs.py", tmp_path / "code"))
    module.write_text(f"{module.read_text()}\n# Another version.\n")
    path = os.pathsep.join([str(module.parent), os.environ["PYTHONPATH"]])
    settings = streams(count, prefixes={count - 1: ("env", f"PYTHONPATH={path}")})
    message = rf"process {count - 1} was started with other settings .*the code of uneven_inputs differs"
    check_all_refuse(rows, "another version of the code", settings, message)


@pytest.fixture
def helped(streams, tmp_path):
    """A function that returns a job whose last process has a further prefix, and perhaps another helper of the loss."""
    for name, scale in (("first", 1), ("last", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "loss_helper.py").write_text(f"SCALE = {scale}\n")

    def settings(count: int, *prefix: str, helper: str = "first") -> Uneven:
        folders = dict.fromkeys(range(count), "first") | {count - 1: helper}
        prefixes = {
            index: ("env", f"PYTHONPATH={tmp_path / folder}{os.pathsep}{os.environ['PYTHONPATH']}")
            + (prefix if index == count - 1 else ())
            for index, folder in folders.items()
        }
        return streams(count, exp="uneven_inputs.HelpedLoss", prefixes=prefixes)

    return settings


def test_a_module_that_the_loss_imports_is_the_same(helped):
    job, statuses, _ = finished(helped(2))
    assert statuses == [0, 0], job.log()


@several
def test_a_module_that_the_loss_imports_differs(rows, helped, count):
    settings = helped(count, helper="last")
    check_all_refuse(
        rows, "another module in the loss", settings, rf"process {count - 1} .*the code of loss_helper differs"
    )
    assert steps_on_disk(settings.directory) == []


@several
def test_a_variable_that_the_loss_reads_differs(rows, helped, count):
    message = rf"process {count - 1} .*UNEVEN_INPUTS_SCALE"
    check_all_refuse(rows, "another environment variable", helped(count, "UNEVEN_INPUTS_SCALE=2"), message)


@several
def test_other_xla_flags(rows, helped, count):
    flags = f"XLA_FLAGS={os.environ['XLA_FLAGS']} --xla_cpu_enable_fast_math=true"
    check_all_refuse(rows, "other XLA flags", helped(count, flags), rf"process {count - 1} .*XLA_FLAGS")


@several
def test_other_data(rows, streams, count, tmp_path):
    texts = []
    for number in (0, 1):
        texts.append(tmp_path / f"{number}.txt")
        texts[-1].write_text("Some text. " * (1000 + number))
    starts = {index: ("env", f"TEXT={texts[index == count - 1]}") for index in range(count)}
    settings = streams(count, exp="uneven_inputs.OtherData", prefixes=starts)
    check_all_refuse(rows, "other data", settings, rf"reads other data on process {count - 1} than on process 0")


@from_one
def test_the_coordinator_dies(rows, streams, count):
    settings = streams(count, fields=WITHOUT_END)
    with started(settings) as job:
        job.wait_for_line("saved step 50")
        job.send(signal.SIGKILL, 0)
        killed = time.monotonic()
        statuses = job.finish()
        seconds = time.monotonic() - killed
    assert statuses[0] == -signal.SIGKILL
    assert set(statuses[1:]) <= {STATUS_LOST_PROCESS}, job.log()
    assert all("exits because process 0 (" in log for log in job.logs[1:]), job.log()
    newest = steps_on_disk(settings.directory)[-1]
    again = run(dataclasses.replace(settings, fields=FIELDS | {"num_train_steps": newest + 2}))
    assert f"restored step {newest} from" in again.logs[0]
    rows.add("the coordinator dies", seconds, 10, statuses)


@several
def test_a_stopped_process(rows, streams, count):
    with started(streams(count, fields=WITHOUT_END)) as job:
        job.wait_for_line("saved step 50")
        job.send(signal.SIGSTOP, count - 1)
        stopped = time.monotonic()
        for process in job.processes[:-1]:
            process.wait(60)
        seconds = time.monotonic() - stopped
        job.send(signal.SIGCONT, count - 1)
        statuses = job.finish()
    assert statuses[:-1] == [STATUS_LOST_PROCESS] * (count - 1), job.log()
    named = rf"exits because process {count - 1} \(.*\) of {count} is lost\. It has not answered for \d+ s"
    assert all(re.search(named, log) for log in job.logs[:-1]), job.log()
    assert statuses[-1] == STATUS_LOST_PROCESS, job.log()
    rows.add(f"the last process is stopped, H={HEARTBEAT} s", seconds, HEARTBEAT * 1.5 + 5, statuses)


@contextlib.contextmanager
def taken_port() -> Iterator[int]:
    """A port on which another program listens, and says nothing."""
    with socket.create_server(("", 0)) as server:
        yield server.getsockname()[1]


@several
def test_a_port_that_is_taken(rows, streams, count):
    with taken_port() as port:
        own = dict.fromkeys(range(count), (f"--coordinator_address=localhost:{port}",))
        job, statuses, seconds = finished(streams(count, own=own))
    assert statuses[0] == STATUS_USER_ERROR, job.log()
    assert_names(job.logs[0], "can't listen", f"port {port}")
    assert statuses[1:] == [STATUS_USER_ERROR] * (count - 1), job.log()
    rows.add("the coordinator's port is taken", seconds, start_seconds(count) + 10, statuses)


@several
def test_one_process_id_twice(rows, streams, count):
    settings = streams(count, own={count - 1: (f"--process_id={count - 2}",)})
    check_all_refuse(rows, "one --process_id twice", settings, f"two processes have --process_id={count - 2}: ")


def test_a_second_job_of_one_process_in_the_same_directory(rows, streams):
    settings = streams(1, fields=WITHOUT_END)
    with started(settings) as first:
        first.wait_for_line("training from step")
        second, statuses, seconds = finished(settings)
        first.send(signal.SIGTERM, 0)
        assert first.finish() == [0], first.log()
    assert statuses == [STATUS_USER_ERROR], second.log()
    assert "Traceback" not in second.log()
    rows.add("a second job in the same directory", seconds, START_SECONDS, statuses)


@several
def test_a_process_that_fails_before_it_joins(rows, streams, count):
    job, statuses, seconds = finished(streams(count, own={count - 1: ("--fdl.set=task.train.num_trian_steps=3",)}))
    assert statuses == [STATUS_LOST_PROCESS] * (count - 1) + [STATUS_USER_ERROR], job.log()
    named = rf"process {count - 1} \(.*\) of {count} failed before it joined: .*num_trian_steps"
    assert all(re.search(named, log) for log in job.logs[:-1]), job.log()
    rows.add("the last process fails before it joins", seconds, start_seconds(count) + 10, statuses)


@from_one
def test_streams_resume_where_they_were_and_on_as_many_processes(rows, streams, tmp_path, count):
    settings = streams(count)
    whole = run(dataclasses.replace(settings, directory=tmp_path / "whole"))
    run(dataclasses.replace(settings, fields=FIELDS | {"num_train_steps": 4}))
    again = run(settings)
    assert "restored step 4 from" in again.logs[0], again.log()
    assert losses(settings.directory) == losses(whole.settings.directory)
    other = dataclasses.replace(streams(count + 1), fields=FIELDS | {"num_train_steps": 12})
    saved = "the one process" if count == 1 else f"the {count} processes"
    check_all_refuse(rows, f"streams of {count} processes", other, rf"training input.* {saved} that saved it")
