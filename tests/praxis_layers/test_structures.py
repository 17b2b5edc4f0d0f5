"""praxis' structures, schedules and optimizers: repeated and pipelined layers give the numbers of sequential ones."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import base_layer, layers, optimizers, schedules
from praxis.layers import attentions
from praxis_layer_helpers import PARAMS, Config, apply, assert_trees_close, build, initial, normal, randomized

from spmd_trainer.step import optax_bridge

BATCH, TIME, WIDTH, HIDDEN = 4, 5, 6, 7
X = normal(BATCH, TIME, WIDTH)
PADDINGS = jnp.zeros((BATCH, TIME))
MASK = jnp.broadcast_to(attentions.causal_mask(X), (BATCH, 1, TIME, TIME))


def stack(num_layers):
    layer_p = Config(
        layers.StackedTransformer, model_dims=WIDTH, hidden_dims=HIDDEN, num_heads=2, num_layers=num_layers
    )
    layer_p.mask_self_attention = True
    return layer_p


def value_and_grads(layer, variables):
    def loss(params):
        out = apply(layer, {**variables, PARAMS: params}, X, PADDINGS, segment_mask=MASK)
        return (out * normal(*out.shape, seed=3)).sum(), out

    (_, out), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(variables[PARAMS])
    return out, grads


@pytest.fixture(scope="module")
def sequential():
    """Two sequential layers: their variables and gradients, stacked as in repeated layers, and their output."""
    layer = build(stack(2))
    variables = initial(layer, X, PADDINGS, segment_mask=MASK)
    out, grads = value_and_grads(layer, variables)

    def stacked(tree):
        return {"x_layers_0": jax.tree.map(lambda a, b: jnp.stack([a, b]), tree["x_layers_0"], tree["x_layers_1"])}

    return stacked(variables[PARAMS]), out, stacked(grads)


@pytest.mark.full
@pytest.mark.parametrize(
    "policy",
    [
        layers.AutodiffCheckpointType.SAVE_EVERYTHING,
        layers.AutodiffCheckpointType.SAVE_NOTHING,
        layers.AutodiffCheckpointType.SAVE_DOT_ONLY,
    ],
)
def test_repeated_layers_equal_sequential_layers_with_any_checkpoint_policy(sequential, policy):
    params, expected, expected_grads = sequential
    layer = build(Config(layers.StackedTransformerRepeated, block=stack(1), x_times=2, checkpoint_policy=policy))
    variables = {PARAMS: {"repeat": {"sub": params}}}
    out, grads = value_and_grads(layer, variables)
    assert_trees_close(out, expected)
    assert_trees_close(grads["repeat"]["sub"], expected_grads, rtol=1e-4)


@pytest.mark.parametrize("stream_io", [pytest.param(False, marks=pytest.mark.full), True])
def test_a_pipeline_equals_sequential_layers(sequential, stream_io):
    params, expected, expected_grads = sequential
    layer = build(
        Config(
            layers.PipelinedTransformer,
            pipeline_stage=stack(1),
            num_pipeline_stages=2,
            num_pipeline_microbatches=2,
            stream_io=stream_io,
        )
    )
    out, grads = value_and_grads(layer, {PARAMS: {"pipeline": {"body": params}}})
    assert_trees_close(out, expected)
    assert_trees_close(grads["pipeline"]["body"], expected_grads, rtol=1e-4)


@pytest.mark.full
def test_language_model_loss_is_the_mean_over_weighted_tokens():
    model_p = Config(layers.LanguageModel, lm_tpl=Config(layers.TransformerLm, vocab_size=11, model_dims=WIDTH))
    model_p.lm_tpl.stacked_transformer_tpl = stack(1)
    model = build(model_p)
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(0, 11, (BATCH, TIME)))
    weights = jnp.asarray(rng.integers(0, 2, (BATCH, TIME)), jnp.float32)
    batch = layers.models.NestedMap(
        ids=ids, labels=(ids * 3) % 11, weights=weights, paddings=PADDINGS, inputs_indicator=ids * 0
    )
    variables = initial(model, batch)
    (metrics, _), predictions = (
        apply(model, variables, batch),
        apply(model, variables, batch, method=model.compute_predictions),
    )
    log_probs = jax.nn.log_softmax(predictions.logits)
    xent = -jnp.take_along_axis(log_probs, batch.labels[..., None], -1)[..., 0]
    np.testing.assert_allclose(metrics["total_loss"][0], (xent * weights).sum() / (weights.sum() + 1e-6), rtol=1e-5)
    np.testing.assert_allclose(metrics["total_loss"][1], weights.sum())


def test_schedules():
    def at(schedule_p, *steps):
        schedule = build(schedule_p)
        return [float(schedule.value_at(jnp.asarray(step))) for step in steps]

    assert at(Config(schedules.Constant, value=0.5), 0, 100) == [0.5, 0.5]
    cosine = Config(
        schedules.LinearRampupCosineDecay, warmup_steps=10, decay_start=10, decay_end=110, min_ratio=0.1, max=2.0
    )
    expected = [1.0, 2.0, 0.2 + 1.8 * 0.5, 0.2, 0.2]
    np.testing.assert_allclose(at(cosine, 5, 10, 60, 110, 500), expected, rtol=1e-5)
    exponential = Config(
        schedules.LinearRampupExponentialDecay, warmup_steps=10, decay_start=10, decay_end=110, min_ratio=0.01, max=1.0
    )
    np.testing.assert_allclose(at(exponential, 5, 10, 60, 110, 500), [0.5, 1.0, 0.1, 0.01, 0.01], rtol=1e-4)


def updates_of(optimizer_p, params, grads, steps=3):
    """Returns the parameters after `steps` steps with the same gradient."""
    optimizer = optax_bridge.as_optimizer(optimizer_p)
    hparams = jax.tree.map(lambda x: base_layer.WeightHParams(shape=list(x.shape), dtype=x.dtype), params)
    grad_tx = optax_bridge.grad_transformation(optimizer, hparams)
    state = grad_tx.init(params)
    for _ in range(steps):
        with base_layer.JaxContext.new_context():
            updates, state = grad_tx.update(grads, state, params)
        params = jax.tree.map(lambda p, u: p + u, params, updates)
    return params


def with_rate(cls, **fields):
    return Config(cls, learning_rate=0.1, lr_schedule=Config(schedules.Constant, value=1.0), **fields)


PARAMETERS = {"w": normal(4, 3), "b": normal(3, seed=5)}
GRADIENTS = randomized(PARAMETERS, seed=7)


def test_adam_follows_its_paper():
    """Kingma, Ba 2014 (arXiv:1412.6980), algorithm 1. With equal gradients, the bias-corrected moments are g and g^2."""
    ours = updates_of(with_rate(optimizers.Adam, beta1=0.9, beta2=0.99, epsilon=1e-3), PARAMETERS, GRADIENTS)
    expected = jax.tree.map(lambda p, g: p - 3 * 0.1 * g / (jnp.abs(g) + 1e-3), PARAMETERS, GRADIENTS)
    assert_trees_close(ours, expected, rtol=1e-4)


def test_sgd_subtracts_the_scaled_gradient():
    ours = updates_of(with_rate(optimizers.ShardedSgd), PARAMETERS, GRADIENTS)
    assert_trees_close(ours, jax.tree.map(lambda p, g: p - 0.3 * g, PARAMETERS, GRADIENTS))


@pytest.mark.full
def test_adafactor_factors_second_moments_into_rows_and_columns():
    """Shazeer, Stern 2018 (arXiv:1804.04235): second moments of a matrix from its row and column means; RMS clipped to 1."""
    optimizer_p = with_rate(
        optimizers.ShardedAdafactor, decay_method="adam", decay_adam=0.99, clip_threshold=1.0, min_dim_size_to_factor=2
    )
    ours = updates_of(optimizer_p, PARAMETERS, GRADIENTS, steps=1)

    def clipped(update):
        return update / jnp.maximum(1.0, jnp.sqrt((update**2).mean()))

    def step(p, g):
        square = g**2 + 1e-30
        if g.ndim == 2:
            rows, columns = square.mean(1, keepdims=True), square.mean(0, keepdims=True)
            return p - 0.1 * clipped(g / jnp.sqrt(rows * columns / rows.mean()))
        return p - 0.1 * clipped(g / jnp.sqrt(square))

    assert_trees_close(ours, jax.tree.map(step, PARAMETERS, GRADIENTS), rtol=1e-3)
