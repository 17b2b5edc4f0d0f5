"""What a learner does to variables and optimizer states, against plain optax or arithmetic by hand."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from facts import raises_naming
from learner_helpers import (
    NestedMap,
    assert_close,
    assert_same,
    build,
    hparams,
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

from spmd_trainer import learners
from spmd_trainer.step import masks

# isort: split
from praxis import base_layer, optimizers

COLLECTIONS = base_layer.WeightHParamsCollection
STACKED = "p#3#i-1"  # the key of optimizer states of 3 repeated layers that are not split over the mesh

# --- one optimizer ----------------------------------------------------------------------------------------------------


def test_praxis_adam_is_adam() -> None:
    mdl_vars, var_hparams = model()
    gradients = [random_like(mdl_vars, seed) for seed in (1, 2, 3)]
    adam = praxis(optimizers.Adam, 0.01, beta1=0.9, beta2=0.99, epsilon=1e-6, clip_threshold=1e9)
    new_vars, _ = train(build(adam), mdl_vars, var_hparams, gradients)
    assert_close(new_vars, train_optax(optax.adam(0.01, 0.9, 0.99, 1e-6), mdl_vars, gradients), rtol=1e-4)


def test_accumulation_over_four_batches_is_one_step_on_their_mean_gradient() -> None:
    mdl_vars, var_hparams = model(stacked=True)
    gradients = [random_like(mdl_vars, seed) for seed in range(1, 5)]
    accumulator = praxis(
        optimizers.ShardedStaticAccumulator, 0.01, optimizer_tpl=praxis(optimizers.Adam, 0.01), num_sub_batches=4
    )
    learner = build(accumulator)
    unchanged, _ = train(learner, mdl_vars, var_hparams, gradients[:3])
    assert_same(unchanged, mdl_vars)
    accumulated, _ = train(learner, mdl_vars, var_hparams, gradients)
    mean = jax.tree.map(lambda *g: sum(g) / 4, *gradients)
    at_once, _ = train(build(praxis(optimizers.Adam, 0.01)), mdl_vars, var_hparams, [mean])
    assert_close(accumulated, at_once)


def test_updates_keep_the_variables_dtype() -> None:
    mdl_vars = NestedMap(w=jnp.ones((4,), jnp.bfloat16))
    learner = build(sgd())
    new_vars = learner.apply_gradient(mdl_vars, NestedMap(w=jnp.ones((4,), jnp.float32)), NestedMap(w=hparams((4,))))
    assert new_vars.w.dtype == jnp.bfloat16
    np.testing.assert_array_equal(new_vars.w, 2 * np.ones(4))


def test_scale_update_by_var_norm_scales_matrices_by_their_initial_magnitude() -> None:
    var_hparams = NestedMap(
        w=hparams((2, 2), init=base_layer.WeightInit.Gaussian(0.25)),
        b=hparams((2,), init=base_layer.WeightInit.Gaussian(0.25)),
    )
    zeros, ones = (jax.tree.map(lambda p, x=x: jnp.full(p.shape, x), var_hparams) for x in (0.0, 1.0))
    new_vars = build(sgd(), scale_update_by_var_norm=True).apply_gradient(zeros, ones, var_hparams)
    np.testing.assert_allclose(new_vars.w, 0.25)
    np.testing.assert_allclose(new_vars.b, 1.0)


# --- clipping and skipped steps ---------------------------------------------------------------------------------------

GRADS = NestedMap(a=jnp.array([3.0, 4.0]), b=jnp.array([12.0]))  # norms 5 and 12, together 13


@pytest.mark.parametrize(
    ("limits", "factor_a", "factor_b"),
    [
        ({"clip_gradient_norm_to_value": 1.0}, 1 / 13, 1 / 13),
        ({"clip_gradient_norm_to_value": 20.0}, 1, 1),
        ({"clip_gradient_single_norm_to_value": 6.0}, 1, 6 / 12),
        ({}, 1, 1),
    ],
)
def test_clipping(limits: dict[str, float], factor_a: float, factor_b: float) -> None:
    grads, valid = build(sgd(**limits)).scale_gradients(GRADS)
    assert valid
    assert_close(grads, NestedMap(a=GRADS.a * factor_a, b=GRADS.b * factor_b))


def test_zero_gradients_survive_clipping() -> None:
    for limit in ("clip_gradient_norm_to_value", "clip_gradient_single_norm_to_value"):
        grads, valid = build(sgd(**{limit: 1.0})).scale_gradients(NestedMap(a=jnp.zeros(3)))
        assert valid
        np.testing.assert_array_equal(grads.a, np.zeros(3))


@pytest.mark.parametrize(("bad", "stacked"), [(np.nan, False), (np.nan, True), (np.inf, False), (1e6, False)])
def test_a_bad_gradient_leaves_variables_and_states_untouched(bad: float, stacked: bool) -> None:
    mdl_vars, var_hparams = model(stacked=stacked)
    learner = build(praxis(optimizers.Adam, ema_decay=0.9), skip_step_gradient_norm_value=1e5)
    good = random_like(mdl_vars, 1)
    mdl_vars, state = train(learner, mdl_vars, var_hparams, [good])
    poisoned = good.DeepCopy()
    poisoned.params.emb = poisoned.params.emb.at[2, 1].set(bad)
    new_vars, new_state = one_step(learner, mdl_vars, state, poisoned, var_hparams)
    assert_same(new_vars, mdl_vars)
    assert_same(new_state, state)
    moved, _ = one_step(learner, mdl_vars, state, good, var_hparams)
    assert not np.array_equal(moved.params.emb, mdl_vars.params.emb)


@pytest.mark.parametrize("field", ["enable_skip_step_on_gradient_anomalies", "check_valid_step"])
def test_steps_are_not_skipped_when_told_so(field: str) -> None:
    mdl_vars, var_hparams = NestedMap(w=jnp.zeros(2)), NestedMap(w=hparams((2,)))
    new_vars, _ = train(build(sgd(), **{field: False}), mdl_vars, var_hparams, [NestedMap(w=jnp.array([jnp.nan, 1.0]))])
    np.testing.assert_allclose(new_vars.w, [np.nan, -0.1], rtol=1e-6)


def test_the_skip_limit_looks_at_the_norm_before_clipping() -> None:
    learner = build(sgd(clip_gradient_norm_to_value=1.0), skip_step_gradient_norm_value=13.5)
    assert learner.scale_gradients(GRADS)[1]
    assert not learner.scale_gradients(jax.tree.map(lambda g: 2 * g, GRADS))[1]


# --- several optimizers -----------------------------------------------------------------------------------------------


def test_each_group_has_its_own_optimizer() -> None:
    mdl_vars, var_hparams = model(stacked=True)
    gradients = [random_like(mdl_vars, seed) for seed in (1, 2)]
    new_vars, _ = train(two_groups(sgd(0.1), optax.adam(0.01)), mdl_vars, var_hparams, gradients)
    by_sgd = train_optax(optax.sgd(0.1), mdl_vars, gradients)
    by_adam = train_optax(optax.adam(0.01), mdl_vars, gradients)
    by_sgd.params.head = by_adam.params.head
    assert_close(new_vars, by_sgd)


def test_auxiliary_regexes_match_the_beginning_of_a_path() -> None:
    _, var_hparams = model(stacked=True)
    (chosen,), rest = two_groups(sgd(), sgd(), "params/(head/b|lay)").get_masks(var_hparams)
    paths = lambda mask: [path for path, selected in masks.with_paths(mask) if selected]  # noqa: E731
    assert paths(chosen) == ["params/head/b", "params/layers/scale", "params/layers/w"]
    assert paths(rest) == ["params/emb", "params/head/w"]


def test_joint_scaling_clips_all_gradients_by_the_main_optimizers_value() -> None:
    learner = two_groups(sgd(clip_gradient_norm_to_value=1.0), sgd(clip_gradient_norm_to_value=6.0), "b")
    grads, _ = learner.scale_gradients(GRADS)
    assert_close(grads, jax.tree.map(lambda g: g / 13, GRADS))


def test_separate_scaling_clips_each_group_by_its_own_value() -> None:
    learner = two_groups(
        sgd(clip_gradient_norm_to_value=1.0), sgd(clip_gradient_norm_to_value=6.0), "b", apply_separate_scaling=True
    )
    grads, valid = learner.scale_gradients(GRADS)
    assert valid
    assert_close(grads, NestedMap(a=GRADS.a / 5, b=GRADS.b / 2))
    _, valid = learner.scale_gradients(NestedMap(a=GRADS.a, b=jnp.array([jnp.nan])))
    assert not valid


@pytest.mark.parametrize(
    ("regexes", "message"),
    [
        (["nowhere"], r"'nowhere' selects no variable that learns; paths are params/emb, params/head/b"),
        ([".*/head", ".*/b"], "selects params/head/b; make them disjoint"),
    ],
)
def test_auxiliary_regexes_that_fit_badly_are_refused(regexes: list[str], message: str) -> None:
    _, var_hparams = model()
    learner = build(
        sgd(),
        learners.MultiOptimizerLearner,
        auxiliary_optimizers=[sgd()] * len(regexes),
        auxiliary_regex=regexes,
        auxiliary_names=[str(i) for i in range(len(regexes))],
    )
    with pytest.raises(ValueError, match=message):
        learner.get_grad_tx(var_hparams).init(var_hparams)


# --- repeated layers --------------------------------------------------------------------------------------------------


def test_states_of_repeated_layers_are_kept_by_kind_of_stacking() -> None:
    mdl_vars, var_hparams = model(stacked=True)
    learner = build(praxis(optimizers.Adam))
    state = learner.get_grad_tx(var_hparams).init(mdl_vars)
    specs = state_specs(learner, var_hparams)
    assert set(state) == set(specs) == {"no_prefix", STACKED}
    # praxis' chain: l1, l2, optimizer, weight decay.
    moment, spec = state[STACKED][2].m.params.layers.w, specs[STACKED][2].m.params.layers.w
    assert moment.shape == (3, 4, 4)
    assert (tuple(spec.shape), spec.repeat_prefix) == ((4, 4), [3])
    assert state[STACKED][2].count.shape == (3,)
    assert isinstance(state["no_prefix"][2].m.params.layers.w, optax.MaskedNode)
    assert state["no_prefix"][2].m.params.emb.shape == (6, 4)


def test_without_repeated_layers_the_state_has_no_groups_unless_forced() -> None:
    mdl_vars, var_hparams = model()
    init = lambda **kwargs: build(sgd(), **kwargs).get_grad_tx(var_hparams).init(mdl_vars)  # noqa: E731
    assert isinstance(init(), tuple)
    assert set(init(force_repeat_prefix_structure=True)) == {"no_prefix"}


def test_layers_of_a_stacked_variable_are_optimized_one_by_one() -> None:
    mdl_vars, var_hparams = model(stacked=True)
    grads = random_like(mdl_vars, 1)
    lamb = optax.lamb(0.1)  # scales each variable's update by that variable's norm
    new_vars, _ = train(build(lamb), mdl_vars, var_hparams, [grads])
    weights, weight_grads = mdl_vars.params.layers.w, grads.params.layers.w
    one_by_one = jnp.stack([train_optax(lamb, w, [g]) for w, g in zip(weights, weight_grads, strict=True)])
    together = train_optax(lamb, weights, [weight_grads])
    np.testing.assert_allclose(new_vars.params.layers.w, one_by_one, rtol=1e-5)
    assert not np.allclose(together, one_by_one)
    as_one, _ = train(build(lamb, vectorize_on_repeat_prefix=False), mdl_vars, var_hparams, [grads])
    np.testing.assert_allclose(as_one.params.layers.w, together, rtol=1e-5)


# --- moving averages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("several", [False, True])
def test_ema_follows_the_variables_as_they_were_before_each_step(stacked: bool, several: bool) -> None:
    mdl_vars, var_hparams = model(stacked=stacked)
    optimizer = sgd(ema_decay=0.3)
    learner = two_groups(optimizer, sgd(0.5)) if several else build(optimizer)
    state = learner.get_grad_tx(var_hparams).init(mdl_vars)
    expected = mdl_vars
    for step in range(4):
        # praxis lets averages of the first steps decay faster.
        decay = min(0.3, (1 + step) / (10 + step))
        expected = jax.tree.map(lambda e, v, d=decay: d * e + (1 - d) * v, expected, mdl_vars)
        mdl_vars, state = one_step(learner, mdl_vars, state, random_like(mdl_vars, step), var_hparams)
    assert learners.has_ema(learner)
    assert_close(learners.extract_ema([state], mdl_vars), expected)


def test_a_variable_without_an_average_keeps_its_value() -> None:
    mdl_vars, var_hparams = model(stacked=True)
    learner = build(sgd(ema_decay=0.5), bprop_variable_exclusion=["params/head/w"])
    excluded = learners.get_excluded_var_mask_for_opt(var_hparams, learner)
    masked_vars = masks.mask_out(mdl_vars, excluded)
    state = learner.get_grad_tx(masks.mask_out(var_hparams, excluded)).init(masked_vars)
    later = jax.tree.map(lambda v: v + 1, mdl_vars)
    averages = learners.extract_ema([state], later)
    np.testing.assert_array_equal(averages.params.head.w, later.params.head.w)
    np.testing.assert_array_equal(averages.params.emb, mdl_vars.params.emb)


def test_a_variable_called_ema_is_not_taken_for_an_average() -> None:
    mdl_vars = NestedMap(params=NestedMap(ema=jnp.ones(2)))
    learner = build(praxis(optimizers.Adam))
    assert not learners.has_ema(learner)
    state = learner.get_grad_tx(NestedMap(params=NestedMap(ema=hparams((2,))))).init(mdl_vars)
    with raises_naming(ValueError, "no EMA", "ema_decay"):
        learners.extract_ema([state], mdl_vars)


# --- which variables learn --------------------------------------------------------------------------------------------


def mixed_model() -> NestedMap:
    return NestedMap(
        params=NestedMap(
            a=hparams((2,)), b=hparams((2,)), scale=hparams((), collections=[COLLECTIONS.OVERWRITE_WITH_GRADIENT])
        ),
        non_trainable=NestedMap(mean=hparams((2,), collections=[COLLECTIONS.NON_TRAINABLE])),
    )


@pytest.mark.parametrize(
    ("optimizer", "fields", "no_gradient", "no_state"),
    [
        (sgd(), {}, {"mean"}, {"mean", "scale"}),
        (sgd(ema_decay=0.9), {}, {"mean"}, {"scale"}),
        (sgd(), {"bprop_variable_exclusion": "params/a"}, {"a", "mean"}, {"a", "mean", "scale"}),
        (sgd(ema_decay=0.9), {"bprop_variable_exclusion": [".*/mean", ".*/a"]}, {"a", "mean"}, {"a", "mean", "scale"}),
        (sgd(), {"bprop_variable_inclusion": [".*/b"]}, {"a", "mean", "scale"}, {"a", "mean", "scale"}),
        (sgd(), {"bprop_variable_inclusion": ".*/b", "keep_optimizer_state_for_excluded_vars": True},
         {"a", "mean", "scale"}, set()),
    ],
)  # fmt: skip
def test_masks(optimizer: Any, fields: dict[str, Any], no_gradient: set[str], no_state: set[str]) -> None:
    learner, var_hparams = build(optimizer, **fields), mixed_model()
    for get_mask, expected in (
        (learners.get_excluded_var_mask_for_grad, no_gradient),
        (learners.get_excluded_var_mask_for_opt, no_state),
    ):
        mask = get_mask(var_hparams, learner)
        assert {path.split("/")[-1] for path, excluded in masks.with_paths(mask) if excluded} == expected


@pytest.mark.parametrize(
    "fields", [{"bprop_variable_exclusion": ["params/nowhere"]}, {"bprop_variable_inclusion": ["params/nowhere"]}]
)
def test_regexes_that_select_no_variable_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"params/nowhere.*params/a, params/b") as error:
        learners.get_excluded_var_mask_for_grad(mixed_model(), build(sgd(), **fields))
    assert next(iter(fields)) in str(error.value)


def test_overwritten_variables_take_their_gradient_and_fixed_ones_stay() -> None:
    var_hparams = mixed_model()
    mdl_vars, grads = random_like(var_hparams, 0), random_like(var_hparams, 1, scale=10.0)
    # A gradient that overwrites is no gradient: it is neither clipped nor counted.
    learner = build(praxis(optimizers.Adam, ema_decay=0.9), skip_step_gradient_norm_value=1e4)
    grads.params.scale = jnp.array(1e5)
    excluded = learners.get_excluded_var_mask_for_opt(var_hparams, learner)
    state = learner.get_grad_tx(masks.mask_out(var_hparams, excluded)).init(masks.mask_out(mdl_vars, excluded))
    new_vars, new_state = one_step(learner, mdl_vars, state, grads, var_hparams)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert new_vars.params.scale == 1e5
    np.testing.assert_array_equal(new_vars.non_trainable.mean, mdl_vars.non_trainable.mean)
    assert not np.array_equal(new_vars.params.a, mdl_vars.params.a)


# --- summaries and errors ---------------------------------------------------------------------------------------------


def test_summaries_of_a_step() -> None:
    mdl_vars = NestedMap(a=jnp.array([1.0, 2.0]), b=jnp.array([2.0]))
    var_hparams = NestedMap(a=hparams((2,)), b=hparams((1,)))
    learner = build(sgd(clip_gradient_norm_to_value=6.5), grad_norm_individual_vars=True, var_norm_individual_vars=True)
    with base_layer.JaxContext.new_context():
        learner.plot_learning_rate(jnp.array(3))
        one_step(learner, mdl_vars, learner.get_grad_tx(var_hparams).init(mdl_vars), GRADS, var_hparams)
        summaries = base_layer.all_global_summaries()
    values = {base_layer.trim_summary_type_from_key(key): float(value) for key, value in summaries.items()}
    assert values == pytest.approx(
        {
            "learning/lr": 0.1,
            "learning/is_valid_step": 1.0,
            "learning/raw_grad_norm": 13.0,
            "learning/grad_scale": 0.5,
            "learning/clipped_grad_norm": 6.5,
            "learning/applied_grad_norm": 0.65,
            "learning/var_norm": 3.0,
            "per_var_grad_norm/a": 5.0,
            "per_var_grad_norm/b": 12.0,
            "per_var_norm/a": 5**0.5,
            "per_var_norm/b": 2.0,
        }
    )


def test_learning_rates_of_several_optimizers() -> None:
    with base_layer.JaxContext.new_context():
        two_groups(sgd(0.1), sgd(0.2)).plot_learning_rate(jnp.array(0))
        build(optax.sgd(0.1)).plot_learning_rate(jnp.array(0))  # does not tell
        summaries = base_layer.all_global_summaries()
    values = {base_layer.trim_summary_type_from_key(key): float(value) for key, value in summaries.items()}
    assert values == pytest.approx({"learning/lr": 0.1, "learning/lr_main": 0.1, "learning/lr_head": 0.2})


@pytest.mark.parametrize(
    ("optimizer", "fields", "message"),
    [
        (None, {}, "optimizer is not set; e.g. pax_fiddle.Config"),
        ("adam", {}, "optimizer is 'adam'; give a praxis optimizer such as .*, or an optax GradientTransformation"),
        (optimizers.Adam, {}, r"optimizer is Adam; .*Config\(Adam"),
        (praxis(optimizers.OptaxOptimizer), {}, r"OptaxOptimizer\.grad_tx is not set"),
        (sgd(clip_gradient_norm_to_value=1.0, clip_gradient_single_norm_to_value=1.0), {}, "has both .*; set one"),
        (sgd(), {"skip_zero_gradients": "variable"}, "skip_zero_gradients='variable' is not supported"),
        (
            sgd(),
            {"bprop_variable_inclusion": "a", "bprop_variable_exclusion": "b"},
            "has both bprop_variable_inclusion",
        ),
        (
            sgd(),
            {"force_repeat_prefix_structure": True, "vectorize_on_repeat_prefix": False},
            "needs vectorize_on_repeat_prefix=True",
        ),
    ],
)
def test_what_cannot_work_is_refused_when_built(optimizer: Any, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build(optimizer, **fields)
