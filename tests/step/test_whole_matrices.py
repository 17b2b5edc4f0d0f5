"""Whole matrices of split variables: the numbers of one device on any mesh and split, and two moves for each group of shapes."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from compilers import NEEDS_CUDA, NEEDS_TPU
from jax import lax
from jax.sharding import AxisType, Mesh, PartitionSpec

from spmd_trainer.errors import UserError
from spmd_trainer.planner import topologies
from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.step import muon, whole_matrices
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.step.whole_matrices import Family, Matrices
from tests.facts import raises_naming

P = PartitionSpec
STACKED = MatrixDims((0,), (1,), (2,))
# Shape, roles, split. Some dimensions don't divide, some matrices are fewer than the devices.
UNEVEN = [
    ((3, 4, 6), STACKED, P(None, "data", "mdl")),
    ((2, 6, 4), STACKED, P(None, "mdl", "data")),
    ((4, 3, 2), MatrixDims((), (0,), (1, 2)), P("data", "mdl", None)),
    ((3, 5, 7), MatrixDims((0,), (2,), (1,)), P("mdl", None, ("replica", "data"))),
    ((3, 2, 4), MatrixDims((1,), (0,), (2,)), P(None, None, None)),
    ((5, 3, 2), MatrixDims((), (1, 0), (2,)), P("mdl", "data", None)),
]
# One shape in three variables that are split alike, up to their directions; and squares, of which the same holds.
EVEN = [
    ((5, 8, 16), STACKED, P(None, "data", "mdl")),
    ((5, 16, 8), STACKED, P(None, "mdl", "data")),
    ((8, 4, 4), MatrixDims((), (0,), (1, 2)), P("data", "mdl", None)),
    ((8, 8), MatrixDims((), (0,), (1,)), P("data", "mdl")),
    ((2, 4, 8), MatrixDims((), (0, 1), (2,)), P("mdl", None, "data")),
]


def mesh_of(sizes, devices=None):
    devices = np.array((devices or jax.devices())[: np.prod(sizes)]).reshape(sizes)
    return Mesh(devices, ("replica", "data", "mdl"), axis_types=(AxisType.Auto,) * 3)


def arrays(cases):
    rng = np.random.default_rng(0)
    return [rng.normal(size=shape).astype(np.float32) for shape, *_ in cases]


def of_each(x):
    """Needs the whole matrix, and has no preferred direction."""
    return lax.dot_general(x * jnp.sum(x, axis=(1, 2), keepdims=True), x, (((2,), (2,)), ((0,), (0,)))) @ x


def applied(cases, values):
    given = [Matrices(x, dims, spec) for x, (_, dims, spec) in zip(values, cases, strict=True)]
    return whole_matrices.apply(of_each, given, jnp.float32)


def expected(cases):
    """Matrix by matrix, in NumPy."""
    found = []
    for x, (_, dims, _) in zip(arrays(cases), cases, strict=True):
        order = (*dims.stack, *dims.inputs, *dims.outputs)
        stack, rows, cols = ([x.shape[dim] for dim in side] for side in (dims.stack, dims.inputs, dims.outputs))
        flat = x.transpose(order).reshape(-1, np.prod(rows), np.prod(cols))
        results = np.stack([m.sum() * m @ m.T @ m for m in flat])
        found.append(results.reshape(*stack, *rows, *cols).transpose(np.argsort(order)))
    return found


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ((2, 2, 2), UNEVEN),
        ((2, 2, 2), EVEN),
        *(
            pytest.param(sizes, UNEVEN, marks=pytest.mark.full)
            for sizes in [(1, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2)]
        ),
        *(pytest.param((1, 2, 3), cases, marks=pytest.mark.full) for cases in (UNEVEN, EVEN)),
    ],
    ids=str,
)
def test_any_mesh_and_split_gives_each_matrix_its_own_result(sizes, cases):
    mesh = mesh_of(sizes)
    with jax.set_mesh(mesh):
        found = jax.jit(evenly(lambda *values: applied(cases, values), mesh))(*arrays(cases))
    for ours, theirs in zip(found, expected(cases), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def test_without_a_mesh():
    for ours, theirs in zip(applied(UNEVEN, arrays(UNEVEN)), expected(UNEVEN), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-4)


def with_companions(cases):
    """For each case one more array, a square of its rows, and for all but the last one of its columns."""
    rng = np.random.default_rng(1)
    found = []
    for number, (x, (shape, dims, _)) in enumerate(zip(arrays(cases), cases, strict=True)):
        stack, rows, cols = ([shape[dim] for dim in side] for side in (dims.stack, dims.inputs, dims.outputs))
        sides = [rows, cols] if number < len(cases) - 1 else [rows]
        squares = [rng.normal(size=(*stack, np.prod(side), np.prod(side))).astype(np.float32) for side in sides]
        found.append((x, rng.normal(size=shape).astype(np.float32), *squares))
    return found


def of_family(batch):
    """Needs everything whole, and is the same function for everything transposed."""
    (x, y), rows, cols = batch
    found = y
    for left in rows:
        found = left @ found
    for right in cols:
        found = found @ right
    return Family((found,), tuple(left @ x @ y.mT for left in rows), tuple(y.mT @ x @ right for right in cols))


def applied_to_families(cases, values):
    given = []
    for (x, y, rows, *cols), (_, dims, spec) in zip(values, cases, strict=True):
        given.append(Matrices(x, dims, spec, Family((y,), (rows,), tuple(cols))))
    return whole_matrices.apply_to_families(of_family, given, jnp.float32)


@pytest.mark.parametrize(
    ("sizes", "cases"),
    [
        ((2, 2, 2), UNEVEN),
        *(pytest.param((1, 2, 3), cases, marks=pytest.mark.full) for cases in (UNEVEN, EVEN)),
        *(pytest.param(sizes, UNEVEN, marks=pytest.mark.full) for sizes in [(1, 1, 1), (1, 8, 1), (1, 4, 2)]),
    ],
    ids=str,
)
def test_companions_come_with_their_matrices(sizes, cases):
    mesh, values = mesh_of(sizes), with_companions(cases)
    with jax.set_mesh(mesh):
        found = jax.jit(evenly(lambda values: applied_to_families(cases, values), mesh))(values)
    for (x, y, *squares), (_, dims, _), ours in zip(values, cases, found, strict=True):
        order = (*dims.stack, *dims.inputs, *dims.outputs)
        stack, (rows, *_) = [x.shape[dim] for dim in dims.stack], (square.shape[-1] for square in squares)
        flat_x, flat_y = (z.transpose(order).reshape(*stack, rows, -1) for z in (x, y))
        left, right = (squares[0], squares[1] if len(squares) == 2 else None)
        result = left @ flat_y if right is None else left @ flat_y @ right
        result = result.reshape([x.shape[dim] for dim in order]).transpose(np.argsort(order))
        tolerance = {"rtol": 1e-5, "atol": 1e-4}
        np.testing.assert_allclose(ours.arrays[0], result, **tolerance)
        np.testing.assert_allclose(ours.of_rows[0], left @ flat_x @ flat_y.swapaxes(-1, -2), **tolerance)
        assert len(ours.of_cols) == (right is not None)
        if right is not None:
            np.testing.assert_allclose(ours.of_cols[0], flat_y.swapaxes(-1, -2) @ flat_x @ right, **tolerance)


def moves(devices, sizes, num_iterations=5):
    """The exchanges of a compiled program that makes the matrices orthogonal, by kind."""
    mesh = mesh_of(sizes, devices)

    def step(*values):
        given = [Matrices(x, dims, spec) for x, (_, dims, spec) in zip(values, EVEN, strict=True)]
        return whole_matrices.apply(lambda x: muon.orthogonalized(x, "keller", num_iterations), given, jnp.float32)

    with jax.set_mesh(mesh):
        shardings = [jax.NamedSharding(mesh, spec) for *_, spec in EVEN]
        shapes = [
            jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(arrays(EVEN), shardings, strict=True)
        ]
        jitted = jax.jit(evenly(step, mesh), out_shardings=shardings)
        text = jitted.lower(*shapes).compile().as_text()
    kinds = "all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute"
    return collections.Counter(re.findall(rf" ({kinds})(?:-start)?\(", text))


@pytest.mark.parametrize(("sizes", "gathers"), [((1, 4, 2), 0), ((2, 2, 2), 2)], ids=str)
def test_two_moves_for_each_group_of_shapes_and_none_in_an_iteration(sizes, gathers):
    """There are two groups, and with replicas one more exchange in each, which gives them all the results."""
    for num_iterations in (1, 5):
        found = moves(jax.devices(), sizes, num_iterations)
        assert found == collections.Counter({"all-to-all": 4, **({"all-gather": gathers} if gathers else {})})


@pytest.mark.slow
@NEEDS_TPU
@pytest.mark.parametrize(("sizes", "gathers"), [((1, 4, 2), 0), ((2, 2, 2), 2)], ids=str)
def test_the_moves_on_tpus(sizes, gathers):
    found = moves(topologies.topology_devices("v5p:2x2x2"), sizes)
    assert found == collections.Counter({"all-to-all": 4, **({"all-gather": gathers} if gathers else {})})


@NEEDS_CUDA
@pytest.mark.parametrize(("sizes", "gathers"), [((1, 4, 2), 0), ((2, 2, 2), 1)], ids=str)
def test_the_moves_on_gpus(sizes, gathers):
    """The compiler joins the all-gathers of both groups."""
    found = moves(topologies.topology_devices("h100:1x8"), sizes)
    assert found == collections.Counter({"all-to-all": 4, **({"all-gather": gathers} if gathers else {})})


def test_parts_of_matrices_are_refused():
    def local(x):
        return whole_matrices.apply(of_each, [Matrices(x, MatrixDims((), (0,), (1,)), P())], jnp.float32)[0]

    with jax.set_mesh(mesh_of((1, 4, 2))), raises_naming(UserError, "shard_map", "ShardMapPartitioner"):
        jax.shard_map(local, in_specs=P("data"), out_specs=P("data"))(jnp.ones((8, 4)))
