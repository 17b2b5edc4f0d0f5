"""Programs that are evaluated with padding: whatever it holds, the results are those of the logical arrays."""

from __future__ import annotations

import random
import re

import jax
import jax.numpy as jnp
import numpy as np
import partitioner_probe as probe
import pytest
from facts import assert_names
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_program import EvenProgram, evenly, own_constraints
from spmd_trainer.sharding.even_values import Pins, put_back, slice_off


def padded_results(fn, args, seed, most=3):
    """Evaluates `fn` on arrays with up to `most` rows of padding in any dimension, which hold NaN or absurd indices."""
    rng, program = random.Random(seed), EvenProgram(Pins(None))

    def grown(x):
        widths = [(0, rng.choice([0, 1, most])) for _ in x.shape]
        fill = np.nan if x.dtype == np.float32 else rng.choice([-1000, 0, 10**6])
        return np.pad(x, widths, constant_values=fill) if np.ndim(x) else x

    closed = jax.make_jaxpr(fn)(*args)

    def run(*arrays):
        values = [program.pins.value(x, y.shape) for x, y in zip(arrays, args, strict=True)]
        return [value.at(value.shape) for value in program.run(closed.jaxpr, closed.consts, values)]

    return jax.jit(run, compiler_options=probe.CHEAP)(*map(grown, args))


def assert_padding_changes_nothing(fn, *args, seed=0):
    got = padded_results(fn, args, seed)
    wanted = jax.tree.leaves(jax.jit(fn, compiler_options=probe.CHEAP)(*args))
    assert max(probe.largest_errors(got, wanted)) <= probe.TOLERANCE


@pytest.mark.parametrize("name", sorted(probe.OPS))
def test_what_padding_holds_changes_nothing(name):
    """The operation and its gradients."""
    case = probe.draw(len(name), name)
    assert_padding_changes_nothing(probe.program(case, None), *case.args, seed=len(name))


@pytest.mark.full
@pytest.mark.parametrize("name", sorted(probe.OPS))
def test_what_padding_holds_changes_nothing_in_more_shapes(name):
    for seed in range(4):
        case = probe.draw(seed, name)
        assert_padding_changes_nothing(probe.program(case, None), *case.args, seed=seed)


X = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
W = np.random.default_rng(1).normal(size=(3, 3)).astype(np.float32)


def test_a_loops_carry_gets_the_padding_of_what_enters_it():
    def scan(x, w):
        total, ys = lax.scan(lambda s, row: (s + jnp.tanh(row @ w), s.sum()), jnp.zeros(3), x)
        return total, ys

    assert_padding_changes_nothing(scan, X, W)
    assert_padding_changes_nothing(jax.grad(lambda x, w: scan(x, w)[0].sum()), X, W)


def test_while_and_cond():
    def loop(x, w):
        x = lax.while_loop(lambda s: (s[1] < 3) & (s[0].max() < 1e3), lambda s: (s[0] @ w, s[1] + 1), (x, 0))[0]
        return lax.cond(x.sum() > 0, lambda x: x * 2, lambda x: jnp.flip(x, 0), x)

    assert_padding_changes_nothing(loop, X, W)
    assert_padding_changes_nothing(loop, -X, W)


def test_what_is_computed_again_in_the_backward_pass():
    layer = jax.checkpoint(lambda x, w: jnp.tanh(x @ w) / jnp.sqrt(x.var(0) + 1))
    assert_padding_changes_nothing(jax.grad(lambda x, w: (layer(layer(x, w), w) ** 2).sum(), (0, 1)), X, W)


def test_random_numbers_are_those_of_the_logical_shape():
    def dropped(x, key):
        return jnp.where(jax.random.bernoulli(key, 0.5, x.shape), x, 0), jax.random.normal(key, (3, x.shape[0]))

    assert_padding_changes_nothing(lambda x: dropped(x, jax.random.key(3)), X)


def test_an_operation_without_a_rule_gets_no_padding():
    square = X[:3]
    assert_padding_changes_nothing(lambda a: jnp.linalg.qr(a)[1], square)
    assert_padding_changes_nothing(lambda a: jnp.fft.fft(a, axis=0).real, square)


def test_a_loop_that_is_mapped_over_rows():
    def grow(row):
        return lax.while_loop(lambda s: s[0].sum() < 20, lambda s: (s[0] * 2 + 1, s[1] + 1), (row, jnp.zeros(())))

    assert_padding_changes_nothing(lambda x: jax.vmap(grow)(jnp.abs(x)), X)


def test_keys_of_rows():
    def draw(x):
        keys = jnp.where(x[:, 0] > 0, jax.random.split(jax.random.key(0), 5), jax.random.key(1))
        return jax.vmap(jax.random.uniform)(keys) + x[:, 0]

    assert_padding_changes_nothing(draw, X)


def test_many_operations_on_constants():
    def deep(x):
        y = jnp.arange(5.0)
        for _ in range(200):
            y = jnp.sin(y) + 1
        return x + y[:, None]

    assert_padding_changes_nothing(deep, X)


def test_a_type_without_infinity():
    x = X.astype(jnp.float8_e4m3fn)
    got = padded_results(lambda x: (x.max(0).astype(jnp.float32), jnp.argmax(x, 0)), [x], 1)
    np.testing.assert_array_equal(got[1], np.argmax(X, 0))
    np.testing.assert_array_equal(got[0], x.max(0).astype(np.float32))


def test_derivatives_of_padding_are_not_padding():
    grown = np.concatenate([X, np.ones((3, 3), np.float32)])
    sliced = jax.grad(lambda x: ((slice_off(x, (5, 3)) + 1) ** 2).sum())
    assert_padding_changes_nothing(sliced, grown)
    assert_padding_changes_nothing(jax.grad(lambda x: (put_back(x, (8, 3)) ** 2).sum()), X)
    assert_padding_changes_nothing(lambda x: jax.jvp(lambda x: slice_off(x, (5, 3)).sum(), (x,), (x,)), grown)


def test_what_is_computed_again_may_hold_constants():
    at = np.array([0, 4, 7], np.int32)
    policy = jax.checkpoint(lambda t, w: jnp.sin(t.at[at].get(mode="clip")) * w, prevent_cse=(True, False))
    assert_padding_changes_nothing(jax.grad(lambda t, w: policy(t, w).sum()), X, W)


MOVED = ("axis0", None, "axis1"), ("axis0", "axis1", None), ("axis1", None, "axis0")


@pytest.mark.parametrize("inside", ["checkpoint", "scan", "cond", "reshape", "barrier"])
def test_a_products_axes_are_known_through_control_flow(inside):
    """XLA gets this product wrong: docs/partitioner_faults.md."""
    mesh = probe.mesh_of((4, 2))
    x, w = np.random.default_rng(0).normal(size=(2, 8, 8, 8)).astype(np.float32)

    def split(x, axes):
        return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*axes)))

    def step(x, w):
        a, b, c = MOVED
        x, w = split(x, a), split(w, b)
        match inside:
            case "checkpoint":
                return jax.checkpoint(lambda x, w: split(x @ w, c))(x, w)
            case "scan":
                return lax.scan(lambda h, _: (h, split(x @ w, c)), 0.0, None, length=1)[1][0]
            case "cond":
                return lax.cond(x.sum() > -1e9, lambda x, w: split(x @ w, c), lambda x, w: x, x, w)
            case "reshape":
                return split((x @ w).reshape(8, 1, 8, 8), (c[0], None, *c[1:])).reshape(8, 8, 8)
        return split(lax.optimization_barrier(x @ w), c)

    run = jax.jit(evenly(step, mesh), out_shardings=NamedSharding(mesh, PartitionSpec()))
    np.testing.assert_allclose(run(x, w), x @ w, atol=1e-4)


def test_an_index_outside_of_the_logical_shape_stays_outside():
    at = np.array([0, 4, 7, -1], np.int32)  # 5 rows: 7 is outside, -1 is the last
    for mode in ("clip", "fill"):
        assert_padding_changes_nothing(lambda x, at, mode=mode: jnp.nan_to_num(x.at[at].get(mode=mode)), X, at)
        assert_padding_changes_nothing(lambda x, at, mode=mode: x.at[at].set(1.0, mode=mode), X, at)


@pytest.mark.parametrize(
    "first", [pytest.param(0), *(pytest.param(n, marks=pytest.mark.full) for n in range(16, 320, 16))]
)
def test_on_a_mesh_the_results_are_those_of_one_device(first):
    """Splits that XLA gets wrong by itself are among them; `docs/partitioner_faults.md` has the table."""
    for seed in range(first, first + 16):
        case = probe.draw(seed)
        assert max(probe.errors(case, evenly)) <= probe.TOLERANCE, case


def constraints(jaxpr):
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "sharding_constraint":
            yield eqn.invars[0].aval.shape, eqn.params["sharding"]
        for inner in jax.extend.core.jaxprs_in_params(eqn.params):
            yield from constraints(inner)


def test_the_compiler_sees_only_dimensions_that_divide():
    mesh = probe.mesh_of((4, 2))
    rows = NamedSharding(mesh, PartitionSpec("axis0"))

    def step(table, ids):
        return jax.grad(lambda t: jnp.mean(t[lax.with_sharding_constraint(slice_off(ids, (17,)), rows)] ** 2))(table)

    args = np.ones((11, 6), np.float32), np.zeros(24, np.int32)
    before = list(constraints(jax.make_jaxpr(step)(*args).jaxpr))
    after = list(constraints(jax.make_jaxpr(evenly(step, mesh))(*args).jaxpr))
    assert ((17,), rows) in before
    assert (20,) in [shape for shape, _ in after]
    for shape, sharding in after:
        shards = sharding.shard_shape(shape)  # raises where an axis does not divide
        assert all(size % shard == 0 for size, shard in zip(shape, shards, strict=True))


def test_of_what_a_scatter_writes_each_device_holds_its_own_rows_unless_rows_of_a_mapped_one_are_split_otherwise():
    mesh, free = probe.mesh_of((4, 2)), PartitionSpec.UNCONSTRAINED
    rows = NamedSharding(mesh, PartitionSpec("axis0"))

    def specs(size, fn, *args):
        found = constraints(jax.make_jaxpr(evenly(fn, mesh))(*args).jaxpr)
        return [sharding.spec for shape, sharding in found if len(shape) > 1 and shape[0] == size]

    def add(table, ids):
        return table.at[lax.with_sharding_constraint(slice_off(ids, (17,)), rows)].add(1)

    def add_mapped(table, ids):
        return jax.vmap(lambda t, at: t.at[at].add(1))(
            table, lax.with_sharding_constraint(slice_off(ids, (7, 3)), rows)
        )

    assert specs(20, add, np.ones((11, 6), np.float32), np.zeros(24, np.int32)) == []
    mapped = specs(8, add_mapped, np.ones((7, 5), np.float32), np.zeros((8, 3), np.int32))
    assert PartitionSpec(free, None, free) in mapped  # of the indices
    assert PartitionSpec(None, None, free) not in mapped


def test_a_program_that_needs_nothing_is_left_as_it_is():
    fn = lambda x, w: jnp.tanh(x @ w).sum()  # noqa: E731
    mesh = probe.mesh_of((4, 2))
    assert str(jax.make_jaxpr(evenly(fn, mesh))(X, W)) == str(jax.make_jaxpr(fn)(X, W))


def test_padding_is_zero_again_at_the_end():
    mesh = probe.mesh_of((4, 2))
    padded = np.full((8, 3), 7, np.float32)
    fn = lambda x: put_back(1 / slice_off(x, (5, 3)), (8, 3))  # noqa: E731
    for run in (jax.jit(fn), jax.jit(evenly(fn, mesh))):
        found = np.asarray(run(padded))
        np.testing.assert_allclose(found[:5], 1 / 7, rtol=1e-6)
        assert not found[5:].any()


def test_padding_for_a_shard_map_moves_nothing():
    """The function pads its rows to divide, and drops what comes of the padding; the array holds these rows already."""
    mesh = probe.mesh_of((4, 2))
    spec = PartitionSpec("axis0")

    def padded(x):
        each = jax.shard_map(lambda x: x + jnp.sum(x), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
        return each(jnp.pad(x, [(0, 3), (0, 0)], constant_values=2))[:5]

    def step(x):
        x = lax.with_sharding_constraint(slice_off(x, (5, 3)), NamedSharding(mesh, spec))
        return put_back(jax.grad(lambda x: jnp.sum(padded(x) ** 2))(x), (8, 3))

    held = np.pad(X, [(0, 3), (0, 0)], constant_values=np.nan)
    over = NamedSharding(mesh, spec)
    even = jax.jit(evenly(step, mesh), in_shardings=over, out_shardings=over).lower(held).compile()
    np.testing.assert_allclose(even(held), jax.jit(step, in_shardings=over)(held), rtol=1e-6)
    exchanges = set(re.findall(r" (all-[a-z]+|reduce-scatter|collective-permute)\(", even.as_text()))
    assert exchanges <= {"all-reduce"}  # of the function's own gradient


def test_constraints_of_the_program_are_named_with_what_they_split_unevenly():
    mesh = probe.mesh_of((4, 2))
    spec = NamedSharding(mesh, PartitionSpec("axis0", "axis1"))
    jaxpr = jax.make_jaxpr(lambda x: lax.with_sharding_constraint(x, spec) + 1)(X)
    (place,), (notes,) = zip(*own_constraints(jaxpr.jaxpr).items(), strict=True)
    assert place.rsplit(":", 1)[0] == __file__
    assert_names(notes[0], place, "(5, 3)", "dimension 0", "axis0=4", 8)
    assert_names(notes[1], "dimension 1", "axis1=2", 4)
