"""Small arrays of a batch move to their layout in one collective; axes in an order for which XLA multiplies rightly."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.planner import hlo_collectives
from spmd_trainer.sharding import create_device_mesh
from spmd_trainer.sharding.constraints import axes_pairs, computable, constrain, constrain_together
from spmd_trainer.sharding.even_program import evenly

ROWS = 8


@pytest.fixture(scope="module")
def mesh():
    return create_device_mesh([("data", 4), ("mdl", 2)])


def batch(rng):
    """Arrays of several ranks and dtypes, with values whose bits a conversion would change."""
    floats = rng.standard_normal((ROWS, 3)).astype(np.float32)
    floats[0] = [np.nan, -0.0, 1e-42]
    return {
        "ids": rng.integers(-(2**31), 2**31, (ROWS, 5)).astype(np.int32),
        "weights": floats,
        "lengths": rng.integers(0, 2**32, ROWS).astype(np.uint32),
        "flags": rng.integers(0, 2, (ROWS, 2)).astype(bool),
        "images": rng.standard_normal((ROWS, 2, 2)).astype(np.float32),
        "empty": np.zeros((ROWS, 0), np.int32),
    }


def compiled(arrays, specs, mesh):
    """The program that moves arrays, which arrive split over the whole mesh."""
    arrive = [NamedSharding(mesh, PartitionSpec(("data", "mdl"))) for _ in arrays]
    leave = [NamedSharding(mesh, spec) for spec in specs]
    program = jax.jit(lambda xs: constrain_together(xs, specs, mesh), in_shardings=(arrive,), out_shardings=leave)
    return program.lower(arrays).compile()


@pytest.mark.parametrize("rows_over", ["data", "mdl", ("mdl", "data"), None])
def test_every_bit_arrives(mesh, rows_over):
    arrays = list(batch(np.random.default_rng(0)).values())
    specs = [PartitionSpec(rows_over, *[None] * (x.ndim - 1)) for x in arrays]
    placed = [jax.device_put(x, NamedSharding(mesh, PartitionSpec(("data", "mdl")))) for x in arrays]
    for given, found, spec in zip(arrays, compiled(arrays, specs, mesh)(placed), specs, strict=True):
        assert found.dtype == given.dtype
        assert np.asarray(found).tobytes() == given.tobytes()
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), given.ndim)


def test_tokens_take_one_collective(mesh):
    arrays = [jnp.zeros((ROWS, 16), jnp.int32), jnp.zeros((ROWS, 16), jnp.float32), jnp.zeros(ROWS, jnp.int32)]
    specs = [PartitionSpec("data", *[None] * (x.ndim - 1)) for x in arrays]
    found = hlo_collectives.find_collectives(compiled(arrays, specs, mesh).as_text())
    assert sum(collective.times for collective in found) == 1


def test_what_is_split_in_another_way_moves_by_itself(mesh):
    arrays = [jnp.zeros((ROWS, 16), jnp.int32)] * 3
    specs = [PartitionSpec("data", None), PartitionSpec("mdl", None), PartitionSpec("data", "mdl")]
    for found, spec in zip(compiled(arrays, specs, mesh)(arrays), specs, strict=True):
        assert found.sharding.is_equivalent_to(NamedSharding(mesh, spec), 2)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (PartitionSpec(("replica", "data"), None, "mdl"), PartitionSpec(("data", "replica"), None, "mdl")),
        (PartitionSpec(("replica", "data"), "seq"), PartitionSpec(("data", "replica"), "seq")),
        (PartitionSpec(("replica", "seq"), "mdl"), PartitionSpec(("replica", "seq"), "mdl")),
        (PartitionSpec(("one", "data"), None), PartitionSpec(("one", "data"), None)),
        (PartitionSpec("data", None), PartitionSpec("data", None)),
        (PartitionSpec(), PartitionSpec()),
        (PartitionSpec(PartitionSpec.UNCONSTRAINED, "mdl"), PartitionSpec(PartitionSpec.UNCONSTRAINED, "mdl")),
        (PartitionSpec(("replica", "unknown")), PartitionSpec(("replica", "unknown"))),
    ],
)
def test_axes_that_xla_would_confuse_come_first(spec, expected):
    sizes = {"one": 1, "replica": 4, "data": 2, "seq": 3, "mdl": 2}
    assert computable(spec, sizes) == expected


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ((4, 2, 2, 2), ("d", "f", "r")),
        ((4, 2, 3, 6), ("d", "r", "f")),
        ((2, 4, 2, 4), ("r", "d", "f")),
        ((2, 2, 2, 2), ("f", "d", "r")),  # every order ends in an axis of m's size: the outermost one comes last
    ],
)
def test_three_axes_of_a_batch(sizes, expected):
    spec = PartitionSpec(("r", "d", "f"), "m")
    assert computable(spec, dict(zip("rdfm", sizes, strict=True)))[0] == expected


@pytest.mark.parametrize("rows", [2, 4, 8, 16])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (1, 4, 2), (4, 2, 1), (2, 1, 4)])
def test_products_and_their_gradients_are_right(sizes, rows):
    """Weights split over data and mdl, and rows over replica and data, as in Pax."""
    mesh = create_device_mesh(list(zip(("replica", "data", "mdl"), sizes, strict=True)))
    split = PartitionSpec(("replica", "data"), None, "mdl")
    rng = np.random.default_rng(0)

    def two_layers(x, up, down):
        hidden = constrain(jnp.einsum("btd,df->btf", x, up), split, mesh)
        return constrain(jnp.einsum("btf,fd->btd", hidden, down), split, mesh)

    def with_gradients(x, up, down, outer):
        y, backward = jax.vjp(two_layers, x, up, down)
        return y, *backward(constrain(outer, split, mesh))

    x, outer = rng.standard_normal((2, rows, 6, 64)).astype(np.float32)
    up, down = (
        rng.standard_normal(shape).astype(np.float32) / np.sqrt(shape[0], dtype=np.float32)
        for shape in ((64, 256), (256, 64))
    )
    layouts = [NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data", "mdl"), ("mdl", "data"), ())]
    found = jax.jit(with_gradients, in_shardings=layouts)(x, up, down, outer)
    hidden, d_hidden = x @ up, outer @ down.T
    expected = [
        hidden @ down,
        d_hidden @ up.T,
        np.einsum("btd,btf->df", x, d_hidden),
        np.einsum("btf,btd->fd", hidden, outer),
    ]
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_allclose(a, b, rtol=0, atol=1e-4 * np.abs(b).max())


def product_is_right(rows, features, *weights):
    """x @ w for each weight's axes in one program, with the gradients: on (2, 2, 2), as NumPy computes them."""
    mesh = create_device_mesh([("r", 2), ("d", 2), ("m", 2)])
    rng = np.random.default_rng(0)
    x, *ws = rng.standard_normal((1 + len(weights), 8, 8)).astype(np.float32)

    def split(value, *axes):
        return jax.lax.with_sharding_constraint(value, NamedSharding(mesh, PartitionSpec(*axes)))

    def run(x, *ws):
        def products(x, *ws):
            ws = [split(w, *axes) for w, axes in zip(ws, weights, strict=True)]
            return [split(split(x, rows, features) @ w, rows, features) for w in ws]

        ys, backward = jax.vjp(products, x, *ws)
        return *ys, *backward(ys)

    found = jax.jit(evenly(run, mesh), out_shardings=NamedSharding(mesh, PartitionSpec()))(x, *ws)
    ys = [x @ w for w in ws]
    wanted = [*ys, sum(y @ w.T for y, w in zip(ys, ws, strict=True)), *(x.T @ y for y in ys)]
    for got, want in zip(found, wanted, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * np.abs(want).max())


PRODUCTS = [
    (tuple(axis for axis in order if axis != features), features, weight)
    for features in "rdm"
    for order in itertools.permutations("rdm")
    if order[2] == features
    for weight in itertools.permutations("rdm", 2)
]
# The order of the rows is the one that XLA computes rightly with this weight, and not the mesh's reversed one.
TELLING = [(("r", "d"), "m", ("m", "r")), (("d", "m"), "r", ("d", "r"))]


@pytest.mark.parametrize(
    "product", [pytest.param(one, marks=() if one in TELLING else pytest.mark.full) for one in PRODUCTS], ids=str
)
def test_products_are_right_whatever_the_order_of_axes(product):
    product_is_right(*product)


@pytest.mark.parametrize(("rows", "features"), [(("r", "d"), "m"), (("d", "r"), "m")])
def test_where_no_order_suits_all_weights_rows_are_whole(rows, features):
    product_is_right(rows, features, ("m", "r"), ("d", "m"))
    sizes = {"r": 2, "d": 2, "m": 2}
    pairs = axes_pairs([PartitionSpec("m", "r"), PartitionSpec("d", "m")], sizes)
    assert computable(PartitionSpec(rows, "m"), sizes, pairs)[0] is None


def test_axes_of_size_1_and_of_another_mesh_split_nothing():
    sizes = {"r": 2, "d": 2, "one": 1, "e": 2}
    pairs = axes_pairs([PartitionSpec("r", ("one", "d")), PartitionSpec("elsewhere", "d")], sizes)
    assert pairs == {frozenset({frozenset("r"), frozenset("d")})}
    assert computable(PartitionSpec(("e", "d"), "r"), sizes, pairs)[0] == ("d", "e")


@pytest.mark.parametrize("rows", list(itertools.permutations("rdm", 2)))
def test_an_order_that_was_chosen_is_kept(rows):
    sizes = {"r": 2, "d": 2, "m": 2}
    for weight in (None, PartitionSpec("m", "d"), PartitionSpec("r", None, "m")):
        pairs = None if weight is None else axes_pairs([weight], sizes)
        once = computable(PartitionSpec(rows, None), sizes, pairs)
        assert computable(once, sizes, pairs) == once
