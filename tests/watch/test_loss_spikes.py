"""Loss spikes: found in noise and in a falling loss, once each, and not where the loss is only noisy or flat."""

import logging
import math

import numpy as np
import pytest
from facts import assert_names

from spmd_trainer.step.packing import Scalars, SummaryNames
from spmd_trainer.watch.loss_spikes import LossSpikes


class SomeRun:
    def __init__(self):
        self.logged = []

    def log(self, scalars):
        self.logged.append(scalars["loss_spikes"])


def spikes(losses, caplog):
    """The steps that are warned of, and the count in the summaries after each step."""
    callback, run = LossSpikes(), SomeRun()
    caplog.clear()
    with caplog.at_level(logging.WARNING):
        for step, loss in enumerate(losses, start=1):
            callback.after_step(run, step, Scalars(float(loss)))
    steps = [int(line.split("step ")[1].split()[0]) for line in caplog.messages]
    assert run.logged[-1] == callback.count == len(steps)
    return steps


def falling(count=400, noise=0.02):
    steps = np.arange(1, count + 1)
    return 2.0 + 6.0 * steps**-0.5 + np.random.default_rng(0).normal(0, noise, count)


@pytest.mark.parametrize(
    "losses", [falling(), falling(noise=0.2), [2.0] * 100 + [2.01] * 100, list(np.linspace(2.0, 2.5, 400))]
)
def test_noise_a_flat_loss_and_a_slow_rise_are_no_spikes(losses, caplog):
    assert spikes(losses, caplog) == []


def test_each_spike_is_said_once(caplog):
    losses = falling()
    losses[199] += 3.0  # one step
    losses[299:310] += 3.0  # several
    assert spikes(losses, caplog) == [200, 300]
    assert_names(caplog.text, "the median", "100 steps")


def test_a_loss_that_stays_up_is_one_spike(caplog):
    losses = falling()
    losses[249:] += 3.0
    assert spikes(losses, caplog) == [250]


def test_the_first_steps_and_invalid_ones_are_no_spikes(caplog):
    losses = falling()
    losses[9] = 50.0
    assert spikes(losses, caplog) == []
    losses = falling()
    losses[199] = math.nan
    losses[200] = math.inf
    assert spikes(losses, caplog) == []


def test_a_skipped_step_does_not_count(caplog):
    callback, run = LossSpikes(), SomeRun()
    for step in range(1, 60):
        callback.after_step(run, step, Scalars(2.0))
    skipped = Scalars(9.0, {}, {}, SummaryNames(["learning/is_valid_step"]), [0.0])
    callback.after_step(run, 60, skipped)
    assert run.logged[-1] == 0
    callback.after_step(run, 61, Scalars(9.0))
    assert run.logged[-1] == 1


def test_batches_that_are_harder_now_and_then_are_no_spikes(caplog):
    losses = falling()
    losses[::10] += 1.0
    assert spikes(losses, caplog) == []


def test_a_loss_that_is_mostly_zero_is_not_full_of_spikes(caplog):
    random = np.random.default_rng(0)
    losses = np.where(random.uniform(size=2000) < 0.2, random.uniform(size=2000), 0.0)
    assert len(spikes(losses, caplog)) <= 3
