"""`PreferenceLoss` against a computation by hand in NumPy, float64, and its settings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.errors import UserError

SETTINGS = [
    {"loss": "sigmoid", "beta": 0.1},
    {"loss": "sigmoid", "beta": 2.0, "label_smoothing": 0.2},
    {"loss": "sigmoid_norm", "beta": 5.0},
    {"loss": "sigmoid_norm", "beta": 0.7, "label_smoothing": 0.1},
    {"loss": "robust", "beta": 0.5, "label_smoothing": 0.3},
    {"loss": "ipo", "beta": 0.3},
    {"loss": "simpo", "beta": 2.5, "target_margin": 1.4},
    {"loss": "simpo", "beta": 2.0, "label_smoothing": 0.05},
]


def pairs_of(count, seed=0):
    """Log-probabilities by the model and the reference, and lengths, [count, 2]."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, 40, (count, 2))
    logps = -rng.uniform(0.2, 3, (count, 2)) * lengths
    return logps.astype(np.float32), (logps + rng.normal(0, 2, (count, 2))).astype(np.float32), lengths


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


def by_hand(logps, reference, lengths, *, loss, beta, label_smoothing=0.0, target_margin=0.0):
    """Returns the losses [n] and their gradients by the log-probabilities [n, 2], float64."""
    logps, reference, share = logps.astype(np.float64), reference.astype(np.float64), label_smoothing
    per_token = loss in ("sigmoid_norm", "ipo", "simpo")
    scale = np.array([1.0, -1.0]) * (1 / lengths if per_token else np.ones_like(logps))  # of the margin, by each logp
    margin = np.sum(scale * (logps if loss == "simpo" else logps - reference), axis=1)
    if loss == "ipo":
        error = margin - 1 / (2 * beta)
        return error**2, 2 * error[:, None] * scale
    h = beta * margin - target_margin
    sigmoid = 1 / (1 + np.exp(-h))
    sign = -1 if loss == "robust" else 1
    divisor = 1 - 2 * share if loss == "robust" else 1
    losses = ((1 - share) * softplus(-h) + sign * share * softplus(h)) / divisor
    slope = (-(1 - share) * (1 - sigmoid) + sign * share * sigmoid) / divisor
    return losses, (slope * beta)[:, None] * scale


@pytest.mark.parametrize("count", [1, 7])
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_losses_and_gradients_are_those_of_a_computation_by_hand(settings, count):
    logps, reference, lengths = pairs_of(count)
    preference = PreferenceLoss(**settings)
    preference.check()
    losses, gradient = by_hand(logps, reference, lengths, **settings)
    found = preference(jnp.asarray(logps), jnp.asarray(lengths), jnp.asarray(reference))
    np.testing.assert_allclose(found.loss, losses, rtol=1e-6, atol=1e-6)
    by_jax = jax.grad(lambda x: jnp.sum(preference(x, jnp.asarray(lengths), jnp.asarray(reference)).loss))
    np.testing.assert_allclose(by_jax(jnp.asarray(logps)), gradient, rtol=1e-6, atol=1e-6)
    per_answer = logps / lengths if settings["loss"] == "simpo" else logps - reference
    np.testing.assert_allclose(found.rewards, settings["beta"] * per_answer, rtol=1e-5, atol=1e-6)


def test_the_reference_and_the_rewards_have_no_gradient():
    logps, reference, lengths = map(jnp.asarray, pairs_of(4))
    preference = PreferenceLoss()
    assert not np.any(jax.grad(lambda x: jnp.sum(preference(logps, lengths, x).loss))(reference))
    assert not np.any(jax.grad(lambda x: jnp.sum(preference(x, lengths, reference).rewards))(logps))


@pytest.mark.parametrize("settings", [{"beta": 10.0}, {"loss": "robust", "label_smoothing": 0.4}], ids=str)
@pytest.mark.parametrize("difference", [-1e4, 1e4])
def test_extreme_differences_give_finite_numbers(difference, settings):
    logps = jnp.array([[difference - 2e4, -2e4]], jnp.float32)
    loss = PreferenceLoss(**settings)

    def total(logps):
        return jnp.sum(loss(logps, jnp.array([[5, 5]]), jnp.full((1, 2), -2e4)).loss)

    value, gradient = jax.value_and_grad(total)(logps)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    if loss.loss == "sigmoid":
        assert value == pytest.approx(max(0.0, -10.0 * difference), rel=1e-6)


def test_an_answer_without_tokens_gives_finite_numbers():
    """Rows that only fill a batch have no tokens."""
    for settings in SETTINGS:
        found = PreferenceLoss(**settings)(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.full((1, 2), -3.0))
        assert np.isfinite(found.loss).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"loss": "sigmoid_nrom"}, "preference.loss='sigmoid_nrom'; set it to .*did you mean sigmoid_norm"),
        ({"beta": 0}, "preference.beta=0; set it above 0"),
        ({"beta": "x"}, "preference.beta='x'; set it to a number"),
        ({"beta": float("nan")}, "preference.beta=nan; set it to a number"),
        ({"label_smoothing": 0.5}, "label_smoothing=0.5; set it to 0 or more, below 0.5"),
        ({"label_smoothing": -0.1}, "label_smoothing=-0.1; set it to 0 or more, below 0.5"),
        ({"loss": "ipo", "label_smoothing": 0.1}, "the loss 'ipo' has none"),
        ({"target_margin": 1.0}, "target_margin=1.0 with the loss 'sigmoid'"),
        ({"loss": "simpo", "target_margin": -1.0}, "target_margin=-1.0 with the loss 'simpo'"),
    ],
)
def test_settings_that_are_refused(settings, message):
    with pytest.raises(UserError, match=message):
        PreferenceLoss(**settings).check()
