"""Rank-based split mappings (contract 3.2)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import raises_naming
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import (
    infer_partition_spec_based_on_rank_fn,
    input_partition_spec,
    input_partition_specs,
    reshard_input_based_on_rank_fn,
    reshard_inputs,
    shard_on_batch_dim_partition_spec,
    to_partition_spec,
    validate_split_mapping,
)

AXES = ("replica", "data", "mdl")
SIZES = {"replica": 1, "data": 4, "mdl": 2}
MAPPING = {
    "map_1d": (("replica", "data"),),
    "map_2d": (("replica", "data"), None),
    "map_4d": ("data", None, None, "mdl"),
}


def array(*shape):
    return jax.ShapeDtypeStruct(shape, np.float32)


@pytest.mark.parametrize(
    ("mapping", "spec"),
    [
        ((0, -1), P("replica", None)),
        ((("replica", "data"), "mdl"), P(("replica", "data"), "mdl")),
        ((1, 2), P("data", "mdl")),
        ((None, -1), P(None, None)),
        (((0, "data"), None), P(("replica", "data"), None)),
        ((("data",), None), P("data", None)),
        (("data", None, np.int32(2)), P("data", None, "mdl")),
        ((), P()),
        (None, P()),
    ],
)
def test_to_partition_spec(mapping, spec):
    assert to_partition_spec(mapping, AXES) == spec


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        (("dta",), ["('dta',)", "dimension 0", "'dta'", "did you mean data?", "replica, data, mdl"]),
        ((3,), ["axis number 3", "0 to 2"]),
        (("data", "data"), ["'data'", "more than once", "dimensions [0, 1]"]),
        ((("data", "data"),), ["'data'", "more than once"]),
        ((1, "data"), ["'data'", "more than once"]),
        ((1.5,), ["1.5", "axis name"]),
        (((0, -1),), ["-1"]),
        (((0, None),), ["None", "not allowed inside a tuple"]),
        ("data", ["'data'", "('data',)"]),
        (7, ["7", "tuple"]),
    ],
)
def test_to_partition_spec_errors(mapping, words):
    with pytest.raises(ValueError, match=saying(*words)):
        to_partition_spec(mapping, AXES)


def test_shard_on_batch_dim():
    assert shard_on_batch_dim_partition_spec(AXES, array(8, 3, 2)) == P(AXES, None, None)
    assert shard_on_batch_dim_partition_spec(AXES, array(8)) == P(AXES)
    with pytest.raises(ValueError, match="scalar"):
        shard_on_batch_dim_partition_spec(AXES, array())


def test_infer_by_rank():
    assert infer_partition_spec_based_on_rank_fn(MAPPING, AXES, array(8, 3)) == P(("replica", "data"), None)
    assert infer_partition_spec_based_on_rank_fn(MAPPING, AXES, array(8)) == P(("replica", "data"))
    assert infer_partition_spec_based_on_rank_fn({"map_5d": ("data", *[None] * 4)}, AXES, array(4, 1, 1, 1, 1)) == P(
        "data", None, None, None, None
    )
    assert infer_partition_spec_based_on_rank_fn({"map_2d": None}, AXES, array(8, 3)) is None
    assert infer_partition_spec_based_on_rank_fn(None, AXES, array(8, 3)) is None


def test_missing_rank_says_what_to_add():
    with raises_naming(
        ValueError,
        "task.train.inputs_split_mapping",
        "no map_3d",
        "'images/patches'",
        "rank 3",
        (16, 196, 768),
        "replica=1, data=4, mdl=2",
        "map_3d=(('replica', 'data'), None, None)",
        "map_3d=None",
    ):
        input_partition_spec(MAPPING, SIZES, "images/patches", array(16, 196, 768))


@pytest.mark.parametrize(
    ("sizes", "proposed"),
    [(SIZES, "map_2d=(('replica', 'data', 'mdl'), None)"), ({"data": 8}, "map_2d=('data', None)")],
)
def test_without_another_rank_the_whole_mesh_is_proposed_for_the_batch(sizes, proposed):
    with raises_naming(ValueError, proposed):
        input_partition_spec({}, sizes, "tokens", array(16, 32))


def test_an_override_by_name_wins_over_the_rank():
    mapping = MAPPING | {"by_name": {"images": (None, None, None, "mdl"), "audio/*": ("mdl", None), "audio/id": None}}
    batch = {
        "images": array(8, 4, 4, 2),
        "other": array(8, 4, 4, 2),
        "audio": {"wave": array(8, 100), "id": array(8, 1)},
        "labels": array(8),
    }
    assert input_partition_specs(mapping, AXES, batch) == {
        "images": P(None, None, None, "mdl"),
        "other": P("data", None, None, "mdl"),
        "audio": {"wave": P("mdl", None), "id": P()},
        "labels": P(("replica", "data")),
    }


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (lambda batch, mesh: (MAPPING, batch, AXES), ["mesh_axis_names = {'ids'", "mesh.axis_names"]),
        (lambda batch, mesh: (AXES, MAPPING, batch), ["mesh_axis_names = {'map_1d'", "mesh.axis_names"]),
        (lambda batch, mesh: (batch, AXES, MAPPING), ["inputs_split_mapping has a key 'ids'", "map_1d, map_2d"]),
        (lambda batch, mesh: (batch, AXES, {"map_1d": (0,)}), ["inputs_split_mapping has a key 'ids'"]),
        (lambda batch, mesh: (AXES, AXES, batch), ["inputs_split_mapping must be a dict, not a tuple"]),
        (lambda batch, mesh: (MAPPING, mesh, batch), ["(a Mesh)", "mesh.axis_names"]),
        (lambda batch, mesh: (MAPPING, "data", batch), ["'data' (a str)", "('data', 'mdl')"]),
        (lambda batch, mesh: (MAPPING, ("data", 4), batch), ["('data', 4)", "names"]),
        (lambda batch, mesh: (MAPPING, AXES, {"ids": "text"}), ["'ids'", "'text'"]),
    ],
)
def test_arguments_of_another_type_or_swapped(arguments, words, pax_mesh):
    with pytest.raises(ValueError, match=saying(*words)):
        input_partition_specs(*arguments({"ids": array(8, 3)}, pax_mesh))


def test_an_override_of_another_rank():
    with pytest.raises(ValueError, match=r"by_name\['images'\].*2 entries.*'images' has rank 4.*\(8, 4, 4, 2\)"):
        input_partition_spec({"by_name": {"images": ("data", None)}}, SIZES, "images", array(8, 4, 4, 2))


def test_worked_example_images_and_token_ids_in_one_batch(pax_mesh):
    """The guide's example: rank 1 to 4 in one batch, a new rank and one exception by name."""
    mapping = {
        "map_1d": (("replica", "data"),),
        "map_2d": (("replica", "data"), None),
        "map_3d": (("replica", "data"), None, None),
        "by_name": {"images": ("data", None, None, "mdl")},
    }
    batch = {
        "labels": jnp.arange(8),
        "ids": jnp.ones((8, 16), jnp.int32),
        "boxes": jnp.ones((8, 5, 4)),
        "images": jnp.ones((8, 4, 4, 2)),
    }
    validate_split_mapping(mapping, pax_mesh.shape, batch)
    with jax.set_mesh(pax_mesh):
        out = jax.jit(lambda b: reshard_inputs(mapping, AXES, b))(batch)
    shards = {key: x.addressable_shards[0].data.shape for key, x in out.items()}
    assert shards == {"labels": (2,), "ids": (2, 16), "boxes": (2, 5, 4), "images": (2, 4, 4, 1)}
    for key, x in batch.items():
        np.testing.assert_array_equal(out[key], x)


def test_reshard_inside_jit(pax_mesh):
    x = jnp.arange(32.0).reshape(8, 4)
    with jax.set_mesh(pax_mesh):
        y = jax.jit(lambda a: reshard_input_based_on_rank_fn(MAPPING, AXES, a))(x)
    assert y.addressable_shards[0].data.shape == (2, 4)
    np.testing.assert_array_equal(x, y)
    z = jax.jit(lambda a: reshard_input_based_on_rank_fn({"map_2d": ("mdl", None)}, AXES, a, mesh=pax_mesh))(x)
    assert z.addressable_shards[0].data.shape == (4, 4)


def test_reshard_none_leaves_inputs_alone():
    x = jnp.ones((3, 5))
    assert reshard_input_based_on_rank_fn(None, AXES, x) is x
    batch = {"x": x}
    assert reshard_inputs(None, AXES, batch) is batch


def test_reshard_replicates_where_the_entry_is_none(pax_mesh):
    x = jax.device_put(jnp.ones((8, 4)), jax.NamedSharding(pax_mesh, P("data")))
    y = jax.jit(lambda a: reshard_input_based_on_rank_fn({"map_2d": None}, AXES, a, mesh=pax_mesh))(x)
    assert y.sharding.is_fully_replicated


def test_reshard_refuses_a_dimension_that_does_not_divide(pax_mesh):
    def step(x, **kwargs):
        return reshard_inputs(MAPPING, AXES, {"ids": x}, mesh=pax_mesh, **kwargs)

    words = r"input 'ids': dimension 0 of shape \(6, 4\) \(size 6\).*replica=1 x data=4.*4 or 8"
    with pytest.raises(ValueError, match=words):
        jax.jit(step)(jnp.ones((6, 4)))
    total = jax.jit(lambda x: step(x, allow_uneven=True)["ids"].sum())(jnp.ones((6, 4)))
    assert total == 24


def test_reshard_without_a_mesh():
    with raises_naming(ValueError, "no mesh", "'ids'", "jax.set_mesh"):
        reshard_inputs(MAPPING, AXES, {"ids": jnp.ones((8, 4))})


@pytest.mark.parametrize("mapping", [None, {}, MAPPING, {"map_7d": None}, {"by_name": None}, {"by_name": {"a": None}}])
def test_valid_mappings(mapping):
    validate_split_mapping(mapping, AXES)


@pytest.mark.parametrize(
    ("mapping", "words"),
    [
        ({"map_3d": ("data", None)}, ["map_3d", "('data', None)", "needs 3", "map_3d=('data', None, None)"]),
        ({"map_1d": ("replica", "data")}, ["map_1d", "needs 1", "map_1d=(('replica', 'data'),)"]),
        ({"map_1d": ("data", None)}, ["map_1d", "map_2d"]),
        ({"map_2d": ("dat", None)}, ["map_2d", "'dat'", "did you mean data?", "replica=1, data=4, mdl=2"]),
        ({"map_2d": ("data", "data")}, ["map_2d", "'data'", "more than once"]),
        ({"map1d": None}, ["'map1d'", "did you mean map_1d?"]),
        ({"map_0d": ()}, ["'map_0d'", "scalar"]),
        ({"by_nam": {}}, ["'by_nam'", "did you mean by_name?"]),
        ({"by_name": {"a": ("x",)}}, ["by_name['a']", "'x'"]),
        ({"by_name": ("data",)}, ["by_name", "must map input paths"]),
        (("data", None), ["tuple", "must be a dict"]),
    ],
)
def test_validation_errors_name_key_entry_axes_and_fix(mapping, words):
    with pytest.raises(ValueError, match=saying("task.train.inputs_split_mapping", "replica=1, data=4, mdl=2", *words)):
        validate_split_mapping(mapping, SIZES)


def test_validation_on_an_empty_mesh():
    with raises_naming(ValueError, "mesh", "no axes"):
        validate_split_mapping(MAPPING, ())


def test_validation_against_the_batch():
    batch = {"images": array(8, 4, 4, 2), "ids": array(8, 16)}
    validate_split_mapping(MAPPING | {"by_name": {"im*": None}}, AXES, batch)
    with raises_naming(ValueError, "by_name['image']", "no input", "mean images"):
        validate_split_mapping(MAPPING | {"by_name": {"image": None}}, AXES, batch)
    with pytest.raises(ValueError, match=r"has no map_2d, and input 'ids'.*\n.*add map_2d="):
        validate_split_mapping({"map_4d": None}, AXES, batch)
