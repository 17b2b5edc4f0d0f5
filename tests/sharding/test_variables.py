"""The record and the paths."""

import collections
import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import raises_naming
from flax import linen as nn
from flax import nnx
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import make_variable_spec, named_shardings
from spmd_trainer.sharding.variables import broadcast_prefix, is_spec, leaf_shape_dtype, named_leaves

SIZES = {"x": 2, "y": 4}


def test_record_of_a_padded_variable():
    v = make_variable_spec("emb", (50257, 512), jnp.bfloat16, P("y", "x"), SIZES, "declared")
    assert v.paddings == (3, 0)
    assert v.padded_shape == (50260, 512)
    assert v.is_padded
    assert not v.is_replicated
    assert v.shard_shape(SIZES) == (12565, 256)
    assert v.bytes_per_device(SIZES) == 12565 * 256 * 2
    assert v.logical_bytes() == 50257 * 512 * 2
    assert v.padding_bytes() == 3 * 512 * 2


def test_specs_that_mean_the_same_are_equal():
    made = [make_variable_spec("w", (4, 8), np.float32, spec, SIZES, "") for spec in (P("x"), P("x", None), P(("x",)))]
    assert made[0] == made[1] == made[2]
    assert make_variable_spec("w", (4, 8), "float32", P(None, None), SIZES, "").spec == P()
    assert hash(made[0]) == hash(made[1])


def test_record_is_a_leaf(xy_mesh):
    tree = {"a": make_variable_spec("a", (4,), np.float32, P("x"), SIZES, ""), "b": None}
    assert len(jax.tree.leaves(tree)) == 1
    assert named_shardings(tree, xy_mesh)["a"].spec == P("x")


def test_equal_specs_share_one_sharding(xy_mesh):
    variables = [make_variable_spec(str(i), (4,), np.float32, P("x"), SIZES, "") for i in range(3)]
    assert len({id(sharding) for sharding in named_shardings(variables, xy_mesh)}) == 1


def test_prng_keys_have_records():
    key = jax.random.key(0)
    v = make_variable_spec("key", key.shape, key.dtype, None, SIZES, "")
    assert v.bytes_per_device(SIZES) == 8


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        (P("x", None, None), ["a/w: ", "3 entries", "rank 2"]),
        (P("yy"), ["a/w: ", "'yy'", "did you mean y?", "x=2, y=4"]),
        (P("x", "x"), ["a/w: ", "'x'", "dimension 0 (size 4)", "dimension 1 (size 8)"]),
    ],
)
def test_record_errors(spec, words):
    with pytest.raises(ValueError, match=saying(*words)):
        make_variable_spec("a/w", (4, 8), np.float32, spec, SIZES, "")


Pair = collections.namedtuple("Pair", ["left", "right"])


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Node:
    weight: object
    inner: object


class Map(dict):
    """A dict subclass registered with string keys, as praxis' NestedMap is."""


jax.tree_util.register_pytree_with_keys(
    Map,
    lambda m: (tuple((jax.tree_util.DictKey(k), m[k]) for k in sorted(m)), tuple(sorted(m))),
    lambda keys, values: Map(zip(keys, values, strict=True)),
)


def paths(tree):
    return [path for path, _ in named_leaves(tree)]


def test_paths_of_plain_trees():
    assert paths({"a": {"b": [1, 2]}, "c": Pair(1, Map(z=2))}) == ["a/b/0", "a/b/1", "c/left", "c/right/z"]
    assert paths(Node(weight=1, inner={0: 2})) == ["weight", "inner/0"]
    assert paths(Node(weight={"value": 1}, inner=None)) == ["weight/value"]
    assert paths(3.0) == [""]


def test_paths_of_models():
    assert "lin/kernel" in paths(nnx.state({"lin": nnx.Linear(2, 3, rngs=nnx.Rngs(0))}))
    assert "kernel" in paths(nnx.Linear(2, 3, rngs=nnx.Rngs(0)))
    dense = nn.Dense(3, kernel_init=nn.with_partitioning(nn.initializers.ones, ("a", "b")))
    assert paths(dense.init(jax.random.key(0), jnp.ones((1, 2)))) == ["params/bias", "params/kernel"]
    assert "0/mu/w" in paths(optax.adam(1e-3).init({"w": jnp.ones(3)}))


@pytest.mark.parametrize(
    ("prefix", "words"),
    [
        ({"layers": [{"kernel": P()}, {"kernel": P(), "bias": P()}]}, ["an entry for layers/1/bias", "the tree lacks"]),
        ({"layers": [{"kernel": P()}]}, ["no entry for layers/1/kernel"]),
        ({"layers": {"0": P()}}, ["no entry for layers/1/kernel"]),
    ],
)
def test_a_prefix_that_does_not_fit_names_the_path(prefix, words):
    tree = {"layers": [{"kernel": 1}, {"kernel": 2}]}
    with raises_naming(ValueError, "specs", "prefix", *words):
        broadcast_prefix("specs", prefix, tree, is_spec)


def test_leaves_without_shape():
    assert leaf_shape_dtype("n", 3)[0] == ()
    with pytest.raises(ValueError, match=r"opt/name: a str \('adam'\) has no shape"):
        leaf_shape_dtype("opt/name", "adam")
