"""Real processes that join, or are refused before JAX connects them: each of them ends soon, and says why."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest
from facts import assert_names
from job_helpers import (
    STATUS_INTERRUPTED,
    STATUS_LOST_PROCESS,
    STATUS_USER_ERROR,
    TIMEOUT_SECONDS,
    RunningJob,
    Settings,
    free_port,
    started,
)

pytestmark = pytest.mark.xdist_group("multiprocess")
# Joins, says so, stays until its stdin is closed, and fails if it was told to.
JOIN = f"""
import os, sys
from spmd_trainer.cli import distributed
from spmd_trainer.errors import UserError
from spmd_trainer.multihost import join
address, count, index, seconds, version = sys.argv[1:]
distributed._JOIN_SECONDS = float(seconds)
join.REPORT_SECONDS = 0.5
join.__version__ = version or join.__version__
bind_address = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS")
cluster = distributed.Cluster(
    address or None, int(count) or None, int(index) if address else None, 5, bind_address=bind_address
)
try:
    with distributed.Processes(cluster) as processes:
        if "FAILS" in os.environ:
            raise {{"UserError": UserError, "ImportError": ImportError}}[os.environ["FAILS"]]("no such setting")
        sys.stderr.write(f"joined {{processes.join('train')}} processes\\n")
        sys.stderr.flush()
        if sys.stdin.read():
            raise RuntimeError("out of luck")
except UserError as error:
    sys.stderr.write(f"spmd-trainer: {{error}}\\n")
    raise SystemExit({STATUS_USER_ERROR})
"""


class Joining(RunningJob):
    """Processes of `JOIN`, which can be started one after the other."""

    def __init__(self) -> None:
        self.port = free_port()
        self.processes, self.logs, self._readers = [], [], []
        self._changed = threading.Condition()

    def start(
        self, index: int, count: int, *, address: str | None = None, seconds: float = 60, version: str = "", **env: str
    ) -> None:
        """Starts a process; without an address, at this job's."""
        address = f"localhost:{self.port}" if address is None else address
        command = [sys.executable, "-c", JOIN, address, str(count), str(index), str(seconds), version]
        self.processes.append(
            subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env=os.environ | env,
                start_new_session=True,
            )
        )
        self.logs.append("")
        self._readers.append(threading.Thread(target=self._read, args=(len(self.logs) - 1,)))
        self._readers[-1].start()

    def leave(self) -> None:
        """Lets the processes that have joined end."""
        for process in self.processes:
            process.stdin.close()


@pytest.fixture
def job() -> Iterator[Joining]:
    running = Joining()
    try:
        yield running
    finally:
        running.end()


@pytest.mark.full
def test_processes_with_the_same_id_are_refused_and_so_is_their_job(job):
    for index in (0, 1, 1):
        job.start(index, 3)
    assert job.finish() == [STATUS_USER_ERROR] * 3, job.log()
    for log in job.logs:
        assert re.search(r"two processes .*--process_id=1: \S+, pid \d+ and \S+, pid \d+\..* from 0 to 2", log), (
            job.log()
        )


@pytest.mark.full
def test_a_process_that_comes_late_hears_why_the_job_was_refused(job):
    for index in (0, 1, 1):
        job.start(index, 4)
    job.wait_for_line("two processes have", 1)
    job.start(2, 4)
    assert job.finish() == [STATUS_USER_ERROR] * 4, job.log()
    assert "two processes have --process_id=1" in job.logs[3]


@pytest.mark.full
@pytest.mark.parametrize("own_port", [False, True], ids=["on one host", "on two hosts"])
def test_two_processes_0_are_refused(job, own_port):
    job.start(0, 2)
    job.wait_for_line("waiting for process 1 of 2")
    # On another host the second one can listen, but the coordinator's address leads to the first one.
    job.start(0, 2, **({"JAX_COORDINATOR_BIND_ADDRESS": f"localhost:{free_port()}"} if own_port else {}))
    job.wait_for_line("two processes have", 1)
    job.start(1, 2)
    assert job.finish() == [STATUS_USER_ERROR] * 3, job.log()
    assert all("two processes have --process_id=0: " in log for log in job.logs), job.log()


@pytest.mark.full
def test_a_process_too_many_is_refused_and_the_job_goes_on(job):
    job.start(0, 2)
    job.start(1, 2)
    job.wait_for_line("joined 2 processes", 1)
    job.start(1, 2)
    job.processes[2].wait(TIMEOUT_SECONDS)
    assert [process.poll() for process in job.processes] == [None, None, STATUS_USER_ERROR], job.log()
    job.leave()
    assert job.finish() == [0, 0, STATUS_USER_ERROR], job.log()
    assert_names(job.logs[2], f"localhost:{job.port}", "already in use", "--process_id=1")


@pytest.mark.full
@pytest.mark.parametrize("interrupted", [0, 1])
def test_ctrl_c_in_one_process_is_no_traceback_and_the_reason_of_the_others(job, interrupted):
    for index in (0, 1):
        job.start(index, 2)
    for index in (0, 1):
        job.wait_for_line("joined 2 processes", index)
    job.send(signal.SIGINT, interrupted)
    statuses, other = job.finish(), 1 - interrupted
    assert (statuses[interrupted], statuses[other]) == (STATUS_INTERRUPTED, STATUS_LOST_PROCESS), job.log()
    assert_names(job.logs[interrupted], "interrupted", "same command")
    reason = rf"process {other} exits .*process {interrupted} \(.*\) of 2 .*interrupted: Ctrl-C\."
    assert re.search(reason, job.logs[other]), job.log()
    assert "Traceback" not in job.log()


@pytest.mark.full
def test_processes_that_disagree_about_their_number_are_refused(job):
    job.start(0, 2)
    job.start(1, 3)
    assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    for log in job.logs:
        assert re.search(
            r"process 1 \(.*\) was started with --num_processes=3, and process 0 \(.*\) with --num_proc", log
        )


@pytest.mark.full
def test_processes_of_different_versions_are_refused(job):
    job.start(0, 2)
    job.start(1, 2, version="0.0.1")
    assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    for log in job.logs:
        assert re.search(r"process 1 \(.*\) has version 0\.0\.1 .*process 0 \(.*\) has \d", log)


@pytest.mark.full
def test_a_process_that_is_started_late_is_waited_for(job):
    job.start(0, 3)
    job.start(2, 3)
    job.wait_for_line("waiting for process 1 of 3 at localhost:")
    job.start(1, 3)
    job.leave()
    assert job.finish() == [0] * 3, job.log()
    assert all("joined 3 processes" in log for log in job.logs)


@pytest.mark.full
def test_process_0_names_the_processes_that_do_not_join(job):
    job.start(0, 4, seconds=3)
    job.start(2, 4, seconds=3)
    assert job.finish() == [STATUS_LOST_PROCESS] * 2, job.log()
    for index, log in zip((0, 2), job.logs, strict=True):
        assert f"process {index} exits: " in log
    assert re.search(r"processes 1, (2, )?3 of 4 did not join .*localhost:\d+ within 3 s", job.logs[0])


@pytest.mark.full
def test_a_missing_process_0_is_named(job):
    job.start(1, 2, seconds=2)
    assert job.finish() == [STATUS_LOST_PROCESS]
    assert re.search(
        r"process 1 exits: process 0 did not answer .*localhost:\d+ within 2 s \(Connection refused\)", job.logs[0]
    )


@pytest.mark.full
def test_a_wrong_coordinator_address_is_named(job):
    job.start(0, 2, address=f"localhost:{free_port()}", seconds=3, JAX_COORDINATOR_BIND_ADDRESS=f"localhost:{job.port}")
    assert job.finish() == [STATUS_LOST_PROCESS]
    assert re.search(r"process 0 exits: process 0 did not answer .*localhost:\d+ within 3 s .*refused", job.logs[0])


@pytest.mark.full
def test_a_process_that_dies_before_all_have_joined_ends_the_others(job):
    job.start(0, 3)
    job.start(1, 3)
    job.wait_for_line("waiting for process 2 of 3")
    job.send(signal.SIGKILL, 1)
    assert job.finish() == [STATUS_LOST_PROCESS, -signal.SIGKILL], job.log()
    assert re.search(r"process 0 exits: process 1 \(.*\) was lost before .*joined", job.logs[0])


@pytest.mark.parametrize(
    ("error", "status"), [("UserError", STATUS_USER_ERROR), pytest.param("ImportError", 1, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("failing", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_process_that_fails_before_it_joins_ends_the_others_with_its_error(job, failing, error, status):
    for index in range(3):
        job.start(index, 3, **({"FAILS": error} if index == failing else {}))
    assert job.finish() == [status if index == failing else STATUS_LOST_PROCESS for index in range(3)], job.log()
    for index in {0, 1, 2} - {failing}:
        assert re.search(
            rf"process {index} exits: process {failing} \(\S+, pid \d+\) of 3 failed before .*no such setting",
            job.logs[index],
        ), job.log()
    assert job.logs[failing].count("no such setting") == 1, job.log()


@pytest.mark.full
def test_processes_that_all_fail_before_they_join_say_so_once(job):
    for index in range(3):
        job.start(index, 3, FAILS="UserError")
    assert job.finish() == [STATUS_USER_ERROR] * 3, job.log()
    # A process may have begun to wait for another one that is slow to start.
    said = [[line for line in log.splitlines() if "waiting for process" not in line] for log in job.logs]
    assert said == [["spmd-trainer: no such setting"]] * 3, job.log()


@pytest.mark.full
def test_the_command_tells_the_others_of_settings_that_one_process_cannot_use(cache, tmp_path):
    class Misspelt(Settings):
        def commands(self) -> list[list[str]]:
            first, second = super().commands()
            return [first, [*second, "--fdl.set=task.train.num_trian_steps=3"]]

    with started(Misspelt(tmp_path / "run", 2, cache)) as running:
        assert running.finish() == [STATUS_LOST_PROCESS, STATUS_USER_ERROR], running.log()
    assert re.search(r"process 0 exits: process 1 \(.*\) of 2 failed before .*num_trian_steps", running.logs[0]), (
        running.log()
    )
    assert not any("Traceback" in log for log in running.logs), running.log()


@contextlib.contextmanager
def listening(answer: bytes) -> Iterator[int]:
    """A server of another program, which sends this to whoever connects. Yields its port."""
    with socket.create_server(("", 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(answer)
                        connection.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        yield server.getsockname()[1]
        server.shutdown(socket.SHUT_RDWR)


@pytest.mark.full
def test_a_port_that_is_taken_is_named(job):
    with listening(b"SSH-2.0\r\n") as port:
        for index in (0, 1):
            job.start(index, 2, address=f"localhost:{port}")
        assert job.finish() == [STATUS_USER_ERROR] * 2, job.log()
    assert_names(job.logs[0], "can't listen", f"port {port}")
    assert_names(job.logs[1], f"localhost:{port}", "already in use")


@pytest.mark.full
def test_a_stranger_who_sends_a_byte_now_and_then_keeps_nobody_waiting(job):
    job.start(0, 2)
    job.wait_for_line("waiting for process 1 of 2")
    done = threading.Event()

    def drip() -> None:
        with contextlib.suppress(OSError), socket.create_connection(("localhost", job.port)) as connection:
            while not done.wait(0.2):
                connection.sendall(b"x")

    strangers = [threading.Thread(target=drip) for _ in range(3)]
    for stranger in strangers:
        stranger.start()
    with socket.create_connection(("localhost", job.port)) as scan:
        scan.sendall(b"GET / HTTP/1.0\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            while scan.recv(100):  # its own protocol's greeting, and then the end
                pass
    job.start(1, 2)
    job.wait_for_line("joined 2 processes", 1)
    assert "joined 2 processes" in job.logs[1], job.log()
    job.leave()
    assert job.finish() == [0, 0], job.log()
    done.set()
    for stranger in strangers:
        stranger.join()


@pytest.mark.full
def test_processes_of_slurm_find_each_other(job):
    common = {"SLURM_JOB_ID": "4711", "SLURM_NTASKS": "2", "SLURM_STEP_NODELIST": "localhost"}
    for index in (0, 1):
        own = {"SLURM_PROCID": str(index), "SLURM_LOCALID": str(index)}
        job.start(0, 0, address="", **common, **own, JAX_COORDINATOR_PORT=str(job.port))
    job.leave()
    assert job.finish() == [0, 0], job.log()
    assert all("joined 2 processes" in log for log in job.logs)


@pytest.mark.parametrize("lost", [pytest.param(0, marks=pytest.mark.full), 1])
def test_a_process_that_dies_is_named_by_the_other(job, lost):
    for index in (0, 1):
        job.start(index, 2)
    for index in (0, 1):
        job.wait_for_line("joined 2 processes", index)
    job.send(signal.SIGKILL, lost)
    statuses = job.finish()
    assert (statuses[lost], statuses[1 - lost]) == (-signal.SIGKILL, STATUS_LOST_PROCESS), job.log()
    assert re.search(
        rf"process {1 - lost} exits because process {lost} \(\S+, pid \d+\) of 2 is lost", job.logs[1 - lost]
    )


@pytest.mark.full
@pytest.mark.parametrize("failing", [0, 1])
def test_a_process_that_fails_is_named_by_the_others_with_its_error(job, failing):
    for index in range(3):
        job.start(index, 3)
    for index in range(3):
        job.wait_for_line("joined 3 processes", index)
    job.processes[failing].stdin.write("fail")
    job.processes[failing].stdin.close()
    expected = [STATUS_LOST_PROCESS] * 3
    expected[failing] = 1
    assert job.finish() == expected, job.log()
    for index in {0, 1, 2} - {failing}:
        assert re.search(
            rf"process {index} exits .*process {failing} \(\S+, pid \d+\) of 3 failed: RuntimeError: .*luck",
            job.logs[index],
        ), job.log()


@pytest.mark.full
@pytest.mark.parametrize("stopped", [0, 1])
def test_a_stopped_process_is_named_and_ends_once_it_goes_on(job, stopped):
    for index in (0, 1):
        job.start(index, 2)
    for index in (0, 1):
        job.wait_for_line("joined 2 processes", index)
    job.send(signal.SIGSTOP, stopped)
    other = 1 - stopped
    job.processes[other].wait(TIMEOUT_SECONDS)
    assert re.search(
        rf"process {other} exits .*process {stopped} \(\S+, pid \d+\) .*not answered .*\d s: .*stopped",
        job.logs[other],
    ), job.log()
    job.send(signal.SIGCONT, stopped)
    statuses = job.finish()
    assert statuses[other] == STATUS_LOST_PROCESS, job.log()
    assert statuses[stopped] == STATUS_LOST_PROCESS, job.log()


@pytest.mark.full
def test_the_command_refuses_a_second_process_of_the_same_id(cache, tmp_path):
    class Twice(Settings):
        def commands(self) -> list[list[str]]:
            first, second, third = super().commands()
            return [first, second, [*third, "--process_id=1"]]

    with started(Twice(tmp_path / "run", 3, cache, rows=6)) as running:
        assert running.finish() == [STATUS_USER_ERROR] * 3, running.log()
    assert all("two processes have --process_id=1" in log for log in running.logs), running.log()
    assert not any("Traceback" in log for log in running.logs), running.log()
    assert not (tmp_path / "run").exists()
