"""Meshes from sizes (contract 3.1)."""

import dataclasses

import jax
import numpy as np
import pytest
from facts import raises_naming
from jax.sharding import AxisType
from sharding_helpers import saying

from spmd_trainer.sharding import create_device_mesh, create_hybrid_mesh
from spmd_trainer.sharding.mesh import _granules


def ids(mesh):
    return np.vectorize(lambda device: device.id)(mesh.devices).tolist()


def test_sizes_and_auto_axes():
    mesh = create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    assert dict(mesh.shape) == {"replica": 1, "data": 4, "mdl": 2}
    assert mesh.axis_types == (AxisType.Auto,) * 3
    assert sorted(np.ravel(ids(mesh))) == list(range(8))


@pytest.mark.parametrize(
    ("config", "sizes"),
    [
        ([("data", -1), ("mdl", 2)], (4, 2)),
        ([("data", 8), ("mdl", -1)], (8, 1)),
        ([("data", -1)], (8,)),
        ({"data": 2, "mdl": -1}, (2, 4)),
    ],
)
def test_one_size_may_be_the_rest(config, sizes):
    assert tuple(create_device_mesh(config).shape.values()) == sizes


def test_given_devices_are_all_used():
    mesh = create_device_mesh([("data", -1), ("mdl", 2)], devices=jax.devices()[:6])
    assert dict(mesh.shape) == {"data": 3, "mdl": 2}


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ([("data", 3), ("mdl", 2)], ["data=3, mdl=2", "multiply to 6", "8 devices", "data=4, mdl=2"]),
        ([("data", 2), ("mdl", 2)], ["multiply to 4", "8 devices", "data=2, mdl=4", "data=4, mdl=2", "devices"]),
        ([("data", -1), ("mdl", 3)], ["mdl=3", "no whole number for 'data'", "mdl=2", "mdl=4"]),
        ([("data", 16)], ["multiply to 16", "data=8"]),
        ([("data", -1), ("mdl", -1)], ["only one size may be -1", "['data', 'mdl']", "8 devices"]),
        ([], ["empty", "[('data', -1)]"]),
        ([("data", 0)], ["'data': 0 is not a size", "1 or more"]),
        ([("data", -2)], ["'data': -2 is not a size"]),
        ([("data", 2.0)], ["'data': 2.0 is not a size"]),
        ([("data", 2), ("data", 4)], ["'data'", "twice"]),
        (["data"], ["'data'", "(name, size)"]),
    ],
)
def test_sizes_that_do_not_fit_say_what_would(config, words):
    with pytest.raises(ValueError, match=saying(*words)):
        create_device_mesh(config)


def test_proposed_sizes_really_fit():
    with raises_naming(ValueError, "that fit", "replica=1, data=4, mdl=2 or"):
        create_device_mesh([("replica", 1), ("data", 5), ("mdl", 2)])


def test_hybrid_with_trivial_dcn_is_the_plain_mesh():
    plain = create_device_mesh([("data", 4), ("mdl", 2)])
    assert create_hybrid_mesh([4, 2], [1, 1], ["data", "mdl"]) == plain
    assert create_hybrid_mesh([4, 2], None, ["data", "mdl"]) == plain


@pytest.mark.parametrize(
    ("ici", "dcn", "expected"),
    [
        ([1, 4], [2, 1], [[0, 1, 2, 3], [4, 5, 6, 7]]),
        # Each run of two along mdl is in one granule of four devices.
        ([2, 2], [1, 2], [[0, 1, 4, 5], [2, 3, 6, 7]]),
        ([2, 2], [2, 1], [[0, 1], [2, 3], [4, 5], [6, 7]]),
        ([2, -1], [2, 1], [[0, 1], [2, 3], [4, 5], [6, 7]]),
    ],
)
def test_hybrid_runs_stay_inside_a_granule(ici, dcn, expected):
    mesh = create_hybrid_mesh(ici, dcn, ["data", "mdl"])
    assert ids(mesh) == expected
    assert mesh.axis_types == (AxisType.Auto,) * 2


def test_hybrid_that_does_not_fit():
    with pytest.raises(ValueError, match=r"dcn data=3.*multiply to 12.*8 devices.*dcn data=2"):
        create_hybrid_mesh([1, 4], [3, 1], ["data", "mdl"])
    with pytest.raises(ValueError, match="equally long"):
        create_hybrid_mesh([1, 4], [2], ["data", "mdl"])


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    id: int
    slice_index: int
    process_index: int
    platform: str = "tpu"


def test_granules_are_slices_then_processes():
    # Four processes in two slices, in an order that mixes them.
    devices = [FakeDevice(i, slice_index=i % 2, process_index=i // 2) for i in range(8)]
    by_slice = _granules(devices, {"data": 2})
    assert [{d.slice_index for d in group} for group in by_slice] == [{0}, {1}]
    one_slice_each = [FakeDevice(i, slice_index=0, process_index=1 - i // 4, platform="gpu") for i in range(8)]
    by_process = _granules(one_slice_each, {"data": 2})
    assert [[d.id for d in group] for group in by_process] == [[4, 5, 6, 7], [0, 1, 2, 3]]


@pytest.mark.parametrize("slices", [1, 2])
def test_dcn_may_not_cut_through_a_slice(slices):
    devices = [FakeDevice(i, slice_index=i * slices // 8, process_index=0) for i in range(8)]
    with pytest.raises(ValueError, match=rf"dcn data=4 asks for 4 slices.*form {slices} slice"):
        _granules(devices, {"data": 4})
