"""Stacks name threads and lines, the main thread first, and are written even while no Python thread can run."""

from __future__ import annotations

import ctypes
import threading
import time

from etils import epath

from spmd_trainer.watch.stacks import HeldInterpreter, stacks


def test_the_main_thread_comes_first_then_those_that_read_input():
    ends, began = threading.Event(), threading.Semaphore(0)

    def read_rows():
        began.release()
        ends.wait()

    threads = [threading.Thread(target=read_rows, name=name) for name in ("other", "prefetch-train", "watchdog")]
    for thread in threads:
        thread.start()
        assert began.acquire(timeout=60)
    try:
        text = stacks()
    finally:
        ends.set()
    order = [text.index(f"({name})") for name in ("MainThread", "prefetch-train", "other")]
    assert order == sorted(order)
    assert "(watchdog)" not in text
    assert "in read_rows" in text
    assert 'test_stacks.py", line' in text


def test_they_are_cut_short():
    assert len(stacks(200)) < 250
    assert stacks(200).endswith("cut short")


def test_c_code_that_holds_the_interpreter_is_found(tmp_path):
    path = epath.Path(tmp_path) / "logs" / "stuck.txt"
    held = HeldInterpreter(path, 0.2)
    held.alive()
    ctypes.PyDLL(None).usleep(900_000)  # PyDLL keeps the interpreter's lock
    held.close()
    text = path.read_text()
    assert "in test_c_code_that_holds_the_interpreter_is_found" in text


def test_nothing_is_left_where_nothing_was_held(tmp_path):
    path = epath.Path(tmp_path) / "logs" / "stuck.txt"
    held = HeldInterpreter(path, 60.0)
    for _ in range(3):
        held.alive()
        time.sleep(0.01)
    held.close()
    assert not path.parent.exists()
