"""What is due at the start, after a step and at the end, by the intervals alone."""

import pytest

from spmd_trainer.training.periodic import Due, Schedule

SCHEDULE = Schedule(
    num_steps=10,
    saves=True,
    save_interval=4,
    eval_interval=3,
    evaluates_at_end=True,
    decode_interval=2,
    decodes_at_end=True,
    decode_start=5,
)


class EveryFourth:
    """Checkpoints that are due at multiples of four."""

    def should_save(self, step):
        return step % 4 == 0


def due(step, *, asked=False, leaves=False):
    found = SCHEDULE.due(EveryFourth(), step, asked=asked, leaves=leaves)
    return [name for name in ("save", "evaluate", "decode") if getattr(found, name)]


def test_step_0_is_saved_at_the_start_and_no_other():
    assert [step for step in range(9) if SCHEDULE.saves_at_start(EveryFourth(), step)] == [0]


def test_intervals_end_at_their_multiples():
    assert {step: due(step) for step in range(1, 10)} == {
        1: [],
        2: [],
        3: ["evaluate"],
        4: ["save"],
        5: [],
        6: ["evaluate", "decode"],
        7: [],
        8: ["save", "decode"],
        9: ["evaluate"],
    }


def test_a_signal_saves_and_a_run_that_leaves_does_nothing_else():
    assert due(3, asked=True) == ["save", "evaluate"]
    assert due(4, leaves=True) == []
    assert due(10) == ["save"]


@pytest.mark.parametrize(
    ("evaluated", "decoded", "lacks"),
    [(None, None, (True, True)), (9, 8, (True, True)), (10, 8, (False, True)), (10, 10, (False, False))],
)
def test_the_last_step_is_evaluated_and_decoded_once(evaluated, decoded, lacks):
    assert SCHEDULE.due_at_end(10, evaluated=evaluated, decoded=decoded) == Due(False, *lacks)
