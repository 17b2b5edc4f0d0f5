"""Rotary embeddings against references that are written from the papers, with complex numbers and loops."""

import math

import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import small_spec
from praxis import pax_fiddle
from praxis.pax_fiddle import Config

from spmd_trainer.decoder import rotary
from spmd_trainer.models.decoder_spec import RotaryScaling

HEAD = 16


def spec_of(scaling=None, **fields):
    scaling_p = None if scaling is None else Config(RotaryScaling, **scaling)
    return pax_fiddle.build(small_spec(head_dims=HEAD, rotary_scaling=scaling_p, **fields))


def plain(base=10_000.0):
    return np.array([base ** (-2 * i / HEAD) for i in range(HEAD // 2)])


def rotated(spec, x, positions, kind="global"):
    return np.asarray(rotary.rotate(jnp.asarray(x), *rotary.sine_and_cosine(spec, kind, jnp.asarray(positions))))


def test_pairs_of_the_two_halves_rotate_by_their_angle():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(2, 5, 3, HEAD)).astype(np.float32)
    positions = rng.integers(0, 50, (2, 5))
    pairs = (x[..., : HEAD // 2] + 1j * x[..., HEAD // 2 :]) * np.exp(1j * positions[:, :, None, None] * plain())
    expected = np.concatenate([pairs.real, pairs.imag], axis=-1)
    np.testing.assert_allclose(rotated(spec_of(), x, positions), expected, atol=2e-5)


@pytest.mark.full
def test_products_depend_only_on_distances():
    query, key = np.random.default_rng(1).normal(size=(2, 1, 1, 1, HEAD)).astype(np.float32)

    def product(i, j):
        return np.sum(rotated(spec_of(), query, [[i]]) * rotated(spec_of(), key, [[j]]))

    np.testing.assert_allclose(product(9, 4), product(25, 20), rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-2


def test_linear_scaling_divides_positions():
    x = np.random.default_rng(2).normal(size=(1, 4, 1, HEAD)).astype(np.float32)
    scaled = rotated(spec_of({"kind": "linear", "factor": 4.0}), x, [[0, 4, 8, 40]])
    np.testing.assert_allclose(scaled, rotated(spec_of(), x, [[0, 1, 2, 10]]), atol=1e-5)


def test_llama3_scaling():
    scaling = {
        "kind": "llama3",
        "factor": 8.0,
        "original_max_positions": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    expected = []
    for frequency in plain():
        wavelength = 2 * math.pi / frequency
        if wavelength < 64 / 4:
            expected.append(frequency)
        elif wavelength > 64 / 1:
            expected.append(frequency / 8)
        else:
            kept = (64 / wavelength - 1) / (4 - 1)
            expected.append((1 - kept) * frequency / 8 + kept * frequency)
    found, factor = rotary.frequencies(spec_of(scaling), "global")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert factor == 1.0
    changed = found / plain()
    assert changed[0] == pytest.approx(1)
    assert changed[-1] == pytest.approx(1 / 8)
    assert ((changed > 0.13) & (changed < 0.99)).any()  # one in between


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn_scaling(truncate):
    scaling = {"kind": "yarn", "factor": 4.0, "original_max_positions": 512, "truncate": truncate}

    def index_with(rotations):
        """Returns i with 512 * base^(-2i / HEAD) / 2 pi == rotations."""
        return HEAD / 2 * math.log(512 / (2 * math.pi * rotations)) / math.log(10_000)

    low, high = index_with(32.0), index_with(1.0)
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    expected = []
    for i, frequency in enumerate(plain()):
        ramp = min(max((i - low) / (high - low), 0), 1)
        expected.append(frequency * (1 - ramp) + frequency / 4 * ramp)
    found, factor = rotary.frequencies(spec_of(scaling), "global")
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)


@pytest.mark.parametrize(
    ("fields", "factor"),
    [
        ({"attention_factor": 0.5}, 0.5),
        ({"mscale": 2.0, "mscale_all_dim": 1.0}, (0.2 * math.log(4) + 1) / (0.1 * math.log(4) + 1)),
        ({"mscale": 2.0}, 0.1 * math.log(4) + 1),
        ({"factor": 1.0}, 1.0),
    ],
)
def test_yarn_scales_the_embedding(fields, factor):
    scaling = RotaryScaling(**{"kind": "yarn", "factor": 4.0, "original_max_positions": 512, **fields})
    assert rotary.yarn_attention_factor(scaling) == pytest.approx(factor)
    spec = spec_of({"kind": "yarn", "factor": 4.0, "original_max_positions": 512, **fields})
    sine, cosine = rotary.sine_and_cosine(spec, "global", jnp.asarray([[3]]))
    np.testing.assert_allclose(sine**2 + cosine**2, factor**2, rtol=1e-5)


def test_local_layers_have_a_base_of_their_own_without_scaling():
    spec = spec_of({"kind": "linear", "factor": 8.0}, rotary_base=1e6, local_rotary_base=100.0)
    np.testing.assert_allclose(rotary.frequencies(spec, "local")[0], plain(100.0), rtol=1e-5)
    np.testing.assert_allclose(rotary.frequencies(spec, "global")[0], plain(1e6) / 8, rtol=1e-5)
    shared = spec_of({"kind": "linear", "factor": 8.0})
    np.testing.assert_array_equal(rotary.frequencies(shared, "local")[0], rotary.frequencies(shared, "global")[0])
