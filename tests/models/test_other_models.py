"""Linen modules, plain functions, optimizers of every kind, `generate`, and an own training loop."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from clu import metrics as clu_metrics
from facts import raises_naming
from flax import linen as nn
from model_helpers import KEY, Config, batch, failing_steps, loss, nnx_task, shapes_of, snapshots, task

from spmd_trainer import models, partitioning
from spmd_trainer.errors import UserError
from spmd_trainer.shard_map_partitioning import ShardMapPartitioner
from spmd_trainer.step.pjit import PjitPartitioner


class LinenNet(nn.Module):
    width: int
    rate: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        kernel = nn.with_logical_partitioning(nn.initializers.normal(0.3), ("embed", "mlp"))
        x = nn.Dense(self.width, kernel_init=kernel, use_bias=False, name="up")(x)
        x = nn.BatchNorm(deterministic, momentum=0.9, name="norm")(x)
        x = nn.Dropout(self.rate, deterministic=deterministic)(nn.tanh(x))
        return nn.Dense(8, name="down")(x)


def linen_task(rules=(("embed", "data"), ("mlp", "mdl")), rate=0.0):
    return task(
        Config(models.LinenModel, module=Config(LinenNet, width=7, rate=rate), logical_axis_rules=rules), strategy=None
    )


def records(built):
    partitioner = PjitPartitioner()
    partitioner.setup(built, shapes_of(batch()))
    return {v.path: v for v in partitioner.metadata.records()}


@pytest.mark.full
def test_a_linen_module_on_a_mesh():
    built = linen_task(rate=0.3)
    found = records(built)
    assert tuple(found["mdl_vars/params/up/kernel"].spec) == ("data", "mdl")
    assert found["mdl_vars/params/up/kernel"].padded_shape == (8, 8)
    assert "mdl_vars/non_trainable/batch_stats/norm/mean" in found
    assert not failing_steps(built)


def test_a_linen_step_is_that_of_plain_linen():
    built = linen_task()
    (zero, first, *_), partitioner = snapshots(built, (1, 1))
    start = jax.tree.map(lambda v: zero.variables[v.path], partitioner.metadata.variables)
    net, rows = LinenNet(7), batch(0)

    def value(params):
        variables = {"params": params, **start.mdl_vars["non_trainable"]}
        outputs, written = net.apply(variables, rows["x"], deterministic=False, mutable=["batch_stats"])
        return loss(outputs, rows)["loss"][0], written

    (found, written), grads = jax.jit(jax.value_and_grad(value, has_aux=True))(start.mdl_vars["params"])
    np.testing.assert_allclose(first.loss, found, rtol=1e-6)
    expected = start.mdl_vars["params"]["up"]["kernel"] - 0.1 * grads["up"]["kernel"]
    np.testing.assert_allclose(first.variables["mdl_vars/params/up/kernel"], expected, rtol=1e-5, atol=1e-6)
    mean = written["batch_stats"]["norm"]["mean"]
    np.testing.assert_allclose(first.variables["mdl_vars/non_trainable/batch_stats/norm/mean"], mean, rtol=1e-5)


def test_an_axis_that_no_rule_has_is_named():
    with raises_naming(UserError, "up/kernel", "logical axis 'mlp'"):
        records(linen_task(rules=(("embed", "data"),)))


class Says(nn.Module):
    """Adds what it is told about its mode to the input."""

    train: bool | None = None

    @nn.compact
    def __call__(self, x):
        return x + self.param("w", nn.initializers.zeros, (8,)) + 1.0 * self.train


class SaysDeterministic(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic):
        return x + self.param("w", nn.initializers.zeros, (8,)) + 1.0 * (not deterministic)


class SaysInference(nn.Module):
    @nn.compact
    def __call__(self, x, inference):
        return x + self.param("w", nn.initializers.zeros, (8,)) + 1.0 * (not inference)


class SaysTwice(nn.Module):
    deterministic: bool = True

    @nn.compact
    def __call__(self, x, train, use_running_average=False):
        x = x + self.param("w", nn.initializers.zeros, (8,)) + 1.0 * train
        return x + 2.0 * (not use_running_average) + 4.0 * (not self.deterministic)


def added(module, **settings):
    """What the module adds to its input in training and in evaluation."""
    model = task(Config(models.LinenModel, module=Config(module), **settings)).model
    mdl_vars = {"params": {"w": jnp.zeros(8)}}
    x = jnp.zeros((4, 8))
    return [float(model.run(mdl_vars, (x,), KEY, do_eval=do_eval)[0][0, 0]) for do_eval in (False, True)]


EVERY = {"train": True, "use_running_average": False, "deterministic": False}


@pytest.mark.parametrize(
    ("module", "mode_argument", "expected"),
    [
        (Says, None, [1, 0]),  # a field of the module
        (SaysDeterministic, None, [1, 0]),
        (SaysInference, {"inference": False}, [1, 0]),
        (SaysTwice, "train", [3, 2]),
        (SaysTwice, EVERY, [7, 0]),
    ],
)
def test_a_linen_module_is_told_whether_it_trains(module, mode_argument, expected):
    assert added(module, mode_argument=mode_argument) == expected


@pytest.mark.parametrize(
    ("module", "mode_argument", "says"),
    [
        (SaysTwice, None, r"SaysTwice has several settings .*: train, use_running_average. .*'train': True"),
        (SaysTwice, "training", "neither an argument nor a field 'training'; did you mean train"),
        (SaysInference, "inference", r"'inference', which may mean both .*\{'inference': False\}"),
    ],
)
def test_a_mode_argument_that_is_not_clear_is_named(module, mode_argument, says):
    with pytest.raises(UserError, match=says):
        added(module, mode_argument=mode_argument)


def test_a_mode_that_the_config_fixes_is_named_or_kept():
    model_p = Config(models.LinenModel, module=Config(Says, train=True))
    with raises_naming(UserError, "task.model.module", "sets train", "LinenModel"):
        task(model_p).model.run({"params": {"w": jnp.zeros(8)}}, (jnp.zeros((4, 8)),), KEY, do_eval=True)
    model_p.mode_argument = ""
    found, _ = task(model_p).model.run({"params": {"w": jnp.zeros(8)}}, (jnp.zeros((4, 8)),), KEY, do_eval=True)
    assert found[0, 0] == 1


# --- functions --------------------------------------------------------------------------------------------------------


def init(key):
    first, second = jax.random.split(key)
    return {"up": jax.random.normal(first, (8, 5)), "down": jax.random.normal(second, (5, 8)) / 3}


def apply(params, x, *, key, train):
    x = jnp.tanh(x @ params["up"])
    return (x * jax.random.bernoulli(key, 0.7, x.shape) if train else x) @ params["down"]


def init_with_count(key):
    return init(key), {"count": jnp.zeros(())}


def apply_with_count(params, state, x):
    return jnp.tanh(x @ params["up"]) @ params["down"], {"count": state["count"] + 1}


def test_functions_on_a_mesh():
    assert not failing_steps(task(Config(models.FunctionModel, init=init, apply=apply)))


def test_functions_with_a_state():
    built = task(Config(models.FunctionModel, init=init_with_count, apply=apply_with_count, has_state=True))
    states, _ = snapshots(built, (4, 2))
    assert [float(s.variables["mdl_vars/non_trainable/count"]) for s in states] == [0, 1, 2, 3]


def test_a_state_of_another_structure_is_named():
    built = task(Config(models.FunctionModel, init=init_with_count, apply=lambda p, s, x: (x, {}), has_state=True))
    mdl_vars = {"params": init(KEY), "non_trainable": {"count": jnp.zeros(())}}
    with raises_naming(UserError, "task.model.apply", "state of structure", "'count'"):
        built.model.forward(mdl_vars, batch(), KEY, do_eval=False, mutable=["non_trainable"])


def test_a_state_of_another_shape_is_named():
    def grow(params, state, x):
        return x, {"count": jnp.zeros(2)}

    built = task(Config(models.FunctionModel, init=init_with_count, apply=grow, has_state=True))
    mdl_vars = {"params": init(KEY), "non_trainable": {"count": jnp.zeros(())}}
    with raises_naming(UserError, "shape of count", "() to (2,)"):
        built.model.forward(mdl_vars, batch(), KEY, do_eval=False, mutable=["non_trainable"])


class Sows(nn.Module):
    @nn.compact
    def __call__(self, x):
        self.sow("kept", "x", x)
        return nn.Dense(8)(x)


def test_a_collection_that_grows_is_named():
    built = task(Config(models.LinenModel, module=Config(Sows)))
    boxed = built.model.init_variables(KEY, batch())
    mdl_vars = jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda x: hasattr(x, "meta"))
    with raises_naming(UserError, "sows", "collection 'kept'", "task.model.dropped_collections"):
        built.model.forward(mdl_vars, batch(), KEY, do_eval=False, mutable=["non_trainable"])


# --- optimizers -------------------------------------------------------------------------------------------------------

OPTIMIZERS = {
    "adamw": lambda: optax.adamw(1e-2),
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=4),
    "muon": lambda: optax.contrib.muon(1e-2),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), lambda params: jax.tree.map(lambda x: x.ndim > 1, params)),
        optax.sgd(1e-2, momentum=0.9),
    ),
    "several": lambda: optax.multi_transform(
        {"adam": optax.adam(1e-2), "sgd": optax.sgd(1e-2, momentum=0.9)},
        lambda params: jax.tree.map(lambda x: "adam" if x.ndim > 1 else "sgd", params),
    ),
}


@pytest.mark.parametrize(
    "name", [n if n in ("adafactor", "several") else pytest.param(n, marks=pytest.mark.full) for n in OPTIMIZERS]
)
@pytest.mark.full
def test_optimizer_states_follow_their_variables(name):
    built = nnx_task(optimizer=OPTIMIZERS[name]())
    found = records(built)
    variables = {path.removeprefix("mdl_vars/"): v for path, v in found.items() if path.startswith("mdl_vars/")}
    matched = set()
    for path, state in found.items():
        if not path.startswith("opt_states/"):
            continue
        variable = next((v for name, v in variables.items() if path.endswith("/" + name)), None)
        if variable is not None and variable.logical_shape == state.logical_shape:
            assert (state.spec, state.paddings) == (variable.spec, variable.paddings)
            matched.add(variable.path.removeprefix("mdl_vars/"))
        else:
            # Counters and factored moments: never split by guess.
            assert not any(state.spec)
            assert state.reason.startswith("replicated: ")
    if name != "adafactor":  # which keeps moments of rows and columns
        assert matched == {path for path in variables if path.startswith("params/")}
    assert not failing_steps(built)


@pytest.mark.full
def test_the_learners_own_parts_apply():
    """Frozen variables by regex, clipping, and averages, around an optax transformation."""
    from praxis import optimizers, schedules

    optimizer = Config(
        optimizers.OptaxOptimizer,
        grad_tx=optax.adam(1e-2),
        ema_decay=0.9,
        learning_rate=1.0,
        clip_gradient_norm_to_value=0.5,
        lr_schedule=Config(schedules.Constant, value=1.0),
    )
    built = nnx_task(optimizer=optimizer, bprop_variable_exclusion=["params/layers/0/.*"])
    states, _ = snapshots(built, (4, 2))
    for path, x in states[0].variables.items():
        if path.startswith("mdl_vars/params/"):
            assert np.array_equal(x, states[-1].variables[path]) == ("layers/0" in path), path
    assert any("ema" in path for path in states[0].variables)
    assert not failing_steps(built)


# --- the partitioner with written-out collectives ---------------------------------------------------------------------


@pytest.mark.parametrize("mode", [pytest.param("dp", marks=pytest.mark.full), "fsdp"])
def test_shard_map(mode):
    """Without batch norm, whose statistics are over one device's rows there."""
    from spmd_trainer import sharding
    from spmd_trainer.training import verify

    built = task(
        Config(models.FunctionModel, init=init, apply=lambda p, x: jnp.tanh(x @ p["up"]) @ p["down"]), strategy=None
    )
    reference, single = snapshots(built, (1, 1))
    initial = jax.tree.map(lambda v: reference[0].variables[v.path], single.metadata.variables)
    partitioner = ShardMapPartitioner(mode)
    partitioner.use_mesh(sharding.create_device_mesh([("data", 8), ("mdl", 1)]))
    partitioner.setup(built, shapes_of(batch()))
    run = list(verify.run_steps(partitioner, [batch(number) for number in range(3)], KEY, initial))
    compared = [verify.compare(one, many, verify.Tolerance()) for one, many in zip(reference, run, strict=True)]
    assert all(step.passed for step in compared), compared


# --- decoding, own loop -----------------------------------------------------------------------------------------------


def generate(net, batch, key):
    del key
    return {"outputs": net(batch["x"])}


def test_generate_runs_split_by_batch():
    built = nnx_task()
    built.model.generate = generate
    partitioner = PjitPartitioner()
    partitioner.setup(built, shapes_of(batch()))
    from spmd_trainer.step import step_fns

    state = partitioner.initialize_train_state(KEY)
    step = partitioner.partition(step_fns.decode_step, shapes_of(batch()), is_eval=True)
    inputs = partitioner.layout.put(batch())
    _, output = step(state.to_eval_state(), KEY, inputs)
    outputs = output.per_example_out["outputs"]
    whole = built.model.for_generate(jax.jit(partitioner.metadata.slice)(state).mdl_vars)
    np.testing.assert_allclose(outputs, whole(batch()["x"]), rtol=1e-5, atol=1e-6)


def test_outputs_of_generate_that_are_not_per_example_are_named():
    built = nnx_task()
    built.model.generate = lambda net, batch, key: {"outputs": jnp.zeros((3, 8))}
    built.model.for_generate = lambda mdl_vars: None
    with pytest.raises(UserError, match=r"generate returns \['outputs'\] of shape \(3, 8\); the batch has 16 rows"):
        built.model.decode({}, batch(), KEY, mutable=[])


def test_decoding_without_generate_says_what_is_missing():
    with pytest.raises(UserError, match=r"needs task.model.generate: a function \(variables, batch, key\)"):
        nnx_task().model.decode({}, batch(), KEY, mutable=[])


KINDS = {
    "nnx": nnx_task,
    "linen": lambda: linen_task(rate=0.1),
    "functions": lambda: task(
        Config(models.FunctionModel, init=init_with_count, apply=apply_with_count, has_state=True)
    ),
}


@pytest.mark.parametrize("kind", [pytest.param(k, marks=pytest.mark.full) if k == "linen" else k for k in KINDS])
@pytest.mark.full
def test_an_own_loop(kind):
    built = KINDS[kind]()
    state, _, _, train_step, eval_step, num_params = partitioning.partition_spmd_model(built, KEY, shapes_of(batch()))
    assert num_params > 0
    losses = []
    for number in range(5):
        state, value, *_ = train_step(state, KEY, batch(number % 2))
        losses.append(float(value))
    assert losses[-1] < losses[0]
    assert int(state.step) == 5
    value, metrics, *_ = eval_step(state.mdl_vars, KEY, state.step, batch(0))
    assert float(value) == float(metrics["loss"][0]) < losses[0]


def test_an_own_loop_decodes():
    built = nnx_task()
    built.model.generate = generate
    state, specs, *_ = partitioning.partition_spmd_model(built, KEY, shapes_of(batch()))
    decode, _ = partitioning.get_partitioned_spmd_model_decode_fn(built, KEY, state, specs, shapes_of(batch()))
    _, metrics, per_example, _ = decode(state.mdl_vars, KEY, state.step, batch())
    assert per_example["outputs"].shape == (16, 8)
    assert metrics["num_decoded"][0] == 16


@pytest.mark.full
def test_an_own_loop_gets_clu_metrics():
    built = nnx_task()
    built.model.loss = lambda outputs, batch: {
        **loss(outputs, batch),
        "last": clu_metrics.LastValue.from_model_output(outputs[:, 0]),
    }
    state, _, _, train_step, eval_step, _ = partitioning.partition_spmd_model(built, KEY, shapes_of(batch()))
    *_, summaries = eval_step(state.mdl_vars, KEY, state.step, batch())
    assert summaries["last"].count == 16
    *_, summaries = train_step(state, KEY, batch())
    assert summaries["last"].count == 16
