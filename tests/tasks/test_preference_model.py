"""`PreferenceModel`: its loss, gradients and metrics; meshes, minibatches and padding; where the reference comes from."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from decoder_helpers import evaluating, small_spec
from facts import raises_naming
from praxis import base_layer, layers
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap
from preference_helpers import KEY, pair_batch, partitioner_on, steps_on_one_device, task_of
from test_preference_loss import by_hand

from spmd_trainer import tasks_lib
from spmd_trainer.decoder.lm import DecoderLanguageModel, DecoderLm
from spmd_trainer.decoder.preferences.model import PreferenceLanguageModel
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import pad_batch
from spmd_trainer.models.base import as_model
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.step.shard_map import ShardMapPartitioner
from spmd_trainer.training import verify

MESHES = [(1, 1, 1), (1, 8, 1), (1, 1, 8), (1, 4, 2), (2, 2, 2)]
WEIGHTS = (1, 1, 0.5, 0, 1, 1)
NORMALISED = {"loss": "sigmoid_norm", "beta": 3.0, "label_smoothing": 0.1}


def variables_of(task, batch):
    with evaluating(False):
        boxed = jax.jit(as_model(task.model).init_variables)(jax.random.key(0), batch)
    return base_layer.maybe_unbox_value(boxed)


def run(task, variables, batch, *, do_eval=False):
    """Returns the model's scalars and outputs for each pair."""
    with evaluating(do_eval):
        (scalars, rows), _ = as_model(task.model).forward(
            variables, batch, KEY, do_eval=do_eval, mutable=[base_layer.AUX_LOSS]
        )
    return scalars, rows


def logps_by_row(task, params, rows):
    """Log-probabilities of the labels that count, by a plain language model, [rows]."""
    model = base_layer.instantiate(Config(DecoderLanguageModel, name="lm", lm_tpl=task.model.lm_tpl))
    with evaluating():
        logits = model.apply({"params": params}, rows, method=model.compute_predictions).logits
    log_probs = jnp.take_along_axis(jax.nn.log_softmax(logits), jnp.asarray(rows.labels)[..., None], axis=2)[..., 0]
    return jnp.sum(log_probs * rows.weights, axis=1)


def as_floats(batch):
    return np.stack([batch[side].reference_logps.view(np.float32) for side in ("chosen", "rejected")], axis=1)


@pytest.mark.full
@pytest.mark.parametrize(
    ("preference", "pairs"),
    [({"beta": 0.5}, 6), (NORMALISED, 5), ({"loss": "ipo"}, 1), ({"loss": "robust", "label_smoothing": 0.2}, 6)],
    ids=str,
)
def test_loss_and_gradient_are_those_of_a_computation_by_hand(preference, pairs):
    task, batch = task_of(preference), pair_batch(pairs, weights=WEIGHTS[:pairs])
    variables = variables_of(task, batch)

    def both(params):
        return jnp.stack([logps_by_row(task, params, batch[side]) for side in ("chosen", "rejected")], axis=1)

    logps, pullback = jax.vjp(jax.jit(both), variables["params"])
    lengths = np.stack([batch[side].weights.sum(1) for side in ("chosen", "rejected")], axis=1)
    settings = {"loss": "sigmoid", "beta": 0.1, **preference}
    losses, slopes = by_hand(np.asarray(logps), as_floats(batch), lengths, **settings)
    share = batch.eval_sample_weights / batch.eval_sample_weights.sum()
    (gradient,) = pullback(jnp.asarray(slopes * share[:, None], jnp.float32))

    def total_loss(params):
        return run(task, {**variables, "params": params}, batch)[0]["total_loss"][0]

    found, found_gradient = jax.jit(jax.value_and_grad(total_loss))(variables["params"])
    assert found == pytest.approx(np.sum(losses * share), rel=1e-6, abs=1e-6)
    difference = optax.tree.norm(jax.tree.map(jnp.subtract, found_gradient, gradient))
    # One sums the rows of both sides at once, the other by sides: how far float32 then differs is the processor's.
    assert difference < 4e-6 * optax.tree.norm(gradient)


@pytest.mark.full
def test_metrics_are_weighted_means_over_the_pairs():
    task, batch = task_of({"beta": 0.5}), pair_batch(weights=WEIGHTS)
    scalars, rows = run(task, variables_of(task, batch), batch)
    rewards = 0.5 * (np.asarray(rows.logps) - as_floats(batch))
    np.testing.assert_allclose(rows.rewards, rewards, rtol=1e-5, atol=1e-5)
    expected = {
        "rewards/chosen": rewards[:, 0],
        "rewards/rejected": rewards[:, 1],
        "rewards/accuracies": rewards[:, 0] > rewards[:, 1],
        "rewards/margins": rewards[:, 0] - rewards[:, 1],
        "logps/chosen": rows.logps[:, 0],
        "logps/rejected": rows.logps[:, 1],
        "preference_loss": rows.loss,
        "total_loss": rows.loss,
    }
    assert sorted([*expected, "aux_loss"]) == sorted(scalars)
    for name, values in expected.items():
        value, weight = scalars[name]
        assert weight == sum(WEIGHTS), name
        assert value == pytest.approx(np.average(np.asarray(values), weights=WEIGHTS), rel=1e-5), name


@pytest.mark.full
def test_rows_that_fill_a_batch_change_nothing():
    task, batch = task_of(NORMALISED), pair_batch(3)
    variables = variables_of(task, batch)
    scalars, _ = run(task, variables, batch)
    padded, _ = run(task, variables, pad_batch(batch, 7))
    for name, (value, weight) in scalars.items():
        assert padded[name][0] == pytest.approx(float(value), rel=1e-6), name
        assert padded[name][1] == weight


@functools.cache
def three_steps():
    """The task, batches of 6 pairs of which some count less, and three steps of training on one device."""
    task = task_of(NORMALISED)
    batches = [pair_batch(seed=seed, weights=WEIGHTS) for seed in range(3)]
    return task, batches, *steps_on_one_device(task, batches)


def assert_same_training(sizes, partitioner):
    task, batches, snapshots, initial = three_steps()
    steps = list(verify.run_steps(partitioner_on(task, sizes, batches[0], partitioner), batches, KEY, initial))
    assert len({step.loss for step in snapshots}) == 4
    for ours, theirs in zip(snapshots, steps, strict=True):
        compared = verify.compare(ours, theirs, verify.Tolerance())
        assert compared.passed, compared


@pytest.mark.full
@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_any_mesh_gives_the_numbers_of_one_device(sizes):
    assert_same_training(sizes, pjit.PjitPartitioner())


@pytest.mark.full
@pytest.mark.parametrize("num_minibatches", [2, 3])
@pytest.mark.parametrize("sizes", [(1, 1, 1), (1, 4, 2)], ids=str)
def test_minibatches_give_the_numbers_of_whole_batches(sizes, num_minibatches):
    assert_same_training(sizes, pjit.PjitPartitioner(num_minibatches=num_minibatches))


@pytest.mark.full
@pytest.mark.parametrize(
    ("sizes", "settings"),
    [
        ((1, 8, 1), {}),  # 6 pairs on 8 devices
        ((1, 4, 1), {"num_minibatches": 2}),  # 2 pairs on each of 4 devices, the last of which has padding only
        ((1, 2, 1), {"num_minibatches": 3}),  # one pair at a time
        ((1, 4, 1), {"sharding": "fsdp", "min_weight_size": 1}),
    ],
    ids=str,
)
def test_each_device_on_its_own_pairs_gives_the_numbers_of_one_device(sizes, settings):
    assert_same_training(sizes, ShardMapPartitioner(**settings))


@pytest.mark.full
def test_the_reference_of_the_model_itself():
    """What a run computes before its first step is what a step computes live."""
    task, batch = task_of({"beta": 0.5}), pair_batch(reference=False)
    variables = variables_of(task, batch)
    model = task.model
    with evaluating(False):
        found = model.apply(variables, batch, method=model.with_reference)
    expected = [logps_by_row(task, variables["params"], batch[side]) for side in ("chosen", "rejected")]
    np.testing.assert_allclose(found.chosen.reference_logps, expected[0], rtol=1e-5)
    np.testing.assert_allclose(found.rejected.reference_logps, expected[1], rtol=1e-5)
    assert found.chosen.reference_logps.dtype == jnp.float32
    assert "reference_logps" not in batch.chosen
    scalars, _ = run(task, variables, found)
    assert scalars["preference_loss"][0] == pytest.approx(np.log(2), rel=1e-6)
    assert scalars["rewards/margins"][0] == pytest.approx(0, abs=1e-5)
    as_bits = jax.tree.map(np.asarray, found)
    for side in (as_bits.chosen, as_bits.rejected):
        side.reference_logps = side.reference_logps.view(np.int32)
    for name, (value, _) in run(task, variables, as_bits)[0].items():
        assert value == scalars[name][0], name


@pytest.mark.full
def test_the_reference_has_no_dropout_and_no_gradient():
    task, batch = task_of(), pair_batch(reference=False)
    task.model.lm_tpl.spec.dropout = 0.5
    variables = variables_of(task, batch)
    model = task.model

    def reference(variables, key):
        with evaluating(False):
            return model.apply(variables, batch, method=model.with_reference, rngs={"random": key})

    found = [reference(variables, jax.random.key(seed)) for seed in (0, 1)]
    np.testing.assert_array_equal(found[0].chosen.reference_logps, found[1].chosen.reference_logps)
    dropped = [run(task, variables, found[0])[1].logps, found[0].chosen.reference_logps]
    assert not np.allclose(dropped[0][:, 0], dropped[1])
    gradient = jax.grad(lambda v: jnp.sum(reference(v, KEY).chosen.reference_logps))(variables)
    assert not any(np.any(x) for x in jax.tree.leaves(gradient))


@pytest.mark.full
def test_a_batch_without_reference_is_refused():
    task, batch = task_of(), pair_batch(reference=False)
    variables = variables_of(task, batch)
    with pytest.raises(UserError, match=r"no reference_logps, .*reference='file'.*task.lora with reference=True"):
        run(task, variables, batch)
    simpo = task_of({"loss": "simpo", "beta": 2.0, "target_margin": 1.0})
    assert np.isfinite(run(simpo, variables, batch)[0]["total_loss"][0])


@pytest.mark.full
def test_a_step_in_bfloat16_keeps_all_digits_of_the_reference():
    task, batch = task_of({"beta": 1.0}, fprop_dtype=jnp.bfloat16), pair_batch()
    batch.chosen.reference_logps = np.full(6, -300.7, np.float32).view(np.int32)
    variables, key = variables_of(task, batch), jax.random.key(0)
    layout = partitioner_on(task, (1, 1, 1), batch).layout
    output, _ = step_fns.forward(layout, variables, key, batch, do_eval=True)
    rows = output.per_example_out
    np.testing.assert_allclose(rows.rewards[:, 0], rows.logps[:, 0] + np.float32(300.7), rtol=1e-6)
    batch.chosen.reference_logps = np.full(6, -300.7, np.float32)
    with pytest.raises(UserError, match=r"reference_logps is bfloat16: .*view\(np.int32\)"):
        step_fns.forward(layout, variables, key, batch, do_eval=True)


@pytest.mark.full
def test_a_batch_of_a_language_model_gives_praxis_loss():
    task, batch = task_of(), pair_batch()
    variables, rows = variables_of(task, batch), NestedMap(batch.chosen)
    del rows["reference_logps"]
    plain = base_layer.instantiate(Config(DecoderLanguageModel, name="lm", lm_tpl=task.model.lm_tpl))
    with evaluating():
        expected, _ = plain.apply(variables, rows)
    found, _ = run(task, variables, rows, do_eval=True)
    assert sorted(found) == sorted(expected)
    assert found["total_loss"] == expected["total_loss"]
    assert jax.tree.structure(variables) == jax.tree.structure(variables_of(task, rows))


@pytest.mark.full
def test_praxis_own_decoder_learns_from_pairs_too():
    """Its vocabulary of 61 is padded on the mesh."""
    lm_p = Config(layers.TransformerLm, vocab_size=61, model_dims=8, packed_input=True)
    stack_p = lm_p.stacked_transformer_tpl
    stack_p.model_dims, stack_p.hidden_dims, stack_p.num_heads, stack_p.num_layers = 8, 16, 2, 1
    # The gradient of a key's bias is zero but for rounding noise, which has no value to compare.
    stack_p.transformer_layer_params_tpl.tr_atten_tpl.use_bias = False
    task_p = Config(tasks_lib.SingleTask, name="pairs")
    task_p.model = Config(PreferenceLanguageModel, name="lm", lm_tpl=lm_p)
    task_p.model.ici_mesh_shape, task_p.model.mesh_axis_names = [1, 4, 2], ["replica", "data", "mdl"]
    task_p.train.learner = task_of().train.learner
    task_p.train.sharding_strategy = [(".*", 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)')]
    task = tasks_lib.build_task(task_p)
    batches = [pair_batch(seed=seed) for seed in range(2)]
    snapshots, initial = steps_on_one_device(task, batches)
    steps = verify.run_steps(partitioner_on(task, (1, 4, 2), batches[0]), batches, KEY, initial)
    for ours, theirs in zip(snapshots, steps, strict=True):
        assert verify.compare(ours, theirs, verify.Tolerance()).passed


def test_layers_that_predict_further_tokens_would_learn_the_rejected_answers():
    lm_p = Config(DecoderLm, spec=small_spec(mtp_layers=1))
    with raises_naming(UserError, "mtp_layers=1", "rejected"):
        base_layer.instantiate(Config(PreferenceLanguageModel, name="lm", lm_tpl=lm_p)).init(jax.random.key(0), None)
