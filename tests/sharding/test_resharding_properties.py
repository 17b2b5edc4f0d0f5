"""Properties of resharding: for any meshes, specs and shapes, values stay and no device holds more than its share."""

import math

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from resharding_helpers import collective_bytes, shard_bytes, watched

from spmd_trainer.sharding import (
    NoIntermediateShardingError,
    find_intermediate_sharding,
    pad_uneven,
    reshard,
    reshard_with_intermediate_sharding,
    slice_uneven,
    split_by_mesh_axis,
)
from spmd_trainer.sharding.intermediate_sharding import plan_intermediate
from spmd_trainer.sharding.specs import shard_counts

RANK = 2
SIZES = [(8,), (4,), (2, 4), (4, 2), (2, 2, 2), (6,), (3, 2), (1, 4), (3,), (1,)]
quick = settings(max_examples=30, deadline=None)


@st.composite
def layouts(draw):
    """A mesh of any shape over some of the devices, in any order, and a spec of rank 2 or less on it."""
    sizes = draw(st.sampled_from(SIZES))
    names = draw(st.sampled_from([("a", "b", "c"), ("fsdp", "tp", "dp")]))[: len(sizes)]
    devices = jax.devices()
    if draw(st.booleans()):
        devices = draw(st.permutations(devices))
    first = draw(st.integers(0, 8 - math.prod(sizes)))
    entries = [[] for _ in range(RANK)]
    for axis in draw(st.permutations(names)):
        dim = draw(st.integers(-1, RANK - 1))
        if dim >= 0:
            entries[dim].append(axis)
    while entries and not entries[-1] and draw(st.booleans()):
        entries.pop()
    mesh = Mesh(np.array(devices[first : first + math.prod(sizes)]).reshape(sizes), names)
    return NamedSharding(mesh, P(*(tuple(axes) or None for axes in entries)))


def even_shape(logical, *shardings):
    """The least shape from `logical` on that all the shardings divide: uneven variables lie padded."""
    counts = [shard_counts(s.spec, RANK, s.mesh.shape) for s in shardings]
    return tuple(size + -size % math.lcm(*each) for size, *each in zip(logical, *counts, strict=True))


logical_shapes = st.tuples(st.integers(1, 50), st.integers(1, 50))


@pytest.mark.full
@pytest.mark.parametrize("way", [reshard, reshard_with_intermediate_sharding])
@quick
@given(layouts(), layouts(), logical_shapes, st.booleans(), st.sampled_from([np.float32, np.int8]))
def test_values_stay_and_no_device_holds_too_much(way, source, target, logical, donate, dtype):
    shape = even_shape(logical, source, target)
    values = np.zeros(shape, dtype)
    values[: logical[0], : logical[1]] = np.random.default_rng(0).integers(-100, 100, size=logical)
    given_sharding = (source,) if way is reshard_with_intermediate_sharding else ()
    with pytest.MonkeyPatch.context() as monkeypatch, watched(monkeypatch) as watch:
        x = jax.device_put(values, source)
        y = way({"x": x}, *given_sharding, target, donate=donate)["x"]
    assert y.sharding == target
    assert y.dtype == dtype
    np.testing.assert_array_equal(y, values)
    assert x.is_deleted() == donate
    shards = shard_bytes(y, source), shard_bytes(y, target)
    try:
        between = shard_bytes(y, find_intermediate_sharding(source, target)[0])
    except NoIntermediateShardingError:
        between = 0
    assert watch.most <= sum(shards) + between
    assert watch.in_programs <= sum(shards) + max(shards)


@pytest.mark.full
@quick
@given(layouts(), layouts())
def test_an_intermediate_sharding_lies_between(source, target):
    shape = even_shape((24, 24), source, target)
    try:
        between, replica_axes = find_intermediate_sharding(source, target)
    except NoIntermediateShardingError:
        return
    rank = len(between.spec)
    counts, wanted, had = (math.prod(shard_counts(s.spec, rank, s.mesh.shape)) for s in (between, target, source))
    assert counts == wanted < had
    assert between.mesh.axis_names[: len(replica_axes)] == tuple(replica_axes)
    assert math.prod(between.mesh.shape[axis] for axis in replica_axes) == had // wanted
    # Every device keeps what it has and adds its neighbours' shards: the least that a hop can gather.
    now, then = source.devices_indices_map(shape), between.devices_indices_map(shape)
    for device in now:
        for small, large, size in zip(now[device], then[device], shape, strict=True):
            (start, stop, _), (least, most, _) = small.indices(size), large.indices(size)
            assert least <= start
            assert stop <= most
    x = jax.ShapeDtypeStruct(shape, np.float32, sharding=source)
    in_order = plan_intermediate(source, target).in_order
    hop = jax.jit(lambda x: x, out_shardings=in_order).lower(x).compile()
    assert max(collective_bytes(hop.as_text()), default=0) <= shard_bytes(x, between)


@pytest.mark.full
@quick
@given(layouts(), layouts(), logical_shapes)
def test_uneven_variables_move_with_new_paddings(source, target, logical):
    values = np.random.default_rng(0).normal(size=logical).astype(np.float32)
    both = even_shape(logical, source, target)
    x = jax.device_put(np.pad(values, [(0, n - size) for n, size in zip(both, logical, strict=True)]), source)
    moved = np.asarray(reshard(x, target))[: logical[0], : logical[1]]
    padded = pad_uneven(moved, target, logical, target.mesh)
    np.testing.assert_array_equal(slice_uneven(padded, target, logical), values)


@quick
@given(layouts(), st.data())
def test_parts_of_a_mesh_hold_what_they_held(sharding, data):
    shape = even_shape((24, 12), sharding)
    x = jax.device_put(np.random.default_rng(0).normal(size=shape), sharding)
    axis = data.draw(st.sampled_from(sharding.mesh.axis_names))
    size = sharding.mesh.shape[axis]
    sections = data.draw(st.sampled_from([None, 1, size, list(range(1, size))]))
    before = {shard.device: np.array(shard.data) for shard in x.addressable_shards}
    parts = split_by_mesh_axis(x, axis, sections)
    after = {shard.device: np.array(shard.data) for part in parts for shard in part.addressable_shards}
    assert before.keys() == after.keys()
    assert sum(part.sharding.num_devices for part in parts) == len(before)
    for device, held in before.items():
        np.testing.assert_array_equal(after[device], held)
