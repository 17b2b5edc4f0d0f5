"""The load of experts in a run's summaries, and warnings of experts that no token reaches."""

import logging

import numpy as np
import pytest
from facts import assert_names

from spmd_trainer.step.packing import Scalars
from spmd_trainer.watch.expert_load import DEAD_AFTER, ExpertLoad

LAYER = "lm/layers/sub/layer_0/moe/router"


class SomeRun:
    """What the callback asks of a run, and what it was told."""

    def __init__(self):
        self.task = self.train = self.summaries = self
        self.summary_interval_steps, self.first_step = 10, 0
        self.logged, self.written = [], {}

    def log(self, scalars):
        self.logged.append(scalars)

    def replace_from(self, name, step):
        assert (name, step) == ("experts", 1)

    def write(self, name, step, scalars, notes):
        assert name == "experts"
        self.written[step] = (scalars, notes)


@pytest.fixture
def run():
    return SomeRun()


@pytest.fixture
def callback(run):
    found = ExpertLoad()
    found.on_open(run)
    found.on_start(run)
    return found


def load_of(*rows):
    return Scalars(1.0, loads={LAYER: np.array(rows, np.float32)})


def test_summaries_of_the_load(run, callback):
    for step in range(1, 11):
        callback.after_step(run, step, load_of([6, 2, 0], [4, 4, 4]))
    assert run.logged[-1] == {"experts/max_over_mean": 2.25, "experts/without_tokens": 1.0}
    ((step, (scalars, notes)),) = run.written.items()
    assert step == 10
    assert scalars == {
        f"{LAYER}/0/max_over_mean": 2.25,
        f"{LAYER}/0/without_tokens": 1.0,
        f"{LAYER}/1/max_over_mean": 1.0,
        f"{LAYER}/1/without_tokens": 0.0,
    }
    assert notes == {f"{LAYER}/0/load": "0.75 0.25 0", f"{LAYER}/1/load": "0.3333 0.3333 0.3333"}


def test_a_model_without_experts_has_none(run, callback):
    callback.after_step(run, 10, Scalars(1.0))
    assert not run.logged
    assert not run.written


def test_dead_experts_are_named_once_until_they_have_a_token_again(run, callback, caplog):
    dead, alive, empty = (
        load_of([6, 2, 0, 0], [4, 4, 0, 4]),
        load_of([6, 2, 0, 1], [4, 4, 1, 4]),
        load_of([0] * 4, [0] * 4),
    )

    def warned(scalars, steps):
        caplog.clear()
        for step in range(1, steps + 1):
            callback.after_step(run, step, scalars)
        return caplog.messages

    with caplog.at_level(logging.WARNING):
        assert warned(dead, DEAD_AFTER - 1) == []
        assert warned(empty, 3) == [], "a batch without tokens says nothing"
        (message,) = warned(dead, 2 * DEAD_AFTER)
        assert_names(message, DEAD_AFTER, f"{LAYER}/0: 2, 3", f"{LAYER}/1: 2", "choice_bias", "aux_loss_weight")
        assert warned(alive, 1) == []
        (message,) = warned(dead, DEAD_AFTER)
        assert_names(message, f"{LAYER}/0: 3", f"{LAYER}/1: 2")
