"""The progress line: at intervals of steps, and at least every half minute."""

import pytest

from spmd_trainer.step.packing import Scalars
from spmd_trainer.watch.progress import LONGEST_SILENCE, Progress


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


def run(clock, caplog, seconds_per_step, steps=range(1, 11)):
    """Reports steps of so many seconds, an interval of 5; returns {step: timing} and the steps that had a line."""
    progress = Progress(num_steps=10, items_per_step=100, unit="tokens", interval=5, clock=clock)
    progress.start(0)
    timings, lines = {}, []
    with caplog.at_level("INFO", logger="absl"):
        for step in steps:
            clock.now += seconds_per_step
            caplog.clear()
            timings[step] = progress.report(step, Scalars(1.5))
            lines += [(step, message) for message in caplog.messages]
    return timings, lines


def test_fast_steps_have_a_line_at_each_interval(clock, caplog):
    timings, lines = run(clock, caplog, 2.0)
    assert [step for step, _ in lines] == [5, 10]
    assert [step for step, timing in timings.items() if timing] == [5, 10]


def test_slow_steps_have_lines_in_between_and_the_same_timings(clock, caplog):
    slow, lines = run(clock, caplog, LONGEST_SILENCE / 2)
    assert [step for step, _ in lines] == [2, 4, 5, 7, 9, 10]
    assert all("1.5000" in line and "7 tokens/s  15000 ms/step" in line for _, line in lines)
    assert [step for step, timing in slow.items() if timing] == [5, 10]
    assert slow[5] == slow[10] == {"steps_per_sec": pytest.approx(1 / 15), "tokens_per_sec": pytest.approx(100 / 15)}


def test_a_pause_counts_for_no_step(clock, caplog):
    progress = Progress(num_steps=10, items_per_step=100, unit="tokens", interval=5, clock=clock)
    progress.start(0)
    clock.now = 1000.0
    progress.start(0)  # an evaluation took that long
    clock.now = 1005.0
    with caplog.at_level("INFO", logger="absl"):
        assert progress.report(4, Scalars(1.5)) == {}
    assert not caplog.messages
    assert progress.report(5, Scalars(1.5))["steps_per_sec"] == pytest.approx(1.0)


def test_the_live_line_reads_the_latest_step_and_the_speed_of_the_interval(clock):
    progress = Progress(
        num_steps=10,
        items_per_step=100,
        unit="tokens",
        interval=5,
        flops_per_item={"mfu_6n": 6.0},
        peak_flops=1200.0,
        clock=clock,
    )
    assert progress.status() is None
    progress.start(0)
    status = progress.status()
    assert (status.step, status.num_steps, status.loss, status.seconds_per_step, status.utilization) == (
        0,
        10,
        None,
        None,
        {},
    )
    for step in range(1, 6):
        clock.now += 1.0
        progress.report(step, Scalars(2.0 - step))
    status = progress.status()
    assert (status.step, status.loss, status.seconds_per_step) == (5, -3.0, 1.0)
    assert status.utilization == {"mfu_6n": 0.5}
    # A slower interval begins. Its first step says little; after two seconds the interval has its own speed.
    clock.now += 1.5
    progress.report(6, Scalars(0.0))
    assert (progress.status().step, progress.status().seconds_per_step) == (6, 1.0)
    clock.now += 1.5
    progress.report(7, Scalars(0.0))
    assert progress.status().seconds_per_step == 1.5
    # After a pause, the last speed stays until there is a new one.
    progress.report(10, Scalars(0.0))
    clock.now += 100.0
    progress.start(10)
    assert progress.status().seconds_per_step == pytest.approx(3.0 / 5)
