"""A vocabulary's padding kept inside the step: where it is safe, and that it has no effect there."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import base_layer, pax_fiddle
from praxis.layers import linears

from spmd_trainer import sharding, tasks_lib
from spmd_trainer.experiments.synthetic import structures
from spmd_trainer.inputs import batches
from spmd_trainer.step import pjit, vocabulary_padding
from spmd_trainer.tasks.lm import cheaper_layers
from spmd_trainer.training import verify

SHAPES = batches.lm_input_specs(6, 12)
KEY = jax.random.key(2)
VOCAB_SIZE, PADDED_VOCAB_SIZE = 61, 62
W = "mdl_vars/params/lm/softmax/logits_ffn/linear/w"


def partitioner(task_p):
    mesh = sharding.create_device_mesh([("replica", 1), ("data", 4), ("mdl", 2)])
    result = pjit.PjitPartitioner(mesh)
    result.setup(tasks_lib.build_task(task_p), SHAPES)
    return result


def seen_shapes(task_p):
    it = partitioner(task_p)
    layout = vocabulary_padding.for_step(it.layout, SHAPES)
    return {v.path: v.logical_shape for v in jax.tree.leaves(layout.in_step)}


def test_the_step_sees_the_padded_vocabulary_and_the_metadata_keeps_logical_shapes():
    task_p = structures.TinyLm().task()
    shapes = seen_shapes(task_p)
    assert shapes[W] == (16, PADDED_VOCAB_SIZE)
    assert shapes["mdl_vars/params/lm/softmax/logits_ffn/bias/b"] == (PADDED_VOCAB_SIZE,)
    moments = [shape for path, shape in shapes.items() if path.startswith("opt_states") and path.endswith("linear/w")]
    assert moments.count((16, PADDED_VOCAB_SIZE)) == 2
    records = {v.path: v for v in partitioner(task_p).metadata.records()}
    assert records[W].logical_shape == (16, VOCAB_SIZE)


def smoothed(task_p):
    task_p.model.lm_tpl.softmax_tpl.label_smoothing_prob = 0.1


def soft_capped(task_p):
    task_p.model.lm_tpl.softmax_tpl.soft_cap_logits = 30.0


def without_epsilon(task_p):
    task_p.train.learner.optimizer.epsilon = 0.0


def scaled_by_norm(task_p):
    task_p.train.learner.scale_update_by_var_norm = True


@pytest.mark.parametrize("change", [smoothed, soft_capped, without_epsilon, scaled_by_norm])
def test_padding_is_sliced_off_for_models_and_learners_that_it_could_affect(change):
    task_p = structures.TinyLm().task()
    change(task_p)
    assert seen_shapes(task_p)[W] == (16, VOCAB_SIZE)


def test_padding_is_sliced_off_for_an_optimizer_that_sums_over_a_variable():
    assert seen_shapes(structures.TinyAdafactor().task())[W] == (16, VOCAB_SIZE)


class Derived(cheaper_layers.SharedEmbeddingSoftmax):
    """May do with its vocabulary what the class that it is derived from does not."""


@pytest.mark.parametrize(
    ("layer", "size"), [(cheaper_layers.SharedEmbeddingSoftmax, PADDED_VOCAB_SIZE), (Derived, VOCAB_SIZE)]
)
def test_a_layer_says_that_padding_is_harmless_for_itself_alone(layer, size):
    task_p = structures.TinyLm().task()
    fdl.update_callable(task_p.model.lm_tpl.softmax_tpl, layer)
    assert seen_shapes(task_p)[W] == (16, size)


def test_nothing_changes_if_nothing_is_padded():
    task_p = structures.TinyLm().task()
    task_p.model.lm_tpl.vocab_size = PADDED_VOCAB_SIZE
    it = partitioner(task_p)
    assert vocabulary_padding.for_step(it.layout, SHAPES) is it.layout


def test_padding_is_zero_after_a_step_that_wrote_to_it():
    it = partitioner(structures.TinyLm().task())

    def spoil(layout, state, key, inputs):
        return jax.tree.map(lambda x: jnp.full_like(x, 7), state), {}

    step = it.partition(spoil, SHAPES, is_eval=False)
    inputs = jax.tree.map(lambda x: np.zeros(x.shape, x.dtype), SHAPES)
    state, _ = step(it.initialize_train_state(KEY), KEY, it.layout.put(inputs))
    for variable, x in zip(it.metadata.records(), jax.tree.leaves(state), strict=True):
        x = np.array(x)
        logical = tuple(slice(size) for size in variable.logical_shape)
        assert (x[logical] == 7).all()
        x[logical] = 0
        assert not x.any(), variable.path


def test_masked_logits_have_no_probability_and_no_gradient():
    layer = pax_fiddle.build(
        pax_fiddle.Config(vocabulary_padding.MaskedFeedForward, name="f", input_dims=3, output_dims=5, num_logits=4)
    )
    x = jnp.ones((2, 3))
    with base_layer.JaxContext.new_context():
        variables = layer.init(KEY, x)

        def loss(variables):
            return jax.nn.log_softmax(layer.apply(variables, x))[:, 0].sum()

        grads = jax.grad(loss)(variables)
    np.testing.assert_allclose(np.exp(jax.nn.log_softmax(layer.apply(variables, x))).sum(-1), 1.0, rtol=1e-6)
    assert not np.asarray(layer.apply(variables, x) > -1e30)[:, 4].any()
    for grad in jax.tree.leaves(grads):
        assert not np.asarray(grad)[..., 4].any()
        assert np.asarray(grad)[..., :4].any()


@pytest.mark.full
def test_mesh_equivalence_would_notice_an_unmasked_logit(monkeypatch):
    monkeypatch.setattr(vocabulary_padding.MaskedFeedForward, "__call__", linears.FeedForward.__call__)
    experiment = structures.TinyLm()
    batch = pax_fiddle.build(experiment.train_datasets()[0]).get_next_padded()
    it = partitioner(experiment.task())
    reference = verify.run_steps(verify.single_device_partitioner(it.task, SHAPES), [batch], KEY)
    one, many = (list(run)[1] for run in (reference, verify.run_steps(it, [batch], KEY)))
    assert not verify.compare(one, many, verify.Tolerance()).passed
