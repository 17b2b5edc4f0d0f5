"""Products are right however their operands and results are split, and usual layouts cost no more than XLA's own choice."""

from __future__ import annotations

import math
import random
import types

import jax
import jax.numpy as jnp
import numpy as np
import optax
import partitioner_probe as probe
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_products import Operands, asked_splits, safe_split
from spmd_trainer.sharding.even_program import evenly
from spmd_trainer.sharding.jaxprs import scan_sizes

MESHES = [(2, 2), (4, 2), (2, 4), *[(2, 2, 2)] * 4]
PRODUCTS = [
    "bd,bv->dv",
    "btd,btv->dv",
    "btd,dv->btv",
    "btv,dv->btd",
    "btd,bdv->btv",
    "bnts,bsnh->btnh",
    "btd,dnh->btnh",
    "btnh,btd->dnh",
    "ecd,edf->ecf",
    "ecd,ecf->edf",
]


def split(x, mesh, spec):
    return lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def draw_spec(rng, sizes, rank):
    """Each axis, in any order, splits some dimension or none."""
    dims = [()] * rank
    for axis in rng.sample(range(len(sizes)), len(sizes)):
        dim = rng.choice([None, *range(rank)])
        if dim is not None:
            dims[dim] += (f"axis{axis}",)
    return [dim or None for dim in dims]


def product_is_right(seed):
    rng, values = random.Random(seed), np.random.default_rng(seed)
    sizes, equation = rng.choice(MESHES), rng.choice(PRODUCTS)
    operands, result = equation.split("->")
    x, y = (values.normal(size=(8,) * len(dims)).astype(np.float32) for dims in operands.split(","))
    specs = [draw_spec(rng, sizes, rank) for rank in (x.ndim, y.ndim, len(result))]
    mesh = probe.mesh_of(sizes)

    # What splits the result: a constraint, or an array of known split that is added.
    other, is_stated = values.normal(size=(8,) * len(result)).astype(np.float32), rng.random() < 0.5

    def step(x, y, other):
        product = jnp.einsum(equation, split(x, mesh, specs[0]), split(y, mesh, specs[1]))
        return split(jnp.sin(product), mesh, specs[2]) if is_stated else jnp.sin(product) + split(other, mesh, specs[2])

    found = jax.jit(evenly(step, mesh), out_shardings=NamedSharding(mesh, PartitionSpec()))(x, y, other)
    text = f"seed {seed}: {equation} on {sizes}, {specs}, {is_stated=}"
    wanted = np.sin(np.einsum(equation, x, y)) + (0 if is_stated else other)
    np.testing.assert_allclose(found, wanted, atol=1e-3, err_msg=text)


@pytest.mark.parametrize("seed", [7, 71, 1200230])
def test_a_product_is_right_for_splits_drawn_at_random(seed):
    product_is_right(seed)


@pytest.mark.full
def test_a_hundred_products_are_right():
    for seed in range(first := random.SystemRandom().randrange(10**9), first + 100):
        product_is_right(seed)


# The gradient of a weight over axis1 and (axis2, axis0), with rows over axis1 and features over axis0: XLA alone is wrong by 10.
ROWS, OUTER, WEIGHT = ("axis1", "axis0"), ("axis1", None), ("axis1", ("axis2", "axis0"))


@pytest.mark.parametrize("way", ["sgd", "adam", "accumulated", "mixed precision"])
def test_a_weights_own_split_makes_its_gradient_no_other(way):
    mesh = probe.mesh_of((2, 2, 2))
    x, w, outer = np.random.default_rng(0).normal(size=(3, 8, 8)).astype(np.float32)
    optimizer = optax.adam(0.1) if way == "adam" else optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1))

    def gradient(w, x, outer):
        if way == "accumulated":
            add = lambda total, _: (total + jax.grad(lambda w: (x @ w * outer).sum())(w), None)  # noqa: E731
            return lax.scan(add, jnp.zeros_like(w), length=2)[0]
        if way == "mixed precision":
            return (x.astype(jnp.bfloat16).T @ outer.astype(jnp.bfloat16)).astype(jnp.float32)
        return jax.grad(lambda w: (x @ w * outer).sum())(w)

    def step(variables, x, outer, mesh=mesh):
        w, state = variables
        if mesh is not None:
            x, outer = split(x, mesh, ROWS), split(outer, mesh, OUTER)
        updates, state = optimizer.update(gradient(w, x, outer), state, w)
        return optax.apply_updates(w, updates), state

    variables = w, optimizer.init(w)
    specs = [PartitionSpec(*WEIGHT) if leaf.ndim == 2 else PartitionSpec() for leaf in jax.tree.leaves(variables)]
    shardings = jax.tree.unflatten(jax.tree.structure(variables), [NamedSharding(mesh, spec) for spec in specs])
    run = jax.jit(
        evenly(step, mesh, specs=specs, returns_variables=True),
        in_shardings=(shardings, None, None),
        out_shardings=shardings,
    )
    found, wanted = run(variables, x, outer)[0], step(variables, x, outer, mesh=None)[0]
    np.testing.assert_allclose(found, wanted, atol=1e-3)


SIZES = {"replica": 2, "data": 2, "mdl": 2}
ALL = ("replica", "data")
DATA, MDL = ("data",), ("mdl",)
LAYOUTS = {  # split of the product, what its operands suggest, what is summed over, number of batch dimensions
    "gradient, fully sharded": (((), ALL), ((), ()), ALL, 0),
    "gradient, Megatron, wide": (((), MDL), ((), MDL), ALL, 0),
    "gradient, Megatron, narrow": ((MDL, ()), (MDL, ()), ALL, 0),
    "gradient, data and mdl": ((DATA, MDL), (MDL, MDL), ALL, 0),
    "gradient, mdl and data": ((MDL, DATA), (MDL, MDL), ALL, 0),
    "gradient, all and mdl": ((ALL, MDL), (MDL, MDL), ALL, 0),
    "gradient, mdl and all": ((MDL, ALL), (MDL, MDL), ALL, 0),
    "gradient of q, k and v": ((DATA, MDL, ()), (MDL, MDL, ()), DATA, 0),
    "activations, features over mdl": ((DATA, (), MDL), (DATA, (), ()), MDL, 0),
    "gradient of experts": ((MDL, DATA, ()), (MDL, (), ()), DATA, 1),
    "gradient of experts, features split": ((("replica",), DATA, MDL), (("replica",), MDL, MDL), DATA, 1),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_usual_layouts_need_no_other_split(name):
    asked, suggested, summed, num_batch = LAYOUTS[name]
    shape = (8,) * len(asked)
    assert safe_split(frozenset({asked}), Operands(suggested, frozenset(summed), num_batch), shape, SIZES) is None


def test_what_is_asked_of_products_is_found_through_the_program():
    def step(w, x):
        forward = lambda w: jax.checkpoint(lambda h: jnp.tanh(h @ w[0] @ w[1]))(x)  # noqa: E731
        grad = jax.grad(lambda w: lax.scan(lambda h, _: (h + 1, forward(w).sum()), 0.0, None, length=2)[1].sum())(w)
        return w - 0.1 * lax.cond(x.sum() > 0, lambda g: g, jnp.zeros_like, grad)

    w, x = jnp.ones((2, 4, 4)), jnp.ones((3, 4))
    jaxpr = jax.make_jaxpr(step)(w, x).jaxpr
    axes = (), ("a",), ("b", "c")
    found = [splits for splits in asked_splits(jaxpr, [axes]).values() if splits]
    assert found
    for splits in found:
        assert splits <= {axes[1:], axes, tuple(reversed(axes[1:]))}


def test_a_weight_that_is_reshaped_has_the_right_gradient():
    mesh = probe.mesh_of((2, 2, 2))
    x, outer = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)

    def step(w, x, outer):
        x, outer = split(x, mesh, ("axis1", "axis0")), split(outer, mesh, OUTER)
        return w - jax.grad(lambda w: (x @ w.reshape(8, 8) * outer).sum())(w)

    for shape in ((1, 8, 8), (8, 8, 1), (8, 4, 2), (2, 4, 8)):
        w = np.zeros(shape, np.float32)
        spec = PartitionSpec(*([WEIGHT[0], WEIGHT[1]] if shape[0] != 1 else [None, *WEIGHT]))
        spec = PartitionSpec("axis1", None, ("axis2", "axis0")) if shape[0] == 2 else spec
        run = jax.jit(
            evenly(step, mesh, specs=[spec], returns_variables=True),
            in_shardings=(NamedSharding(mesh, spec), None, None),
            out_shardings=NamedSharding(mesh, spec),
        )
        np.testing.assert_allclose(run(w, x, outer), -(x.T @ outer).reshape(shape), atol=1e-3, err_msg=str(shape))


def test_a_reduction_by_a_function_of_ones_own_is_no_call():
    x = jnp.ones((4, 4, 4))
    fn = lambda x: lax.reduce(jnp.transpose(x @ x, (1, 0, 2)), 0.0, lambda a, b: a + b * 1.0, (0,))  # noqa: E731
    assert asked_splits(jax.make_jaxpr(fn)(x).jaxpr, [(("a",), ("b",))])


def test_a_safe_split_divides():
    asked, suggested, summed = ((("a",), ("c", "b")), (("b",), ()), frozenset("a"))
    sizes = dict.fromkeys("abc", 2)
    for size in (8, 6, 3):
        spec = safe_split(frozenset({asked}), Operands(suggested, summed, 0), (size, 8), sizes)
        assert spec == PartitionSpec(("b",) if size % 2 == 0 else None, None)
        assert math.prod(sizes[axis] for axis in spec[0] or ()) in (1, 2)


def fused(p, h):
    gate, up = jnp.split(h @ p["w"], 2, -1)
    return h + jax.nn.silu(gate) * up @ p["o"]


def skipped(p, h):
    return lax.cond(h.sum() > 0, lambda h: h + jnp.tanh(h @ p["w"]) @ p["o"], lambda h: h, h)


@pytest.mark.parametrize("layer", [fused, skipped])
def test_usual_layers_cost_no_more_than_by_xlas_own_choice(layer):
    mesh = jax.sharding.Mesh(
        np.array(jax.devices()[:8]).reshape(2, 2, 2), SIZES, axis_types=(jax.sharding.AxisType.Auto,) * 3
    )
    specs = {"o": PartitionSpec("mdl", None), "w": PartitionSpec(None, "mdl")}
    params = {"o": jnp.ones((64, 16)), "w": jnp.ones((16, 128 if layer is fused else 64))}
    h = jnp.ones((8, 4, 16))
    on = lambda spec: NamedSharding(mesh, spec)  # noqa: E731

    def step(p, h):
        h = split(h, mesh, [("replica", "data")])
        grads = jax.grad(lambda p: (layer(p, h) ** 2).sum())(p)
        return jax.tree.map(lambda p, g: p - 0.1 * g, p, grads)

    def costs(fn):
        shardings = jax.tree.map(on, specs)
        rows = on(PartitionSpec(("replica", "data")))
        compiled = jax.jit(fn, in_shardings=(shardings, rows), out_shardings=shardings).lower(params, h).compile()
        return compiled.cost_analysis()["flops"], compiled.as_text().count(" all-gather(")

    flops, gathers = costs(evenly(step, mesh, specs=jax.tree.leaves(specs), returns_variables=True))
    by_xla = costs(step)
    assert flops <= 1.01 * by_xla[0]
    assert gathers <= by_xla[1]


def test_a_constraint_on_another_mesh_of_the_same_devices_says_nothing_of_the_steps_mesh():
    other, mesh = probe.mesh_of((4, 2)), probe.mesh_of((2, 2, 2))
    other = jax.sharding.Mesh(other.devices, ("x", "axis0"), axis_types=other.axis_types)
    x, y = np.random.default_rng(0).normal(size=(2, 8, 8)).astype(np.float32)
    step = lambda x, y: split(split(x, other, ("x", "axis0")) @ y, other, ("axis0", "x"))  # noqa: E731
    np.testing.assert_allclose(jax.jit(evenly(step, mesh))(x, y), x @ y, atol=1e-4)


def test_windows_of_a_scalar():
    step = lambda x, y: lax.reduce_window(x.sum(), 0.0, lax.add, (), (), ()) + (x @ y).sum()  # noqa: E731
    x, y = np.ones((2, 8, 8), np.float32)
    assert jax.jit(evenly(step, probe.mesh_of((2, 2, 2))))(x, y) == 64 + 512


def test_the_operands_of_a_scan_are_counted_in_every_version_of_jax():
    w, xs = jnp.ones(3), jnp.ones((4, 3))
    program = jax.make_jaxpr(lambda w, x, xs: jax.lax.scan(lambda c, x: (c * w + x, c.sum()), x, xs))(w, xs[0], xs)
    assert [scan_sizes(eqn.params) for eqn in program.eqns if eqn.primitive.name == "scan"] == [(1, 1)]
    # As JAX 0.11 describes them: a tree with a leaf for each operand.
    tree = types.SimpleNamespace(unpack=lambda: ((None, None), (None,), (None, None, None)))
    assert scan_sizes({"ft_in": tree}) == (2, 1)
