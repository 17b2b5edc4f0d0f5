"""Beats reach process 0, and its conclusion reaches all; who hears nothing of process 0 concludes that by itself."""

from __future__ import annotations

import dataclasses
import threading

import jax
import pytest
from facts import assert_names

from spmd_trainer.watch.board import Board, Digest, Table
from spmd_trainer.watch.stuck import DEVICES, Beat

PERIOD, SILENT = 1.0, 10.0


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Store:
    """The calls of JAX's client that a board makes."""

    def __init__(self):
        self.values: dict[str, str] = {}
        self.reads = 0

    def key_value_set(self, key: str, value: str, allow_overwrite: bool = False) -> None:
        assert allow_overwrite or key not in self.values
        self.values[key] = value

    def key_value_dir_get(self, key: str) -> list[tuple[str, str]]:
        self.reads += 1
        return [(name, value) for name, value in self.values.items() if name.startswith(key)]

    def key_value_try_get(self, key: str) -> str:
        if key not in self.values:
            raise jax.errors.JaxRuntimeError("NOT_FOUND: no such key")
        return self.values[key]


class Job:
    """Boards of some processes that are at `steps`."""

    def __init__(self, count: int):
        self.clock, self.store = Clock(), Store()
        self.steps = [0] * count
        self.parts = [DEVICES] * count
        self.stacks = [""] * count
        self.number = 0
        self.boards = [
            Board(self.store, p, count, lambda p=p: self.beat(p), period=PERIOD, silent_after=SILENT, clock=self.clock)
            for p in range(count)
        ]
        for board in self.boards:  # as in a process of its own
            board._keys = self.boards[0]._keys

    def beat(self, process: int) -> Beat:
        self.number += 1
        step = self.steps[process]
        return Beat(
            process,
            self.number,
            step,
            0,
            f"training step {step}",
            self.parts[process],
            1.0,
            stacks=self.stacks[process],
        )

    def turn(self, *processes: int, seconds: float = PERIOD) -> None:
        self.clock.now += seconds
        for process in processes:
            self.boards[process].turn()
            self.boards[process].conclusion()


def test_all_processes_get_one_conclusion_with_the_stacks_of_who_is_behind():
    job = Job(3)
    job.steps, job.parts[1], job.stacks[1] = [13, 12, 13], "input", "in read_rows"
    for _ in range(6):
        job.turn(2, 1, 0)
    job.turn(1, 2)  # the others read what process 0 has just published
    digests = [board.conclusion() for board in job.boards]
    assert {digest.behind for digest in digests} == {(1,)}
    assert {digest.text for digest in digests} == {digests[0].text}
    assert [digest.stacks for digest in digests] == [{1: "in read_rows"}] * 3
    assert [digest.still for digest in digests] == pytest.approx([6.0] * 3, abs=PERIOD)
    assert job.store.reads == 6  # one read of all beats for each turn of process 0


def test_progress_of_any_process_ends_the_standstill():
    job = Job(2)
    for _ in range(5):
        job.turn(1, 0)
    assert job.boards[0].conclusion().still == 4.0
    job.steps[1] = 1
    job.turn(1, 0)
    assert job.boards[0].conclusion().still == 0.0


def test_a_process_without_beats_is_behind_and_its_last_place_is_known():
    job = Job(2)
    job.steps = [12, 12]
    job.turn(1, 0)
    for _ in range(12):
        job.turn(0)
    assert job.boards[0].conclusion().behind == (1,)
    assert_names(job.boards[0].last_beat(1), "step 12", "the devices", "12 s")


def test_a_process_that_has_never_beaten_is_behind():
    job = Job(2)
    for _ in range(12):
        job.turn(0)
    digest = job.boards[0].conclusion()
    assert digest.behind == (1,)
    assert_names(digest.text, "process 1", "first beat")
    assert job.boards[0].last_beat(1) == ""


def test_the_others_notice_that_process_0_is_silent():
    job = Job(2)
    job.steps = [12, 12]
    job.turn(1, 0)
    for _ in range(14):
        job.turn(1)
    digest = job.boards[1].conclusion()
    assert digest.behind == (0,)
    assert digest.still == pytest.approx(14.0, abs=1.0)
    assert_names(job.boards[1].last_beat(0), "step 12", "the devices", "13 s")


def test_a_silent_process_0_does_not_hide_that_this_process_makes_progress():
    job = Job(2)
    job.turn(1, 0)
    for step in range(14):
        job.steps[1] = step
        job.turn(1)
    assert job.boards[1].conclusion().still == 0.0


def test_time_in_which_this_process_was_stopped_itself_does_not_count():
    job = Job(1)
    job.turn(0)
    job.turn(0)
    job.turn(0, seconds=3600.0)
    assert job.boards[0].conclusion().still == 1.0
    assert job.boards[0].conclusion().behind == ()


def test_a_digest_survives_the_store():
    table = Table(3, 0.0)
    table.note(Beat(0, 1, 3, 2, "training step 3", "input", 1.0, window={"steps": 4}, stacks="s"), 1.0)
    digest = dataclasses.replace(table.digest(2.0, SILENT), stacks={1: "a\nb"})
    assert Digest.from_json(digest.to_json()) == digest


def test_a_store_that_fails_is_logged_once_and_blocks_nobody(caplog):
    failures = threading.Semaphore(0)

    class Broken(Store):
        def key_value_set(self, *args, **kwargs):
            failures.release()
            raise RuntimeError("UNAVAILABLE: no connection")

    board = Board(Broken(), 1, 2, lambda: Beat(1, 1, 0, 0, "start", "start", 0.0), period=0.001, silent_after=0.05)
    board.start()
    for _ in range(100):
        assert failures.acquire(timeout=60)
        board.conclusion()
    board.close()
    assert sum("can't be exchanged" in record.message for record in caplog.records) == 1
