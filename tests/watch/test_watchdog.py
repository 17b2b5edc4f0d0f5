"""A run without progress is reported: where it is, for how long, whose fault, with stacks; then it ends, if it is to."""

from __future__ import annotations

import threading
import time
from types import SimpleNamespace

import pytest
from etils import epath
from facts import assert_names

from spmd_trainer.callbacks import RunTimes
from spmd_trainer.training.phases import Phase
from spmd_trainer.watch.board import Digest
from spmd_trainer.watch.link import STATUS_HANG, JobLink
from spmd_trainer.watch.stuck import not_yet
from spmd_trainer.watch.watchdog import HangError, Watchdog


@pytest.fixture
def run(tmp_path):
    """A run that has begun to save step 3."""
    times = RunTimes()
    return SimpleNamespace(
        activity=("saving step 3", times.begin("save")),
        times=times,
        step=3,
        input=None,
        waits_for_devices=lambda: False,
        hangs=False,
        job_log_dir=epath.Path(tmp_path),
    )


WHERE = "it is in training step 7"


def digest(still: float, behind: tuple[int, ...] = (), stacks: dict[int, str] | None = None) -> Digest:
    return Digest(still, behind, WHERE, stacks or {}, not_yet(0))


def test_reports_after_the_limit_then_at_twice_the_time(run):
    reports = []
    watchdog = Watchdog(10, report=reports.append)
    expected = {9: 0, 11: 1, 12: 1, 19: 1, 21: 2, 39: 2, 41: 3}
    for still, count in expected.items():
        watchdog.check(digest(still), run)
        assert len(reports) == count
    assert_names(reports[0], "no progress", "11 s", "--watchdog_seconds=10", "it goes on", WHERE)
    assert "test_watchdog.py" in reports[0]
    file = run.job_log_dir / "logs" / "stuck.process_0.txt"
    assert file.read_text().count(WHERE) == 3


def test_after_progress_the_full_time_counts_again(run):
    reports = []
    watchdog = Watchdog(10, report=reports.append)
    for still in (11, 21, 0, 9, 11):
        watchdog.check(digest(still), run)
    assert len(reports) == 3


def test_stacks_are_those_of_the_process_behind(run):
    reports = []
    Watchdog(10, report=reports.append).check(digest(11, (1, 2), {1: "in read_rows"}), run)
    assert "Stacks of process 1:\nin read_rows" in reports[0]
    assert_names(reports[0], "Process 2", "no stacks")
    assert "stuck.process_2.txt" in reports[0]
    assert "test_watchdog.py" not in reports[0]
    # This process's own are in its file.
    assert "test_watchdog.py" in (run.job_log_dir / "logs" / "stuck.process_0.txt").read_text()


def test_its_thread_reports_while_the_main_thread_hangs(run):
    reported = threading.Event()
    texts = []

    def report(text: str) -> None:
        texts.append(text)
        reported.set()

    watchdog = Watchdog(0.05, report=report)
    watchdog.on_open(run)
    try:
        assert reported.wait(60)
    finally:
        watchdog.on_end(run)
    # A thread of an earlier test, whose start failed, may still be compiling, and is named after it.
    assert_names(texts[0], "saving step 3, save")
    assert "in wait" in texts[0]
    assert "MainThread" in texts[0]


def test_batches_of_a_long_evaluation_are_progress(run):
    reports, limit = [], 0.5
    watchdog = Watchdog(limit, report=reports.append)
    watchdog.on_open(run)
    try:
        with Phase("evaluating heldout", announce_after=60.0) as phase:
            ends = time.monotonic() + 4 * limit
            while time.monotonic() < ends:
                phase.advance()
                time.sleep(0.01)
            assert not reports
            while not reports:  # no batch is finished any more
                time.sleep(0.01)
    finally:
        watchdog.on_end(run)
    assert "evaluating heldout" in reports[0]


class Left(Exception):
    """Stands for the end of the process."""


class Job(JobLink):
    def __init__(self):
        super().__init__()
        self.left: list[tuple[str, bool]] = []
        self.has_left = threading.Event()

    def leave(self, why, *, is_behind):
        self.left.append((why, is_behind))
        self.has_left.set()
        raise Left


def test_a_hang_does_the_last_work_and_leaves(run):
    job, errors = Job(), []
    run.fail = errors.append
    watchdog = Watchdog(0, hang_seconds=0.1, report=lambda text: None, job=job)
    watchdog.after_step(run, 3, None)
    watchdog.on_open(run)
    try:
        assert job.has_left.wait(60)
    finally:
        job.begin_to_leave()
        watchdog._left = 60.0
        watchdog.on_end(run)
    (why, is_behind), *_ = job.left
    assert "no progress for" in why
    assert "--hang_seconds=0.1" in why
    assert is_behind  # nobody else is
    assert isinstance(errors[0], HangError)
    assert errors[0].exit_status == STATUS_HANG
    assert job.leaving.is_set()
    assert run.hangs


def test_work_that_never_ends_does_not_keep_a_hanging_run(run, monkeypatch):
    monkeypatch.setattr("spmd_trainer.watch.watchdog._LAST_SECONDS", 0.05)
    job, never = Job(), threading.Event()
    run.fail = lambda error: never.wait()
    watchdog = Watchdog(0, hang_seconds=0.1, report=lambda text: None, job=job)
    watchdog.after_step(run, 3, None)
    watchdog.on_open(run)
    try:
        assert job.has_left.wait(60)
    finally:
        never.set()
        watchdog.on_end(run)


def test_zero_watches_nothing_and_less_is_refused(run):
    threads = threading.active_count()
    watchdog = Watchdog(0)
    watchdog.on_open(run)
    assert threading.active_count() == threads
    with pytest.raises(ValueError, match="watchdog_seconds=-1"):
        Watchdog(-1)
    with pytest.raises(ValueError, match="hang_seconds=-1"):
        Watchdog(1, hang_seconds=-1)
