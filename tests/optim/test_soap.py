"""SOAP: its numbers against NumPy; what its state is; any mesh as one device."""

import collections
import functools
import re
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import spmd_trainer as st
from spmd_trainer import models
from spmd_trainer.errors import UserError
from spmd_trainer.step import optax_bridge
from spmd_trainer.training import verify
from tests.facts import assert_names, raises_naming
from tests.models.model_helpers import Config, batch, task
from tests.optim import test_muon
from tests.optim.test_muon import (
    CONSTANT,
    KEY,
    MESHES,
    Wide,
    attends,
    drawn,
    largest_difference,
    losses,
    moved,
    on_mesh,
    on_one_device,
    shapes_of,
    updates,
)


def config(**fields):
    return Config(st.Soap, learning_rate=0.05, lr_schedule=CONSTANT, **fields)


def published(grads, w, *, beta1=0.95, beta2=0.95, shampoo=0.95, every=10, longest=10_000, decay=0.0, rate=0.05):
    """Algorithm 3 with eigenvectors in float64: the updates of one matrix."""
    m, v, found = np.zeros_like(w), np.zeros_like(w), []
    grams = [np.zeros((size, size)) for size in w.shape]
    bases = [np.eye(size) for size in w.shape]
    for count, g in enumerate(grads):
        left, right = bases
        if count == 0:
            found.append(np.zeros_like(w))
        else:
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * (left.T @ g @ right) ** 2
            mean, second = left.T @ m @ right / (1 - beta1**count), v / (1 - beta2**count)
            found.append(-rate * (left @ (mean / (np.sqrt(second) + 1e-8)) @ right.T + decay * w))
        for side, product in enumerate([g @ g.T, g.T @ g]):
            if len(product) > longest:
                continue
            grams[side] = shampoo * grams[side] + (1 - shampoo) * product
            if count == 0:
                bases[side] = np.linalg.eigh(grams[side])[1][:, ::-1]
            elif count % every == 0:
                order = np.argsort(-np.diag(bases[side].T @ grams[side] @ bases[side]))
                v = np.take(v, order, axis=side)
                bases[side] = np.linalg.qr(grams[side] @ bases[side][:, order])[0]
    return found


def compare(grads, optimizer_p, **fields):
    w = np.random.default_rng(5).normal(size=grads[0]["params"]["w"].shape)
    expected = published([np.asarray(g["params"]["w"], np.float64) for g in grads], w, **fields)
    found = updates(optimizer_p, grads, {"params": {"w": jnp.asarray(w, jnp.float32)}})
    for update, theirs in zip(found, expected, strict=True):
        np.testing.assert_allclose(update["params"]["w"], theirs, atol=1e-6)


# --- its numbers ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(5, 5), (4, 5)], ids=str)
def test_a_matrix_moves_as_published(shape):
    """Of a side that is longer by one, the vectors of the first basis are all determined, up to their signs."""
    compare(drawn(1, shape, 8), config(precondition_frequency=3, weight_decay=0.1), every=3, decay=0.1)


@pytest.mark.parametrize("longest", [5, 4])
def test_a_side_above_max_precond_dim_is_not_rotated(longest):
    """With 4 no side is: the numbers are those of Adam, after the first step."""
    grads = drawn(2, (5, 7), 5)
    compare(grads, config(precondition_frequency=2, max_precond_dim=longest), every=2, longest=longest)
    if longest == 5:
        return
    adam = optax.adam(0.05, b1=0.95, b2=0.95)
    state = adam.init(grads[0])
    for g, update in zip(grads[1:], updates(config(max_precond_dim=4), grads, grads[0])[1:], strict=True):
        expected, state = adam.update(g, state)
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), update, expected)


def test_what_is_no_matrix_moves_as_with_adam_and_has_no_preconditioner():
    grads = drawn(2, (5, 3))
    ours = updates(config(rules=[("w", "adam")]), grads, grads[0])
    adam = optax.adam(0.05, b2=0.95)
    state = adam.init(grads[0])
    for g, update in zip(grads, ours, strict=True):
        expected, state = adam.update(g, state, grads[0])
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), update, expected)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"beta1": 1.0}, ["Soap.beta1", "1.0", "0.95"]),
        ({"precondition_frequency": 0}, ["precondition_frequency", "0", "10"]),
        ({"precondition_frequency": 2.5}, ["precondition_frequency", "2.5", "whole number"]),
        ({"epsilon": -1.0}, ["epsilon", "-1.0"]),
        ({"heads": "joint"}, ["Soap.heads", "joined"]),
        ({"rules": [("w", "rows,col")]}, ["Soap.rules", "rule 1", "cols"]),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(fields, named):
    with raises_naming(UserError, *named):
        optax_bridge.as_optimizer(config(**fields))


# --- on meshes --------------------------------------------------------------------------------------------------------

# Shapes, the forms of their rules, and splits; some don't divide. Attention's heads are in `heads`, experts in `experts`.
VARIABLES = {
    "stacked": (
        (2, 6, 9),
        "stack,rows,cols",
        ["shard_dim(1, 'data', allow_uneven=True)", "shard_dim(2, 'mdl', allow_uneven=True)"],
    ),
    "turned": (
        (9, 6),
        "rows,cols",
        ["shard_dim(0, 'mdl', allow_uneven=True)", "shard_dim(1, 'data', allow_uneven=True)"],
    ),
    "heads": (
        (7, 2, 3),
        "rows,cols,cols",
        ["shard_dim(0, 'data', allow_uneven=True)", "shard_dim(2, 'mdl', allow_uneven=True)"],
    ),
    "experts": ((5, 3, 5), "cols,stack,rows", "shard_dim(2, 'data', allow_uneven=True)"),
    "long": ((4, 10), "rows,cols", "shard_dim(1, 'mdl', allow_uneven=True)"),
    "vector": ((9,), "adam", "shard_dim(0, 'data', allow_uneven=True)"),
}


def of_exact_gradients(_):
    """A model whose gradients have few bits, so they are the same on all meshes, and with them the first bases."""
    places = {
        name: np.random.default_rng(number).integers(8, size=(2, *shape))
        for number, (name, (shape, *_)) in enumerate(VARIABLES.items())
    }

    def apply(params, x):
        terms = [(x[:, places[name][0]] * x[:, places[name][1]] * w).reshape(len(x), -1) for name, w in params.items()]
        return jnp.concatenate(terms, axis=1)

    def loss(outputs, batch):
        return {"loss": (jnp.mean(jnp.sum(outputs, axis=1)), jnp.asarray(len(outputs), jnp.float32))}

    model_p = Config(
        models.FunctionModel,
        init=lambda key: {name: jax.random.normal(key, shape) for name, (shape, *_) in VARIABLES.items()},
        apply=apply,
        loss=loss,
    )
    optimizer = config(
        rules=[(name, form) for name, (_, form, _) in VARIABLES.items()],
        precondition_frequency=2,
        max_precond_dim=9,
        weight_decay=0.1,
    )
    strategy = [(name, tactic) for name, (*_, tactic) in VARIABLES.items()]
    rng = np.random.default_rng(1)
    batches = [{"x": rng.integers(-2, 3, size=(16, 8)).astype(np.float32)} for _ in range(5)]
    return task(model_p, optimizer=optimizer, strategy=strategy), batches


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[pytest.mark.full] * (s != (1, 4, 2))) for s in MESHES], ids=str
)
def test_from_the_first_step_on_any_mesh_has_the_numbers_of_one_device(sizes):
    """And two moves for each of four groups of shapes, of which two have replicas; none of them in a branch or a loop."""
    texts = []

    def compiled(lowered):
        program = lowered.compile()
        texts.append(program.as_text())
        return program

    assert largest_difference(of_exact_gradients, None, sizes, compiled=compiled) < 1e-5
    inner, entry = texts[0].split("\nENTRY ")
    kinds = r" (all-to-all|all-gather|all-reduce|reduce-scatter|collective-permute)(?:-start)?\(.*whole_matrices"
    assert not re.findall(kinds, inner)
    if sizes == (1, 4, 2):
        assert collections.Counter(re.findall(kinds, entry)) == {"all-to-all": 8, "all-gather": 2}


@pytest.mark.full
def test_a_run_continues_on_another_mesh_with_the_losses_of_one_device(tmp_path):
    built, batches, reference, _ = on_one_device(of_exact_gradients, None)
    first, second = (on_mesh(built, batches, {"data": x, "mdl": y}) for x, y in [(4, 2), (2, 3)])
    logical = jax.tree.map(lambda v: reference[2].variables[v.path], first.layout.variables)
    state = verify.place(first.layout, logical)
    _, found = losses(second, moved(tmp_path, first, state, second), batches[2:])
    np.testing.assert_allclose(found, [snapshot.loss for snapshot in reference[3:]], rtol=1e-5)


@pytest.mark.parametrize("dtype", ["bfloat16", "8bit"])
def test_moments_have_fewer_bits_and_preconditioners_stay_float32(dtype, caplog):
    settings = {"opt_state_dtype_rules": [("gram_rows", dtype)], "opt_state_memory_kind": "pinned_host"}
    built = task(Config(models.NnxModel, module=Config(Wide)), optimizer=config(), opt_state_dtype=dtype, **settings)
    layout = on_mesh(built, [batch()], {"data": 2, "mdl": 3}).layout
    records = {v.path.split("/", 3)[-1]: v for v in layout.records() if v.path.startswith("opt_states/")}
    squares = {path: v for path, v in records.items() if path.startswith(("gram", "basis"))}
    assert {path: v.logical_shape for path, v in squares.items() if "between" in path} == {
        f"{name}_{side}/params/between/kernel": (size, size)
        for name in ("gram", "basis")
        for side, size in (("rows", 64), ("cols", 72))
    }
    assert {v.dtype for v in squares.values()} == {np.dtype(np.float32)}
    assert {v.memory_kind for path, v in squares.items() if "between" in path} == {"pinned_host"}
    kernel = squares["gram_rows/params/between/kernel"]
    assert (kernel.padded_shape, kernel.reason) == ((64, 66), "split over the axes of its variable")
    codes = "/codes_8bit" if dtype == "8bit" else ""
    for name in ("m", "v"):
        assert records[f"{name}/params/between/kernel{codes}"].dtype == (np.uint8 if codes else jnp.bfloat16)
    assert_names(caplog.text, "rule 1", "gram_rows", "matches no optimizer state", "preconditioners")
    bytes_each = [4 * 2 * (rows**2 + cols**2) for rows, cols in [(64, 64), (64, 64), (8, 64), (64, 72)]]
    notes = built.learner.optimizer.notes(built.learner.optimizer.choices(layout.var_weight_hparams))
    assert f"{sum(bytes_each):,} bytes of float32 preconditioners" in notes


def in_the_middle_of_a_run(path, x):
    """A state of Soap whose bases are determined: averages of full rank, with eigenvalues that are far from each other.

    Their sizes, and those of the second moments, are as of these models' gradients.
    """
    rng = np.random.default_rng(zlib.crc32(path.encode()))
    place = next((name for name in ("gram_rows", "gram_cols", "basis_rows", "basis_cols") if f"/{name}/" in path), None)
    if place is not None:
        side = path.replace("basis_", "gram_")
        size, rng = x.shape[-1], np.random.default_rng(zlib.crc32(side.encode()))
        bases = np.linalg.qr(rng.normal(size=x.shape))[0]
        if place == "basis_cols":
            return bases.swapaxes(-1, -2).astype(x.dtype)
        if place == "basis_rows":
            return bases.astype(x.dtype)
        return (bases * np.linspace(0.04, 0.01, size) @ bases.swapaxes(-1, -2)).astype(x.dtype)
    if path.startswith("opt_states/") and path.endswith("/count"):
        return np.asarray(3, x.dtype)
    if path.startswith("opt_states/") and "/v/" in path:
        return rng.uniform(1e-4, 2e-4, size=x.shape).astype(x.dtype)
    return x


def of_nnx(_):
    return attends(optimizer=MIDDLE), [batch(number) for number in range(3)]


def of_experiment(name):
    return test_muon.of_experiment(name, MIDDLE)


MIDDLE = config(precondition_frequency=2, clip_gradient_norm_to_value=1.0, weight_decay=0.1)


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[pytest.mark.full] * (s != (1, 4, 2))) for s in MESHES], ids=str
)
def test_an_nnx_module_on_any_mesh_has_the_numbers_of_one_device(sizes):
    """Stacked layers, heads and experts."""
    assert largest_difference(of_nnx, None, sizes, in_the_middle_of_a_run) < 1e-5


@functools.cache
def of_roundings(name):
    """The most that a run on one device changes, as above, if the variables of its first state are rounded anew."""
    built, batches, reference, initial = on_one_device(of_experiment, name, in_the_middle_of_a_run)
    one = verify.single_device_partitioner(built, shapes_of(batches[0]))
    rng, found = np.random.default_rng(0), []

    def rounded(v, x):
        ulps = rng.choice([-1, 1], x.shape).astype(x.dtype)
        return x * (1 + ulps * np.finfo(x.dtype).eps) if v.path.startswith("mdl_vars/params/") else x

    for _ in range(4):
        run = verify.run_steps(one, batches, KEY, jax.tree.map(rounded, one.layout.variables, initial))
        found += [verify.compare(*states, verify.Tolerance()).worst[1] for states in zip(reference, run, strict=True)]
    return max(found)


@pytest.mark.full
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["lm.cloud.LmCloudSpmdAdamTiny", "lm.mistral.TinyMixtral"])
def test_praxis_and_decoder_on_any_mesh_have_the_numbers_of_one_device(name, sizes):
    """A mesh sums in another order. What it may change is what a rounding of each variable changes on one device."""
    found = largest_difference(of_experiment, name, sizes, in_the_middle_of_a_run)
    assert found < 1e-5 or found < min(of_roundings(name), 4e-5)
