"""Meshes and the arrays on them cut along an axis (contract 3.7)."""

import jax
import numpy as np
import pytest
from facts import raises_naming
from jax.sharding import PartitionSpec as P
from resharding_helpers import layout, random_array
from sharding_helpers import saying

from spmd_trainer.sharding import split_by_mesh_axis


def test_split_by_mesh_axis_copies_nothing():
    sharding = layout((2, 4), P("data"), ("replica", "data"))
    values, x = random_array(sharding, (8, 4))
    pointers = {shard.device: shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), sharding)

    first, second = split_by_mesh_axis({"x": x, "keys": keys}, "replica")
    for part, devices in ((first, jax.devices()[:4]), (second, jax.devices()[4:])):
        np.testing.assert_array_equal(part["x"], values)
        assert list(part["x"].sharding.mesh.devices.flat) == devices
        assert dict(part["x"].sharding.mesh.shape) == {"replica": 1, "data": 4}
        assert part["keys"].sharding.spec == P("data")
        np.testing.assert_array_equal(jax.random.key_data(part["keys"]), jax.random.key_data(keys))
        for shard in part["x"].addressable_shards:
            assert shard.data.unsafe_buffer_pointer() == pointers[shard.device]

    halves = split_by_mesh_axis(x, "data", 2)
    assert [dict(half.sharding.mesh.shape) for half in halves] == [{"replica": 2, "data": 2}] * 2
    np.testing.assert_array_equal(np.concatenate(halves), values)
    uneven = split_by_mesh_axis(x, "data", [1])
    assert [part.shape for part in uneven] == [(2, 4), (6, 4)]
    np.testing.assert_array_equal(np.concatenate(uneven), values)


@pytest.mark.parametrize(
    ("axis", "sections", "words"),
    [
        ("dta", None, ("no axis 'dta'", "did you mean data", "replica=2, data=4")),
        ("data", 3, ("data=4", "[1, 2, 4]")),
        ("data", [2, 2], ("empty section", "between 1 and 3")),
        ("data", [4], ("empty section",)),
    ],
)
def test_split_refuses_what_cuts_no_mesh(axis, sections, words):
    _, x = random_array(layout((2, 4), P("data"), ("replica", "data")), (8, 4))
    with pytest.raises(ValueError, match=saying(*words)):
        split_by_mesh_axis(x, axis, sections)


def test_split_wants_one_mesh():
    _, x = random_array(layout((8, 1), P("fsdp")), (8, 4))
    _, y = random_array(layout((4, 1), P("fsdp")), (8, 4))
    with pytest.raises(ValueError, match=saying("b", "one mesh", "fsdp=8", "fsdp=4")):
        split_by_mesh_axis({"a": x, "b": y}, "fsdp")
    with pytest.raises(ValueError, match=saying("a", "ndarray", "reshard")):
        split_by_mesh_axis({"a": np.zeros(3)}, "fsdp")
    with raises_naming(ValueError, "one array"):
        split_by_mesh_axis({}, "fsdp")
