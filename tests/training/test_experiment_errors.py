"""Mistakes in an experiment's own code or settings: one message, before anything runs."""

import pathlib

import optax
import pytest
from facts import assert_names
from praxis import pax_fiddle

from spmd_trainer import tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.stdlib import StdlibBytesTiny
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.training import experiment_config


def message(experiment, *overrides: str) -> str:
    with pytest.raises(UserError) as raised:
        experiment_config.resolve(experiment, overrides)
    return str(raised.value)


def test_an_error_in_the_constructor_has_the_users_line():
    class Opens(StdlibBytesTiny):
        def __init__(self):
            pathlib.Path("/nonexistent/file").read_text()

    assert "FileNotFoundError" in message(Opens)
    assert f"{__file__}:" in message(Opens)


def test_a_task_that_returns_nothing_is_said_with_the_class():
    class Forgets(StdlibBytesTiny):
        def task(self):
            super().task()

    text = message(Forgets, "task.train.num_train_steps=2")
    assert_names(text, "task() returns None", "tasks_lib.SingleTask", f"{__file__}:")


@pytest.mark.parametrize(
    ("method", "made", "field", "mend"),
    [
        ("datasets", lambda: [ArrayInput], "eval_datasets[0]", "Config(ArrayInput, ...)"),
        ("decode_datasets", lambda: [StdlibBytesTiny()], "decode_datasets[0]", "Config(StdlibBytesTiny, ...)"),
        ("task", lambda: tasks_lib.SingleTask, "task()", "Config(SingleTask, ...)"),
        ("task", lambda: tasks_lib.SingleTask(name="t", model=object()), "task.model", "the config of one"),
    ],
)
def test_a_class_or_an_object_in_place_of_a_config_is_said_with_the_mend(method, made, field, mend):
    cls = type("Bare", (StdlibBytesTiny,), {method: lambda self: made()})
    assert_names(message(cls), field, mend)


def test_an_error_deep_in_the_users_code_has_all_of_the_users_lines():
    def helper():
        return {}["x"]

    class Deep(StdlibBytesTiny):
        def task(self):
            return helper()

    text = message(Deep)
    assert_names(text, "KeyError: 'x'", "helper: return {}", "task: return helper()")


def test_exiting_is_an_error_like_any_other():
    class Exits(StdlibBytesTiny):
        def task(self):
            raise SystemExit("no")

    assert "SystemExit: no" in message(Exits)


@pytest.mark.parametrize("shape", ["[0,-1,2]", "[1,-4,2]", "[1,0,2]", "[1,4.5,2]", "[-1,-1,2]", "'abc'", "8"])
def test_sizes_of_a_declared_mesh_that_are_none(shape):
    text = message(StdlibBytesTiny, f"task.model.ici_mesh_shape={shape}")
    assert "task.model.ici_mesh_shape is" in text
    assert "StdlibBytesTiny" in text


def test_overrides_of_one_call_do_not_stick_to_the_instance():
    experiment = StdlibBytesTiny()
    experiment_config.resolve(experiment, ["task.train.num_train_steps=2"])
    assert experiment_config.resolve(experiment).task_p.train.num_train_steps == StdlibBytesTiny.NUM_TRAIN_STEPS


@pytest.mark.parametrize("made", [True, False])
def test_a_field_of_an_optax_transformation_needs_its_config(made):
    class Optax(StdlibBytesTiny):
        def task(self):
            task_p = super().task()
            adam = optax.adam(1e-2) if made else pax_fiddle.Config(optax.adam, learning_rate=1e-2)
            task_p.train.learner.optimizer = adam
            return task_p

    field = "task.train.learner.optimizer.learning_rate"
    if made:
        text = message(Optax, f"{field}=1e-3")
        assert_names(text, field, "Config(optax.adam, learning_rate=...)")
        assert " at 0x" not in text
    else:
        resolved = experiment_config.resolve(Optax, [f"{field}=1e-3"])
        assert resolved.task_p.train.learner.optimizer.learning_rate == 1e-3
        assert tasks_lib.build_task(resolved.task_p).learner.optimizer.grad_tx
