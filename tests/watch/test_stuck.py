"""Who is behind is the process that the others wait for."""

from __future__ import annotations

import dataclasses

import pytest
from facts import assert_names
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_trainer.watch import stuck
from spmd_trainer.watch.stuck import DEVICES, OTHERS_INPUT, Beat, Seen

SILENT = 10.0


def at(process: int, step: int, part: str = DEVICES, finished: int | None = None, **fields) -> Beat:
    """A beat within training."""
    activity = fields.pop("activity", f"training step {step + (part in ('input', OTHERS_INPUT))}")
    return Beat(process, 5, step, step - 1 if finished is None else finished, activity, part, 30.0, **fields)


def find(*beats: Beat, silent: dict[int, float] | None = None) -> stuck.Verdict:
    return stuck.find([Seen(beat, 30.0, (silent or {}).get(beat.process, 1.0)) for beat in beats], SILENT)


def test_the_process_that_waits_for_its_input_is_behind():
    verdict = find(at(0, 13), at(1, 12, "input"), at(2, 13))
    assert verdict.behind == (1,)
    assert_names(verdict.text, "behind: process 1", "step 13, input", "31 s", "Processes 0, 2", "step 13, waiting")


def test_all_that_wait_for_the_devices_are_said_to():
    verdict = find(at(0, 13), at(1, 13))
    assert verdict.behind == ()
    assert_names(verdict.text, "nobody", "2 processes", "the devices", "step 13")


def test_a_silent_process_is_behind_wherever_it_was():
    verdict = find(at(0, 12, "input"), at(1, 13), at(2, 13), silent={2: 40.0})
    assert verdict.behind == (2,)
    assert_names(verdict.text, "process 2", "last beat", "40 s", "step 13, waiting")


@pytest.mark.parametrize(
    ("beats", "behind"),
    [
        # The scalars of fewer steps have come back from its devices.
        ((at(0, 13, finished=12), at(1, 13, finished=11)), (1,)),
        # Its batch is not there, and the others have voted on theirs.
        ((at(0, 12, OTHERS_INPUT), at(1, 12, "input"), at(2, 12, OTHERS_INPUT)), (1,)),
        # It has evaluated fewer batches.
        (
            tuple(at(p, 20, "evaluation", activity="evaluation at step 20", batches=4 - p) for p in (0, 1)),
            (1,),
        ),
        # It has handed fewer steps to its devices, though more have come back: a callback of its own hangs.
        ((at(0, 13, finished=11), at(1, 12, "step", finished=12)), (1,)),
        # It is in a callback of its own, and the others save.
        ((at(0, 20, "other", activity="histograms at step 20"), at(1, 20, "save", activity="saving step 20")), (0,)),
        # It still saves, and most others evaluate.
        (
            (
                at(0, 20, "save", activity="saving step 20"),
                *(at(p, 20, "evaluation", activity="evaluation at step 20") for p in (1, 2)),
            ),
            (0,),
        ),
        # Of two that wait at different points, neither is known to be first.
        (
            (
                at(0, 20, "save", activity="saving step 20"),
                at(1, 20, "evaluation", activity="evaluation at step 20"),
            ),
            (),
        ),
        ((at(0, 12, "input"),), ()),
    ],
)
def test_each_rule(beats, behind):
    assert find(*beats).behind == behind


def test_a_single_process_is_told_where_it_is():
    assert find(at(0, 12, "input")).text == "training step 13, input, for 30 s"


@dataclasses.dataclass
class Process:
    """A process of a run in which step n is done once all have dispatched it, and `keep` steps may be in flight."""

    step: int = 0
    part: str = "input"
    finished: int = 0


def run_until_nothing_moves(processes: list[Process], bad: int, stops: tuple[int, str], keep: int, order) -> None:
    def advance(process: Process, is_bad: bool) -> bool:
        if is_bad and (process.step, process.part) == stops:
            return False
        if process.part == "input":
            process.part, process.step = "step", process.step + 1
        elif process.part == "step":
            process.part = DEVICES
        else:
            done = min(other.step for other in processes)
            if process.finished < process.step - keep and process.finished < done:
                process.finished += 1
            elif process.finished >= process.step - keep:
                process.part = "input"
            else:
                return False
        return True

    moved = [True]
    while any(moved):
        moved = [advance(processes[p], p == bad) for p in order]


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_whoever_stops_for_ever_is_found(data):
    count, keep = data.draw(st.integers(2, 6)), data.draw(st.integers(0, 3))
    bad = data.draw(st.integers(0, count - 1))
    stops = data.draw(st.tuples(st.integers(1, 9), st.sampled_from(("input", "step"))))
    processes = [Process() for _ in range(count)]
    run_until_nothing_moves(processes, bad, stops, keep, data.draw(st.permutations(range(count))))
    beats = [at(p, one.step, one.part, one.finished) for p, one in enumerate(processes)]
    assert find(*beats).behind == (bad,)


BEATS = st.lists(
    st.builds(
        Seen,
        st.builds(
            Beat,
            process=st.integers(0, 50),
            number=st.integers(1, 9),
            step=st.integers(0, 3),
            finished=st.integers(0, 3),
            activity=st.sampled_from(("training step 3", "saving step 3", "start")),
            part=st.sampled_from(("input", "step", "save", "start", DEVICES, OTHERS_INPUT)),
            seconds=st.floats(0, 1e5),
            phase=st.sampled_from(("", "compiling the train step")),
            batches=st.integers(0, 2),
        ),
        still=st.floats(0, 1e5),
        silent=st.floats(0, 20),
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda seen: seen.beat.process,
)


@settings(deadline=None)
@given(BEATS, st.data())
def test_the_verdict_does_not_depend_on_the_order(seen, data):
    assert stuck.find(data.draw(st.permutations(seen)), SILENT).behind == stuck.find(seen, SILENT).behind


@settings(deadline=None)
@given(BEATS)
def test_the_named_are_some_of_all_and_the_silent_are_among_them(seen):
    verdict = stuck.find(seen, SILENT)
    silent = tuple(sorted(one.beat.process for one in seen if one.silent > SILENT))
    assert set(verdict.behind) <= {one.beat.process for one in seen}
    assert verdict.behind == silent if silent else len(verdict.behind) < len(seen)
    assert all(f"process {process}" in verdict.text for process in verdict.behind[:8])
    assert len(verdict.text) < 4000
    assert stuck.standing_still(seen) == min(one.still for one in seen)


@given(BEATS)
def test_beats_survive_the_store(seen):
    for one in seen:
        assert Beat.from_json(one.beat.to_json()) == one.beat


@pytest.mark.parametrize("text", ["", "{}", '{"process": 1, "colour": 2}', "[1]"])
def test_what_is_no_beat_is_refused(text):
    with pytest.raises(ValueError, match=r"not a beat|Expecting value"):
        Beat.from_json(text)
