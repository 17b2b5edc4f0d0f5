"""The pure steps take their forward and backward pass as an argument."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import pytest

from spmd_trainer import learners, tasks_lib
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import batches
from spmd_trainer.step import state_layout, step_fns
from tests.step.test_partitioning import KEY, LENGTH, make_partitioner, make_task

ROWS = 2
SHAPES = batches.lm_input_specs(ROWS, LENGTH)


def trace(step_fn, pass_fn, *, with_opt_states=True):
    """Traces a step; returns the arguments (mdl_vars, inputs) of each call of `pass_fn`, and the logical ones."""
    partitioner = make_partitioner((1, 1, 1), rows=ROWS)
    calls, logical = [], []

    def step(state, key, inputs):
        def recorded(mdl_vars, key, rows):
            calls.append((mdl_vars, rows))
            return pass_fn(layout, state.mdl_vars, key, inputs)

        logical.append((state.mdl_vars, inputs))
        return step_fn(layout, state, key, inputs, recorded)

    layout = partitioner.layout if with_opt_states else partitioner.layout.without_opt_states()
    jax.eval_shape(step, layout.padded_shapes, KEY, SHAPES)
    return calls, logical


def evaluate(*args):
    return step_fns.forward(*args, do_eval=True)[0]


def test_norms_of_variables_in_a_list_have_the_paths_of_all_other_summaries():
    variables = {"params": {"x_layers": [{"w": jnp.full(4, 3.0)}, {"w": jnp.full(2, -2.0)}]}}
    found = {name: float(norm) for name, norm in step_fns._variable_norms(variables)}
    assert found == {"vars/params/x_layers/0/w": 3.0, "vars/params/x_layers/1/w": 2.0}


def test_a_train_step_calls_its_gradient_function_with_its_variables_and_inputs():
    calls, logical = trace(step_fns.train_step, step_fns.gradients)
    assert calls == logical


@pytest.mark.full
def test_an_eval_step_calls_its_forward_function_with_its_variables_and_inputs():
    calls, logical = trace(step_fns.eval_step, evaluate, with_opt_states=False)
    assert calls == logical


def test_decoding_does_not_call_the_forward_function(monkeypatch):
    monkeypatch.setattr(type(make_task().model), "decode", lambda self, inputs: ({}, {}))
    calls, _ = trace(step_fns.decode_step, evaluate, with_opt_states=False)
    assert calls == []


def test_the_initial_state_for_evaluation_has_no_optimizer_states():
    layout = make_partitioner((1, 1, 1), rows=ROWS).layout
    boxed = jax.eval_shape(layout.init_variables, KEY)
    state = state_layout.create_train_state(layout, boxed, with_opt_states=False)
    assert state.opt_states == []
    assert int(state.step) == 0


class Reached(Exception):
    pass


class OwnLearner(learners.Learner):
    def update_states(self, grads, states, old_vars, var_weight_hparams):
        super().update_states(grads, states, old_vars, var_weight_hparams)
        raise Reached


def test_a_train_step_calls_a_learner_s_own_update_states_with_the_arguments_of_pax():
    task_p = StdlibBytesTiny().task()
    fdl.update_callable(task_p.train.learner, OwnLearner)
    layout = make_partitioner((1, 1, 1), tasks_lib.build_task(task_p), rows=ROWS).layout
    with pytest.raises(Reached):
        jax.eval_shape(lambda *args: step_fns.train_step(layout, *args), layout.padded_shapes, KEY, SHAPES)
