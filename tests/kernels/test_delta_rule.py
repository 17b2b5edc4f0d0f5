"""The gated delta rule in chunks gives what its definition, token by token, gives."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from spmd_trainer.kernels.delta_rule import CHUNK, causal_convolution, gated_delta_rule

ROWS, HEADS, VALUES, KEY, VALUE = 2, 3, 2, 8, 5


def token_by_token(query, key, value, log_decay, beta, segment_ids):
    """The definition, for the arguments of `gated_delta_rule`."""
    goes_on = jnp.pad(segment_ids[:, 1:] == segment_ids[:, :-1], ((0, 0), (1, 0)))

    def step(state, of_token):
        query, key, value, log_decay, beta, goes_on = of_token
        state = state * (goes_on[:, None, None] * jnp.exp(log_decay))[..., None, None]
        error = value - jnp.einsum("bgjav,bga->bgjv", state, key)
        state = state + jnp.einsum("bga,bgjv->bgjav", key, beta[..., None] * error)
        return state, jnp.einsum("bgjav,bga->bgjv", state, query) / KEY**0.5

    tokens = [jnp.moveaxis(x, 1, 0) for x in (query, key, value, log_decay, beta, goes_on)]
    state, outputs = jax.lax.scan(step, jnp.zeros((ROWS, HEADS, VALUES, KEY, VALUE)), tokens)
    return jnp.moveaxis(outputs, 0, 1), state


def inputs(length, seed, *, segments=1, keys_repeat=False):
    random = np.random.default_rng(seed)
    query, key = (random.normal(size=(ROWS, length, HEADS, KEY)) for _ in range(2))
    if keys_repeat:
        key[:, length // 2 :] = key[:, length // 2 :][:, :1]
    query, key = (x / np.linalg.norm(x, axis=-1, keepdims=True) for x in (query, key))
    value = random.normal(size=(ROWS, length, HEADS, VALUES, VALUE))
    shape = (ROWS, length, HEADS, VALUES)
    log_decay = -np.exp(random.normal(-2, 2, shape))
    beta = 1 / (1 + np.exp(-3 * random.normal(size=shape)))
    segment_ids = np.sort(random.integers(0, segments, (ROWS, length)), axis=1).astype(np.int32)
    return [jnp.asarray(x, jnp.float32) for x in (query, key, value, log_decay, beta)] + [jnp.asarray(segment_ids)]


rule, definition = jax.jit(gated_delta_rule), jax.jit(token_by_token)


# The lengths are few because each compiles.
@settings(max_examples=30, deadline=None)
@given(
    length=st.sampled_from([1, 7, 2 * CHUNK + 6]),
    seed=st.integers(0, 2**31),
    segments=st.integers(1, 5),
    keys_repeat=st.booleans(),
)
def test_chunks_give_what_the_definition_gives(length, seed, segments, keys_repeat):
    given_to_both = inputs(length, seed, segments=segments, keys_repeat=keys_repeat)
    for found, wanted in zip(rule(*given_to_both), definition(*given_to_both), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=0, atol=2e-5)


def test_gradients_are_those_of_the_definition():
    *arrays, segment_ids = inputs(CHUNK + 6, 3, segments=3)
    weights = jnp.asarray(np.random.default_rng(4).normal(size=arrays[2].shape), jnp.float32)

    def loss(rule, *arrays):
        outputs, state = rule(*arrays, segment_ids)
        return jnp.sum(outputs * weights) + jnp.sum(state)

    gradients = [
        jax.jit(jax.grad(lambda *x, rule=rule: loss(rule, *x), argnums=tuple(range(5))))(*arrays)
        for rule in (gated_delta_rule, token_by_token)
    ]
    for found, wanted in zip(*gradients, strict=True):
        scale = float(jnp.max(jnp.abs(wanted)))
        np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-4 * scale)


@pytest.mark.parametrize(("cut", "segments"), [(1, 1), (CHUNK, 1), (CHUNK, 3)])
def test_a_row_may_be_cut_anywhere_and_go_on_from_its_state(cut, segments):
    arrays = inputs(CHUNK + 6, 5, segments=segments)
    arrays[-1] = arrays[-1].at[:, cut].set(arrays[-1][:, cut - 1])  # the state is of the same segment
    arrays[-1] = jax.lax.cummax(arrays[-1], axis=1)
    whole, last = rule(*arrays)
    first, state = rule(*(x[:, :cut] for x in arrays))
    second, state = rule(*(x[:, cut:] for x in arrays), state)
    np.testing.assert_allclose(jnp.concatenate([first, second], axis=1), whole, rtol=0, atol=2e-5)
    np.testing.assert_allclose(state, last, rtol=0, atol=2e-5)


def test_a_convolution_sees_its_own_segment_and_the_past():
    random = np.random.default_rng(0)
    x, kernel = random.normal(size=(2, 9, 4)).astype(np.float32), random.normal(size=(3, 4)).astype(np.float32)
    segment_ids = np.array([[1, 1, 1, 1, 2, 2, 3, 3, 3], [1] * 9], np.int32)
    wanted = np.zeros_like(x)
    for row in range(2):
        for t in range(9):
            for back in range(3):
                if t - back >= 0 and segment_ids[row, t - back] == segment_ids[row, t]:
                    wanted[row, t] += kernel[2 - back] * x[row, t - back]
    found, past = causal_convolution(x, kernel, segment_ids)
    np.testing.assert_allclose(found, wanted, atol=1e-6)
    np.testing.assert_array_equal(past, x[:, -2:])
    first, past = causal_convolution(x[1:, :4], kernel, segment_ids[1:, :4])
    second, _ = causal_convolution(x[1:, 4:], kernel, segment_ids[1:, 4:], past)
    np.testing.assert_allclose(np.concatenate([first, second], axis=1), wanted[1:], atol=1e-6)
