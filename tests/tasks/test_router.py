"""The router against the published rules, written as loops over tokens in numpy."""

import functools
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import evaluating, small_spec
from praxis import base_layer
from praxis.pax_fiddle import Config

from spmd_trainer.decoder import feed_forward, router
from spmd_trainer.models.decoder_spec import MoeSpec
from spmd_trainer.step import load_balance, masks

ROWS, LENGTH, DIMS = 2, 6, 12
WRITTEN = [base_layer.AUX_LOSS, base_layer.SUMMARIES, base_layer.NON_TRAINABLE]


def settings_of(seed):
    """Random settings that MoeSpec allows."""
    rng = np.random.default_rng(seed)
    groups = int(rng.choice([1, 1, 2, 3, 4]))
    experts = groups * int(rng.integers(2, 6))
    kept = int(rng.integers(1, groups + 1))
    return MoeSpec(
        num_experts=experts,
        num_experts_per_token=int(rng.integers(1, experts // groups * kept + 1)),
        hidden_dims=5,
        score=str(rng.choice(["softmax", "sigmoid"])),
        normalise_top_k=bool(rng.integers(2)),
        scaling_factor=float(rng.choice([1.0, 2.5])),
        num_groups=groups,
        num_chosen_groups=kept,
        choice_bias=bool(rng.integers(2)),
        aux_loss_weight=float(rng.choice([0.0, 0.3])),
        z_loss_weight=float(rng.choice([0.0, 0.7])),
    )


def routed(moe, x, w, bias, real, *, train=True, dtype=jnp.float32):
    """The router's experts and weights, and what it wrote."""
    spec_p = small_spec(model_dims=x.shape[-1], moe=Config(MoeSpec, **vars(moe)))
    layer = base_layer.instantiate(Config(router.Router, name="router", spec=spec_p, fprop_dtype=dtype))
    variables = {"params": {"w": w}}
    if moe.choice_bias:
        variables[base_layer.NON_TRAINABLE] = {"choice_bias": bias}
    with evaluating(not train):
        return jax.jit(functools.partial(layer.apply, mutable=WRITTEN))(variables, x, real)


def expected(moe, x, w, bias, real):
    """Experts (sorted) with their weights for each token, tokens of each expert, and both losses, by the papers."""
    chosen, load, squares, probabilities = {}, np.zeros(moe.num_experts), [], np.zeros(moe.num_experts)
    for place in np.ndindex(x.shape[:2]):
        logits = x[place] @ w
        softmax = np.exp(logits) / np.exp(logits).sum()
        scores = softmax if moe.score == "softmax" else 1 / (1 + np.exp(-logits))
        corrected = scores + bias if moe.choice_bias else scores
        groups = np.split(np.arange(moe.num_experts), moe.num_groups)
        best = sorted(groups, key=lambda group: -np.sort(corrected[group])[-2:].sum())[: moe.num_chosen_groups]
        allowed = np.concatenate(best)
        experts = allowed[np.argsort(-corrected[allowed])][: moe.num_experts_per_token]
        weights = scores[experts] / (scores[experts].sum() if moe.normalise_top_k else 1) * moe.scaling_factor
        chosen[place] = dict(zip(experts.tolist(), weights, strict=True))
        if real[place]:
            load[experts] += 1
            squares.append(np.log(np.exp(logits).sum()) ** 2)
            probabilities += scores / scores.sum()
    count, layers = real.sum(), 2
    balance = moe.aux_loss_weight / layers * moe.num_experts * np.sum(load / count * probabilities / count)
    return chosen, load, balance, moe.z_loss_weight / layers * np.mean(squares)


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 40), marks=pytest.mark.full)])
def test_random_settings_choose_and_weigh_as_published(seeds):
    for seed in seeds:
        moe, rng = settings_of(seed), np.random.default_rng(seed)
        assert not moe.problems()
        x, w = rng.normal(size=(ROWS, LENGTH, DIMS)).astype(np.float32), rng.normal(size=(DIMS, moe.num_experts))
        bias, real = 0.3 * rng.normal(size=moe.num_experts), rng.random((ROWS, LENGTH)) < 0.7
        (experts, weights), written = routed(moe, x, w.astype(np.float32), bias.astype(np.float32), real)
        chosen, load, balance, z_loss = expected(moe, x, w, bias, real)
        for place, wanted in chosen.items():
            found = dict(zip(experts[place].tolist(), weights[place].tolist(), strict=True))
            assert found == pytest.approx(wanted, rel=1e-4), (seed, place)
        np.testing.assert_array_equal(written[base_layer.SUMMARIES]["expert_load_histogram"], load)
        losses = {name: loss.value for name, loss in written.get(base_layer.AUX_LOSS, {}).items()}
        wanted = {name: value for name, value in (("load_balancing", balance), ("router_z", z_loss)) if value}
        assert losses == pytest.approx(wanted, rel=1e-4), seed


def test_the_bias_decides_who_is_chosen_and_not_the_weight():
    moe = MoeSpec(num_experts=4, num_experts_per_token=2, hidden_dims=5, score="sigmoid", choice_bias=True)
    x, w = np.ones((1, 1, 1), np.float32), np.array([[2.0, 1.0, 0.0, -1.0]], np.float32)
    (experts, weights), _ = routed(moe, x, w, np.array([0.0, 0.0, 0.0, 5.0], np.float32), np.ones((1, 1), bool))
    scores = 1 / (1 + np.exp(-w[0]))
    assert experts.tolist() == [[[3, 0]]]
    np.testing.assert_allclose(weights[0, 0], scores[[3, 0]] / scores[[3, 0]].sum(), rtol=1e-6)


def test_biases_move_by_the_rate_until_the_load_is_even():
    """From a router that prefers one expert, and avoids another."""
    moe = MoeSpec(num_experts=5, num_experts_per_token=2, hidden_dims=5, score="sigmoid", choice_bias=True)
    rng, rate = np.random.default_rng(0), 0.005
    x, w = rng.normal(size=(8, 32, 6)).astype(np.float32), 0.2 * rng.normal(size=(6, 5)).astype(np.float32)
    x[..., 0], w[0] = 1.0, [1.5, 0.0, 0.0, -1.5, 0.0]
    marked = base_layer.WeightHParams([5], collections=[f"{masks.MOVED_BY_LOAD}{rate}"])
    layout = types.SimpleNamespace(var_weight_hparams={"non_trainable": {"router": {"choice_bias": marked}}})
    bias, loads, real = np.zeros(5, np.float32), [], np.ones((8, 32), bool)
    step = jax.jit(functools.partial(routed, moe))
    for _ in range(150):
        load = step(x, w, bias, real)[1]["summaries"]["expert_load_histogram"]
        written = {"non_trainable": {"router": {"choice_bias": bias}}}
        moved = load_balance.moved_by_load(layout, written, {"router/expert_load_histogram": load})
        new = moved["non_trainable"]["router"]["choice_bias"]
        np.testing.assert_allclose(new - bias, rate * np.sign(load.mean() - load), atol=1e-6)
        bias, loads = new, [*loads, np.asarray(load)]
    assert loads[0].max() / loads[0].mean() > 2
    assert loads[0].min() == 0
    late = np.mean(loads[-10:], axis=0)
    assert late.max() / late.mean() < 1.1


def test_scores_too_small_to_add_up_have_finite_gradients():
    """As in rows that XLA adds to a batch, where all scores are 0."""
    moe = MoeSpec(num_experts=4, num_experts_per_token=2, hidden_dims=5, score="sigmoid")
    w, real = np.full((1, 4), -200.0, np.float32), np.ones((1, 1), bool)

    def total(w):
        return jnp.sum(routed(moe, np.ones((1, 1, 1), np.float32), w, None, real)[0][1])

    assert np.isfinite(jax.grad(total)(w)).all()


def test_a_bfloat16_model_routes_in_float32():
    """Logits that differ by less than bfloat16 resolves."""
    moe = MoeSpec(num_experts=3, num_experts_per_token=1, hidden_dims=5)
    w = np.array([[1.0, 1.001, 1.0005]], np.float32)
    x = jnp.ones((1, 1, 1), jnp.bfloat16)
    (experts, weights), _ = routed(moe, x, w, None, np.ones((1, 1), bool), dtype=jnp.bfloat16)
    assert experts.tolist() == [[[1]]]
    assert weights.dtype == jnp.float32


def test_evaluation_counts_nothing():
    moe = MoeSpec(num_experts=3, num_experts_per_token=1, hidden_dims=5, choice_bias=True)
    x, w, real = np.ones((1, 2, 1), np.float32), np.ones((1, 3), np.float32), np.ones((1, 2), bool)
    _, written = routed(moe, x, w, np.zeros(3, np.float32), real, train=False)
    assert base_layer.SUMMARIES not in written


def test_no_device_chooses_for_the_tokens_of_another():
    """XLA would gather the scores of all tokens for a top-k."""
    moe_p = Config(MoeSpec, num_experts=6, num_experts_per_token=2, hidden_dims=5, num_groups=3, num_chosen_groups=2)
    spec_p = small_spec(moe=moe_p)
    layer = base_layer.instantiate(Config(router.Router, name="router", spec=spec_p, mesh_axis_names=["data", "mdl"]))
    mesh = jax.sharding.Mesh(np.reshape(jax.devices()[:6], (3, 2)), ("data", "mdl"))
    by_row = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))

    def weights(w, x, real):
        return jnp.sum(jnp.sin(layer.apply({"params": {"w": w}}, x, real)[1]))

    shapes = [((12, 6), jnp.float32), ((6, 4, 12), jnp.float32), ((6, 4), bool)]
    given = [jax.ShapeDtypeStruct(*one, sharding=by_row if i else None) for i, one in enumerate(shapes)]
    with evaluating(), jax.set_mesh(mesh):
        text = jax.jit(jax.grad(weights)).lower(*given).compile().as_text()
    assert "all-reduce" in text
    assert "all-gather" not in text


@pytest.mark.full
def test_shared_experts_are_added_to_the_routed_ones():
    moe_p = Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5, shared_dims=7, scaling_factor=2.5)
    layer = base_layer.instantiate(Config(feed_forward.MixtureOfExperts, name="moe", spec=small_spec(moe=moe_p)))
    alone = base_layer.instantiate(
        Config(feed_forward.FeedForward, name="mlp", spec=small_spec(moe=moe_p), hidden_dims=7)
    )
    x, real = np.random.default_rng(1).normal(size=(2, 4, 12)).astype(np.float32), np.ones((2, 4), bool)
    with evaluating():
        params = layer.init(jax.random.key(0), x, real)["params"]
        both = layer.apply({"params": params}, x, real)
        shared = alone.apply({"params": params["shared"]}, x)
        without = layer.apply({"params": {**params, "shared": jax.tree.map(jnp.zeros_like, params["shared"])}}, x, real)
    np.testing.assert_allclose(both, without + shared, rtol=1e-5, atol=1e-6)
    assert np.abs(shared).max() > 0.1
