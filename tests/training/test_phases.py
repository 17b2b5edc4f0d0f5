"""Lines of a phase that lasts: the beginning, a clock at growing intervals, how long it took."""

import itertools
import threading

import pytest

from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.training.live_status import SHOWN_LIVE, PhaseStatus, live
from spmd_trainer.training.phases import Phase


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def lines_at(phase, clock, moments):
    """Lets the clock come to each moment inside the phase; what the thread would see by itself much later."""
    with phase:
        for clock.now in moments:
            phase.check()


def test_it_says_that_it_begins_that_it_lasts_and_how_long_it_took():
    clock, lines = Clock(), []
    phase = Phase("compiling the train step", report=lines.append, clock=clock)
    lines_at(phase, clock, [1, 9, 10, 11, 19, 20, 40, 59, 60, 61, 119, 120, 300, 301])
    what = "compiling the train step"
    assert lines == [
        f"{what} ...",
        f"{what}: 10 s so far",
        f"{what}: 20 s so far",
        f"{what}: 40 s so far",
        f"{what}: 1m00s so far",
        f"{what}: 2m00s so far",
        f"{what}: 5m00s so far",
        f"{what} took 5m01s",
    ]


def test_details_stand_in_the_first_line_and_done_in_the_last():
    clock, lines = Clock(), []
    with Phase("restoring step 4", "15 variables", report=lines.append, clock=clock) as phase:
        clock.now = 0.5
        phase.done = "restored step 4 from DIR"
    assert lines == ["restoring step 4: 15 variables", "restored step 4 from DIR in 0.50 s"]


def test_a_short_phase_may_be_silent_and_a_long_one_says_its_batches_and_what_is_left():
    clock, lines = Clock(), []
    lines_at(Phase("evaluating x", announce_after=2.0, report=lines.append, clock=clock), clock, [1, 1.9])
    assert lines == []
    clock.now = 0.0
    with Phase("evaluating x", announce_after=2.0, total=4, report=lines.append, clock=clock) as phase:
        for clock.now in (2.0, 6.0, 12.0):
            phase.check()
            phase.advance()
        clock.now = 21.0
        phase.check()
    assert lines == [
        "evaluating x ...",
        "evaluating x: 12 s so far, 2 of 4 batches, about 12 s left",
        "evaluating x: 21 s so far, 3 of 4 batches, about 7.0 s left",
        "evaluating x took 21 s",
    ]


def test_without_a_known_number_of_batches_nothing_is_estimated():
    clock, lines = Clock(), []
    with Phase("decoding x", report=lines.append, clock=clock) as phase:
        phase.advance()
        clock.now = 10.0
        phase.check()
    assert lines[1] == "decoding x: 10 s so far, 1 batches"


def test_the_clock_of_an_outer_phase_is_silent_while_an_inner_one_lasts():
    clock, lines = Clock(), []
    with Phase("outer", report=lines.append, clock=clock) as outer:
        with Phase("inner", report=lines.append, clock=clock) as inner:
            clock.now = 10.0
            outer.check()
            inner.check()
        clock.now = 20.0
        outer.check()
    assert lines == [
        "outer ...",
        "inner ...",
        "inner: 10 s so far",
        "inner took 10 s",
        "outer: 20 s so far",
        "outer took 20 s",
    ]


def test_a_phase_that_fails_leaves_the_last_word_to_its_error():
    lines = []
    with pytest.raises(RuntimeError, match="broken"), Phase("compiling", report=lines.append):
        raise RuntimeError("broken")
    assert lines == ["compiling ..."]


def test_its_thread_logs_by_itself():
    logged = threading.Event()

    def report(line):
        if "so far" in line:
            logged.set()

    # A clock that jumps a minute whenever it is read.
    with Phase("compiling", clock=itertools.count(0, 60).__next__, report=report):
        assert logged.wait(60)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.0, "0.00 s"),
        (0.42, "0.42 s"),
        (0.996, "1.0 s"),
        (4.21, "4.2 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1m00s"),
    ],
)
def test_durations_have_the_digits_that_a_person_reads(seconds, text):
    assert format_duration(seconds) == text


def test_a_display_sees_the_phases_that_go_on_and_their_batches():
    clock = Clock()
    with Phase("outer", report=len, clock=clock):
        assert [phase.what for phase in live.phases()] == ["outer"]
        clock.now = 3.0
        with Phase("inner", total=4, report=len, clock=clock) as inner:
            inner.advance()
            clock.now = 5.0
            assert list(live.phases()) == [PhaseStatus("inner", 2.0, 1, 4)]
        assert list(live.phases()) == [PhaseStatus("outer", 5.0)]
    assert not list(live.phases())


def test_the_clock_of_a_live_display_replaces_lines_that_say_how_long_it_lasts(caplog):
    clock = Clock()
    with caplog.at_level("INFO", logger="absl"):
        lines_at(Phase("compiling", clock=clock), clock, [10])
    assert caplog.messages[:2] == ["compiling ...", "compiling: 10 s so far"]
    assert [hasattr(record, *SHOWN_LIVE) for record in caplog.records] == [False, True, False]
