"""Rules by path (contract 3.4)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import assert_names
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import fsdp, infer_sharding, parse_tactic, plan_sharding, replicate, shard_dim

MIB = 2**20


def array(*shape, dtype=np.float32):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {
    "params": {"kernel": array(512, 1024), "bias": array(1024), "odd": array(7, 13)},
    "step": array(dtype=np.int32),
}


def specs(state, strategy, mesh):
    return jax.tree.map(lambda sharding: sharding.spec, infer_sharding(state, strategy, mesh))


def only(leaf, tactic, mesh):
    """The record of one leaf under one tactic."""
    return plan_sharding({"w": leaf}, [("w", tactic)], mesh)["w"]


def test_first_match_wins_and_search_finds_anywhere(data_mesh):
    strategy = [("kern", "shard_dim(1, 'mdl')"), ("params/.*", "fsdp('data', 0)"), (".*", "replicate")]
    assert specs(STATE, strategy, data_mesh) == {
        "params": {"kernel": P(None, "mdl"), "bias": P("data"), "odd": P()},
        "step": P(),
    }


def test_same_structure_back_on_any_tree(data_mesh):
    state = (optax.adam(1e-3).init({"w": jnp.ones((8, 4))}), [None, optax.MaskedNode()], STATE)
    shardings = infer_sharding(state, [(".*", fsdp("data", 0))], data_mesh)
    assert jax.tree.structure(shardings) == jax.tree.structure(state)
    assert shardings[0][0].mu["w"] == NamedSharding(data_mesh, P("data", None))
    assert shardings[0][0].count.spec == P()


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((512, 1024), P(None, "data")),
        ((1024, 512), P("data", None)),
        ((8, 4, 2), P("data", None, None)),
        ((6, 4), P(None, "data")),  # 6 does not divide by 4
        ((4, 7), P("data", None)),  # 7 neither
        ((8, 8), P(None, "data")),  # of equal ones the last
        ((7, 13), P()),
    ],
)
def test_fsdp_takes_the_largest_dimension_that_divides(shape, spec, data_mesh):
    assert only(array(*shape), "fsdp('data', 0)", data_mesh).spec == spec


def test_fsdp_over_several_axes(data_mesh):
    for axis in ("data, mdl", ("data", "mdl"), ["data", "mdl"]):
        assert only(array(12, 8), fsdp(axis, 0), data_mesh).spec == P(None, ("data", "mdl"))


def test_fsdp_leaves_small_leaves_alone(data_mesh):
    at = only(array(MIB), fsdp("data"), data_mesh)  # 4 MiB of float32
    assert at.spec == P()
    assert_names(at.reason, "4.0 MiB", "min_size_to_shard_mb=4")
    assert only(array(MIB + 4), fsdp("data"), data_mesh).spec == P("data")
    assert only(array(MIB + 4, dtype=np.int8), fsdp("data"), data_mesh).spec == P()


@pytest.mark.parametrize(
    ("shape", "spec", "paddings"),
    [
        ((7, 13), P("data", None), (1, 0)),  # 7 -> 8 adds less than 13 -> 16
        ((3, 1001), P(None, "data"), (0, 3)),
        ((8, 13), P("data", None), (0, 0)),  # one divides: no padding
        ((5,), P("data"), (3,)),
    ],
)
def test_fsdp_may_pad(shape, spec, paddings, data_mesh):
    record = only(array(*shape), 'fsdp("data", 0, allow_uneven=True)', data_mesh)
    assert (record.spec, record.paddings) == (spec, paddings)
    padded = jax.device_put(np.zeros(record.padded_shape), NamedSharding(data_mesh, record.spec))
    assert padded.addressable_shards[0].data.shape == record.shard_shape(data_mesh.shape)


def test_tactics_compose(data_mesh):
    record = only(array(512, 1024), ["shard_dim(-1, 'mdl')", fsdp("data", 0)], data_mesh)
    assert record.spec == P("data", "mdl")
    assert record.reason == "rule 1 ('w', [shard_dim(dim=-1, axis='mdl'), fsdp(axis='data', min_size_to_shard_mb=0)])"
    half = only(array(7, 1024), ["shard_dim(-1, 'mdl')", fsdp("data", 0)], data_mesh)
    assert half.spec == P(None, "mdl")
    assert_names(half.reason, "no unsplit dimension", (7, 1024), "data=4")


def test_callables_are_tactics(data_mesh):
    seen = []

    def first_dim(spec, mesh, path, leaf):
        seen.append((spec, dict(mesh.shape), path, leaf.shape))
        return P("data")

    record = only(array(8, 4), [first_dim, "shard_dim(1, 'mdl')"], data_mesh)
    assert seen == [(P(None, None), {"data": 4, "mdl": 2}, "w", (8, 4))]
    assert record.spec == P("data", "mdl")
    assert record.reason == "rule 1 ('w', [first_dim, shard_dim(dim=1, axis='mdl')])"
    # The built-in ones have the same signature.
    assert replicate()(P(None), data_mesh, "w", array(8)) == P(None)
    assert shard_dim(0, "data")(P(None), data_mesh, "w", array(8)) == P("data")


def test_nothing_is_silent(data_mesh):
    strategy = [
        ("kernel", "replicate"),
        ("odd", "fsdp('data', 0)"),
        ("bias", "shard_dim(0, 'data')"),
        ("s", "fsdp('data')"),
    ]
    state = {"kernel": array(8), "odd": array(7, 13), "bias": array(6), "step": array(), "other": array(8)}
    reasons = {v.path: v.reason for v in plan_sharding(state, strategy, data_mesh).values()}
    facts = {
        "kernel": ["rule 1 ('kernel', replicate())"],
        "odd": ["replicated", (7, 13), "data=4", "rule 2 ('odd', fsdp(axis='data', min_size_to_shard_mb=0))"],
        "bias": ["replicated", "dimension 0", (6,), "data=4", "rule 3 ('bias', shard_dim(dim=0, axis='data'))"],
        "step": ["replicated", "scalar", "rule 4 ('s', fsdp(axis='data'))"],
        "other": ["replicated", "no rule"],
    }
    assert reasons.keys() == facts.keys()
    for path, named in facts.items():
        assert_names(reasons[path], *named)
    assert "replicated" not in reasons["kernel"]


def test_leaves_that_lie_on_the_mesh_already(data_mesh, xy_mesh):
    x = jax.device_put(jnp.zeros((8, 4)), NamedSharding(data_mesh, P("data")))
    state = {"params": {"w": x}}
    with pytest.raises(ValueError, match=saying("params/w", "P('data', None)", "data=4, mdl=2", "already split")):
        infer_sharding(state, [(".*", "replicate")], data_mesh)
    assert specs(state, [], data_mesh) == {"params": {"w": P("data", None)}}
    assert plan_sharding(state, [], data_mesh)["params"]["w"].reason.startswith("keeps its spec")
    # Once more the same rule changes nothing; another axis takes what is left.
    assert specs(state, [(".*", "fsdp('data', 0)")], data_mesh) == {"params": {"w": P("data", None)}}
    assert specs(state, [(".*", "fsdp('mdl', 0)")], data_mesh) == {"params": {"w": P("data", "mdl")}}
    # On another mesh its old place says nothing.
    assert specs(state, [(".*", "replicate")], xy_mesh) == {"params": {"w": P()}}


def test_a_tactic_that_split_before_is_not_undone(data_mesh):
    with pytest.raises(ValueError, match=saying("w: replicate()", "P('data', None)", "rule 1")):
        only(array(8, 2), ["fsdp('data', 0)", "replicate()"], data_mesh)


@pytest.mark.parametrize(
    ("text", "tactic"),
    [
        ("replicate", replicate()),
        ("replicate()", replicate()),
        (' fsdp(axis="data") ', fsdp("data")),
        ('fsdp(axis="data, mdl")', fsdp(("data", "mdl"))),
        ('fsdp(("data", "mdl"), min_size_to_shard_mb=0)', fsdp("data,mdl", 0)),
        ('fsdp("data", 0.5, allow_uneven=True)', fsdp("data", 0.5, True)),
        ('shard_dim(-1, "mdl")', shard_dim(dim=-1, axis="mdl")),
        ('shard_dim(dim=0, axis="data, mdl", allow_uneven=True)', shard_dim(0, ("data", "mdl"), allow_uneven=True)),
    ],
)
def test_tactics_from_text(text, tactic):
    assert parse_tactic(text) == tactic
    assert parse_tactic(str(tactic)) == tactic


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fsd('data')", ["'fsd'", "did you mean fsdp?", "replicate()", "fsdp(axis", "shard_dim(dim, axis"]),
        ("zero", ["'zero'", "Known tactics"]),
        ("fsdp(data)", ["plain strings", "quotes"]),
        ("fsdp(axes='data')", ["no argument 'axes'", "did you mean axis?"]),
        ("fsdp()", ["missing", "'axis'"]),
        ("fsdp('data', 1, 2, 3)", ["too many"]),
        ("import os", ["cannot be read"]),
        ("os.remove('x')", ["not a call of a tactic"]),
        ("fsdp(axis=__import__('os').sep)", ["plain strings"]),
        ("fsdp(axis='')", ["axis=''", "mesh axis"]),
        ("fsdp(axis='data, data')", ["different"]),
        ("fsdp('data', 'big')", ["min_size_to_shard_mb='big'"]),
        ("shard_dim('data', 0)", ["dim='data'", "whole number"]),
        ("shard_dim(0, 0)", ["axis=0"]),
        ("fsdp(3)", ["axis=3"]),
    ],
)
def test_bad_tactics(text, words, data_mesh):
    with pytest.raises(ValueError, match=saying("Sharding rule 2 ('.*')", *words)):
        infer_sharding(STATE, [("a", "replicate"), (".*", text)], data_mesh)


@pytest.mark.parametrize(
    ("strategy", "words"),
    [
        ([("(", "replicate")], ["rule 1", "'('", "does not compile", "character 0"]),
        ([("a", 3)], ["rule 1", "3 is not a tactic"]),
        ("fsdp('data')", ["list of (regex, tactic)", "str"]),
        ({".*": "replicate"}, ["list of (regex, tactic)", "dict"]),
        (["replicate"], ["rule 1", "'replicate'", "(regex, tactic)"]),
        ([("a", "replicate", 1)], ["rule 1", "(regex, tactic)"]),
        (
            [("kernel", "fsdp('dta', 0)")],
            ["params/kernel", "(512, 1024)", "'dta'", "did you mean data?", "data=4, mdl=2"],
        ),
        ([("step", "shard_dim(0, 'data')")], ["step", "shape ()", "no dimension 0", "data=4", "scalar", "rule 1"]),
        ([("bias", "shard_dim(1, 'data')")], ["params/bias", "(1024,)", "no dimension 1", "0 to 0"]),
        ([("step", lambda *_: P("data"))], ["step", "P('data')", "scalar", "rule 1"]),
        ([("bias", lambda *_: P("dat"))], ["params/bias", "'dat'", "did you mean data?"]),
        (
            [("kernel", lambda *_: P("data", "data"))],
            ["params/kernel", "'data'", "dimension 0 (size 512)", "dimension 1"],
        ),
        (
            [("kernel", ["shard_dim(0, 'data')", "shard_dim(0, 'mdl')"])],
            ["params/kernel", "dimension 0 (size 512)", "already split over data=4", "remove one"],
        ),
        (
            [("kernel", ["shard_dim(0, 'data')", "shard_dim(1, 'data')"])],
            ["params/kernel", "dimension 0 (size 512)", "already split over data=4"],
        ),
        ([("kernel", ["shard_dim(0, 'data')", "fsdp('data, mdl', 0)"])], ["params/kernel", "axis 'data'", "already"]),
    ],
)
def test_bad_strategies(strategy, words, data_mesh):
    with pytest.raises(ValueError, match=saying(*words)):
        infer_sharding(STATE, strategy, data_mesh)


def test_leaves_without_a_shape(data_mesh):
    with pytest.raises(ValueError, match=r"opt/name: a str"):
        infer_sharding({"opt": {"name": "adam"}}, [], data_mesh)


def test_an_abstract_mesh_will_do():
    mesh = jax.sharding.AbstractMesh((512, 8), ("data", "mdl"))
    assert only(array(4096, 1024), "fsdp('data, mdl', 0)", mesh).spec == P(("data", "mdl"), None)
