"""Steps that a learner skips without being told a limit."""

import jax
import jax.numpy as jnp
import pytest
from learner_helpers import NestedMap, assert_same, build, hparams, model, one_step, sgd, train, two_groups


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
