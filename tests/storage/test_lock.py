"""One trainer to a directory: a second one is refused, the lock of a dead one is taken over, of two that try one wins."""

import concurrent.futures
import json
import os
import subprocess
import sys
import threading
import time

import pytest
from etils import epath
from facts import assert_names, raises_naming

from spmd_trainer.storage import lock as lock_lib
from spmd_trainer.storage.lock import LockedError, locked

FAST = {"heartbeat_seconds": 0.1, "stale_seconds": 1.0}


def left(directory):
    try:
        return [path.name for path in (directory / "lock").iterdir()]
    except FileNotFoundError:
        return []


def leave_a_lock(directory, **changes):
    """Leaves what a process that was killed leaves; `changes` say where it ran."""
    owner = lock_lib.dataclasses.replace(lock_lib._myself(), **changes)
    assert lock_lib._create(directory / "lock" / "000001.json", owner)
    return owner


def test_free_again_after_use(anywhere):
    for _ in range(2):
        with locked(anywhere, **FAST) as check:
            check()
            assert left(anywhere) == ["000001.json"]
        assert left(anywhere) == []


def test_a_second_one_is_refused_at_once_on_the_same_machine(anywhere):
    refused = raises_naming(LockedError, f"--job_log_dir={anywhere}", "in use", f"process {os.getpid()} on")
    with locked(anywhere, **FAST):
        with refused, locked(anywhere, heartbeat_seconds=100, stale_seconds=1000):
            raise AssertionError("two hold the lock")
        assert left(anywhere) == ["000001.json"]


def test_a_second_one_is_refused_while_the_heart_beats_on_another_machine(anywhere, monkeypatch):
    with locked(anywhere, **FAST):
        monkeypatch.setattr(lock_lib, "_machine", lambda: "another")
        with (
            raises_naming(LockedError, "in use"),
            locked(anywhere, heartbeat_seconds=0.1, stale_seconds=20),
        ):
            raise AssertionError("two hold the lock")


def test_the_lock_of_a_process_that_was_killed_is_taken_over_at_once(tmp_path, caplog):
    code = "import sys, time\nfrom etils import epath\nfrom spmd_trainer.storage.lock import locked\n"
    code += "with locked(epath.Path(sys.argv[1])):\n    print('locked', flush=True)\n    time.sleep(1000)\n"
    process = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "locked\n"
    with raises_naming(LockedError, "in use", f"process {process.pid} on"), locked(epath.Path(tmp_path)):
        raise AssertionError("two hold the lock")
    process.kill()
    process.wait()
    with locked(epath.Path(tmp_path), stale_seconds=1000):
        assert left(epath.Path(tmp_path)) == ["000002.json"]
    assert_names(caplog.text, f"locked by process {process.pid}", "taking it over")


def test_the_lock_of_a_silent_process_elsewhere_is_taken_over(anywhere, caplog):
    leave_a_lock(anywhere, host="node-7", machine="another", pid=1)
    with locked(anywhere, **FAST):
        assert left(anywhere) == ["000002.json"]
    assert_names(caplog.text, "locked by process 1 on node-7")


def test_a_process_id_that_is_used_again_is_another_process(anywhere):
    leave_a_lock(anywhere, process_start="12")
    with locked(anywhere, heartbeat_seconds=100, stale_seconds=1000):
        assert left(anywhere) == ["000002.json"]


@pytest.mark.parametrize("content", ["", "{", "[]", json.dumps({"host": "x"})])
def test_an_unreadable_lock_is_stale(anywhere, content):
    path = anywhere / "lock" / "000001.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    with locked(anywhere, heartbeat_seconds=0.1, stale_seconds=0.1):
        assert left(anywhere) == ["000002.json"]


@pytest.mark.parametrize("written", ["", '{"host": "no'])
def test_a_lock_that_is_being_written_is_not_taken_over(tmp_path, monkeypatch, written):
    """On a mount without hard links, the file is there a moment before its content."""
    path = epath.Path(tmp_path) / "lock" / "000001.json"
    path.parent.mkdir()
    path.write_text(written)
    # While the second one waits, the first one finishes.
    monkeypatch.setattr(lock_lib.time, "sleep", lambda _: path.write_text(lock_lib._text(lock_lib._myself())))
    with raises_naming(LockedError, "in use", f"process {os.getpid()} on"), locked(epath.Path(tmp_path)):
        raise AssertionError("two hold the lock")
    assert left(epath.Path(tmp_path)) == ["000001.json"]


def test_a_lock_that_is_removed_before_it_can_be_read_is_free(tmp_path, monkeypatch):
    path = epath.Path(tmp_path) / "lock" / "000001.json"
    path.parent.mkdir()
    path.write_text("")
    monkeypatch.setattr(lock_lib.time, "sleep", lambda _: path.unlink())
    with locked(epath.Path(tmp_path)):
        assert left(epath.Path(tmp_path)) == ["000001.json"]


def until_it_raises(call):
    for _ in range(600):
        call()
        time.sleep(0.05)


def test_whoever_was_stopped_for_too_long_is_told(anywhere):
    with locked(anywhere, heartbeat_seconds=0.1, stale_seconds=1.0) as check:
        lock_lib._create(anywhere / "lock" / "000002.json", lock_lib._myself())
        with raises_naming(LockedError, "taken over"):
            until_it_raises(check)
    assert sorted(left(anywhere)) == ["000001.json", "000002.json"]


def test_of_many_that_try_at_once_one_wins(anywhere):
    leave_a_lock(anywhere, process_start="12")
    start, done = threading.Barrier(6), threading.Event()

    def attempt(_):
        start.wait()
        try:
            with locked(anywhere, heartbeat_seconds=100, stale_seconds=1000):
                done.wait(600)  # a busy machine must not let the winner go early
                return True
        except LockedError:
            return False

    with concurrent.futures.ThreadPoolExecutor(6) as pool:
        running = [pool.submit(attempt, number) for number in range(6)]
        refused, _ = concurrent.futures.wait(running, timeout=60, return_when=concurrent.futures.FIRST_COMPLETED)
        while sum(future.done() for future in running) < 5:
            concurrent.futures.wait([future for future in running if not future.done()], timeout=0.1)
        done.set()
        assert sum(future.result() for future in running) == 1
    assert refused


def test_a_lower_number_is_given_back_at_once(anywhere):
    """The first number is tried without looking; the lock that was taken over from it has a higher one."""
    leave_a_lock(anywhere, process_start="12")
    with locked(anywhere, **FAST):
        assert left(anywhere) == ["000002.json"]
        with pytest.raises(LockedError), locked(anywhere, heartbeat_seconds=100, stale_seconds=1000):
            raise AssertionError("two hold the lock")
        assert left(anywhere) == ["000002.json"]
    assert left(anywhere) == []
