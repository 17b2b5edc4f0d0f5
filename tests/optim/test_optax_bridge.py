"""Optimizers of every kind and number as one: they train alike, and their specs tell where their states live."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import optax
import pytest
from learner_helpers import (
    Config,
    assert_close,
    build,
    model,
    one_step,
    praxis,
    random_like,
    sgd,
    state_specs,
    train,
    train_optax,
    two_groups,
)

# isort: split
from praxis import optimizers

from spmd_trainer import learners
from spmd_trainer.step import optax_bridge


@pytest.mark.parametrize(
    "given", [optax.adamw(0.01), Config(optax.adamw, learning_rate=0.01)], ids=["transformation", "config"]
)
def test_an_optax_transformation_is_an_optimizer(given: Any) -> None:
    mdl_vars, var_hparams = model(stacked=True)
    gradients = [random_like(mdl_vars, seed) for seed in (1, 2, 3)]
    new_vars, _ = train(build(given), mdl_vars, var_hparams, gradients)
    assert_close(new_vars, train_optax(optax.adamw(0.01), mdl_vars, gradients))


def test_optax_optimizer_of_praxis_adds_its_weight_decay() -> None:
    mdl_vars, var_hparams = model()
    grads = random_like(mdl_vars, 1)
    optimizer = praxis(optimizers.OptaxOptimizer, 0.1, grad_tx=optax.sgd(0.1), decoupled_weight_decay=0.5)
    new_vars, _ = train(build(optimizer), mdl_vars, var_hparams, [grads])
    assert_close(new_vars, jax.tree.map(lambda v, g: v - 0.1 * g - 0.1 * 0.5 * v, mdl_vars, grads))


def keep_all(tree: Any) -> Any:
    return jax.tree.map(lambda _: True, tree)


def by_rank(tree: Any) -> Any:
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


OPTIMIZERS = {
    "adam": praxis(optimizers.Adam, ema_decay=0.9),
    "adam of optax": praxis(optimizers.Adam, sharded_adam=False),
    "sgd": praxis(optimizers.Sgd, momentum=0.9),
    "lamb": praxis(optimizers.Lamb),
    "sharded adafactor": praxis(optimizers.ShardedAdafactor, decay_method="adam", decay_adam=0.99),
    "accumulator": praxis(optimizers.ShardedStaticAccumulator, optimizer_tpl=praxis(optimizers.Sgd), num_sub_batches=2),
    "optax optimizer": praxis(optimizers.OptaxOptimizer, grad_tx=optax.adam(0.1), ema_decay=0.9),
    "optax adamw": optax.adamw(0.1),
    "optax adafactor": optax.adafactor(0.1, min_dim_size_to_factor=2),
    "optax masked": optax.masked(optax.adam(0.1), keep_all),
    "optax by label": optax.multi_transform({"matrix": optax.adam(0.1), "vector": optax.sgd(0.1, 0.9)}, by_rank),
    "optax with hyperparameters": optax.inject_hyperparams(optax.adamw)(0.1),
}


@pytest.mark.parametrize("several", [False, True], ids=["one", "several"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_specs_have_the_structure_and_shapes_of_states_and_steps_keep_both(name: str, several: bool) -> None:
    mdl_vars, var_hparams = model(stacked=True)
    optimizer = OPTIMIZERS[name]
    learner = two_groups(optimizer, optimizer) if several else build(optimizer)
    state = jax.eval_shape(learner.get_grad_tx(var_hparams).init, mdl_vars)
    specs = state_specs(learner, var_hparams)
    assert jax.tree.structure(specs) == jax.tree.structure(state)
    jax.tree.map(lambda leaf, spec: np.testing.assert_equal(tuple(leaf.shape), tuple(spec.full_shape)), state, specs)
    new_vars, new_state = jax.eval_shape(
        lambda s: one_step(learner, mdl_vars, s, random_like(mdl_vars, 1), var_hparams), state
    )
    assert new_state == state
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new_vars) == jax.tree.map(lambda x: (x.shape, x.dtype), mdl_vars)


@pytest.mark.parametrize("name", ["adam", "optax adamw"])
def test_moments_are_split_like_their_variable_and_counters_replicated(name: str) -> None:
    _, var_hparams = model(stacked=True)
    mappings: dict[Any, set[Any]] = {}
    for path, spec in jax.tree_util.tree_leaves_with_path(state_specs(build(OPTIMIZERS[name]), var_hparams)):
        keys = [getattr(key, "key", getattr(key, "name", None)) for key in path]
        if "params" in keys:
            variable = "/".join(keys[keys.index("params") + 1 :])
            mappings.setdefault(variable, set()).add(tuple(spec.full_split_dims_mapping))
        else:
            assert set(spec.full_split_dims_mapping) <= {-1}
    assert mappings["emb"] == {("mdl", None)}
    assert mappings["head/w"] == {(None, "mdl")}
    assert mappings["head/b"] == {(-1,)}
    assert mappings["layers/w"] == {(-1, "data", "mdl")}


def test_factored_moments_of_an_optax_transformation_are_replicated() -> None:
    _, var_hparams = model()
    specs = state_specs(build(OPTIMIZERS["optax adafactor"]), var_hparams)
    row, column = (
        next(s for path, s in jax.tree_util.tree_leaves_with_path(specs) if name in str(path) and "emb" in str(path))
        for name in ("v_row", "v_col")
    )
    assert {tuple(row.shape), tuple(column.shape)} == {(4,), (6,)}
    assert set(row.full_split_dims_mapping) == set(column.full_split_dims_mapping) == {-1}


def test_an_optimizer_without_a_schedule_is_refused_with_the_fix() -> None:
    with pytest.raises(ValueError, match=r"optimizer \(Adam\) has no lr_schedule; give e\.g\. .*schedules\.Constant"):
        optax_bridge.require_schedule(Config(optimizers.Adam, learning_rate=1e-3))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"auxiliary_optimizers": [sgd()]}, "equally many .*; they are 1, 0 and 0"),
        (
            {"auxiliary_optimizers": [sgd()], "auxiliary_regex": ["("], "auxiliary_names": ["x"]},
            r"auxiliary_regex '\(' doesn't compile",
        ),
    ],
)
def test_auxiliary_fields_that_do_not_belong_together_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(sgd(), learners.MultiOptimizerLearner, **fields)
