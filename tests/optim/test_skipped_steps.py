"""Steps that a learner skips without being told a limit."""

import jax
import jax.numpy as jnp
import pytest
from compilers import NEEDS_CUDA
from learner_helpers import NestedMap, assert_same, build, hparams, model, one_step, praxis, sgd, train, two_groups

from spmd_trainer.planner import topologies
from spmd_trainer.step import minibatches

# isort: split
from praxis import base_layer, optimizers


@pytest.mark.parametrize("bad", [jnp.nan, jnp.inf, -jnp.inf])
def test_a_gradient_that_is_not_finite_is_skipped_without_a_limit(bad):
    mdl_vars, var_hparams = NestedMap(w=jnp.ones(2), v=jnp.ones(())), NestedMap(w=hparams((2,)), v=hparams(()))
    learner = build(sgd())
    state = learner.get_grad_tx(var_hparams).init(mdl_vars)
    grads = NestedMap(w=jnp.array([1.0, bad]), v=jnp.ones(()))
    new_vars, new_state = one_step(learner, mdl_vars, state, grads, var_hparams)
    assert_same(new_vars, mdl_vars)
    assert_same(new_state, state)
    moved, _ = one_step(learner, mdl_vars, state, jax.tree.map(jnp.ones_like, grads), var_hparams)
    assert moved.v < 1


def test_an_auxiliary_regex_that_matches_in_the_middle_of_a_path_selects_nothing():
    mdl_vars, var_hparams = model()
    learner = two_groups(sgd(), sgd(), "head")
    with pytest.raises(ValueError, match="'head' selects no variable"):
        train(learner, mdl_vars, var_hparams, [mdl_vars])


@NEEDS_CUDA
def test_no_zeros_are_kept_for_an_update_that_is_skipped():
    """Beside the sum of the gradients there are one minibatch's and the update. Zeros would be a fourth array of the variable's
    size, held while the gradients are computed."""
    mdl_vars, var_hparams = NestedMap(w=jnp.ones((1024, 1024))), NestedMap(w=hparams((1024, 1024)))
    learner = build(praxis(optimizers.Adam, beta1=0.9, beta2=0.99, epsilon=1e-6, clip_threshold=1.0))
    state = learner.get_grad_tx(var_hparams).init(mdl_vars)

    def loss_fn(params, carry, x, key, index):
        return jnp.sum(jnp.tanh(x @ params.w) ** 2), (carry, (), ())

    def step(mdl_vars, state, x):
        with base_layer.JaxContext.new_context():
            grads, *_ = minibatches.accumulate_gradients(loss_fn, mdl_vars, (), x, jax.random.key(0), 4)
            return one_step(learner, mdl_vars, state, grads, var_hparams)

    (device,) = topologies.topology_devices("h100:1x1")
    on_it = jax.sharding.SingleDeviceSharding(device)
    shapes = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on_it), (mdl_vars, state, jnp.ones((64, 1024)))
    )
    memory = jax.jit(step, donate_argnums=(0, 1)).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < 3.5 * mdl_vars.w.nbytes
