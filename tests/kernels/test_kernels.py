"""Which kernel is picked for a call, and what reports say of it."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from facts import assert_names, raises_naming
from jax.sharding import AbstractDevice, AbstractMesh, AxisType

from spmd_trainer.errors import UserError
from spmd_trainer.kernels import chips, kernels
from spmd_trainer.kernels.chips import Target
from spmd_trainer.kernels.kernels import Choice, Pattern

CPU, TPU = Target("cpu", "cpu"), Target("tpu", "TPU v5 lite")
H100 = Target("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
MI300 = Target("rocm", "AMD Instinct MI300X")


def call(device, length=2048, *, dtype=jnp.bfloat16, segments=False, dropout=False):
    """Returns a call of 8 query heads and 2 key heads."""
    query = jax.ShapeDtypeStruct((2, length, 8, 128), dtype)
    key = jax.ShapeDtypeStruct((2, length, 2, 128), dtype)
    return kernels.Call(query, key, Pattern(), segments, dropout, device)


@pytest.mark.parametrize(
    ("device", "expected"),
    [
        (CPU, ["chunked", "reference"]),
        (TPU, ["splash", "chunked", "reference"]),
        (H100, ["cudnn", "chunked", "reference"]),
        (MI300, ["chunked", "reference"]),
    ],
)
def test_kernels_of_the_platform_come_first(device, expected):
    assert kernels.order(call(device)) == expected


@pytest.mark.parametrize("segments", [False, True])
@pytest.mark.parametrize(("device", "expected"), [(CPU, "chunked"), (TPU, "splash"), (MI300, "chunked")])
def test_the_first_that_can_is_picked(device, expected, segments):
    assert kernels.choose(call(device, segments=segments)) == Choice(expected)


def test_a_kernel_that_cannot_picks_the_next_and_says_why():
    choice = kernels.choose(call(H100, dtype=jnp.float32))
    assert choice.kernel == "chunked"
    assert list(choice.reasons) == ["cudnn"]
    assert "float32" in " ".join(choice.reasons["cudnn"])


@pytest.mark.parametrize("device", [CPU, MI300])
@pytest.mark.parametrize(("length", "expected"), [(1, "reference"), (512, "reference"), (513, "chunked")])
def test_short_rows_are_computed_at_once(device, length, expected):
    assert kernels.choose(call(device, length)).kernel == expected


@pytest.mark.parametrize("device", [CPU, TPU, H100])
def test_only_the_reference_drops_probabilities(device):
    choice = kernels.choose(call(device, dropout=True))
    assert choice.kernel == "reference"
    assert all("drop" in " ".join(why) for why in choice.reasons.values())
    assert "chunked" in choice.reasons


@pytest.mark.parametrize("name", ["chunked", "reference"])
@pytest.mark.parametrize("device", [CPU, TPU, H100])
def test_an_asked_kernel_is_picked(device, name):
    assert kernels.choose(call(device), name) == Choice(name)


def test_an_asked_kernel_that_cannot_is_an_error_with_its_reasons_and_those_that_can():
    with raises_naming(UserError, "'chunked' can't", "drop probabilities", "that can: reference;"):
        kernels.choose(call(CPU, dropout=True), "chunked")
    with raises_naming(UserError, "'cudnn' can't", "can: chunked, reference;"):
        kernels.choose(call(CPU), "cudnn")
    with pytest.raises(UserError, match=r"'splash' can't .*that can: (cudnn, )?chunked, reference;"):
        kernels.choose(call(H100), "splash")


def test_an_unknown_kernel_is_an_error_with_the_nearest_name():
    with raises_naming(UserError, "kernel 'chunkd'", "splash", "cudnn", "reference", "mean chunked"):
        kernels.choose(call(CPU), "chunkd")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"causal": False, "window": 4}, "a window of 4 tokens needs causal=True"),
        ({"window": 0}, "the window is 0; it must be at least 1"),
        ({"softcap": 0.0}, "softcap is 0.0; it must be positive, or None"),
    ],
)
def test_patterns_that_make_no_sense_are_errors(fields, message):
    with pytest.raises(UserError, match=message):
        Pattern(**fields)


@pytest.mark.parametrize(
    ("platform", "kind", "expected"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", H100),
        ("gpu", "AMD Instinct MI300X", MI300),
        ("tpu", "TPU v5 lite", TPU),
        ("cpu", "cpu", CPU),
    ],
)
def test_the_target_is_the_device_of_the_mesh(platform, kind, expected):
    device = AbstractDevice(device_kind=kind, num_cores=None, platform=platform)
    mesh = AbstractMesh((8,), ("data",), axis_types=(AxisType.Auto,), abstract_device=device)
    with jax.sharding.use_abstract_mesh(mesh):
        assert chips.current_target() == expected


def test_the_target_without_a_mesh_is_the_first_device():
    assert chips.current_target() == CPU


def test_recorded_choices_become_lines():
    against = Choice("chunked", {"cudnn": ["head width 320 is over 256", "the heads are float32"]})
    with kernels.recording() as outer:
        kernels.record("layer_0", against)
        with kernels.recording() as inner:
            kernels.record("layer_1", against)
        assert kernels.choice_lines(inner) == kernels.choice_lines(outer)
        kernels.record("layer_2", dataclasses.replace(Choice("chunked"), context_parallel="ring"))
    kernels.record("layer_3", against)
    (line,) = kernels.choice_lines(inner)
    assert_names(line, "kernel: chunked", "not cudnn", "head width 320", 256, "float32")
    first, second = kernels.choice_lines(outer)
    assert_names(first, "layer_0, layer_1: chunked", "not cudnn", "head width 320", 256, "float32")
    assert_names(second, "layer_2: chunked", "a ring")
