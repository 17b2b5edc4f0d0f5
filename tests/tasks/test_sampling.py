"""Temperature, top-k, top-p and repetition penalty, against plain numpy; and one key per row."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_trainer.decoder.generation import sampling
from spmd_trainer.decoder.generation.settings import GenerationSettings

# Few different values, so that ties are common.
ROWS = st.lists(st.sampled_from([-3.0, -1.0, 0.0, 0.5, 0.5, 2.0, 2.0, 4.0]), min_size=6, max_size=6)
FEW = settings(max_examples=60, deadline=None)


def kept_top_k(row, k):
    return row >= np.sort(row)[-k]


def kept_top_p(row, p):
    """Removes tokens from the least likely on (of equal ones, the lowest id first) while the removed mass is at most 1 - p."""
    order = sorted(range(len(row)), key=lambda i: (row[i], i))
    probabilities = np.exp(row - row.max()) / np.exp(row - row.max()).sum()
    kept, removed = np.ones(len(row), bool), 0.0
    for token in order[:-1]:
        removed += probabilities[token]
        if removed > 1 - p:
            break
        kept[token] = False
    return kept


def kept(warped):
    return np.isfinite(np.asarray(warped))


@FEW
@given(ROWS, st.integers(1, 6))
def test_top_k_keeps_the_largest_and_their_equals(row, k):
    row = np.array(row, np.float32)
    np.testing.assert_array_equal(kept(sampling.keep_top_k(row[None], k))[0], kept_top_k(row, k))


# Values of p at which no sum of these rows' probabilities lies.
@FEW
@given(ROWS, st.sampled_from([0.013, 0.137, 0.371, 0.613, 0.837, 0.971]))
def test_top_p_keeps_the_fewest_that_sum_to_more_than_p(row, p):
    row = np.array(row, np.float32)
    found = kept(sampling.keep_top_p(row[None], p))[0]
    np.testing.assert_array_equal(found, kept_top_p(row.astype(np.float64), p))
    assert found.any()


def test_at_the_border_of_top_p():
    half = jnp.log(jnp.array([[0.25, 0.25, 0.5]]))
    # The last two sum to 0.75. A mass of exactly 1 - p may be removed; of equal tokens, the first one is.
    assert kept(sampling.keep_top_p(half, 0.75)).tolist() == [[False, True, True]]
    assert kept(sampling.keep_top_p(half, 0.76)).tolist() == [[True, True, True]]
    assert kept(sampling.keep_top_p(half, 0.5)).tolist() == [[False, False, True]]
    assert kept(sampling.keep_top_p(half, 1e-9)).tolist() == [[False, False, True]]


def test_temperature_comes_before_top_k_and_top_p():
    logits = jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]]))
    warped = sampling.warp(logits, GenerationSettings(temperature=0.5, top_k=3, top_p=0.8))
    # Squared and normalised over the last three: 4/29, 9/29, 16/29. Removing the first leaves 0.86.
    assert kept(warped).tolist() == [[False, False, True, True]]
    np.testing.assert_allclose(warped[0, 2:], 2 * logits[0, 2:], rtol=1e-6)
    # Without the temperature: 2/9, 3/9, 4/9, and 0.78 is less than 0.8.
    assert kept(sampling.warp(logits, GenerationSettings(temperature=1.0, top_k=3, top_p=0.8))).sum() == 3


def test_a_large_top_k_keeps_all():
    assert kept(sampling.warp(jnp.arange(3.0)[None], GenerationSettings(temperature=1.0, top_k=50))).all()


def test_a_penalty_makes_seen_tokens_less_likely():
    logits = jnp.array([[2.0, -2.0, 2.0, -2.0]])
    seen = jnp.array([[True, True, False, False]])
    np.testing.assert_allclose(sampling.penalise_repetition(logits, seen, 2.0), [[1.0, -4.0, 2.0, -2.0]])


def test_greedy_takes_the_first_of_the_most_likely():
    assert sampling.next_tokens(jnp.array([[0.0, 3.0, 3.0]]), GenerationSettings()).tolist() == [1]


def test_draws_have_the_probabilities_of_what_is_kept():
    rows = 4000
    logits = jnp.tile(jnp.log(jnp.array([[0.1, 0.2, 0.3, 0.4]])), (rows, 1))
    keys = sampling.row_keys(jax.random.key(0), jnp.arange(rows))
    drawn = sampling.next_tokens(logits, GenerationSettings(temperature=1.0, top_k=2), keys)
    shares = np.bincount(np.asarray(drawn), minlength=4) / rows
    np.testing.assert_allclose(shares, [0, 0, 3 / 7, 4 / 7], atol=0.03)


@pytest.mark.parametrize("key", [jax.random.key(3), jax.random.PRNGKey(3)], ids=["typed", "raw"])
def test_a_row_s_tokens_depend_on_its_own_key_and_step(key):
    options = GenerationSettings(temperature=1.0, top_p=0.9)
    logits = jax.random.normal(jax.random.key(1), (6, 50))
    keys = sampling.row_keys(key, jnp.arange(6))
    together = sampling.next_tokens(logits, options, keys, 4)
    alone = [int(sampling.next_tokens(logits[i : i + 1], options, keys[i : i + 1], 4)[0]) for i in range(6)]
    assert together.tolist() == alone
    assert sampling.next_tokens(logits, options, keys, 5).tolist() != alone
    assert sampling.next_tokens(logits, options, keys[::-1], 4).tolist() != alone


def test_sampling_without_keys_is_refused():
    with raises_naming(ValueError, "key", "each row"):
        sampling.next_tokens(jnp.zeros((1, 3)), GenerationSettings(temperature=1.0))
