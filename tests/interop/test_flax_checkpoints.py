"""Warm starts from checkpoints that programs in plain Flax wrote with Orbax, in each form that they come in."""

import pathlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from facts import assert_names
from flax import linen as nn
from flax import nnx
from flax.training import train_state
from praxis import pax_fiddle

sys.path.append(str(pathlib.Path(__file__).parents[1] / "models"))
import model_helpers
from warm_starts import init_from_rules

from spmd_trainer import models, sharding
from spmd_trainer.checkpointing import (
    LOAD_ALL,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from spmd_trainer.checkpointing import flax as flax_checkpoints
from spmd_trainer.step.pjit import PjitPartitioner
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import checkpoint_sources

Config = pax_fiddle.Config
NO_MODEL = TrainState(None, {}, [])
WIDTH = 6
X = np.zeros((2, 8), np.float32)


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.BatchNorm(use_running_average=not train, name="norm")(nn.Dense(WIDTH, name="up")(x))
        return nn.Dense(8, name="down")(x)


def linen_task():
    return model_helpers.task(Config(models.LinenModel, module=Config(LinenNet)))


def start(task, rules, sizes=(4, 2)):
    """Initialises a task on a mesh that pads and applies the rules: {path: value at its logical shape}, and the report."""
    mesh = sharding.create_device_mesh(list(zip(model_helpers.AXES, sizes, strict=True)))
    partitioner = PjitPartitioner(mesh)
    partitioner.setup(task, model_helpers.shapes_of(model_helpers.batch()))
    state = partitioner.initialize_train_state(jax.random.key(9))
    variables = partitioner.metadata.variables
    state, report = init_from_rules(state, variables, mesh, rules, open_foreign=checkpoint_sources.open_source)
    values = {}
    for v, x in zip(jax.tree.leaves(variables), jax.tree.leaves(state), strict=True):
        if v.path.startswith("mdl_vars"):
            values[v.path] = np.asarray(x)[tuple(map(slice, v.logical_shape))]
            outside = np.asarray(x).copy()
            outside[tuple(map(slice, v.logical_shape))] = 0
            assert not outside.any(), f"the padding of {v.path} must be zero"
    return values, report


def everything(directory, **fields):
    return {directory: CheckpointLoadingRules(load_rules=[LOAD_ALL], **fields)}


def flat(tree, prefix):
    return {
        f"{prefix}/{'/'.join(map(str, keys))}": np.asarray(x)
        for keys, x in nnx.traversals.flatten_mapping(tree).items()
    }


def save_tree(directory, tree):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(directory, tree)


def save_with_manager(directory, items, step=3):
    with ocp.CheckpointManager(directory) as manager:
        saved = {name: ocp.args.StandardSave(tree) for name, tree in items.items()}
        manager.save(step, args=ocp.args.Composite(**saved))


@pytest.fixture
def trained_nnx():
    """An NNX net as another program has it, whose values are none of an initialisation."""
    net = model_helpers.Net(WIDTH, rngs=nnx.Rngs(5))
    state = nnx.state(net, nnx.Any(nnx.Param, nnx.BatchStat))
    nnx.update(net, jax.tree.map(lambda x: x + 0.5, state))
    return net


def nnx_values(net):
    params, stats = nnx.to_pure_dict(nnx.state(net, nnx.Param)), nnx.to_pure_dict(nnx.state(net, nnx.BatchStat))
    return flat(params, "mdl_vars/params") | flat(stats, "mdl_vars/non_trainable")


@pytest.fixture
def trained_linen():
    variables = LinenNet().init(jax.random.key(5), X)
    variables = jax.tree.map(lambda x: x + 0.5, variables)
    state = train_state.TrainState.create(apply_fn=None, params=variables["params"], tx=optax.adam(1e-3))
    return state, variables["batch_stats"]


def linen_values(state, stats):
    return flat(state.params, "mdl_vars/params") | flat({"batch_stats": stats}, "mdl_vars/non_trainable")


def assert_loaded(values, wanted):
    assert wanted.keys() <= values.keys()
    for path, value in wanted.items():
        np.testing.assert_array_equal(values[path], value, err_msg=path)


@pytest.mark.parametrize("form", [pytest.param("state", marks=pytest.mark.full), "dictionary", "params only"])
@pytest.mark.full
def test_nnx_states(form, tmp_path, trained_nnx):
    kinds = nnx.Param if form == "params only" else nnx.Any(nnx.Param, nnx.BatchStat)
    state = nnx.state(trained_nnx, kinds)
    save_tree(tmp_path / "net", nnx.to_pure_dict(state) if form == "dictionary" else state)
    rule = ("(params/.*)", "{}") if form == "params only" else LOAD_ALL
    rules = {tmp_path / "net": CheckpointLoadingRules(load_rules=[rule])}
    values, report = start(model_helpers.nnx_task(), rules)
    wanted = {k: v for k, v in nnx_values(trained_nnx).items() if form != "params only" or "/params/" in k}
    assert len(wanted) > 4
    assert_loaded(values, wanted)
    assert "the checkpoint" in str(report)


def test_a_linen_train_state_of_a_manager(tmp_path, trained_linen):
    """The optimizer's moments are named like the parameters; the parameters are meant."""
    state, stats = trained_linen
    save_with_manager(tmp_path / "run", {"state": state, "batch_stats": {"batch_stats": stats}})
    values, _ = start(linen_task(), everything(tmp_path / "run"))
    assert_loaded(values, linen_values(state, stats))


@pytest.mark.full
def test_the_newest_step_and_a_named_one(tmp_path, trained_linen):
    state, _ = trained_linen
    older = state.replace(params=jax.tree.map(lambda x: x - 1, state.params))
    rules = {"load_rules": [("(params/.*)", "{}")]}
    for step, saved in ((3, older), (12, state)):
        save_with_manager(tmp_path / "run", {"default": saved}, step)
    newest, _ = start(linen_task(), {tmp_path / "run": CheckpointLoadingRules(**rules)})
    assert_loaded(newest, flat(state.params, "mdl_vars/params"))
    third, _ = start(linen_task(), {tmp_path / "run": CheckpointLoadingRules(**rules, step=3)})
    assert_loaded(third, flat(older.params, "mdl_vars/params"))
    with pytest.raises(CheckpointNotFoundError, match=r"no step 4; it has 3, 12"):
        start(linen_task(), {tmp_path / "run": CheckpointLoadingRules(**rules, step=4)})


def test_a_rule_names_what_the_checkpoint_calls_it(tmp_path, trained_linen):
    state, _ = trained_linen
    averages = jax.tree.map(lambda x: x * 2, state.params)
    save_tree(tmp_path / "both", {"params": state.params, "average": averages})
    values, _ = start(
        linen_task(), {tmp_path / "both": CheckpointLoadingRules(load_rules=[("params/(.*)", "average/{}")])}
    )
    assert_loaded(values, flat(averages, "mdl_vars/params"))


def test_layers_in_a_list(tmp_path):
    """Trees of plain functions hold lists: Orbax keeps them as lists."""
    layers = [{"w": np.full((8, 8), 3.0, np.float32)}, {"w": np.full((8, 8), 4.0, np.float32)}]
    save_tree(tmp_path / "layers", {"params": layers})

    def init(key):
        return {"layers": [{"w": jax.random.normal(key, (8, 8))} for _ in range(2)]}

    def apply(variables, x):
        return x @ variables["layers"][0]["w"] @ variables["layers"][1]["w"]

    task = model_helpers.task(Config(models.FunctionModel, init=init, apply=apply))
    values, _ = start(
        task, {tmp_path / "layers": CheckpointLoadingRules(load_rules=[("params/layers/(.*)", "params/{}")])}
    )
    assert_loaded(values, {f"mdl_vars/params/layers/{i}/w": layer["w"] for i, layer in enumerate(layers)})


def test_what_does_not_fit_is_named(tmp_path, trained_linen):
    state, _ = trained_linen
    wide = {**state.params, "up": {"kernel": np.zeros((8, 7), np.float32), "bias": state.params["up"]["bias"]}}
    del wide["down"]
    save_tree(tmp_path / "wide", {"params": wide})
    with pytest.raises(CheckpointMismatchError) as error:
        start(linen_task(), {tmp_path / "wide": CheckpointLoadingRules(load_rules=[("(params/.*)", "{}")])})
    assert_names(
        error.value,
        "'params/up/kernel'",
        "(8, 7) in the checkpoint",
        "(8, 6) in the model",
        "no 'params/down/kernel'",
    )
    rules = CheckpointLoadingRules(load_rules=[("(params/norm/.*)", "{}")], load_step=True)
    with pytest.raises(CheckpointMismatchError, match="no step counter"):
        start(linen_task(), {tmp_path / "wide": rules})


def test_parts_of_a_list(tmp_path):
    """The model has two layers of three; the rest of the list is not read."""
    save_tree(tmp_path / "layers", {"params": [{"w": np.full((8, 8), float(i), np.float32)} for i in range(3)]})

    def init(key):
        return {"first": jax.random.normal(key, (8, 8)), "last": jax.random.normal(key, (8, 8))}

    task = model_helpers.task(
        Config(models.FunctionModel, init=init, apply=lambda variables, x: x @ variables["first"] @ variables["last"])
    )
    rules = CheckpointLoadingRules(load_rules=[("params/first", "params/0/w"), ("params/last", "params/2/w")])
    values, _ = start(task, {tmp_path / "layers": rules})
    assert np.all(values["mdl_vars/params/first"] == 0)
    assert np.all(values["mdl_vars/params/last"] == 2)


def test_an_nnx_state_beside_a_step(tmp_path, trained_nnx):
    save_tree(tmp_path / "net", {"model": nnx.state(trained_nnx, nnx.Param), "step": np.int32(3)})
    values, _ = start(
        model_helpers.nnx_task(), {tmp_path / "net": CheckpointLoadingRules(load_rules=[("(params/.*)", "{}")])}
    )
    assert_loaded(values, flat(nnx.to_pure_dict(nnx.state(trained_nnx, nnx.Param)), "mdl_vars/params"))


def test_the_checkpoints_own_name_wins(tmp_path, trained_linen):
    """More of the model's names are below 'average', and the rule says 'params'."""
    state, _ = trained_linen
    averages = jax.tree.map(lambda x: x * 2, state.params)
    save_tree(tmp_path / "both", {"params": {"up": state.params["up"]}, "average": averages})
    rules = CheckpointLoadingRules(load_rules=[("params/up/(.*)", "params/up/{}")])
    values, _ = start(linen_task(), {tmp_path / "both": rules})
    assert_loaded(values, flat({"up": state.params["up"]}, "mdl_vars/params"))


@pytest.mark.parametrize("leftover", ["deleting-5", "refused-5", "5.orbax-checkpoint-tmp-1700000000"])
def test_leftovers_of_this_trainer_are_no_flax_checkpoint(leftover, tmp_path):
    variables = {"w": jnp.ones(8)}
    own = tmp_path / "checkpoints"
    (own / "20" / "record").mkdir(parents=True)
    (own / "20" / "record" / "record.json").write_text("{}")
    save_tree(own / leftover / "state", variables)
    assert flax_checkpoints.open_source(own, None, NO_MODEL) is None


def test_an_unfinished_save_is_no_step(tmp_path, trained_linen):
    state, _ = trained_linen
    save_with_manager(tmp_path / "run", {"default": state}, 3)
    save_tree(tmp_path / "run" / "4.orbax-checkpoint-tmp-1700000000" / "default", {"params": {}, "x": jnp.ones(3)})
    found = flax_checkpoints.open_source(tmp_path / "run", None, NO_MODEL)
    assert found.step == 3
    assert {tree.parent.name for tree in found.trees.values()} == {"3"}
