"""Placement (contract 3.6), in one process."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import raises_naming
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import (
    fsdp,
    get_local_slice_from_fsarray,
    make_fsarray_from_local_slice,
    place_like_target,
    update_model_sharding,
)


def test_place_like_target(data_mesh):
    sharding = NamedSharding(data_mesh, P("data", "mdl"))
    abstract = jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)
    target = {"a": jax.device_put(jnp.zeros((8, 4)), sharding), "b": abstract, "c": np.zeros(3), "d": None}
    tree = {"a": np.arange(32.0).reshape(8, 4), "b": jnp.ones((8, 4)), "c": jnp.arange(3.0), "d": None}
    placed = place_like_target(tree, target)
    assert placed["a"].sharding == placed["b"].sharding == sharding
    assert placed["a"].addressable_shards[0].data.shape == (2, 2)
    assert isinstance(placed["c"], np.ndarray)
    jax.tree.map(np.testing.assert_array_equal, placed, tree)
    again = place_like_target(placed, target)
    assert again["a"] is placed["a"]


def test_place_keeps_dtypes_and_prng_keys(data_mesh):
    sharding = NamedSharding(data_mesh, P())
    target = {"x": jax.device_put(jnp.zeros(8), sharding), "key": jax.device_put(jax.random.key(1), sharding)}
    placed = place_like_target({"x": np.zeros(8, jnp.bfloat16), "key": jax.random.key(7)}, target)
    assert placed["x"].dtype == jnp.bfloat16
    assert placed["key"].sharding == sharding
    assert jax.random.key_data(placed["key"]).tolist() == jax.random.key_data(jax.random.key(7)).tolist()


def test_place_errors(data_mesh):
    target = {"a": {"w": jnp.zeros((8, 4))}}
    with pytest.raises(ValueError, match=saying("a/w", "(8, 5)", "(8, 4)")):
        place_like_target({"a": {"w": np.zeros((8, 5))}}, target)
    with raises_naming(ValueError, "tree has ['a/v']", "target has ['a/w']"):
        place_like_target({"a": {"v": np.zeros((8, 4))}}, target)
    uneven = jax.ShapeDtypeStruct((7,), jnp.float32, sharding=NamedSharding(data_mesh, P("data")))
    with pytest.raises(ValueError, match=saying("w: dimension 0", "size 7", "data=4", "4 or 8")):
        place_like_target({"w": np.zeros(7)}, {"w": uneven})


@pytest.mark.parametrize("shape", [(16,), (8, 3), (24, 2, 2)])
def test_local_slices_round_trip(shape):
    rows = np.arange(np.prod(shape)).reshape(shape)
    x = make_fsarray_from_local_slice(rows, jax.devices())
    assert x.shape == shape
    assert {shard.data.shape[0] for shard in x.addressable_shards} == {shape[0] // 8}
    np.testing.assert_array_equal(get_local_slice_from_fsarray(x), rows)


def test_local_slices_follow_the_order_of_the_devices():
    rows = np.arange(8)
    x = make_fsarray_from_local_slice(rows, jax.devices()[::-1])
    assert {shard.device.id: shard.data.tolist() for shard in x.addressable_shards} == {i: [7 - i] for i in range(8)}
    np.testing.assert_array_equal(get_local_slice_from_fsarray(x), rows)
    np.testing.assert_array_equal(x, rows)


def test_local_slice_errors(data_mesh):
    with pytest.raises(ValueError, match=saying("(12, 2)", "12 rows", "8 devices", "8 or 16")):
        make_fsarray_from_local_slice(np.zeros((12, 2)), jax.devices())
    with pytest.raises(ValueError, match="scalar"):
        make_fsarray_from_local_slice(np.float32(1), jax.devices())
    with raises_naming(ValueError, "dimension other than", "first"):
        get_local_slice_from_fsarray(jax.device_put(jnp.zeros((8, 8)), NamedSharding(data_mesh, P(None, "data"))))
    with raises_naming(ValueError, "same rows", "several devices"):
        get_local_slice_from_fsarray(jax.device_put(jnp.zeros((8, 8)), NamedSharding(data_mesh, P("data"))))
    with raises_naming(ValueError, "same rows", "several devices"):
        get_local_slice_from_fsarray(jax.device_put(jnp.float32(0), NamedSharding(data_mesh, P())))


def loaded_state():
    """Parameters, Adam's state and an EMA copy, as a checkpoint reader would hand them over: host arrays."""
    params = {
        "embed": np.arange(101 * 64, dtype=np.float32).reshape(101, 64),
        "layer": {
            "kernel": np.random.default_rng(0).normal(size=(64, 128)).astype(np.float32),
            "bias": np.ones(128, np.float32),
        },
    }
    optimizer = optax.chain(optax.clip(1.0), optax.adam(1e-3), optax.ema(0.99))
    opt_state = jax.tree.map(np.asarray, optimizer.init(params))
    return {"params": params, "opt": opt_state, "ema": jax.tree.map(np.copy, params), "step": np.int32(3)}


def bytes_on_devices():
    """Bytes of all live arrays, by device. Each buffer counts once: looking at a shard makes another array of it."""
    buffers = {
        (shard.device, shard.data.unsafe_buffer_pointer()): shard.data.nbytes
        for x in jax.live_arrays()
        if not jax.dtypes.issubdtype(x.dtype, jax.dtypes.extended)
        for shard in x.addressable_shards
    }
    return {device: sum(n for (d, _), n in buffers.items() if d == device) for device in jax.devices()}


STRATEGY = [
    ("step|count", "replicate"),
    ("embed", 'fsdp("data", 0)'),
    ("kernel", ["shard_dim(-1, 'mdl')", fsdp("data", 0)]),
]


def test_update_model_sharding_moves_model_adam_and_ema(data_mesh):
    state = loaded_state()
    moved = update_model_sharding(state, data_mesh, STRATEGY)
    assert jax.tree.structure(moved) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, moved, state)
    adam = moved["opt"][1][0]
    for tree in (moved["params"], moved["ema"], adam.mu, adam.nu):
        assert tree["layer"]["kernel"].sharding == NamedSharding(data_mesh, P("data", "mdl"))
        assert tree["embed"].sharding == NamedSharding(data_mesh, P(None, "data"))
        assert tree["layer"]["bias"].sharding.is_fully_replicated
    assert adam.count.sharding == NamedSharding(data_mesh, P())


def test_update_model_sharding_never_holds_a_full_copy_on_one_device(data_mesh, monkeypatch):
    state = loaded_state()
    full_copy = sum(x.nbytes for x in jax.tree.leaves(state))
    biggest = max(x.nbytes for x in jax.tree.leaves(state))
    before = bytes_on_devices()
    peaks, largest_piece = [], []
    put = jax.make_array_from_callback

    def counted(shape, sharding, callback):
        def piece(index):
            data = callback(index)
            largest_piece.append(data.nbytes)
            return data

        array = put(shape, sharding, piece)
        now = bytes_on_devices()
        peaks.append(max(now[device] - before[device] for device in now))
        return array

    monkeypatch.setattr(jax, "make_array_from_callback", counted)
    moved = update_model_sharding(state, data_mesh, STRATEGY)
    assert len(peaks) == len(jax.tree.leaves(moved))  # nothing came by another door
    assert max(peaks) < full_copy / 3
    assert max(largest_piece) <= biggest / 4  # no piece is a whole array that is to be split


def test_update_model_sharding_pads(data_mesh):
    state = {"embed": np.arange(101 * 3, dtype=np.float32).reshape(101, 3)}
    moved = update_model_sharding(state, data_mesh, [("embed", 'fsdp("data", 0, allow_uneven=True)')])["embed"]
    assert moved.shape == (104, 3)
    np.testing.assert_array_equal(np.asarray(moved)[:101], state["embed"])
    assert not np.asarray(moved)[101:].any()


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_update_model_sharding_pads_prng_keys(impl, data_mesh):
    size = 2 * data_mesh.shape["data"] - 3
    keys = jax.random.split(jax.random.key(3, impl=impl), size)
    moved = update_model_sharding({"k": keys}, data_mesh, [("k", 'fsdp("data", 0, allow_uneven=True)')])["k"]
    assert moved.shape == (size + 3,)
    assert moved.dtype == keys.dtype
    data = np.asarray(jax.random.key_data(moved))
    np.testing.assert_array_equal(data[:size], np.asarray(jax.random.key_data(keys)))
    assert not data[size:].any()


def test_update_model_sharding_from_another_mesh(data_mesh, xy_mesh):
    x = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(xy_mesh, P("y", "x")))
    few = jax.make_mesh((2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,))
    for mesh in (data_mesh, few):
        moved = update_model_sharding({"w": x, "key": jax.random.key(0)}, mesh, [("w", "fsdp('data', 0)")])
        assert moved["w"].sharding == NamedSharding(mesh, P(None, "data"))
        np.testing.assert_array_equal(moved["w"], x)
        assert moved["key"].sharding == NamedSharding(mesh, P())
    stays = update_model_sharding(moved, few, [("w", "fsdp('data', 0)")])
    assert stays["w"] is moved["w"]
