"""A tracker's queue and thread: nothing that a tracker does reaches the run, and what it loses is counted."""

import json
import logging
import threading

import pytest
from facts import assert_names, missing_facts
from tracking_helpers import TEXTS, facts, page

from spmd_trainer.watch.tracking import feed as feed_lib
from spmd_trainer.watch.tracking.base import Tracker
from spmd_trainer.watch.tracking.feed import Feed, RunIds


class Recorder(Tracker):
    """Notes its calls. Raises in the methods that it is told; waits in them for `go` if it is given."""

    def __init__(self, fails=(), waits=(), batch=1):
        self.calls = []
        self.fails = fails
        self.waits = waits
        self.batch = batch
        self.go = threading.Event()
        self.arrived = threading.Event()

    def _note(self, method, *about):
        self.calls.append((method, *about))
        if method in self.waits:
            self.arrived.set()
            self.go.wait()
        if method in self.fails:
            raise RuntimeError(f"no {method} today")

    def open(self, facts):
        self._note("open", facts.resume_id)
        return "id-1"

    def scalars(self, records):
        self._note("scalars", [(record.step, dict(record.values)) for record in records])

    def samples(self, step, dataset, rows):
        self._note("samples", step, dataset, len(rows))

    def histograms(self, step, histograms):
        self._note("histograms", step)

    def page(self, path):
        self._note("page", path.name)

    def close(self, status):
        self._note("close", status)


def warnings(caplog):
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


def fed(tmp_path, tracker, **settings):
    feed = Feed("mine", tracker, **settings)
    feed.start(facts(tmp_path), RunIds(facts(tmp_path).job_log_dir))
    return feed


def run(tmp_path, tracker, **settings):
    feed = fed(tmp_path, tracker, **settings)
    feed.scalars(1, {"loss": 2.0})
    feed.samples(1, "prompts", TEXTS)
    feed.histograms(1, {})
    feed.scalars(2, {"loss": 1.0})
    feed.end("finished", page(tmp_path))
    feed.join(30)


def test_a_tracker_is_told_everything_in_order(tmp_path, caplog):
    tracker = Recorder()
    run(tmp_path, tracker)
    assert tracker.calls == [
        ("open", None),
        ("scalars", [(1, {"loss": 2.0})]),
        ("samples", 1, "prompts", 2),
        ("histograms", 1),
        ("scalars", [(2, {"loss": 1.0})]),
        ("page", "run.html"),
        ("close", "finished"),
    ]
    assert not warnings(caplog)


def test_the_next_start_continues_under_the_same_id(tmp_path):
    run(tmp_path, Recorder())
    again = Recorder()
    run(tmp_path, again)
    assert again.calls[0] == ("open", "id-1")


def test_unreadable_ids_begin_a_new_run(tmp_path, caplog):
    (tmp_path / "tracking.json").write_text('{"mine": ')
    tracker = Recorder()
    run(tmp_path, tracker)
    assert tracker.calls[0] == ("open", None)
    path = tmp_path / "tracking.json"
    assert any(not missing_facts(text, path, "can't be read") for text in warnings(caplog))


def test_two_callbacks_that_track_keep_all_ids(tmp_path):
    ids = [RunIds(facts(tmp_path).job_log_dir) for _ in range(2)]
    feeds = [Feed(name, Recorder()) for name in ("one", "two")]
    for feed, own in zip(feeds, ids, strict=True):
        feed.start(facts(tmp_path), own)
        feed.end("finished", None)
        feed.join(30)
    assert json.loads((tmp_path / "tracking.json").read_text()) == {"one": "id-1", "two": "id-1"}


def test_an_id_that_cannot_be_written_stops_no_tracker(tmp_path, caplog):
    (tmp_path / "gone").mkdir()
    ids = RunIds(facts(tmp_path / "gone").job_log_dir)
    (tmp_path / "gone").rmdir()
    (tmp_path / "gone").write_text("a file where the directory was")
    tracker = Recorder()
    feed = Feed("mine", tracker)
    feed.start(facts(tmp_path), ids)
    feed.end("finished", None)
    feed.join(30)
    assert tracker.calls[-1] == ("close", "finished")
    assert any(not missing_facts(text, "tracker mine", "restart", "new run") for text in warnings(caplog))


LOST = {"scalars": 2, "samples": 1, "histograms": 1, "page": 1}


@pytest.mark.parametrize("method", LOST)
def test_a_failure_is_told_once_and_counted(tmp_path, caplog, method):
    tracker = Recorder(fails=[method])
    run(tmp_path, tracker)
    first, last = warnings(caplog)
    assert_names(first, "tracker mine", f"failed in {method}", f"RuntimeError: no {method} today")
    assert last == f"tracker mine lost {LOST[method]} of 5 records: {LOST[method]} failed in {method}"
    assert [call[0] for call in tracker.calls] == [
        "open", "scalars", "samples", "histograms", "scalars", "page", "close"
    ]  # fmt: skip


def test_a_tracker_that_does_not_open_gets_nothing_else(tmp_path, caplog):
    tracker = Recorder(fails=["open"])
    run(tmp_path, tracker)
    assert [call[0] for call in tracker.calls] == ["open"]
    first, last = warnings(caplog)
    assert_names(first, "tracker mine", "failed in open", "RuntimeError")
    assert last.startswith("tracker mine lost 5 of 5 records: ")
    assert not (tmp_path / "tracking.json").exists()


def test_a_failure_at_the_end_loses_no_record(tmp_path, caplog):
    run(tmp_path, Recorder(fails=["close"]))
    (only,) = warnings(caplog)
    assert "failed in close" in only


def test_a_hanging_tracker_is_left_behind(tmp_path, caplog):
    tracker = Recorder(waits=["scalars"])
    feed = fed(tmp_path, tracker)
    for step in range(3):
        feed.scalars(step, {"loss": 1.0})
    assert tracker.arrived.wait(30)
    feed.end("finished", None)
    feed.join(0.01)
    hangs, lost = warnings(caplog)
    assert_names(hangs, "tracker mine", "hangs in scalars")
    assert_names(lost, "tracker mine", "3 of 3 records", "3 still waited")
    tracker.go.set()
    feed.join(30)
    assert tracker.calls[-1] == ("close", "finished")


def test_a_full_queue_is_told_once_and_counted(tmp_path, caplog):
    tracker = Recorder(waits=["open"])
    feed = fed(tmp_path, tracker, capacity=4)
    assert tracker.arrived.wait(30)
    for step in range(10):
        feed.scalars(step, {"loss": 1.0})
    tracker.go.set()
    feed.end("finished", page(tmp_path))  # the end and the page are never refused
    feed.join(30)
    steps = [record[0] for name, *about in tracker.calls if name == "scalars" for record in about[0]]
    assert steps == [0, 1, 2, 3]
    assert [call[0] for call in tracker.calls[-2:]] == ["page", "close"]
    slow, lost = warnings(caplog)
    assert_names(slow, "tracker mine", "too slow", "4 records")
    assert_names(lost, "tracker mine", "6 of 11 records", "6 came", "queue")


def test_scalars_that_wait_come_together(tmp_path):
    tracker = Recorder(waits=["open"], batch=3)
    feed = fed(tmp_path, tracker)
    for step in range(4):
        feed.scalars(step, {})
    feed.samples(4, "prompts", [])
    feed.scalars(5, {})
    tracker.go.set()
    feed.end("stopped", None)
    feed.join(30)
    steps = [[step for step, _ in about[0]] if name == "scalars" else name for name, *about in tracker.calls[1:]]
    assert steps == [[0, 1, 2], [3], "samples", [5], "close"]


def test_the_run_may_end_before_it_has_begun(tmp_path, caplog):
    feed = fed(tmp_path, Recorder())
    feed.end("failed", None)
    feed.join(feed_lib.CLOSE_SECONDS)
    assert not warnings(caplog)
