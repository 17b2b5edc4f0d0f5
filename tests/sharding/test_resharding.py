"""Arrays from mesh to mesh (contract 3.7)."""

import gc
import importlib.machinery
import os
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from facts import raises_naming
from jax.sharding import Mesh, NamedSharding, SingleDeviceSharding
from jax.sharding import PartitionSpec as P
from resharding_helpers import (
    FOUND,
    NOT_FOUND,
    NOT_NEEDED,
    collective_bytes,
    layout,
    random_array,
    shard_bytes,
    watched,
)
from sharding_helpers import saying

from spmd_trainer.sharding import (
    NoIntermediateShardingError,
    NoIntermediateShardingNeededError,
    find_intermediate_sharding,
    reshard,
    reshard_with_intermediate_sharding,
)
from spmd_trainer.sharding.intermediate_sharding import plan_intermediate

ROOT = pathlib.Path(__file__).parents[2]
ALL_PAIRS = {name: pair[:2] for name, pair in (FOUND | NOT_FOUND | NOT_NEEDED).items()}
on_eight = [name for name in ALL_PAIRS if not name.startswith("16")]
# Sizes of which neither divides the other, a gather, and a move that needs no array in between.
SHORT = ("6 to 4", "8 to whole", "same dimension")


def coordinates(mesh, axis):
    """{device: its coordinate along the axis}."""
    where = np.indices(mesh.devices.shape)[mesh.axis_names.index(axis)]
    return dict(zip(mesh.devices.flat, where.flat, strict=True))


# -- the table --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [name for name in FOUND if name in on_eight])
def test_intermediate_sharding_of_the_table(name):
    source, target, (split, replica) = FOUND[name]
    check_found(layout(*source), layout(*target), split, replica)


def check_found(source, target, split, replica):
    between, replica_axes = find_intermediate_sharding(source, target)
    assert [between.mesh.shape[axis] for axis in replica_axes] == [replica]
    assert between.mesh.axis_names[: len(replica_axes)] == tuple(replica_axes)
    assert between.mesh.shape[between.spec[0]] == split
    assert between.is_fully_replicated == (split == 1)
    assert between.spec[1] is None
    assert between.device_set == source.device_set
    assert coordinates(between.mesh, "tp") == coordinates(source.mesh, "tp")
    # The first hop: nothing but a merge of neighbours, and no gather beyond the piece that the split leaves.
    x = jax.ShapeDtypeStruct((48, 48), np.float32, sharding=source)
    in_order = plan_intermediate(source, target).in_order
    hop = jax.jit(lambda x: x, out_shardings=in_order).lower(x).compile()
    assert sum(collective_bytes(hop.as_text())) == shard_bytes(x, between) == x.size * 4 // split
    assert hop.memory_analysis().temp_size_in_bytes == 0
    # Both spellings of the layout put the same shards on the same devices.
    assert in_order.devices_indices_map(x.shape) == between.devices_indices_map(x.shape)


@pytest.mark.full
def test_the_table_on_sixteen_devices():
    code = (
        "from tests.sharding.test_resharding import *\n"
        "source, target, (split, replica) = FOUND['16 to 4']\n"
        "check_found(layout(*source), layout(*target), split, replica)\n"
        "values, x = random_array(layout(*source))\n"
        "for y in (reshard(x, layout(*target)), reshard_with_intermediate_sharding(x, x.sharding, layout(*target))):\n"
        "    np.testing.assert_array_equal(y, values)\n"
    )
    folders = [str(ROOT / folder) for folder in ("", "tests", "tests/sharding")]
    env = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=16",
        "PYTHONPATH": os.pathsep.join([*folders, os.environ.get("PYTHONPATH", "")]),
    }
    done = subprocess.run([sys.executable, "-c", code], env=env, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("name", NOT_FOUND)
def test_no_intermediate_sharding(name):
    source, target = NOT_FOUND[name]
    with pytest.raises(NoIntermediateShardingError, match=saying("fsdp=", "tp=", "reshard")) as error:
        find_intermediate_sharding(layout(*source), layout(*target))
    assert error.type is NoIntermediateShardingError


@pytest.mark.parametrize("name", NOT_NEEDED)
def test_no_intermediate_sharding_needed(name):
    source, target = NOT_NEEDED[name]
    with pytest.raises(NoIntermediateShardingNeededError, match=saying("same dimension")):
        find_intermediate_sharding(layout(*source), layout(*target))


def test_other_shardings_have_no_intermediate():
    with pytest.raises(NoIntermediateShardingError, match="NamedSharding"):
        find_intermediate_sharding(SingleDeviceSharding(jax.devices()[0]), layout((8, 1), P("fsdp")))


def test_other_axes_keep_their_devices():
    source = layout((2, 4), P("fsdp"), ("data", "fsdp"))
    between, replica_axes = find_intermediate_sharding(source, layout((1, 2), P(None, "tp")))
    assert dict(between.mesh.shape) == {replica_axes[0]: 2, "data": 2, between.spec[0]: 2}
    assert coordinates(between.mesh, "data") == coordinates(source.mesh, "data")
    # A device goes on holding the rows it had, with its neighbour's along 'fsdp'.
    rows, merged = (s.devices_indices_map((8, 8)) for s in (source, between))
    for device, (had, _) in rows.items():
        has = merged[device][0]
        assert has.start <= had.start
        assert had.stop <= has.stop


def test_a_dimension_over_two_axes_merges_from_the_inner_one():
    source = layout((2, 4), P(("x", "y"), None), ("x", "y"))
    between, replica_axes = find_intermediate_sharding(source, layout((1, 4), P(None, "tp")))
    assert replica_axes == ["y_intermediate_replica"]
    assert between.spec == P(("x", "y_intermediate_split"), None)
    between, replica_axes = find_intermediate_sharding(source, layout((1, 1), P()))
    assert sorted(replica_axes) == ["x_intermediate_replica", "y_intermediate_replica"]
    assert between.is_fully_replicated


def test_axes_that_cannot_be_cut_have_no_intermediate():
    source = layout((2, 3), P(("x", "y"), None), ("x", "y"))  # pairs of its six pieces span both axes
    with pytest.raises(NoIntermediateShardingError, match="neighbours"):
        find_intermediate_sharding(source, layout((1, 3), P(None, "tp")))


# -- values and memory ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [pytest.param(0, marks=pytest.mark.full), 4], ids=["same devices", "shifted devices"])
@pytest.mark.parametrize("donate", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.parametrize(
    "name", [name if name in SHORT else pytest.param(name, marks=pytest.mark.full) for name in on_eight]
)
def test_values_survive_and_no_device_holds_too_much(name, donate, first, monkeypatch):
    (sizes, spec), (target_sizes, target_spec) = ALL_PAIRS[name]
    first = min(first, 8 - int(np.prod(target_sizes)))
    source, target = layout(sizes, spec), layout(target_sizes, target_spec, first=first)
    for way in (
        lambda x: reshard(x, target, donate=donate),
        lambda x: reshard_with_intermediate_sharding(x, source, target, donate=donate),
    ):
        with watched(monkeypatch) as watch:
            values, x = random_array(source)
            y = way(x)
        assert y.sharding == target
        np.testing.assert_array_equal(y, values)
        assert x.is_deleted() == donate
        source_shard, target_shard = shard_bytes(y, source), shard_bytes(y, target)
        try:
            between = shard_bytes(y, find_intermediate_sharding(source, target)[0])
        except NoIntermediateShardingError:
            between = 0
        assert watch.most <= source_shard + target_shard + between
        assert watch.in_programs <= source_shard + target_shard + max(source_shard, target_shard)
        del x, y


@pytest.mark.full
def test_training_layout_to_decode_layout_on_the_same_devices(monkeypatch):
    # XLA's own program for this pair gathers the whole array.
    source, target = layout((8, 1), P("fsdp", None)), layout((2, 4), P(None, "tp"))
    whole = jax.jit(
        lambda x: x, out_shardings=NamedSharding(Mesh(source.mesh.devices.reshape(2, 4), ("fsdp", "tp")), target.spec)
    )
    with watched(monkeypatch) as watch:
        values, x = random_array(source)
        y = reshard(x, target)
    assert max(collective_bytes(whole.lower(x).compile().as_text())) >= x.nbytes
    np.testing.assert_array_equal(y, values)
    assert max(watch.most, watch.in_programs) <= shard_bytes(x, source) + 2 * shard_bytes(x, target)


@pytest.mark.parametrize("dtype", [np.int8, np.bool_, ml_dtypes.bfloat16, np.complex64])
def test_dtypes_stay(dtype):
    values, x = random_array(layout((8, 1), P("fsdp")), dtype=dtype)
    y = reshard(x, layout((1, 3), P(None, "tp"), first=2))
    assert y.dtype == values.dtype
    np.testing.assert_array_equal(y, values)


def test_a_tree_with_a_prefix_of_shardings():
    source, split, whole = layout((8, 1), P("fsdp")), layout((1, 4), P(None, "tp")), layout((1, 4), P())
    values, w = random_array(source)
    keys = jax.device_put(jax.random.split(jax.random.key(3), 8), source)
    state = {"params": {"w": w, "v": values}, "rest": [keys, 7, np.float32(2.5), None, jnp.zeros((0, 4))]}
    for donate in (False, True):
        y = reshard(state, {"params": split, "rest": whole}, donate=donate)
        assert y["params"]["w"].sharding == y["params"]["v"].sharding == split
        assert all(leaf.sharding.is_equivalent_to(whole, leaf.ndim) for leaf in jax.tree.leaves(y["rest"]))
        np.testing.assert_array_equal(y["params"]["w"], values)
        np.testing.assert_array_equal(y["params"]["v"], values)
        np.testing.assert_array_equal(
            jax.random.key_data(y["rest"][0]), jax.random.key_data(jax.random.split(jax.random.key(3), 8))
        )
        assert (y["rest"][1], y["rest"][2], y["rest"][3], y["rest"][4].shape) == (7, 2.5, None, (0, 4))
    assert w.is_deleted()
    assert keys.is_deleted()


def test_keys_are_split_too():
    keys = jax.device_put(jax.random.split(jax.random.key(0), 8), layout((8, 1), P("fsdp")))
    target = layout((4, 1), P("fsdp"), first=2)
    y = reshard_with_intermediate_sharding(keys, keys.sharding, target)
    assert y.sharding == target
    np.testing.assert_array_equal(jax.random.key_data(y), jax.random.key_data(keys))


@pytest.mark.parametrize(
    "target",
    [
        layout((8, 1), P("fsdp")),
        layout((4, 2), P(("fsdp", "tp"))),
        layout((2, 1), P()),
        SingleDeviceSharding(jax.devices()[3]),
    ],
    ids=str,
)
def test_donation_deletes_every_buffer(target):
    values, x = random_array(layout((8, 1), P("fsdp")))
    buffers = [shard.data for shard in x.addressable_shards]
    y = reshard({"a": x, "b": x}, target, donate=True)  # the same array twice: tied variables
    assert x.is_deleted()
    assert all(buffer.is_deleted() for buffer in buffers)
    np.testing.assert_array_equal(y["a"], values)
    np.testing.assert_array_equal(y["b"], values)
    z = jax.jit(lambda a: a + 1, donate_argnums=0)(y["a"])  # a result can be donated itself
    np.testing.assert_array_equal(z, values + 1)
    np.testing.assert_array_equal(y["b"], values)


def test_aliases_only_where_they_may_be():
    def buffers(x):
        return {shard.data.unsafe_buffer_pointer() for shard in x.addressable_shards}

    values, x = random_array(layout((8, 1), P()))
    for target in (layout((8, 1), P()), layout((2, 4), P()), layout((4, 1), P())):
        y = reshard(x, target, may_alias=False)
        assert not buffers(x) & buffers(y)
        np.testing.assert_array_equal(y, values)
    assert reshard(x, x.sharding) is x
    assert buffers(reshard(x, layout((4, 1), P()))) <= buffers(x)


def test_arrays_on_explicit_axes_move():
    explicit = NamedSharding(jax.make_mesh((8,), ("x",)), P("x", None))
    values, x = random_array(explicit)
    for target in (layout((1, 4), P(None, "tp")), layout((1, 8), P(None, "tp"))):
        np.testing.assert_array_equal(reshard(x, target), values)
        np.testing.assert_array_equal(reshard_with_intermediate_sharding(x, explicit, target), values)


@pytest.mark.full
def test_kept_plans_compile_once():
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, *_, **__: compiled.append(event) if event.endswith("backend_compile_duration") else None
    )
    # On the same devices, a merge of neighbours, which is one compiled program.
    values, x = random_array(layout((8, 1), P("fsdp")), shape=(56, 24))
    target = layout((4, 2), P("fsdp"))
    reshard({"a": x, "b": x + 0}, target, cache_resharding_plans=True)
    assert compiled
    compiled.clear()
    y = reshard(x, target, cache_resharding_plans=True)
    assert compiled == []
    np.testing.assert_array_equal(y, values)


# -- Pathways ---------------------------------------------------------------------------------------------------------


@pytest.fixture
def engine_calls(monkeypatch):
    """A stand-in for Pathways' transfer engine, on the proxy platform. Yields the calls it gets."""
    calls = []

    def engine(x, sharding, *, donate=False, may_alias=None, cache_resharding_plans=False):
        calls.append((x, sharding, donate, cache_resharding_plans))
        return jax.device_put(x, sharding)

    for name in ("pathwaysutils", "pathwaysutils.experimental", "pathwaysutils.experimental.reshard"):
        module = types.ModuleType(name)
        module.__spec__ = importlib.machinery.ModuleSpec(name, None)
        monkeypatch.setitem(sys.modules, name, module)
    sys.modules["pathwaysutils.experimental.reshard"].reshard = engine
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", "proxy,cpu")
    yield calls
    jax.config.update("jax_platforms", platforms)


def test_pathways_engine_does_the_last_move(engine_calls):
    values, x = random_array(layout((8, 1), P("fsdp")))
    target = layout((1, 4), P(None, "tp"), first=4)
    direct = layout((4, 1), P("fsdp"))
    y = reshard({"a": x, "b": x + 1}, {"a": target, "b": direct}, cache_resharding_plans=True)
    np.testing.assert_array_equal(y["a"], values)
    np.testing.assert_array_equal(y["b"], values + 1)
    ([copy], [to], donated, kept), ([whole], [directly], given, _) = engine_calls
    assert (to, donated, kept) == (target, True, True)
    assert copy.sharding.num_devices == 4  # one copy of the merged shards
    assert shard_bytes(copy, copy.sharding) == copy.nbytes // 4
    assert (directly, given, whole.sharding) == (direct, False, x.sharding)


def test_the_platform_without_pathwaysutils_is_jax_s_own(monkeypatch):
    platforms = jax.config.jax_platforms
    jax.config.update("jax_platforms", "proxy,cpu")
    try:
        values, x = random_array(layout((8, 1), P("fsdp")))
        np.testing.assert_array_equal(reshard(x, layout((1, 4), P(None, "tp"))), values)
    finally:
        jax.config.update("jax_platforms", platforms)


# -- errors -----------------------------------------------------------------------------------------------------------


def test_a_target_that_does_not_divide_is_refused_with_everything_named():
    x = {"params": {"w": jnp.zeros((8, 6))}}
    words = "params/w", "dimension 1", "size 6", "tp=4", "P(None, 'tp')", "fsdp=1, tp=4", "4 or 8", "pad_uneven"
    with pytest.raises(ValueError, match=saying(*words)):
        reshard(x, layout((1, 4), P(None, "tp")))
    assert not x["params"]["w"].is_deleted()


def test_errors_come_before_anything_is_donated():
    _, x = random_array(layout((8, 1), P("fsdp")))
    with pytest.raises(ValueError, match=saying("b", "dimension 0")):
        reshard({"a": x, "b": jnp.zeros(7)}, layout((4, 1), P("fsdp")), donate=True)
    assert not x.is_deleted()


def test_what_cannot_be_moved_is_named():
    target = layout((4, 1), P())
    with raises_naming(ValueError, "sharding", "prefix", "entry for b"):
        reshard({"a": 1, "b": 2}, {"a": target})
    with raises_naming(ValueError, "a: ", "not a sharding", "NamedSharding(mesh, spec)"):
        reshard({"a": 1}, P("fsdp"))
    with raises_naming(ValueError, "a: ", "not a sharding"):
        reshard({"a": 1}, NamedSharding(target.mesh.abstract_mesh, P()))
    with pytest.raises(ValueError, match=saying("a", "str")):
        reshard({"a": "text"}, target)
    with pytest.raises(ValueError, match=saying("a", "no values")):
        reshard({"a": jax.ShapeDtypeStruct((3,), np.float32)}, target)
    with pytest.raises(ValueError, match=saying("a", "rank 0")):
        reshard({"a": 1}, layout((4, 1), P("fsdp")))
    x = jnp.zeros(4)
    x.delete()
    with pytest.raises(ValueError, match=saying("a", "is deleted", "donate=True")):
        reshard({"a": x}, target)


def test_in_sharding_must_be_the_array_s_own():
    _, x = random_array(layout((8, 1), P("fsdp")))
    with pytest.raises(ValueError, match=saying("w", "in_sharding", "reshard")):
        reshard_with_intermediate_sharding({"w": x}, layout((4, 1), P("fsdp")), layout((1, 4), P(None, "tp")))


@pytest.mark.full
def test_the_source_keeps_no_host_copy():
    _, x = random_array(layout((8, 1), P("fsdp")))
    reshard(x, layout((1, 4), P(None, "tp")))
    gc.collect()
    assert x._npy_value is None
