"""Muon: its numbers against singular values and optax; what it takes for matrices; any mesh as one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as hst
from praxis import base_layer, schedules
from praxis.pax_fiddle import build

import spmd_trainer as st
from spmd_trainer import models, sharding, tasks_lib
from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.errors import UserError
from spmd_trainer.step import muon, optax_bridge, step_fns
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import experiment_config, verify
from tests.facts import raises_naming
from tests.models.model_helpers import KEY, Config, Net, batch, failing_steps, shapes_of, task

CONSTANT = Config(schedules.Constant, value=1.0)


def config(**fields):
    return Config(st.Muon, learning_rate=0.05, lr_schedule=CONSTANT, **fields)


def updates(optimizer_p, grads, mdl_vars, hparams=None):
    """The updates of each step for these gradients."""
    hparams = hparams or jax.tree.map(lambda x: base_layer.WeightHParams(x.shape, dtype=x.dtype), mdl_vars)
    grad_tx = optax_bridge.grad_transformation(optax_bridge.as_optimizer(optimizer_p), hparams)
    state, found = grad_tx.init(mdl_vars), []
    for g in grads:
        update, state = jax.jit(grad_tx.update)(g, state, mdl_vars)
        found.append(update)
    return found


def drawn(seed, shape, count=3):
    rng = np.random.default_rng(seed)
    return [{"params": {"w": jnp.asarray(rng.normal(size=shape), jnp.float32)}} for _ in range(count)]


def of_singular_values(x, coefficients, num_iterations):
    """The iterations in float64, on singular values alone."""
    u, s, v = np.linalg.svd(np.asarray(x, np.float64), full_matrices=False)
    s = s / np.sqrt(np.sum(s**2)) / (1.01 if coefficients == "polar_express" else 1.0)
    numbers = muon.COEFFICIENTS[coefficients]
    for a, b, c in [numbers[min(i, len(numbers) - 1)] for i in range(num_iterations)]:
        s = a * s + b * s**3 + c * s**5
    return (u * s) @ v


# --- its numbers ------------------------------------------------------------------------------------------------------


@settings(deadline=None, max_examples=12)
@given(
    seed=hst.integers(0, 10**6),
    shape=hst.sampled_from([(3, 3), (4, 9), (9, 4), (1, 5)]),
    coefficients=hst.sampled_from(sorted(muon.COEFFICIENTS)),
    num_iterations=hst.integers(1, 10),
)
def test_the_iterations_act_on_singular_values(seed, shape, coefficients, num_iterations):
    x = np.random.default_rng(seed).normal(size=shape).astype(np.float32)
    x = x if shape[0] <= shape[1] else x.T
    found = muon.orthogonalized(jnp.asarray(x), coefficients, num_iterations)
    np.testing.assert_allclose(found, of_singular_values(x, coefficients, num_iterations), atol=2e-5)


def test_polar_express_ends_at_the_nearest_orthogonal_matrix_and_keeps_zeros():
    x = np.zeros((2, 5, 7), np.float32)
    x[0, :4, :6] = np.random.default_rng(0).normal(size=(4, 6))
    u, _, v = np.linalg.svd(x[0, :4, :6], full_matrices=False)
    found = muon.orthogonalized(jnp.asarray(x), "polar_express", 12)
    np.testing.assert_allclose(found[0, :4, :6], u @ v, atol=1e-5)
    assert not np.any(found.at[0, :4, :6].set(0))


@pytest.mark.parametrize("shape", [(6, 4), (4, 6)], ids=str)
@pytest.mark.parametrize(("nesterov", "rms"), [(True, None), (False, 0.2)])
def test_a_matrix_moves_as_with_optax(shape, nesterov, rms):
    grads = drawn(1, shape)
    theirs = optax.contrib.muon(0.05, weight_decay=0.3, nesterov=nesterov, consistent_rms=rms)
    scale = "original" if rms is None else "match_rms"
    ours = updates(config(coefficients="keller", weight_decay=0.3, nesterov=nesterov, scale=scale), grads, grads[0])
    state = theirs.init(grads[0])
    for g, update in zip(grads, ours, strict=True):
        expected, state = theirs.update(g, state, grads[0])
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), update, expected)


def test_what_is_no_matrix_moves_as_with_adam():
    grads = drawn(2, (5, 3))
    ours = updates(config(rules=[("w", "adam")], adam_learning_rate=0.01, adam_weight_decay=0.2), grads, grads[0])
    theirs = optax.adamw(0.01, b2=0.95, weight_decay=0.2)
    state = theirs.init(grads[0])
    for g, update in zip(grads, ours, strict=True):
        expected, state = theirs.update(g, state, grads[0])
        jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-6), update, expected)


def test_a_stack_moves_as_its_matrices_do():
    """Two repeated layers of three experts, along the last dimension."""
    grads = drawn(3, (2, 5, 4, 3))
    hparams = {
        "params": {"w": base_layer.WeightHParams((5, 4, 3), dtype=jnp.float32, repeat_prefix=[2])},
    }
    together = updates(config(rules=[("w", "cols,rows,stack")]), grads, grads[0], hparams)
    for layer in range(2):
        for expert in range(3):
            parts = [{"params": {"w": g["params"]["w"][layer, :, :, expert].T}} for g in grads]
            for all_of_them, one in zip(together, updates(config(), parts, parts[0]), strict=True):
                found = all_of_them["params"]["w"][layer, :, :, expert]
                np.testing.assert_allclose(found, one["params"]["w"].T, atol=1e-6)


def test_moments_are_those_of_matrices_once_and_of_the_rest_twice():
    mdl_vars = {"params": {"w": jnp.ones((2, 3)), "b": jnp.ones(3)}}
    hparams = jax.tree.map(lambda x: base_layer.WeightHParams(x.shape, dtype=x.dtype), mdl_vars)
    grad_tx = optax_bridge.grad_transformation(optax_bridge.as_optimizer(config()), hparams)
    (state,) = [part for part in grad_tx.init(mdl_vars) if "v" in part]
    assert [x.shape for x in jax.tree.leaves(state.m)] == [(3,), (2, 3)]
    assert [x.shape for x in jax.tree.leaves(state.v)] == [(3,)]


# --- what it takes for matrices ---------------------------------------------------------------------------------------


class Attends(nnx.Module):
    """Two stacked blocks of attention and two experts, between an embedding and an output matrix."""

    def __init__(self, *, rngs):
        self.embed = nnx.Embed(5, 8, rngs=rngs)
        self.scale = nnx.Param(jnp.ones((2, 8)))

        # No biases: that of the keys changes nothing, and its gradient would be rounding noise.
        @nnx.split_rngs(splits=2)
        @nnx.vmap
        def stacked(rngs):
            return nnx.MultiHeadAttention(
                num_heads=2, in_features=8, qkv_features=6, use_bias=False, decode=False, rngs=rngs
            )

        self.attention = stacked(rngs)
        self.router = nnx.Linear(8, 2, rngs=rngs)
        self.experts_up = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (2, 8, 12)))
        self.experts_down = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (2, 12, 8)))
        self.head = nnx.Linear(8, 8, rngs=rngs)

    def __call__(self, x):
        tokens = jnp.stack([jnp.roll(x, i, axis=1) for i in range(3)], axis=1)
        x = self.embed(jnp.argmax(tokens[..., :5], axis=-1)) + tokens

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def blocks(layer, x):
            attention, scale = layer
            return x + attention(x * scale)

        x = blocks((self.attention, self.scale), x)
        weights = jax.nn.softmax(self.router(x))
        hidden = jnp.tanh(jnp.einsum("btd,edf->btef", x, self.experts_up[...]))
        x = x + jnp.einsum("btef,efd,bte->btd", hidden, self.experts_down[...], weights)
        return self.head(x).mean(axis=1)


def attends(**settings):
    return task(Config(models.NnxModel, module=Config(Attends)), **settings)


def choices(built):
    partitioner = PjitPartitioner()
    partitioner.setup(built, shapes_of(batch()))
    found = built.learner.optimizer.choices(partitioner.layout.var_weight_hparams)
    return {path.removeprefix("params/"): choice for path, choice in found.items()}, partitioner.layout


def dims(choice):
    return None if choice.matrix is None else dataclasses.astuple(choice.matrix.dims)


def test_matrices_are_found_in_the_program():
    found, layout = choices(attends(optimizer=config()))
    into, out = ((0,), (1,), (2, 3)), ((0,), (1, 2), (3,))
    assert {path: dims(choice) for path, choice in found.items() if choice.matrix} == {
        **{f"attention/{name}/kernel": into for name in ("query", "key", "value")},
        "attention/out/kernel": out,
        "experts_up": ((0,), (1,), (2,)),
        "experts_down": ((0,), (1,), (2,)),
    }
    reasons = {"embed/embedding": "embedding", "router/kernel": "router", "head/kernel": "output matrix"}
    for path, reason in reasons.items():
        assert reason in found[path].reason
    moment = next(v for v in layout.records() if v.path.endswith("/m/params/attention/out/kernel"))
    assert "2 matrices 6 x 8" in moment.reason
    apart, _ = choices(attends(optimizer=config(heads="apart", rules=[("up$", "adam")])))
    assert dims(apart["attention/query/kernel"]) == ((0, 2), (1,), (3,))
    assert dims(apart["attention/out/kernel"]) == ((0, 1), (2,), (3,))
    assert apart["experts_up"].matrix is None


@pytest.mark.full
def test_what_is_a_matrix_in_linear_attention_and_its_neighbours(caplog):
    built, batches = of_experiment("lm.qwen_next.TinyQwenNext")
    layout = on_mesh(built, batches, {"replica": 1, "data": 1, "mdl": 1}).layout
    found = built.learner.optimizer.choices(layout.var_weight_hparams)
    sizes = {path.removeprefix("params/lm/layers/sub/"): str(choice) for path, choice in found.items()}
    assert "1 matrix 20 x 30" in sizes["layer_0/attention/gate/w"]
    assert "1 matrix 20 x 24" in sizes["layer_2/attention/gate/w"]
    for name in ("key_conv/w", "log_decay_rate", "decay_bias"):
        assert found[f"params/lm/layers/sub/layer_0/attention/{name}"].matrix is None
    assert "layer_2/attention/gate" not in caplog.text  # that the gate's columns are heads is no doubt


class TrainsMore(nnx.Module):
    """A layer that training alone adds."""

    def __init__(self, *, rngs):
        self.always, self.training, self.last = (nnx.Linear(8, 8, use_bias=False, rngs=rngs) for _ in range(3))
        self.deterministic = False

    def __call__(self, x):
        x = jnp.tanh(self.always(x))
        return self.last(x if self.deterministic else x + jnp.tanh(self.training(x)))


def test_a_matrix_of_training_alone_is_a_matrix():
    found, _ = choices(task(Config(models.NnxModel, module=Config(TrainsMore)), optimizer=config()))
    assert [path for path, choice in found.items() if choice.matrix] == ["always/kernel", "training/kernel"]


def test_optax_muon_is_refused_where_it_takes_the_wrong_variables():
    with raises_naming(UserError, "Config(st.Muon", "attention/key/kernel gets Adam", "8 x 6"):
        choices(attends(optimizer=optax.contrib.muon(0.1)))


def test_optax_muon_is_kept_where_it_takes_the_right_ones():
    built = task(Config(models.NnxModel, module=Config(Net, width=6)), optimizer=optax.contrib.muon(0.1))
    PjitPartitioner().setup(built, shapes_of(batch()))


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"coefficients": "keler"}, ["coefficients", "keller"]),
        ({"scale": "rms"}, ["scale", "match_rms"]),
        ({"rules": [("w", "rows,col")]}, ["rule 1", "cols"]),
        ({"rules": [("(", "adam")]}, ["rule 1", "compile"]),
        ({"decoupled_weight_decay": 0.1, "weight_decay": 0.1}, ["decoupled_weight_decay"]),
    ],
    ids=str,
)
def test_a_wrong_field_is_refused(fields, named):
    with raises_naming(UserError, *named):
        optax_bridge.as_optimizer(config(**fields))


def test_a_rule_that_does_not_fit_and_an_unknown_variable_are_refused():
    grads = drawn(0, (2, 3, 4))
    with raises_naming(UserError, "params/w", "(2, 3, 4)", "3 dimensions"):
        updates(config(rules=[("w", "rows,cols")]), grads, grads[0])
    with raises_naming(UserError, "params/w", "(2, 3, 4)", "stack,rows,cols"):
        updates(config(), grads, grads[0])


def test_a_model_without_matrices_is_refused():
    def apply(params, x):
        return x @ params["w"]

    model_p = Config(models.FunctionModel, init=lambda key: {"w": jax.random.normal(key, (8, 8))}, apply=apply)
    with raises_naming(UserError, "no matrix", "the output matrix"):
        choices(task(model_p, optimizer=config()))


# --- on meshes --------------------------------------------------------------------------------------------------------

MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]


def of_experiment(name, optimizer_p=None):
    resolved = experiment_config.resolve(name)
    optimizer_p = optimizer_p or config(weight_decay=0.1, clip_gradient_norm_to_value=1.0)
    resolved.task_p.train.learner.optimizer = optimizer_p
    source = build(resolved.config.train_datasets[0])
    return tasks_lib.build_task(resolved.task_p), [source.get_next_padded() for _ in range(3)]


def of_nnx(heads):
    built = attends(optimizer=config(heads=heads, clip_gradient_norm_to_value=0.5, ema_decay=0.9, weight_decay=0.1))
    return built, [batch(number) for number in range(3)]


@functools.cache
def on_one_device(made, argument, prepared=None):
    """The task, its batches, the states of a run, and the first of them, which `prepared` makes of (path, initial value)."""
    built, batches = made(argument)
    partitioner = verify.single_device_partitioner(built, shapes_of(batches[0]))
    initial = jax.tree.map(np.asarray, partitioner.initialize_train_state(KEY))
    if prepared is not None:
        initial = jax.tree.map(lambda v, x: prepared(v.path, x), partitioner.layout.variables, initial)
    return built, batches, list(verify.run_steps(partitioner, batches, KEY, initial)), initial


def on_mesh(built, batches, sizes):
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    partitioner = PjitPartitioner(sharding.create_device_mesh(list(sizes.items()), devices=devices))
    partitioner.setup(built, shapes_of(batches[0]))
    return partitioner


def largest_difference(made, argument, sizes, prepared=None, compiled=None):
    """Of the whole state after each step on a mesh, over the variable's largest element. `compiled`: see `verify.run_steps`."""
    built, batches, reference, initial = on_one_device(made, argument, prepared)
    names = built.model.mesh_axis_names
    partitioner = on_mesh(built, batches, dict(zip(names, sizes[-len(names) :], strict=True)))
    run = verify.run_steps(partitioner, batches, KEY, initial, compiled)
    tolerance = verify.Tolerance()
    return max(verify.compare(one, many, tolerance).worst[1] for one, many in zip(reference, run, strict=True))


@pytest.mark.full
@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", ["lm.cloud.LmCloudSpmdAdamTiny", "lm.mistral.TinyMixtral"])
def test_praxis_and_decoder_on_any_mesh_have_the_numbers_of_one_device(name, sizes):
    """Stacked layers, fused and grouped heads, experts; sizes that the mesh doesn't divide."""
    assert largest_difference(of_experiment, name, sizes) < 1e-5


@pytest.mark.parametrize(
    "sizes", [pytest.param(s, marks=[pytest.mark.full] * (s != (1, 4, 2))) for s in MESHES], ids=str
)
@pytest.mark.parametrize("heads", ["joined", pytest.param("apart", marks=pytest.mark.full)])
def test_an_nnx_module_on_any_mesh_has_the_numbers_of_one_device(sizes, heads):
    assert largest_difference(of_nnx, heads, sizes) < 1e-5


@pytest.mark.full
@pytest.mark.parametrize("mode", ["dp", "fsdp"])
def test_with_collectives_written_out(mode):
    built = attends(optimizer=config(), strategy=None)
    make = functools.partial(ShardMapPartitioner, mode, **({} if mode == "dp" else {"min_weight_size": 16}))
    assert not failing_steps(built, (4, 2), make=lambda mesh: make(mesh=mesh))


class Wide(nnx.Module):
    """Two stacked matrices whose moment has 8,192 elements, and one of 4,608; no axis of 3 or 5 devices divides them."""

    def __init__(self, *, rngs):
        self.stacked = nnx.Param(nnx.initializers.lecun_normal()(rngs.params(), (2, 64, 64)))
        self.first, self.between, self.last = (
            nnx.Linear(*sizes, use_bias=False, rngs=rngs) for sizes in [(8, 64), (64, 72), (72, 8)]
        )

    def __call__(self, x):
        x, _ = jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), self.first(x), self.stacked[...])
        return self.last(jnp.tanh(self.between(x)))


def losses(partitioner, state, batches):
    """The state after these batches, and the losses."""
    step = partitioner.partition(step_fns.train_step, shapes_of(batches[0]), is_eval=False)
    found = []
    for rows in batches:
        state, output = step(state, KEY, partitioner.layout.put(rows))
        found.append(float(output.loss))
    return state, found


def moved(path, first, state, second):
    """A state of one partitioner, saved and restored by another one; checks that nothing changed."""
    with Checkpointer(path) as checkpointer:
        checkpointer.save(2, state, first.layout.variables, input_state=None, metadata={})
    restored = Checkpointer(path, read_only=True).restore(second.layout.variables, second.layout.mesh)
    given, read = (jax.jit(p.metadata.slice)(x) for p, x in [(first, state), (second, restored.state)])
    jax.tree.map(lambda x, y: np.testing.assert_array_equal(np.asarray(x), np.asarray(y)), read, given)
    return restored.state


@pytest.mark.parametrize("dtype", [pytest.param("float32", marks=pytest.mark.full), "8bit"])
def test_a_run_continues_on_another_mesh_with_the_losses_of_one_device(tmp_path, dtype):
    built = task(Config(models.NnxModel, module=Config(Wide)), optimizer=config(), opt_state_dtype=dtype)
    batches = [batch(number) for number in range(4)]
    one, first, second = (on_mesh(built, batches, {"data": x, "mdl": y}) for x, y in [(1, 1), (4, 2), (2, 3)])
    kept = [v for v in first.layout.records() if v.path.startswith("opt_states/") and v.dtype == np.uint8]
    assert [v.logical_shape for v in kept] == ([] if dtype == "float32" else [(64, 72), (2, 64, 64)])
    _, expected = losses(one, one.initialize_train_state(KEY), batches)
    state, before = losses(first, first.initialize_train_state(KEY), batches[:2])
    _, after = losses(second, moved(tmp_path, first, state, second), batches[2:])
    # A moment that differs in its last bit may be rounded to another level of the 8 bits.
    np.testing.assert_allclose([*before, *after], expected, rtol=1e-5 if dtype == "float32" else 1e-3)


@pytest.mark.full
def test_small_moments_and_excluded_variables():
    built = attends(
        optimizer=config(),
        opt_state_dtype_rules=[("/m/", "8bit"), ("/v/", "bfloat16")],
        bprop_variable_exclusion=["params/attention/.*"],
    )
    found, layout = choices(built)
    assert {path for path, choice in found.items() if choice.matrix} >= {"experts_up", "experts_down"}
    assert not any("attention" in v.path for v in layout.records() if v.path.startswith("opt_states"))
    assert not failing_steps(built)
