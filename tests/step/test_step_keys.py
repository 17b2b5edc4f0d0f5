"""Each step, each kind of step and each minibatch draws its own random numbers."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmd_trainer.step import minibatches, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.train_states import TrainState

KEY = jax.random.key(0)


class Called(Exception):
    """Ends a step where it calls the model; its argument is the key."""


def key_of(step_fn, step, *args):
    """Returns the key with which a step calls the model, as numbers."""

    def model(*given, **settings):
        raise Called(next(x for x in given if isinstance(x, jax.Array)))

    task = SimpleNamespace(
        fprop_dtype="float32",
        summary_verbosity=3,
        decode=SimpleNamespace(apply_mutable_list=[]),
        model=None,
        model_for_steps=SimpleNamespace(decode=lambda mdl_vars, inputs, key, mutable: model(key)),
    )
    state = TrainState(step=jnp.uint32(step), mdl_vars={}, opt_states=[])
    with pytest.raises(Called) as called:
        step_fn(LogicalLayout(task, {}), state, KEY, {}, *(arg or model for arg in args))
    return jax.random.key_data(called.value.args[0]).tolist()


def check(step_fn, *args):
    keys = [key_of(step_fn, step, *args) for step in (0, 1, 2, 1)]
    assert keys[1] == keys[3]
    assert len({tuple(key) for key in [*keys, jax.random.key_data(KEY).tolist()]}) == 4


def test_each_training_step_has_a_key_of_its_own():
    check(step_fns.train_step, None)


def test_an_evaluation_has_another_key_at_another_step():
    check(step_fns.eval_step, None)


def test_decoding_has_another_key_at_another_step():
    check(step_fns.decode_step)


@pytest.mark.parametrize("num_minibatches", [2, 4])
def test_each_minibatch_has_a_key_of_its_own(num_minibatches):
    def loss_fn(params, carry, rows, key, index):
        return params, (carry, {}, jax.random.key_data(key)[None])

    batch = jnp.zeros((4, 1))
    *_, keys = minibatches.accumulate_gradients(loss_fn, jnp.ones(()), (), batch, KEY, num_minibatches)
    assert len(np.unique(keys, axis=0)) == num_minibatches
