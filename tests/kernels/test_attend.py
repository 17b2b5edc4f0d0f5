"""Attention on a mesh gives what it gives on one device, and each device computes its own rows and heads."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import assert_names, raises_naming
from jax.sharding import PartitionSpec

from spmd_trainer import sharding
from spmd_trainer.errors import UserError
from spmd_trainer.kernels import kernels, sequence_order
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.kernels import Pattern

LENGTH, WIDTH = 24, 4
PATTERN = Pattern(window=9, softcap=3.0)
NOT_SPLIT = Split()
DATA_AND_HEADS = Split(batch=("data",), heads=("mdl",))


def mesh_of(data=2, mdl=4):
    return sharding.create_device_mesh([("data", data), ("mdl", mdl)])


def rows(num_rows=3, heads=6, kv_heads=3):
    """Returns queries, keys, values and segment ids."""
    rng = np.random.default_rng(heads)
    arrays = (
        jnp.asarray(rng.normal(size=(num_rows, LENGTH, n, WIDTH)), jnp.float32) for n in (heads, kv_heads, kv_heads)
    )
    return *arrays, jnp.asarray(np.sort(rng.integers(0, 3, (num_rows, LENGTH)), axis=1), jnp.int32)


@functools.partial(jax.jit, static_argnames=("split", "kernel"))
def outputs(query, key, value, segment_ids, split=NOT_SPLIT, kernel="chunked"):
    """Returns the output, and the gradients of queries, keys and values."""

    def run(query, key, value):
        out = attend(query, key, value, PATTERN, segment_ids=segment_ids, split=split, kernel=kernel)
        return jnp.sum(jnp.sin(out)), out

    (_, out), grads = jax.value_and_grad(run, (0, 1, 2), has_aux=True)(query, key, value)
    return out, *grads


def assert_equal(found, expected):
    for name, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize("kernel", ["chunked", pytest.param("reference", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "split"),
    [
        (12, 6, DATA_AND_HEADS),
        (5, 1, DATA_AND_HEADS),
        *(
            pytest.param(*case, marks=pytest.mark.full)
            for case in [
                (6, 3, DATA_AND_HEADS),
                (8, 4, DATA_AND_HEADS),
                (8, 2, DATA_AND_HEADS),
                (6, 3, Split(batch=("data", "mdl"))),
                (6, 3, Split(heads=("mdl", "data"))),
                (6, 3, Split()),
            ]
        ),
    ],
)
def test_a_mesh_changes_nothing(heads, kv_heads, split, kernel):
    arrays = rows(heads=heads, kv_heads=kv_heads)
    expected = outputs(*arrays, kernel="reference")
    with jax.set_mesh(mesh_of()):
        assert_equal(outputs(*arrays, split=split, kernel=kernel), expected)


@pytest.mark.full
def test_outside_of_jit():
    query, key, value, ids = rows()
    expected = attend(query, key, value, PATTERN, segment_ids=ids, kernel="chunked")
    with jax.set_mesh(mesh_of()):
        found = attend(query, key, value, PATTERN, segment_ids=ids, split=DATA_AND_HEADS, kernel="chunked")
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "local"), [(8, 4, (2, 1)), (8, 2, (2, 1)), (12, 6, (3, 3)), (6, 3, (2, 2)), (16, 8, (4, 2))]
)
def test_the_kernel_is_chosen_for_the_shapes_of_one_device(heads, kv_heads, local, monkeypatch):
    calls = []
    choose = kernels.choose
    monkeypatch.setattr(kernels, "choose", lambda call, asked: calls.append(call) or choose(call, asked))
    query, key, value, ids = rows(heads=heads, kv_heads=kv_heads)
    with jax.set_mesh(mesh_of()):
        jax.eval_shape(lambda: attend(query, key, value, PATTERN, segment_ids=ids, split=DATA_AND_HEADS))
    assert [calls[0].query.shape, calls[0].key.shape] == [(2, LENGTH, n, WIDTH) for n in local]
    assert (calls[0].pattern, calls[0].segments, calls[0].dropout) == (PATTERN, True, False)


@pytest.mark.parametrize("checked", [pytest.param(False, marks=pytest.mark.full), True])
def test_under_a_shard_map_the_arrays_are_those_of_one_device(checked):
    query, key, value, ids = rows(num_rows=8)
    expected = outputs(query, key, value, ids)
    by_row = PartitionSpec(("data", "mdl"))

    def local(*arrays):
        return outputs(*arrays, split=DATA_AND_HEADS)

    with jax.set_mesh(mesh_of()):
        split = jax.shard_map(local, in_specs=(by_row,) * 4, out_specs=(by_row,) * 4, check_vma=checked)
        assert_equal(jax.jit(split)(query, key, value, ids), expected)


def test_under_a_shard_map_over_some_axes():
    query, key, value, ids = rows(num_rows=4, heads=8, kv_heads=4)
    expected = outputs(query, key, value, ids)
    by_row = PartitionSpec("data")

    def local(*arrays):
        return outputs(*arrays, split=DATA_AND_HEADS)

    with jax.set_mesh(mesh_of()):
        split = jax.shard_map(local, in_specs=(by_row,) * 4, out_specs=(by_row,) * 4, axis_names={"data"})
        assert_equal(jax.jit(split)(query, key, value, ids), expected)


@pytest.mark.full
def test_rows_keep_their_order_under_a_shard_map_over_some_axes():
    """The order of a ring would be wrong there: `attend` computes whole rows."""
    query, key, value, ids = rows(num_rows=4, heads=8, kv_heads=4)
    split = Split(batch=("data",), length=("mdl",))
    by_row = PartitionSpec("data")
    seen = []

    def local(*arrays):
        order = sequence_order.of_rows(LENGTH, ("mdl",))
        seen.append(order.is_zigzag)
        return outputs(*(order.apply(x) for x in arrays), split=split)

    with jax.set_mesh(mesh_of()):
        found = jax.jit(jax.shard_map(local, in_specs=(by_row,) * 4, out_specs=(by_row,) * 4, axis_names={"data"}))
        assert_equal(found(query, key, value, ids), outputs(query, key, value, ids))
    assert not any(seen)


@pytest.mark.parametrize("split", [pytest.param(DATA_AND_HEADS, marks=pytest.mark.full), Split(batch=("data",))])
def test_devices_exchange_nothing(split):
    arrays = rows(num_rows=4, heads=8, kv_heads=4)
    mesh = mesh_of()
    with jax.set_mesh(mesh):
        axes = PartitionSpec(split.batch, None, split.heads or None), PartitionSpec(split.batch)
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=jax.sharding.NamedSharding(mesh, axes[x.ndim == 2]))
            for x in arrays
        ]
        program = outputs.lower(*shapes, split=split).compile().as_text()
    for collective in ("all-reduce", "all-gather", "all-to-all", "collective-permute", "reduce-scatter"):
        assert collective not in program


@pytest.mark.full
def test_dropout_maps_the_probabilities_of_all_rows_and_heads():
    query, key, value, ids = rows()

    def drop(probabilities):
        assert probabilities.shape == (3, 3, 2, LENGTH, LENGTH)
        return 2 * probabilities

    plain = attend(query, key, value, PATTERN, segment_ids=ids)
    with jax.set_mesh(mesh_of()), kernels.recording() as recorded:
        dropped = attend(query, key, value, PATTERN, segment_ids=ids, split=DATA_AND_HEADS, dropout=drop, name="layer")
    np.testing.assert_allclose(dropped, 2 * plain, rtol=1e-5, atol=1e-5)
    assert recorded["layer"].kernel == "reference"


def test_choices_are_recorded_by_the_name_of_the_layer():
    query, key, value, _ = rows()

    def trace(name, **options):
        jax.eval_shape(lambda: attend(query, key, value, Pattern(), name=name, **options))

    with kernels.recording() as recorded:
        trace("short")
        trace("asked", kernel="chunked")
        with jax.set_mesh(mesh_of()):
            for form in ("ring", "all_to_all"):
                trace(form, split=Split(batch=("data",), length=("mdl",)), context_parallel=form)
    expected = [
        ("short: reference",),
        ("asked: chunked",),
        ("ring: chunked", "a ring"),
        ("all_to_all: reference", "all-to-all"),
    ]
    for line, named in zip(kernels.choice_lines(recorded), expected, strict=True):
        assert_names(line, "attention kernel", *named)


@pytest.mark.parametrize(
    ("length", "options", "message"),
    [
        (24, {"kernel": "cuddn"}, "no attention kernel 'cuddn'.*did you mean cudnn"),
        (24, {"kernel": "cudnn"}, "attention kernel 'cudnn' can't be used: "),
        (
            24,
            {"split": Split(batch=("dat",))},
            "split over 'dat', which is not one of the mesh's axes data, mdl; did you mean data",
        ),
        (
            24,
            {"context_parallel": "rings"},
            "context_parallel='rings'; set it to 'ring' or 'all_to_all'; did you mean ring",
        ),
        (
            20,
            {"split": Split(length=("mdl",))},
            "20 tokens are split over 4 devices .mdl., and ring needs a multiple of 8",
        ),
        (
            22,
            {"split": Split(length=("mdl",)), "context_parallel": "all_to_all"},
            "22 tokens are split over 4 devices .mdl., and all_to_all needs a multiple of 4",
        ),
        (
            24,
            {"split": Split(length=("mdl",)), "kernel": "reference"},
            "'reference' can't be used in a ring, which needs",
        ),
        (24, {"split": Split(length=("mdl",)), "dropout": lambda p: p}, "dropout can't be used with a split length"),
    ],
)
def test_errors_say_what_would_be_right(length, options, message):
    query, key, value, _ = (x[:, :length] for x in rows())
    with jax.set_mesh(mesh_of()), pytest.raises(UserError, match=message):
        attend(query, key, value, PATTERN, name="layer", **options)


def test_query_heads_must_be_a_multiple_of_key_heads():
    query, key, value, _ = rows(heads=6, kv_heads=4)
    with raises_naming(UserError, "query heads", 6, "multiple", "key heads", 4):
        attend(query, key, value, PATTERN)
