"""NNX modules in a task: which variables there are, what a step computes, and what a wrong module is told."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from facts import raises_naming
from flax import nnx, traverse_util
from model_helpers import KEY, Config, Net, batch, failing_steps, loss, nnx_task, shapes_of, snapshots, task

from spmd_trainer import models, sharding
from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.errors import UserError
from spmd_trainer.step import state_layout, step_fns
from spmd_trainer.step.pjit import PjitPartitioner


def by_path(tree):
    return {
        jax.tree_util.keystr(path, simple=True, separator="/"): x
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    }


def initial(built):
    boxed = state_layout.variables_initialiser(built, shapes_of(batch()))(KEY)
    return jax.tree.map(lambda box: box.value, boxed, is_leaf=lambda x: hasattr(x, "meta"))


def forward(built, mdl_vars, *, do_eval, key=KEY):
    return built.model.forward(mdl_vars, batch(), key, do_eval=do_eval, mutable=["non_trainable"])


def test_a_tied_weight_is_one_variable_and_streams_are_none():
    assert sorted(by_path(initial(nnx_task(Config(Net, width=6, rate=0.5))))) == [
        "non_trainable/norm/mean",
        "non_trainable/norm/var",
        "params/first/kernel",
        *(f"params/layers/{number}/{kind}" for number in (0, 1) for kind in ("bias", "kernel")),
        "params/norm/bias",
        "params/norm/scale",
    ]


def with_variables(graphdef, state, tree):
    """A module with the variables of a train state or checkpoint, by Flax' own functions."""
    pure = nnx.restore_int_paths(tree["params"])
    pure["norm"] |= tree["non_trainable"]["norm"]
    nnx.replace_by_pure_dict(state, {**nnx.to_pure_dict(state), **pure})
    return nnx.merge(graphdef, state)


def test_a_step_is_that_of_plain_nnx():
    """Three steps of a loop as Flax' documentation writes it, from the same variables."""
    built = nnx_task()
    ours, partitioner = snapshots(built, (1, 1))
    start = jax.tree.map(lambda v: ours[0].variables[v.path], partitioner.metadata.variables).mdl_vars
    graphdef, state = nnx.split(Net(6, rngs=nnx.Rngs(0)))
    net = with_variables(graphdef, state, jax.tree.map(jnp.asarray, start))
    optimizer = nnx.Optimizer(net, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)
    for number, snapshot in enumerate(ours[1:]):
        rows = batch(number)
        net.train()
        value, grads = nnx.value_and_grad(lambda net, rows: loss(net(rows["x"]), rows)["loss"][0])(net, rows)
        optimizer.update(net, grads)
        np.testing.assert_allclose(snapshot.loss, value, rtol=1e-6)
        for path, x in by_path(nnx.to_pure_dict(nnx.state(net, nnx.Param))).items():
            np.testing.assert_allclose(snapshot.variables[f"mdl_vars/params/{path}"], x, rtol=2e-5, atol=1e-6)
        for name in ("mean", "var"):
            x = getattr(net.norm, name)[...]
            np.testing.assert_allclose(
                snapshot.variables[f"mdl_vars/non_trainable/norm/{name}"], x, rtol=2e-5, atol=1e-6
            )


def test_evaluation_uses_the_running_statistics_and_drops_nothing():
    built = nnx_task(Config(Net, width=6, rate=0.5))
    mdl_vars = initial(built)
    (first, _), written = forward(built, mdl_vars, do_eval=True)
    (second, _), _ = forward(built, mdl_vars, do_eval=True, key=jax.random.key(9))
    assert first["loss"] == second["loss"]
    np.testing.assert_array_equal(written["non_trainable"]["norm"]["mean"], np.zeros(6))
    (trained, _), written = forward(built, mdl_vars, do_eval=False)
    assert trained["loss"][0] != first["loss"][0]
    assert np.abs(written["non_trainable"]["norm"]["mean"]).min() > 0


def test_dropout_depends_on_the_key_only():
    built = nnx_task(Config(Net, width=6, rate=0.5))
    mdl_vars = initial(built)
    losses = [float(forward(built, mdl_vars, do_eval=False, key=jax.random.key(k))[0][0]["loss"][0]) for k in (1, 1, 2)]
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.full
@pytest.mark.parametrize("sizes", [(4, 2), (1, 8)])
def test_dropout_and_statistics_on_a_mesh(sizes):
    assert not failing_steps(nnx_task(Config(Net, width=7, rate=0.3)), sizes)


class Block(nnx.Module):
    def __init__(self, width, rate, *, rngs):
        self.linear = nnx.Linear(width, width, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(width, momentum=0.9, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        return self.drop(nnx.tanh(self.norm(self.linear(x))))


class Stacked(nnx.Module):
    """A scan over layers that are stacked by vmap; each has batch norm, and dropout of its own."""

    def __init__(self, width, rate=0.0, layers=3, *, rngs):
        self.up = nnx.Linear(8, width, use_bias=False, rngs=rngs)
        self.blocks = nnx.vmap(lambda rngs: Block(width, rate, rngs=rngs))(rngs.split(layers))
        self.down = nnx.Linear(width, 8, rngs=rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda block, x: block(x), in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        return self.down(scan(self.blocks, self.up(x)))


@pytest.mark.parametrize("sizes", [pytest.param((4, 2), marks=pytest.mark.full), (3, 2)])
def test_stacked_layers_with_dropout_and_statistics_on_a_mesh(sizes):
    assert not failing_steps(nnx_task(Config(Stacked, width=7, rate=0.3)), sizes)


def test_stacked_layers_have_dropout_and_statistics_of_their_own():
    built = nnx_task(Config(Stacked, width=6, rate=0.5, layers=2))
    mdl_vars = initial(built)
    assert mdl_vars["params"]["blocks"]["linear"]["kernel"].shape == (2, 6, 6)
    net = built.model._module(mdl_vars, KEY, do_eval=False)
    keys = jax.random.key_data(net.blocks.drop.rngs.key[...])
    assert not np.array_equal(keys[0], keys[1])
    _, written = forward(built, mdl_vars, do_eval=False)
    means = written["non_trainable"]["blocks"]["norm"]["mean"]
    assert means.shape == (2, 6)
    assert np.abs(means).min() > 0
    (one, _), _ = forward(built, mdl_vars, do_eval=True, key=jax.random.key(1))
    (two, _), _ = forward(built, mdl_vars, do_eval=True, key=jax.random.key(2))
    assert one["loss"] == two["loss"]


class Scale(nnx.Param):
    """A kind of parameter of the module's own."""


class Constant(nnx.Variable):
    """A kind of variable that does not learn."""


class OwnKinds(nnx.Module):
    def __init__(self, *, rngs):
        self.linear = nnx.Linear(8, 8, rngs=rngs)
        self.scale = Scale(jnp.ones(8))
        self.shift = Constant(jnp.full(8, 0.5))

    def __call__(self, x):
        return self.linear(x) * self.scale + self.shift


@pytest.mark.full
def test_subclasses_of_param_learn_and_other_kinds_stay():
    built = nnx_task(Config(OwnKinds))
    (start, *_, last), _ = snapshots(built, (4, 2))
    assert not np.array_equal(start.variables["mdl_vars/params/scale"], last.variables["mdl_vars/params/scale"])
    np.testing.assert_array_equal(last.variables["mdl_vars/non_trainable/shift"], np.full(8, 0.5))
    assert not failing_steps(built)


# --- annotations ------------------------------------------------------------------------------------------------------


class Annotated(nnx.Module):
    def __init__(self, axes=("embed", "mlp"), *, rngs):
        init = nnx.with_partitioning(nnx.initializers.normal(0.1), axes)
        self.up = nnx.Linear(8, 9, use_bias=False, kernel_init=init, rngs=rngs)
        self.down = nnx.Linear(9, 8, rngs=rngs)

    def __call__(self, x):
        return self.down(self.up(x))


def layout(built):
    partitioner = PjitPartitioner()
    partitioner.setup(built, shapes_of(batch()))
    return {v.path.removeprefix("mdl_vars/params/"): v for v in partitioner.metadata.records() if "params" in v.path}


def annotated(rules, axes=("embed", "mlp")):
    return task(Config(models.NnxModel, module=Config(Annotated, axes=axes), logical_axis_rules=rules), strategy=None)


def test_logical_axes_are_declared():
    found = layout(annotated([("embed", "data"), ("mlp", "mdl")]))
    assert tuple(found["up/kernel"].spec) == ("data", "mdl")
    assert found["up/kernel"].padded_shape == (8, 10)
    assert found["up/kernel"].reason == state_layout.DECLARED
    assert found["down/kernel"].reason == state_layout.NOT_DECLARED


def test_axes_without_rules_are_mesh_axes():
    assert tuple(layout(annotated((), axes=("mdl", None)))["up/kernel"].spec)[:1] == ("mdl",)


def test_an_unknown_logical_axis_is_named_with_the_nearest():
    with raises_naming(UserError, "up/kernel", "logical axis 'mlp'", "mean mpl"):
        layout(annotated([("embed", "data"), ("mpl", "mdl")]))


# --- restoring without this trainer -----------------------------------------------------------------------------------


@pytest.mark.full
def test_flax_restores_what_a_run_saved(tmp_path):
    """`nnx.merge` on the restored tree computes the same, without this trainer. A mesh that pads saves arrays padded."""
    built = nnx_task()
    partitioner = PjitPartitioner(sharding.create_device_mesh([("data", 2), ("mdl", 1)], devices=jax.devices()[:2]))
    partitioner.setup(built, shapes_of(batch()))
    state = partitioner.initialize_train_state(KEY)
    with Checkpointer(tmp_path) as checkpoints:
        checkpoints.save(1, state, partitioner.metadata.variables, input_state=None, metadata={})
    flat = ocp.StandardCheckpointer().restore(tmp_path / "1" / "state")
    tree = traverse_util.unflatten_dict(flat, sep="/")["mdl_vars"]
    net = with_variables(*nnx.split(Net(6, rngs=nnx.Rngs(0))), tree)
    net.eval()
    (scalars, _), _ = forward(built, state.mdl_vars, do_eval=True)
    np.testing.assert_allclose(loss(net(batch()["x"]), batch())["loss"][0], scalars["loss"][0], rtol=1e-6)


# --- planted faults ---------------------------------------------------------------------------------------------------


def on_a_mesh():
    return jax.sharding.get_abstract_mesh().size > 1


def test_statistics_that_are_averaged_twice_are_caught(monkeypatch):
    run = models.NnxModel.run

    def twice(self, mdl_vars, arguments, key, *, do_eval):
        outputs, written = run(self, mdl_vars, arguments, key, do_eval=do_eval)
        if on_a_mesh():
            old = mdl_vars["non_trainable"]
            written = jax.tree.map(lambda new, old: 0.9 * new + 0.1 * old, written, old)
        return outputs, written

    monkeypatch.setattr(models.NnxModel, "run", twice)
    assert failing_steps(nnx_task())


@pytest.mark.full
def test_the_same_dropout_on_two_shards_is_caught(monkeypatch):
    bernoulli = jax.random.bernoulli

    def same(key, p=0.5, shape=None, **kwargs):
        if not on_a_mesh() or not shape or shape[0] % 2:
            return bernoulli(key, p, shape, **kwargs)
        return jnp.tile(bernoulli(key, p, (shape[0] // 2, *shape[1:]), **kwargs), (2, *[1] * (len(shape) - 1)))

    monkeypatch.setattr(jax.random, "bernoulli", same)
    monkeypatch.setattr(nnx.nn.stochastic.random, "bernoulli", same)
    assert failing_steps(nnx_task(Config(Net, width=6, rate=0.5)))


@pytest.mark.full
def test_a_tied_weight_that_learns_twice_is_caught(monkeypatch):
    gradients = step_fns.gradients

    def twice(*args):
        output, written, grads = gradients(*args)
        if on_a_mesh():
            grads["params"]["first"]["kernel"] *= 2
        return output, written, grads

    monkeypatch.setattr(step_fns, "gradients", twice)
    assert failing_steps(nnx_task())


# --- wrong models -----------------------------------------------------------------------------------------------------


class WritesItsParameter(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        self.w[...] = self.w[...] * 0.9
        return x * self.w


class Grows(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones(8))

    def __call__(self, x):
        self.more = nnx.BatchStat(jnp.zeros(3))
        return x * self.w


class ReplacesItsParameter(WritesItsParameter):
    def __call__(self, x):
        self.w = nnx.Param(self.w[...] * 0.9)
        return x * self.w


class HasAnArray(WritesItsParameter):
    def __init__(self, *, rngs):
        super().__init__(rngs=rngs)
        self.table = nnx.data(jnp.arange(8.0))


class ChangesAShape(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones(8))
        self.seen = nnx.BatchStat(jnp.zeros(3))

    def __call__(self, x):
        self.seen.set_value(jnp.zeros(4))
        return x * self.w


class Shrinks(ChangesAShape):
    def __call__(self, x):
        del self.seen
        return x * self.w


class NoModule:
    def __init__(self, *, rngs):
        pass


@pytest.mark.parametrize(
    ("module", "says"),
    [
        (WritesItsParameter, "writes its parameter w in the forward pass.*nnx.BatchStat"),
        (ReplacesItsParameter, "writes its parameter w in the forward pass"),
        (HasAnArray, "keeps table as|JAX array as its attribute table; make it an nnx.Variable"),
        (Grows, "adds the variable more in the forward pass; create all variables in __init__"),
        (Shrinks, "removes the variable seen in the forward pass; create all variables in __init__"),
        (ChangesAShape, r"changes the shape of seen from \(3,\) to \(4,\); a train state has fixed shapes"),
        (NoModule, "makes a NoModule, which is not an nnx.Module"),
    ],
)
def test_a_wrong_module_is_named(module, says):
    built = nnx_task(Config(module))
    with pytest.raises(UserError, match=says):
        forward(built, {"params": {"w": jnp.ones(8)}, "non_trainable": {"seen": jnp.zeros(3)}}, do_eval=False)


@pytest.mark.parametrize(
    ("loss_fn", "says"),
    [
        (lambda outputs, batch: outputs[:, 0], r"task.model.loss returns 'float32\[16\]'; return \(loss, weight\)"),
        (lambda outputs, batch: (outputs[:, 0], 1.0), r"value of metric 'loss' has shape \(16,\).*take its mean"),
        (lambda outputs, batch: {"loss": (0.0, batch["x"])}, r"weight of metric 'loss' has shape \(16, 8\)"),
        (lambda outputs, batch: (0.0, {"more": 1.0}), r"metric 'loss' is .*return \(loss, weight\)"),
        (lambda outputs, batch: {"loss": 1.0}, r"metric 'loss' is .*give \(value, weight\)"),
    ],
)
def test_a_wrong_loss_is_named(loss_fn, says):
    built = nnx_task()
    built.model.loss = loss_fn
    with pytest.raises(UserError, match=says):
        forward(built, initial(built), do_eval=False)


def test_a_loss_alone_weighs_the_rows_of_the_batch_and_needs_no_name():
    built = nnx_task(loss_name=None)
    built.model.loss = lambda outputs, batch: jnp.mean(outputs)
    assert built.learner.loss_name == "loss"
    (scalars, *_), _ = forward(built, initial(built), do_eval=False)
    assert scalars["loss"][0].shape == ()
    assert float(scalars["loss"][1]) == 16


def test_a_class_in_place_of_a_config_is_named_with_the_mend():
    for module in (NoModule, NoModule(rngs=None)):
        with raises_naming(UserError, "task.model.module", "Config(NoModule, ...)"):
            models.NnxModel(module=module, loss=lambda outputs, batch: 0.0)


def test_outputs_that_are_not_per_example_are_named():
    built = nnx_task()
    built.model.per_example = lambda outputs, batch: {"mean": jnp.mean(outputs, axis=0)}
    with pytest.raises(UserError, match=r"per_example returns \['mean'\] of shape \(8,\); the batch has 16 rows"):
        forward(built, initial(built), do_eval=True)


def test_an_input_that_the_batch_lacks_is_named():
    built = nnx_task()
    built.model.inputs = ("xs",)
    with raises_naming(UserError, "no entry 'xs'", "mean x"):
        forward(built, initial(built), do_eval=True)


def test_a_missing_loss_is_named():
    with raises_naming(UserError, "loss", "not set"):
        models.NnxModel(module=Config(Net, width=6))


def test_bfloat16_leaves_statistics_and_the_batch_alone():
    """A counter beyond 256 goes on, running means are those of float32, and the loss sees the batch's own weights."""
    seen = []

    def loss_of(outputs, batch):
        seen.append((outputs.dtype, batch["y"].dtype))
        return loss(outputs, batch)

    model_p = Config(models.NnxModel, module=Config(Counts), loss=loss_of, fprop_dtype=jnp.bfloat16)
    states, _ = snapshots(task(model_p), (4, 2))
    counts = [state.variables["mdl_vars/non_trainable/count"] for state in states]
    assert [float(count) for count in counts] == [300, 301, 302, 303]
    assert {count.dtype for count in counts} == {np.dtype(np.float32)}
    assert set(seen) == {(jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32))}


class Counts(nnx.Module):
    def __init__(self, *, rngs):
        self.w = nnx.Param(jnp.ones(8))
        self.count = nnx.BatchStat(jnp.asarray(300.0))

    def __call__(self, x):
        self.count[...] += 1
        return x * self.w


def test_two_axes_for_one_mesh_axis_are_named():
    with raises_naming(UserError, "up/kernel", "'mlp'", "'mdl' already", "('mlp', None)"):
        layout(annotated([("embed", "mdl"), ("mlp", "mdl")]))
    found = layout(annotated([("embed", "mdl"), ("mlp", "mdl"), ("mlp", None)]))
    assert tuple(found["up/kernel"].spec) in [("mdl",), ("mdl", None)]
