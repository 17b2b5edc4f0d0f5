"""The scaling law of a ladder."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_trainer.sweeps import scaling_law

FLOPS = np.geomspace(1e15, 1e18, 7)


@settings(max_examples=20, deadline=None)
@given(st.floats(0.2, 2.0), st.floats(0.5, 4.0), st.floats(0.05, 0.3))
def test_a_law_without_noise_is_found(floor, scale, exponent):
    law = scaling_law.ScalingLaw(floor, scale, exponent, 1e16)
    found = scaling_law.fit(FLOPS, law.loss(FLOPS))
    np.testing.assert_allclose(found.loss(FLOPS), law.loss(FLOPS), rtol=2e-3)
    assert found.loss(1e19) == pytest.approx(law.loss(1e19), rel=0.03)


def test_error_bars_hold_the_true_loss_about_as_often_as_they_say():
    law, held = scaling_law.ScalingLaw(1.5, 1.0, 0.15, 1e16), 0
    for seed in range(12):
        noise = np.exp(np.random.default_rng(seed).normal(scale=0.01, size=FLOPS.size))
        found = scaling_law.record(list(zip(range(7), FLOPS, law.loss(FLOPS) * noise, strict=True)))
        times, _, low, high = found["ahead"][0]
        held += low <= law.loss(FLOPS.max() * times) <= high
    assert 8 <= held <= 12


def test_a_sweep_of_one_size_or_of_losses_below_zero_has_no_law():
    assert scaling_law.record([(n, 1e15, 2.0 + n) for n in range(6)]) is None
    assert scaling_law.record([(n, 1e15 * (n + 1), -1.0) for n in range(6)]) is None
