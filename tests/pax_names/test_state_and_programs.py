"""The moving averages of a state as a state, and programs that an experiment declares for datasets, without building a model."""

from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from praxis.py_utils import NestedMap

from spmd_trainer import base_experiment, tasks_lib
from spmd_trainer.base_experiment import SingleTaskEvalProgram
from spmd_trainer.errors import UserError
from spmd_trainer.train_states import TrainState

DATASETS = [SimpleNamespace(name="mine", is_training=True), SimpleNamespace(name="heldout", is_training=False)]


def test_the_averages_take_the_place_of_the_variables_that_have_some():
    mdl_vars = {"params": NestedMap(w=jnp.ones(2)), "non_trainable": NestedMap(seen=jnp.zeros(()))}
    averages = {"params": NestedMap(w=jnp.full(2, 0.5))}
    opt_states = [NestedMap(count=jnp.uint32(3), ema=averages)]
    found = tasks_lib.extract_ema(TrainState(jnp.uint32(7), mdl_vars, opt_states, ("more",)))
    assert int(found.step) == 7
    assert found.mdl_vars["params"].w.tolist() == [0.5, 0.5]
    assert found.mdl_vars["non_trainable"].seen == 0
    assert (found.opt_states, found.extra_state) == ([], ())


class Evaluates(base_experiment.BaseExperiment):
    """An experiment with evaluations of its own."""

    evaluated = ("heldout",)

    def datasets(self):
        return DATASETS

    def task(self):
        raise AssertionError("the task is not needed")

    def eval_programs(self):
        return [SingleTaskEvalProgram(SimpleNamespace(name=name)) for name in self.evaluated]


class EvaluatesOthers(Evaluates):
    evaluated = ("train",)


class EvaluatesNothing(Evaluates):
    evaluated = ()


def test_programs_are_for_the_experiments_own_datasets():
    base_experiment.check_overrides(Evaluates())
    for cls in (EvaluatesOthers, EvaluatesNothing):
        named = rf"{cls.__name__}.eval_programs\(\) is for the datasets .*eval_datasets\(\) returns \['heldout'\]"
        with pytest.raises(UserError, match=named):
            base_experiment.check_overrides(cls())
