"""NaN, Inf and gradients above the limit: the step is skipped or the run stops, counted, and never saved as good."""

import json
import logging

import numpy as np
import pytest
from facts import raises_naming

from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.errors import UserError
from spmd_trainer.step.packing import Scalars, SummaryNames
from spmd_trainer.training import invalid_steps, train
from spmd_trainer.training.invalid_steps import InvalidSteps, NonFiniteStepError, NothingLearntError, learns
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config

FIELDS = ("num_train_steps=4", "save_interval_steps=2", "summary_interval_steps=1", "eval_interval_steps=0")
# The gradient norm of every step is above it.
TINY_LIMIT = "task.train.learner.skip_step_gradient_norm_value=1e-9"


def run(directory, *overrides: str, **settings: bool) -> None:
    fields = [f"task.train.{field}" for field in FIELDS]
    overrides = (*fields, *overrides)
    train.train(Job.build(make_run_config("lm.stdlib.StdlibBytesTiny", directory, overrides=overrides, **settings)))


def records(directory) -> list[dict[str, float]]:
    return [json.loads(line) for line in (directory / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.full
def test_skipped_steps_are_counted_logged_and_change_nothing(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path / "run", TINY_LIMIT)
    assert [record["invalid_steps"] for record in records(tmp_path / "run")] == [1, 2, 3, 4]
    assert len({record["learning/var_norm"] for record in records(tmp_path / "run")}) == 1
    lines = [line for line in caplog.messages if "is invalid" in line]
    assert len(lines) == 4
    for words in (
        "step 3 is invalid",
        "gradient norm",
        "skip_step_gradient_norm_value is 1e-09",
        "was skipped",
        "3 inv",
    ):
        assert words in lines[2]


@pytest.mark.full
def test_the_run_stops_when_told_to(tmp_path):
    with pytest.raises(NonFiniteStepError, match=r"step 1 is invalid.*--stop_on_invalid_step"):
        run(tmp_path / "run", TINY_LIMIT, stop_on_invalid_step=True)
    with Checkpointer(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [0]


def test_a_state_with_nan_is_never_saved_and_the_run_ends_with_the_reason(tmp_path):
    # An infinite learning rate: the gradient is good, what it makes of the variables is not.
    with raises_naming(UserError, "step 2", "not saved", "NaN or infinity", "newest whole checkpoint"):
        run(tmp_path / "run", "task.train.learner.optimizer.learning_rate=1e400")
    with Checkpointer(tmp_path / "run" / "checkpoints", read_only=True) as checkpoints:
        assert checkpoints.all_steps() == [0]
    assert not np.isfinite(records(tmp_path / "run")[-1]["loss"])


def scalars_of(loss=1.0, weight=8.0, accepted=(1.0,)):
    names = SummaryNames([f"optimizer_{i}/is_valid_step" for i in range(len(accepted))])
    return Scalars(loss, {"total_loss": loss}, {"total_loss": weight}, names, list(accepted))


@pytest.mark.parametrize(
    ("scalars", "expected"),
    [
        (scalars_of(), True),
        (scalars_of(weight=0.0), False),
        (scalars_of(loss=float("nan")), False),
        (scalars_of(accepted=(0.0,)), False),
        # One of two optimizers takes its gradient.
        (scalars_of(accepted=(0.0, 1.0)), True),
        (Scalars(), True),
    ],
)
def test_a_step_learns_if_its_loss_has_weight_and_an_optimizer_takes_the_gradient(scalars, expected):
    assert learns(scalars, "total_loss") is expected


class SomeRun:
    """What the callback needs of a run."""

    class task:
        class learner:
            loss_name = "total_loss"
            skip_step_gradient_norm_value = 0.0
            check_valid_step = True
            enable_skip_step_on_gradient_anomalies = True

    def log(self, scalars):
        pass


IDLE = {
    "no weight": (scalars_of(weight=0.0), ["weights", "last batch"]),
    "NaN": (scalars_of(loss=float("nan"), accepted=(0.0,)), ["invalid", "loss nan"]),
}


@pytest.mark.parametrize("kind", IDLE)
def test_a_run_that_learns_nothing_any_more_ends(kind, monkeypatch):
    monkeypatch.setattr(invalid_steps, "MAX_IDLE_STEPS", 5)
    idle, why = IDLE[kind]
    callback, run = InvalidSteps(), SomeRun()
    callback.on_open(run)
    # A good step in between starts the count again.
    for step, scalars in enumerate([idle] * 4 + [scalars_of()] + [idle] * 4, start=1):
        callback.after_step(run, step, scalars)
    with raises_naming(NothingLearntError, "5 steps", "6 to 10", *why):
        callback.after_step(run, 10, idle)


@pytest.mark.full
def test_a_training_run_whose_steps_are_all_skipped_ends(tmp_path, monkeypatch):
    monkeypatch.setattr(invalid_steps, "MAX_IDLE_STEPS", 3)
    with raises_naming(NothingLearntError, "3 steps", "1 to 3", "checkpoints"):
        run(tmp_path / "run", TINY_LIMIT)
