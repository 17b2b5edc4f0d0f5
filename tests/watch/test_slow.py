"""Slow processes are named with the part that is slow; even ones, however noisy, are not."""

from __future__ import annotations

import json
import re

import pytest
from facts import assert_names
from simulated import Processes

from spmd_trainer.watch import slow
from spmd_trainer.watch.slow import SlowProcesses
from spmd_trainer.watch.step_parts import WINDOW

HOST_ONLY = {"input": 0.004, "dispatch": 0.006, "device": 0.0, "probe": 0.0005}


def lines_of(
    processes: Processes, steps: int, factors=None, more=None, judge=None, every: int = 5
) -> list[tuple[int, str]]:
    """Takes steps; returns the lines of the log and the steps at which they came."""
    judge = judge or SlowProcesses()
    found = []
    for _ in range(steps):
        processes.take(factors or {}, more)
        if processes.step % every == 0:
            found += [(processes.step, line) for line in judge.update(processes.windows())]
    return found


@pytest.mark.parametrize("medians", [Processes.MEDIANS, HOST_ONLY], ids=["device", "host only"])
@pytest.mark.parametrize("noise", [0.1, 0.6])
@pytest.mark.parametrize("count", [2, 4])
def test_even_processes_raise_no_alarm(count, noise, medians):
    assert lines_of(Processes(count, 0, noise, medians), 1000, every=20) == []


@pytest.mark.slow
@pytest.mark.parametrize("count", [2, 3, 4, 16, 64])
def test_even_processes_raise_no_alarm_over_many_seeds(count):
    found = []
    for seed in range(100, 101 + 24 // count):
        for noise in (0.1, 0.3, 0.6):
            for medians in (Processes.MEDIANS, HOST_ONLY):
                found += lines_of(Processes(count, seed, noise, medians), 1000)
    assert found == []


@pytest.mark.parametrize("count", [2, 3, 4, 8])
@pytest.mark.parametrize("part", ["input", "dispatch", "device"])
@pytest.mark.parametrize("seed", range(2))
def test_a_process_a_third_slower_is_named_with_its_part_within_20_steps_of_a_full_window(count, part, seed):
    processes = Processes(count, seed, 0.05)
    judge = SlowProcesses()
    assert lines_of(processes, 100, judge=judge) == []
    slow_one = count - 1
    whole = 0.13
    if part == "device":
        slowed = {"factors": {(slow_one, "device"): 1.42, (slow_one, "probe"): 1.42}}
    else:
        slowed = {"more": {(slow_one, part): 0.32 * whole}}
    found = lines_of(processes, 2 * WINDOW, judge=judge, **slowed)
    assert len(found) == 1, found
    step, line = found[0]
    assert step <= 100 + 2 * WINDOW
    assert line.startswith(f"process {slow_one} (host h{slow_one}) is slow: {part} takes "), line
    again = lines_of(processes, 100, judge=judge)
    assert len(again) == 1, again
    assert_names(again[0][1], f"process {slow_one}", f"host h{slow_one}", "fast", "over steps")
    assert "slow" not in again[0][1]


def test_a_process_is_named_once_and_again_for_another_part():
    processes, judge = Processes(4, 0, 0.05), SlowProcesses()
    first = lines_of(processes, 200, more={(2, "input"): 0.11}, judge=judge)
    second = lines_of(processes, 200, more={(2, "dispatch"): 0.11}, judge=judge)
    assert [line.split(":")[0] for _, line in first + second] == ["process 2 (host h2) is slow"] * 2
    assert re.search(r"input takes 1[23]\d ms .*\b(19|20)\S* ms .*\bmedian of 4 processes", first[0][1])
    assert re.search(r"dispatch takes 1[12]\d ms .*\b(9|10)\S* ms ", second[0][1])


def test_what_the_devices_hide_is_said():
    processes = Processes(4, 0, 0.05)
    for _ in range(30):
        processes.take({}, {(1, "dispatch"): 0.1})
    told = {p: window | {"dry": 0.0} for p, window in processes.windows().items()}
    (line,) = SlowProcesses().update(told)
    assert_names(line, "steps 11 to 30", "the devices have work", "no step waits")


def test_less_than_a_millisecond_is_not_named():
    tiny = {"input": 0.0001, "dispatch": 0.0005, "device": 0.001, "probe": 0.0005}
    assert lines_of(Processes(4, 0, 0.02, tiny), 100, more={(0, "dispatch"): 0.0009}) == []


@pytest.mark.parametrize("gap", [3, 150, 300])
def test_windows_told_at_different_moments_are_compared_over_the_same_steps(gap):
    processes, judge = Processes(4, 0, 0.1), SlowProcesses()
    for _ in range(320):
        processes.take({}, {})
    early = {p: processes.window(p) for p in (0, 1)}
    for _ in range(gap):
        processes.take({(p, part): 4.0 for p in range(4) for part in ("input", "dispatch")}, {})  # load on all
    late = {p: processes.window(p) for p in (2, 3)}
    verdicts = slow.judge(early | late)
    assert len(verdicts) == 4
    assert {verdict.steps for verdict in verdicts} == {(301, 320)}
    assert judge.update(early | late) == []


def test_nothing_is_judged_before_all_processes_have_told_a_window():
    processes = Processes(4, 0, 0.05)
    for _ in range(30):
        processes.take({}, {(2, "input"): 0.2})
    told = processes.windows()
    assert slow.judge(told | {1: None}) == []
    assert slow.judge({2: told[2]}) == []
    assert slow.judge(told, newer_than=30) == []
    assert [verdict.process for verdict in slow.judge(told, newer_than=29) if verdict.is_slow] == [2]


def test_windows_survive_json():
    processes = Processes(4, 0, 0.05)
    for _ in range(500):
        processes.take({}, {})
    told = processes.windows()
    assert slow.judge({p: json.loads(json.dumps(window)) for p, window in told.items()}) == slow.judge(told)
    assert len(json.dumps(told[0])) < 2500
