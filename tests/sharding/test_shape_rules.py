"""Rules by shape (contract 3.5)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import assert_names, raises_naming
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import MeshPartitionHelper


def helper(**sizes):
    names, shape = tuple(sizes), tuple(sizes.values())
    return MeshPartitionHelper(jax.make_mesh(shape, names, axis_types=(AxisType.Auto,) * len(names)))


ALL = {"dp": 2, "fsdp": 2, "tp": 2, "sp": 1}


def test_analyze_pytree():
    tree = {"a": jnp.zeros((8, 4)), "b": [jnp.zeros((8, 4)), jnp.zeros(3)], "c": jnp.float32(1)}
    singles = [("dp",), ("sp",), ("tp",), ("fsdp",)]
    assert helper(**ALL).analyze_pytree(tree) == {(8, 4): [("fsdp", "sp"), *singles], (3,): singles, (): []}
    assert helper(dp=4, tp=2).analyze_pytree(tree) == {(8, 4): [("dp",), ("tp",)], (3,): [("dp",), ("tp",)], (): []}
    assert helper(data=8).analyze_pytree(tree) == {(8, 4): [], (3,): [], (): []}


@pytest.mark.parametrize(
    ("sizes", "shape", "spec"),
    [
        ({"fsdp": 2, "sp": 4}, (128, 128), P("fsdp", "sp")),
        ({"fsdp": 4, "sp": 2}, (6, 8192), P("sp", "fsdp")),  # the product divides by 8, and 6 does not by 4
        ({"fsdp": 8, "sp": 1}, (12, 6144), P(None, "fsdp")),
        ({"dp": 8}, (8192,), P("dp")),
        ({"dp": 8, "tp": 1}, (8192, 3), P("dp", None)),
        ({"dp": 2, "tp": 4}, (128, 128), P("dp", "tp")),
        ({"dp": 2, "fsdp": 2, "tp": 2}, (64, 64, 64), P("dp", "tp", "fsdp")),
        ({"dp": 4, "tp": 2}, (7, 13), P()),
        ({"data": 8}, (8192,), P()),
        ({"dp": 8}, (), P()),
    ],
)
def test_specs(sizes, shape, spec):
    h = helper(**sizes)
    assert h.create_partition_spec(shape, h.analyze_pytree(np.zeros(shape, np.int8))[shape]) == spec


def test_the_limit_counts_elements_of_the_piece():
    h = helper(dp=2, tp=4)
    methods = [("dp",), ("tp",)]
    assert h.create_partition_spec((64, 128), methods) == P("dp", "tp")  # 8192 / 8 = 1024
    assert h.create_partition_spec((64, 124), methods) == P("dp", None)  # 992 is too small
    assert h.create_partition_spec((32, 32), methods) == P()
    assert h.create_partition_spec((32, 32), methods, min_shard_size=1) == P("dp", "tp")
    both = helper(fsdp=2, sp=4)
    assert both.create_partition_spec((64, 64), [("fsdp", "sp"), ("sp",), ("fsdp",)]) == P("sp", None)  # 4096 / 4


def test_an_axis_takes_what_is_left():
    h = helper(fsdp=4, sp=2)
    # Together they do not fit; alone fsdp does, although no method of its own is given.
    assert h.create_partition_spec((3, 4096), [("fsdp", "sp")]) == P(None, "fsdp")


def test_axes_of_size_one_are_never_named():
    h = helper(fsdp=8, sp=1, dp=1, tp=1)
    plan = h.plan_sharding({"w": np.zeros((64, 512), np.float32)})
    assert plan["w"].spec == P("fsdp", None)


def test_unknown_axis():
    with raises_naming(ValueError, "'dpp'", "(8,)", "dp=8", "mean dp"):
        helper(dp=8).create_partition_spec((8,), [("dpp",)])


def test_shard_array():
    h = helper(dp=8)
    x = h.shard_array(np.arange(16.0), P("dp"))
    assert x.addressable_shards[0].data.shape == (2,)
    with pytest.raises(ValueError, match=saying("dimension 0", "(7,)", "size 7", "dp=8", "Sizes that do: 8")):
        h.shard_array(np.zeros(7), P("dp"))
    with pytest.raises(ValueError, match=saying("'d'", "dp=8")):
        h.shard_array(np.zeros(8), P("d"))


def test_auto_shard_pytree(capsys):
    tree = {"a": np.ones((64, 512), np.float32), "b": [jnp.arange(7), 3.0], "none": None}
    h = helper(dp=2, tp=4)
    out = h.auto_shard_pytree(tree)
    assert out["a"].sharding.spec == P("dp", "tp")
    assert out["b"][0].sharding.is_fully_replicated
    jax.tree.map(np.testing.assert_array_equal, out, tree)
    assert capsys.readouterr().out == ""


def test_reasons():
    h = helper(dp=2, tp=4)
    tree = {"a": np.zeros((64, 512)), "b": np.zeros(7), "c": np.zeros(()), "d": np.zeros((8, 8))}
    reasons = {v.path: v.reason for v in h.plan_sharding(tree).values()}
    facts = {
        "a": ["shape rule", "dp, tp"],
        "b": ["replicated", (7,), "dp=2, tp=4"],
        "c": ["replicated", "scalar"],
        "d": ["replicated", "dp=2, tp=4", (8, 8), "min_shard_size=1024"],
    }
    assert reasons.keys() == facts.keys()
    for path, named in facts.items():
        assert_names(reasons[path], *named)
    other = helper(data=8).plan_sharding({"w": np.zeros((64, 512))})["w"]
    assert_names(other.reason, "replicated", "data=8", "fsdp", "sp", "dp", "tp")
