"""muP: the multipliers of the paper's table for each kind of variable, its optimizers, starts, meshes and restarts."""

import copy
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from praxis import optimizers, schedules
from praxis.pax_fiddle import build

import spmd_trainer as st
from spmd_trainer import models, sharding
from spmd_trainer.errors import UserError
from spmd_trainer.step import mup, optax_bridge
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.training import experiment_config, verify
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from tests.facts import raises_naming
from tests.models import model_helpers
from tests.models.model_helpers import KEY, Config, shapes_of, snapshots
from tests.planner import coord_models

BASE, WIDTH = 12, 48
GROWTH = WIDTH / BASE
CONSTANT = Config(schedules.Constant, value=1.0)


class Kinds(nnx.Module):
    """A variable of each kind. Its two heads grow in width."""

    def __init__(self, width, *, rngs):
        self.input = nnx.Linear(8, width, rngs=rngs)
        self.norm = nnx.LayerNorm(width, rngs=rngs)
        self.hidden = nnx.Linear(width, 2 * width, rngs=rngs)
        self.query = nnx.LinearGeneral(2 * width, (2, width // 2), rngs=rngs)
        self.output = nnx.LinearGeneral((2, width // 2), 8, axis=(-2, -1), rngs=rngs)

    def __call__(self, x):
        return self.output(nnx.tanh(self.query(nnx.tanh(self.hidden(self.norm(self.input(x)))))))


class Conv(nnx.Module):
    """A convolution over 8 places, and a mean of them."""

    def __init__(self, width, *, rngs):
        self.input = nnx.Linear(1, width, rngs=rngs)
        self.conv = nnx.Conv(width, width, (3,), rngs=rngs)
        self.output = nnx.Linear(width, 1, rngs=rngs)

    def __call__(self, x):
        return self.output(self.conv(self.input(x[..., None])))[..., 0]


def net(module, width):
    return Config(models.NnxModel, module=Config(module, width=width), loss=model_helpers.loss)


def task_of(module=Kinds, width=WIDTH, *, base=BASE, optimizer=None, **settings):
    built = model_helpers.task(net(module, width), optimizer=optimizer or optax.adam(0.01))
    small = net(module, base)
    small.inputs = "x"
    built.mup = build(Config(st.Mup, base={"width": base}, base_model=mup.BaseModel(small), **settings))
    return built


def partitioner_of(built):
    partitioner = PjitPartitioner(sharding.create_device_mesh([("data", 1), ("mdl", 1)], devices=jax.devices()[:1]))
    partitioner.setup(built, shapes_of(model_helpers.batch()))
    return partitioner


def scales(built):
    return mup.scales_of(partitioner_of(built).layout.var_weight_hparams)


# --- the table --------------------------------------------------------------------------------------------------------

# Table 3 of the paper: standard deviation, Adam's rate, SGD's rate.
INPUT, HIDDEN, OUTPUT = (1, 1, GROWTH), (GROWTH**-0.5, 1 / GROWTH, 1), (1 / GROWTH, 1 / GROWTH, 1 / GROWTH)


def test_multipliers_are_those_of_the_papers_table():
    found = {path.removeprefix("params/"): scale for path, scale in scales(task_of()).items()}
    table = {
        **dict.fromkeys(["input/kernel", "input/bias", "norm/scale", "norm/bias", "hidden/bias"], INPUT),
        "hidden/kernel": HIDDEN,
        "output/kernel": OUTPUT,
        "output/bias": (1, 1, 1),
    }
    for path, (std, adam, sgd) in table.items():
        scale = found.pop(path)
        assert scale.std == pytest.approx(std), path
        assert scale.update == pytest.approx(adam), path
        assert scale.update * scale.gradient == pytest.approx(sgd), path
    # Attention logits are divided by d instead of its root: a factor for the queries. A factor a makes SGD's rate a ** 2.
    a = GROWTH**-0.5
    for path, (std, adam, sgd) in {"query/kernel": HIDDEN, "query/bias": INPUT}.items():
        scale = found.pop(path)
        assert (scale.std, scale.update) == pytest.approx((a * std, a * adam)), path
        assert scale.update * scale.gradient == pytest.approx(a**2 * sgd), path
    assert not found


def test_a_start_has_the_standard_deviations_of_the_base_times_the_table():
    plain = model_helpers.task(net(Kinds, WIDTH), optimizer=optax.sgd(0.01))
    one, other = (
        partitioner_of(built).initialize_train_state(KEY).mdl_vars["params"]
        for built in (task_of(optimizer=optax.sgd(0.01)), plain)
    )
    # Flax' kernels have standard deviations of fan-in ** -0.5, so hidden ones are right as they are.
    factors = {"input": 1, "hidden": 1, "query": GROWTH**-0.5, "output": GROWTH**-0.5}
    for name, factor in factors.items():
        np.testing.assert_allclose(one[name]["kernel"], other[name]["kernel"] * factor, rtol=1e-5)
    np.testing.assert_array_equal(one["norm"]["scale"], np.ones(WIDTH))


def test_at_the_base_nothing_is_different():
    assert set(scales(task_of(width=BASE)).values()) == {mup.Scale(1, 1, 1, 1)}


@pytest.mark.full
def test_a_mesh_that_pads_trains_as_one_device():
    # 4 x 2 devices divide neither 2 heads of 23, nor 46.
    one, mesh = (snapshots(task_of(width=46, base=23), sizes, steps=2)[0] for sizes in ((1, 1), (4, 2)))
    for first, second in zip(one, mesh, strict=True):
        result = verify.compare(first, second, verify.Tolerance(loss=1e-4, variables=1e-3))
        assert result.passed, result


def test_convolutions_need_a_rule():
    with raises_naming(UserError, "conv/kernel", "rows,rows,cols"):
        scales(task_of(Conv))
    scale = scales(task_of(Conv, rules=[("conv/kernel", "stack,rows,cols")]))["params/conv/kernel"]
    assert (scale.rows, scale.cols) == (GROWTH, GROWTH)


# --- optimizers -------------------------------------------------------------------------------------------------------


DRAWN = np.random.default_rng(0).normal(size=(2, 2 * WIDTH, 2, WIDTH // 2)).astype(np.float32)


@functools.cache
def query():
    """WeightHParams and scale of the queries' kernel, whose three multipliers are all different."""
    hparams = partitioner_of(task_of()).layout.var_weight_hparams["params"]["query"]["kernel"]
    tree = {"params": {"w": hparams}}
    return tree, mup.scales_of(tree)["params/w"]


def step(optimizer):
    """The update of the first step, and the state."""
    hparams, scale = query()
    tx = mup.grad_transformation(optax_bridge.as_optimizer(optimizer), hparams)
    mdl_vars, grads = ({"params": {"w": jnp.asarray(x)}} for x in DRAWN)
    updates, state = tx.update(grads, tx.init(mdl_vars), mdl_vars)
    return np.asarray(updates["params"]["w"]), scale, state


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adam_takes_its_rate_times_the_multiplier_and_decays_as_at_the_base(decay):
    # Adam's first step is the sign of the gradient.
    update, scale, _ = step(optax.adamw(0.01, eps=0.0, weight_decay=decay))
    np.testing.assert_allclose(update, -0.01 * (scale.update * np.sign(DRAWN[1]) + decay * DRAWN[0]), atol=1e-7)


def test_sgd_and_epsilon_see_the_gradient_of_the_base():
    update, scale, _ = step(optax.sgd(0.01))
    np.testing.assert_allclose(update, -0.01 * scale.update * scale.gradient * DRAWN[1], rtol=1e-5)
    # A large epsilon is all that Adam divides by.
    update, _, _ = step(optax.adam(0.01, eps=1e4))
    np.testing.assert_allclose(update, -0.01 * scale.update * scale.gradient * DRAWN[1] / 1e4, rtol=1e-2)


def test_moving_averages_are_of_the_variables_themselves():
    adam = Config(optimizers.Adam, learning_rate=0.1, lr_schedule=CONSTANT, ema_decay=0.9, decoupled_weight_decay=0.5)
    _, _, state = step(adam)
    averages = optax_bridge.extract_ema(state, {"params": {"w": jnp.zeros_like(DRAWN[0])}})
    np.testing.assert_allclose(averages["params"]["w"], DRAWN[0], rtol=1e-6)


@pytest.mark.parametrize(("scale", "factor"), [("match_rms", GROWTH**-0.5), ("original", 1.0)])
def test_updates_of_muon_keep_their_spectral_norm(scale, factor):
    optimizer = Config(st.Muon, learning_rate=0.01, lr_schedule=CONSTANT, scale=scale)
    found = scales(task_of(optimizer=optimizer))
    assert found["params/hidden/kernel"].update == pytest.approx(factor)
    assert found["params/input/bias"].update == 1


def test_optimizers_that_look_at_sizes_are_refused():
    lamb = Config(optimizers.Lamb, learning_rate=0.01, lr_schedule=CONSTANT)
    with raises_naming(UserError, "Lamb", "Adam"):
        scales(task_of(optimizer=lamb))


def test_soap_is_refused():
    with raises_naming(UserError, "task.mup", "Soap", "st.Muon"):
        scales(task_of(optimizer=Config(st.Soap, learning_rate=0.01, lr_schedule=CONSTANT)))


# --- experiments ------------------------------------------------------------------------------------------------------


def job_of(experiment, directory, *overrides):
    return Job.build(make_run_config(experiment, directory, mode="inspect", overrides=overrides))


def test_the_base_is_the_same_experiment_with_other_settings_and_tied_embeddings_divide_logits(tmp_path):
    job = job_of(coord_models.Praxis, tmp_path, "MODEL_DIMS=256", "HIDDEN_DIMS=512")
    found = mup.scales_of(job.partitioner.layout.var_weight_hparams)
    # The embedding is multiplied by the root of the width, so its elements shrink with it; logits are divided by the rest.
    for path in ("params/lm/softmax/logits_ffn/linear/w", "params/lm/final_ln/scale"):
        assert (found[path].folded, found[path].update, found[path].rows) == (0.5, 0.5, 1), path
    assert found["params/lm/softmax/logits_ffn/bias/b"].update == 1


def test_what_the_base_can_not_be_is_refused(tmp_path):
    def with_base(base):
        return type("Other", (coord_models.Decoder,), {"MUP": base})

    with raises_naming(UserError, "MODEL_DIM", "MODEL_DIMS"):
        experiment_config.resolve(with_base({"MODEL_DIM": 64}))
    with raises_naming(UserError, "task.mup", "base"):
        experiment_config.resolve(with_base({}))
    with raises_naming(UserError, "task.mup.base", "layers"):
        job_of(with_base({"NUM_LAYERS": 1}), tmp_path)


def test_adapters_and_tied_embeddings_without_a_norm_are_refused():
    adapted = copy.copy(task_of())
    adapted.lora = object()
    with raises_naming(UserError, "task.lora", "task.mup"):
        mup.base_task(adapted)

    class Tied(nnx.Module):
        def __init__(self, width, *, rngs):
            self.embedding = nnx.Embed(8, width, rngs=rngs)

        def __call__(self, x):
            return self.embedding.attend(self.embedding(jnp.argsort(x)))[..., 0]

    with raises_naming(UserError, "embedding/embedding", "multipliers"):
        scales(task_of(Tied))


@pytest.mark.full
def test_a_run_goes_on_with_the_multipliers_that_it_began_with(tmp_path):
    wide = ["WIDTH=96", "task.train.num_train_steps=1"]
    st.train(coord_models.Nnx, tmp_path, overrides=wide)
    wide[-1] = "task.train.num_train_steps=2"
    with raises_naming(UserError, "task.mup.base: {'WIDTH': 64}", "task.mup: None"):
        st.train(coord_models.Nnx, tmp_path, overrides=[*wide, "task.mup=None"])
    assert st.train(coord_models.Nnx, tmp_path, overrides=wide).step == 2
