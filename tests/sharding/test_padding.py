"""Uneven variables (contract 3.3)."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import raises_naming
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharding_helpers import saying

from spmd_trainer.sharding import make_variable_spec, pad_uneven, slice_uneven, uneven_paddings

XY = ((2, 4), ("x", "y"))


@pytest.mark.parametrize(
    ("shape", "spec", "paddings"),
    [
        ((3, 5), P("x", None), (1, 0)),
        ((3, 5), P(("x", "y"), None), (5, 0)),
        ((3, 5), P(None, "y"), (0, 3)),
        ((50257, 512), P("y", "x"), (3, 0)),
        ((50257, 512), P("y"), (3, 0)),
        ((4, 8), P("x", "y"), (0, 0)),
        ((3, 5), P(), (0, 0)),
        ((3, 5), None, (0, 0)),
        ((), P(), ()),
        ((0,), P("y"), (0,)),
    ],
)
def test_uneven_paddings(shape, spec, paddings):
    assert uneven_paddings(spec, shape, *XY) == paddings


@pytest.mark.parametrize(
    ("spec", "shape", "words"),
    [
        (P("z"), (3, 5), ["P('z')", "(3, 5)", "x=2, y=4", "dimension 0 (size 3)", "'z'"]),
        (P("x", "y"), (3,), ["P('x', 'y')", "2 entries", "rank 1"]),
        (P("x"), (), ["1 entry", "rank 0", "scalar", "P()"]),
        (P("x", "x"), (3, 5), ["'x'", "dimension 0 (size 3)", "dimension 1 (size 5)"]),
        (P(("y", "y")), (3,), ["'y'", "twice"]),
        (P(P.UNCONSTRAINED), (3,), ["UNCONSTRAINED", "dimension 0"]),
    ],
)
def test_uneven_paddings_errors(spec, shape, words):
    with pytest.raises(ValueError, match=saying(*words)):
        uneven_paddings(spec, shape, *XY)


def test_sizes_and_names_of_unequal_length():
    with raises_naming(ValueError, "one size", "axis"):
        uneven_paddings(P(), (3,), (2, 4), ("x",))


@pytest.fixture
def state():
    return {
        "w": jnp.arange(15.0).reshape(3, 5) + 1,
        "b": jnp.arange(5.0) + 1,
        "even": jnp.ones((4, 8)),
        "step": jnp.int32(7),
        "none": jnp.zeros((0,)),
        "masked": optax.MaskedNode(),
        "nothing": None,
    }


SPECS = {
    "w": P("x", "y"),
    "b": P(("x", "y")),
    "even": P("x", "y"),
    "step": P(),
    "none": P("y"),
    "masked": optax.MaskedNode(),
    "nothing": None,
}
SHAPES = {
    "w": (3, 5),
    "b": (5,),
    "even": (4, 8),
    "step": (),
    "none": (0,),
    "masked": optax.MaskedNode(),
    "nothing": None,
}


def test_pad_then_slice_is_the_identity(state, xy_mesh):
    padded = pad_uneven(state, SPECS, SHAPES, xy_mesh)
    assert jax.tree.structure(padded) == jax.tree.structure(state)
    assert padded["w"].shape == (4, 8)
    assert padded["b"].shape == (8,)
    np.testing.assert_array_equal(padded["w"][:3, :5], state["w"])
    assert padded["w"].sum() == state["w"].sum()  # zeros behind it
    back = slice_uneven(padded, SPECS, SHAPES)
    jax.tree.map(np.testing.assert_array_equal, back, state)
    assert isinstance(back["masked"], optax.MaskedNode)


def test_leaves_without_padding_are_the_same_objects(state, xy_mesh):
    padded = pad_uneven(state, SPECS, SHAPES, xy_mesh)
    back = slice_uneven(state, SPECS, SHAPES)
    for key in ("even", "step", "none"):
        assert padded[key] is state[key]
        assert back[key] is state[key]


def test_padding_holds_zeros_whatever_the_step_did(state, xy_mesh):
    """Pad, place, and inside jit: slice, compute, pad."""
    shardings = jax.tree.map(lambda spec: NamedSharding(xy_mesh, spec), SPECS)
    placed = jax.device_put(pad_uneven(state, SPECS, SHAPES, xy_mesh), shardings)

    @jax.jit
    def step(padded):
        logical = slice_uneven(padded, SPECS, SHAPES)
        assert jax.tree.map(jnp.shape, logical)["w"] == (3, 5)
        return pad_uneven(jax.tree.map(lambda x: x * 2 + 1, logical), SPECS, SHAPES, xy_mesh)

    out = jax.device_get(step(placed))
    np.testing.assert_array_equal(out["w"][:3, :5], np.asarray(state["w"]) * 2 + 1)
    assert out["w"][3:].sum() == out["w"][:, 5:].sum() == out["b"][5:].sum() == 0


def test_prefix_trees(state, xy_mesh):
    tree = {"a": {"k": jnp.ones((3, 5)), "l": [jnp.ones((3, 5)), optax.MaskedNode()]}, "b": jnp.ones((3,)), "c": None}
    specs = {"a": P("x"), "b": None, "c": P("x")}
    shapes = {"a": (3, 5), "b": (3,), "c": ()}
    padded = pad_uneven(tree, specs, shapes, xy_mesh)
    assert jax.tree.map(jnp.shape, padded)["a"] == {"k": (4, 5), "l": [(4, 5), optax.MaskedNode()]}
    assert padded["b"] is tree["b"]
    back = slice_uneven(padded, specs, shapes)
    assert jax.tree.map(jnp.shape, back) == jax.tree.map(jnp.shape, tree)
    # One spec and one shape for the whole tree.
    same = pad_uneven([jnp.ones((3,)), jnp.zeros((3,))], P("y"), (3,), xy_mesh)
    assert [x.shape for x in same] == [(4,), (4,)]


def test_shardings_and_records_serve_as_specs_and_shapes(xy_mesh):
    tree = {"w": np.ones((3, 5), np.float32)}
    record = {"w": make_variable_spec("w", (3, 5), np.float32, P("x"), xy_mesh.shape, "declared")}
    padded = pad_uneven(tree, record, record, xy_mesh)
    assert padded["w"].shape == (4, 5)
    assert isinstance(padded["w"], np.ndarray)  # host arrays stay on the host
    assert slice_uneven(padded, {"w": NamedSharding(xy_mesh, P("x"))}, tree)["w"].shape == (3, 5)


def test_pad_errors(xy_mesh):
    tree = {"a": {"w": jnp.ones((4, 5))}}
    with raises_naming(ValueError, "a/w", "shape (4, 5)", "logical shape is (3, 5)", "slice_uneven"):
        pad_uneven(tree, P("x"), (3, 5), xy_mesh)
    with pytest.raises(ValueError, match=r"a/w: spec P\('z'\).*'z'"):
        pad_uneven(tree, P("z"), (4, 5), xy_mesh)
    with raises_naming(ValueError, "specs", "prefix", "entry for b", "tree lacks"):
        pad_uneven(tree, {"b": P("x")}, (4, 5), xy_mesh)
    with raises_naming(ValueError, "a/w", "'x'", "not a spec"):
        pad_uneven(tree, "x", (4, 5), xy_mesh)
    with raises_naming(ValueError, "a/w", 4, "not a shape"):
        pad_uneven(tree, P("x"), 4, xy_mesh)


def test_slice_errors():
    tree = {"w": jnp.ones((4, 5))}
    with raises_naming(ValueError, "w", "(4, 5)", "cannot be sliced", "(5, 5)"):
        slice_uneven(tree, P("x"), (5, 5))
    with pytest.raises(ValueError, match=r"w: .*rank 1"):
        slice_uneven(tree, P("x"), (4,))
    with pytest.raises(ValueError, match=r"w: dimension 1 has size 5 and logical size 3.*P\('x'\)"):
        slice_uneven(tree, P("x"), (4, 3))
