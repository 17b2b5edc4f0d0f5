"""What can be known at the start is refused at the start: settings that contradict each other, metrics that nothing gives."""

import copy
import dataclasses
import functools
import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from etils import epath
from facts import assert_names, raises_naming
from praxis import optimizers, pax_fiddle, schedules
from trained_helpers import make_job, trained

from spmd_trainer.checkpointing import (
    LOAD_ALL,
    Checkpointer,
    CheckpointLoadingRules,
    CheckpointNotFoundError,
)
from spmd_trainer.checkpointing.own_steps import OwnStep
from spmd_trainer.errors import UserError
from spmd_trainer.training import evaluate, experiment_config, start_checks, start_up, train
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.run_config import TrainConfig, config_class

TINY = "synthetic.structures.TinyLm"
DIRECTORY = epath.Path("/nonexistent/run")
EMA = "task.train.eval_use_ema_states"


resolved_once = functools.cache(experiment_config.resolve)


def check(*overrides, exp=TINY, customize=lambda config: None, **settings):
    """Checks the tiny experiment with these overrides and settings, and a directory that checkpoints are to come from."""
    # Building an experiment's config takes longer than all checks.
    resolved = copy.deepcopy(resolved_once(exp, overrides))
    customize(resolved.config)
    mode = settings.pop("mode", "train")
    config = config_class(mode)(resolved, DIRECTORY, mode, **settings)
    start_checks.check_settings(config)
    if config.restore_checkpoint_dir is not None:
        start_checks.check_directories(dataclasses.replace(config, job_log_dir=config.restore_checkpoint_dir / "new"))


def refused(*overrides, **arguments) -> str:
    with pytest.raises(UserError) as error:
        check(*overrides, **arguments)
    return str(error.value)


def with_prompts(config):
    """Decode datasets: only their number counts here."""
    config.decode_datasets = list(config.eval_datasets)


def watching(metric):
    def customize(config):
        config.task.early_stopping_fn = pax_fiddle.Config(EarlyStopping, metric=metric)

    return customize


@pytest.mark.parametrize("mode", ["train", "eval", "inspect", "verify"])
def test_an_experiment_that_fits_its_mode_passes(mode):
    check(mode=mode)
    check(mode=mode, exp="synthetic.structures.TinyEma")


# --- moving averages --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "mode", "is_refused"),
    [
        ("eval_use_ema_states", "train", True),
        ("decode_use_ema_states", "train", True),  # its checkpoints would lack them
        ("eval_use_ema_states", "eval", True),
        ("eval_use_ema_states", "decode_once", False),
        ("decode_use_ema_states", "decode", True),
        ("decode_use_ema_states", "decode_once", True),
        ("decode_use_ema_states", "infer", True),
        ("decode_use_ema_states", "eval", False),
        ("eval_use_ema_states", "inspect", False),
    ],
)
def test_averages_that_the_learner_does_not_keep_are_refused_where_they_matter(field, mode, is_refused):
    arguments = {"mode": mode, "customize": with_prompts}
    if not is_refused:
        check(f"task.train.{field}=True", **arguments)
        return
    message = refused(f"task.train.{field}=True", **arguments)
    for words in (f"task.train.{field}", "Adam has ema_decay=0.0", "task_p.train.learner.optimizer.ema_decay = 0.999"):
        assert words in message
    check(f"task.train.{field}=True", "task.train.learner.optimizer.ema_decay=0.9", **arguments)


def test_averages_of_several_optimizers_are_the_main_ones():
    exp = "synthetic.structures.TinyMultiOptimizer"
    assert_names(refused(f"{EMA}=True", exp=exp), EMA, "main optimizer Adam", "ema_decay=0.0")
    check(f"{EMA}=True", "task.train.learner.optimizer.ema_decay=0.9", exp=exp)


def test_averages_of_an_optax_transformation():
    import optax

    def plain(config):
        config.task.train.learner.optimizer = optax.adam(1e-3)

    def wrapped(config):
        schedule = pax_fiddle.Config(schedules.Constant, value=1.0)
        config.task.train.learner.optimizer = pax_fiddle.Config(
            optimizers.OptaxOptimizer, grad_tx=optax.adam(1e-3), ema_decay=0.99, learning_rate=1.0, lr_schedule=schedule
        )

    message = refused(f"{EMA}=True", customize=plain)
    assert_names(message, EMA, "optax transformation", "no ema_decay", "optimizers.OptaxOptimizer")
    check(f"{EMA}=True", customize=wrapped)


# --- datasets ---------------------------------------------------------------------------------------------------------


def test_eval_without_datasets_is_refused():
    message = refused(mode="eval", customize=lambda config: config.eval_datasets.clear())
    assert_names(message, "--mode=eval", TINY, "no evaluation datasets", "is_training=False", "datasets()")


@pytest.mark.parametrize("mode", ["decode", "decode_once", "infer"])
def test_decode_without_datasets_is_refused(mode):
    message = refused(mode=mode)
    assert_names(message, f"--mode={mode}", TINY, "no decode datasets", "decode_datasets()")
    check(mode=mode, customize=with_prompts)


def test_decode_during_train_needs_an_interval_and_datasets():
    interval = "task.train.decode_interval_steps=5"
    message = refused(decode_during_train=True, customize=with_prompts)
    assert_names(message, "--decode_during_train", "task.train.decode_interval_steps is None")
    assert "no decode datasets" in refused(interval, decode_during_train=True)
    check(interval, decode_during_train=True, customize=with_prompts)
    check(interval)  # not asked for, as in experiments of Pax's


# --- early stopping ---------------------------------------------------------------------------------------------------


def test_early_stopping_needs_evaluations():
    assert "task.train.eval_interval_steps is 0" in refused(
        "task.train.eval_interval_steps=0", customize=watching("heldout/log_pplx")
    )
    assert "--eval_on_test is off" in refused(eval_on_test=False, customize=watching("heldout/log_pplx"))
    check(customize=watching("heldout/log_pplx"))
    check(mode="eval", customize=watching("heldout/log_pplx"))


def test_early_stopping_by_a_function_needs_evaluations_too():
    def customize(config):
        config.task.early_stopping_fn = lambda metrics, mode, step, is_last: False

    message = refused(eval_on_test=False, customize=customize)
    assert_names(message, "task.early_stopping_fn", "--eval_on_test is off", "never end")
    check(customize=customize)


def test_early_stopping_needs_a_dataset_of_that_name():
    message = refused(customize=watching("held_out/log_pplx"))
    assert_names(message, "task.early_stopping_fn", "dataset is named 'held_out'", "mean heldout")
    check(customize=watching("train/log_pplx"))
    message = refused("task.train.eval_skip_train=True", customize=watching("train/log_pplx"))
    assert "set task.train.eval_skip_train=False" in message


def test_a_dataset_whose_name_holds_a_slash_can_be_watched():
    def customize(config):
        config.eval_datasets[0].name = "held/out"
        watching("held/out/log_pplx")(config)

    check(customize=customize)


def test_early_stopping_that_cannot_be_built_is_told():
    assert "set it to 'DATASET/metric'" in refused(customize=watching("log_pplx"))


class DoublesLoss:
    """A `task.metrics` that gives one metric more."""

    def __call__(self, weighted_scalars):
        value, weight = weighted_scalars["total_loss"]
        return type(weighted_scalars)({**weighted_scalars, "double_loss": (2 * value, weight)})


def job_watching(directory, metric, **arguments):
    def customize(config):
        watching(metric)(config)
        config.task.metrics = pax_fiddle.Config(DoublesLoss)

    arguments = {
        "exp": TINY,
        "fields": ("task.train.num_train_steps=1", "task.train.eval_interval_steps=1"),
        **arguments,
    }
    return make_job(directory, customize=customize, **arguments)


@pytest.mark.parametrize(
    "metric",
    [
        "heldout/double_loss",
        "train/double_loss",
        *(
            pytest.param(f"heldout/{name}", marks=pytest.mark.full)
            for name in ("log_pplx", "eval_batches", "eval_seconds")
        ),
    ],
)
def test_a_metric_that_evaluation_gives_passes(tmp_path, metric):
    start_checks.check_training(job_watching(tmp_path, metric))


@pytest.mark.parametrize(
    ("metric", "near"), [("heldout/log_plx", "heldout/log_pplx"), ("train/doubleloss", "train/double_loss")]
)
def test_a_metric_that_no_evaluation_gives_is_refused_with_the_nearest(tmp_path, metric, near):
    with pytest.raises(UserError) as error:
        start_checks.check_training(job_watching(tmp_path, metric))
    assert f"task.early_stopping_fn watches {metric!r}" in str(error.value)
    assert f"did you mean {near}" in str(error.value)
    assert not list(tmp_path.iterdir())


def test_a_training_batch_has_no_timing(tmp_path):
    with raises_naming(UserError, "'train/eval_batches'", "no such metric"):
        start_checks.check_training(job_watching(tmp_path, "train/eval_batches"))


@pytest.mark.full
def test_the_names_are_those_that_evaluation_gives(tmp_path, monkeypatch):
    """The traced names against those of a real evaluation; tracing neither lowers nor compiles nor runs."""
    job = job_watching(tmp_path, "heldout/double_loss")
    with monkeypatch.context() as patch:
        patch.setattr(jax.stages.Traced, "lower", lambda *args, **kwargs: pytest.fail("lowered"))
        patch.setattr(jax.stages.Lowered, "compile", lambda *args, **kwargs: pytest.fail("compiled"))
        traced = start_checks.evaluation_metrics(job, job.process_inputs_shape_dtype)
    given = []
    monkeypatch.setattr(evaluate.Evaluations, "run", record_results(evaluate.Evaluations.run, given))
    train.train(job)
    assert {name for name in given[0] if name.startswith("train/")} == {f"train/{name}" for name in traced}
    timed = {*traced, "eval_batches", "eval_seconds"}
    assert {name for name in given[0] if name.startswith("heldout/")} == {f"heldout/{name}" for name in timed}


def record_results(function, results):
    def recording(*args, **kwargs):
        results.append(function(*args, **kwargs))
        return results[-1]

    return recording


def test_a_metric_missing_from_an_evaluation_is_the_users_to_mend():
    with raises_naming(UserError, "EarlyStopping.metric", "'a/los'", "['a/loss']", "mean a/loss"):
        EarlyStopping(metric="a/los")({"a/loss": 1.0}, "eval", 1, False)


# --- numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("field", "value", "valid"),
    [
        ("num_train_steps", 0, ("whole number", "1 or more")),
        ("num_train_steps", -5, ("whole number", "1 or more")),
        ("num_train_steps", 2.5, ("whole number", "1 or more")),
        ("num_train_steps", "'many'", ("whole number", "1 or more")),
        ("num_train_steps", None, ("whole number", "1 or more")),
        ("num_train_steps", "float('nan')", ()),
        ("save_interval_steps", 0, ("whole number", "1 or more")),
        ("save_max_to_keep", 0, ("whole number", "1 or more", "None keeps all")),
        ("max_inflight_steps", 0, ("whole number", "1 or more")),
        ("summary_interval_steps", 0, ("whole number", "1 or more")),
        ("log_train_output_interval_steps", 0, ("whole number", "1 or more", "None: summary_interval_steps")),
        ("summary_accumulate_interval_steps", -1, ("whole number", "1 or more")),
        ("eval_interval_steps", -100, ("whole number", "0 or more", "0 or None: never")),
        ("decode_interval_steps", -1, ("whole number", "0 or more", "0 or None: never")),
        ("decode_start_after_n_steps", -1, ("whole number", "0 or more")),
        ("profiler_capture_step", 0, ("whole number", "1 or more", "None: never")),
        ("profiler_num_steps", 0, ("whole number", "1 or more")),
        ("profiler_min_duration_sec", -0.5, ("a number", "0 or more")),
        ("learner.skip_step_gradient_norm_value", -1.0, ("a number", "0 or more")),
        ("learner.optimizer.ema_decay", 1.0, ("a number", "less than 1")),
        ("learner.optimizer.clip_gradient_norm_to_value", -1.0, ("a number", "0 or more")),
    ],
)
def test_an_impossible_number_is_refused_with_the_valid_range(field, value, valid):
    if value == "float('nan')":

        def customize(config):
            config.task.train.num_train_steps = float("nan")

        message = refused(customize=customize)
        value = float("nan")
    else:
        message = refused(f"task.train.{field}={value}")
        value = "many" if value == "'many'" else value
    assert_names(message, f"task.train.{field} is {value!r}", *valid)


def test_several_impossible_numbers_are_told_at_once():
    message = refused("task.train.num_train_steps=0", "task.train.max_inflight_steps=0")
    assert [line.split(" is ")[0] for line in message.splitlines()] == [
        "task.train.num_train_steps",
        "task.train.max_inflight_steps",
    ]


@pytest.mark.parametrize(
    "override",
    [
        "num_train_steps=1e7",
        "eval_interval_steps=None",
        "decode_interval_steps=0",
        "save_max_to_keep=None",
        "profiler_capture_step=3",
        "learner.optimizer.clip_gradient_norm_to_value=None",
    ],
)
def test_numbers_that_mean_something_pass(override):
    check(f"task.train.{override}")


def with_fields(**values):
    def customize(config):
        for name, value in values.items():
            setattr(config.task.train, name, value)

    return customize


@pytest.mark.parametrize("value", [np.asarray(40), np.asarray(4e1), jnp.asarray(40), np.int64(40), np.float32(40)])
def test_a_number_may_be_an_array_without_dimensions(value):
    check(customize=with_fields(summary_interval_steps=value))


@pytest.mark.parametrize(
    "value", [np.asarray(0), np.asarray(2.5), np.asarray([40]), np.asarray(True), np.True_, True, 40j, 10**400]
)
def test_what_is_no_such_number_is_refused(value):
    assert "task.train.summary_interval_steps is" in refused(customize=with_fields(summary_interval_steps=value))


def test_a_negative_decay_keeps_no_averages():
    negative = "task.train.learner.optimizer.ema_decay=-1.0"
    check(negative)
    assert "Adam has ema_decay=-1.0" in refused(negative, f"{EMA}=True")


# --- where a run begins -----------------------------------------------------------------------------------------------


def checkpoints_in(directory, *steps):
    for step in steps:
        (directory / str(step)).mkdir(parents=True)
    return epath.Path(directory)


def test_a_step_without_its_directory_is_refused():
    message = refused(restore_checkpoint_step=4)
    assert "--restore_checkpoint_step=4 needs --restore_checkpoint_dir=DIR" in message
    check(restore_checkpoint_step=4, mode="eval")


def test_a_directory_to_begin_with_must_hold_the_step(tmp_path):
    empty, full = epath.Path(tmp_path / "empty"), checkpoints_in(tmp_path / "full", 4, 8)
    message = refused(restore_checkpoint_dir=empty)
    assert_names(message, f"no checkpoint in {empty}", "train first", "--restore_checkpoint_dir=DIR")
    message = refused(restore_checkpoint_dir=full, restore_checkpoint_step=5)
    assert f"no step 5 in {full}; there are 4, 8" in message
    check(restore_checkpoint_dir=full, restore_checkpoint_step=4)


def test_a_run_in_place_of_its_checkpoints_is_told(tmp_path):
    checkpoints_in(tmp_path / "run" / "checkpoints", 4)
    message = refused(restore_checkpoint_dir=epath.Path(tmp_path / "run"))
    assert message.endswith(f"did you mean --restore_checkpoint_dir={tmp_path / 'run' / 'checkpoints'}?")


def test_a_run_that_goes_on_from_its_own_checkpoints_asks_for_no_others(tmp_path):
    checkpoints_in(tmp_path / "checkpoints", 3)
    config = TrainConfig(
        experiment_config.resolve(TINY), epath.Path(tmp_path), restore_checkpoint_dir=epath.Path(tmp_path / "gone")
    )
    (tmp_path / "experiment.json").write_text(json.dumps({"experiment": config.experiment.name}))
    start_checks.check_directories(config)


def test_warm_start_rules_that_give_way_to_a_checkpoint_are_told(tmp_path, caplog):
    rules = {str(tmp_path): CheckpointLoadingRules(load_rules=[LOAD_ALL])}

    def customize(config):
        config.task.train.init_from_checkpoint_rules = rules

    check(customize=customize, restore_checkpoint_dir=checkpoints_in(tmp_path / "full", 4))
    assert_names(caplog.text, "init_from_checkpoint_rules", "not used", f"--restore_checkpoint_dir={tmp_path / 'full'}")


def test_warm_start_rules_are_checked_before_anything_is_written(tmp_path):
    def customize(config):
        rules = CheckpointLoadingRules(load_rules=[("params/decoder/(.*)", "params/lm/{}")])
        config.task.train.init_from_checkpoint_rules = {str(tmp_path / "other"): rules}

    run = tmp_path / "run"
    with raises_naming(
        CheckpointNotFoundError, "init_from_checkpoint_rules", "no whole checkpoint", tmp_path / "other"
    ):
        start_checks.check_training(make_job(run, exp=TINY, customize=customize))
    assert not run.exists()
    # A run that goes on needs its warm start no more.
    checkpoints_in(run / "checkpoints", 1)
    start_checks.check_training(make_job(run, exp=TINY, customize=customize))


@pytest.mark.full
def test_the_contents_of_a_warm_start_s_checkpoint_are_checked_once(tmp_path, monkeypatch):
    """At the start its record is enough; its files are read and compared before the arrays are loaded."""
    checked = []
    compare = OwnStep.checked

    def recording(step):
        checked.append(step.step_dir)
        return compare(step)

    def customize(config):
        rules = CheckpointLoadingRules(load_rules=[LOAD_ALL], step=8)
        config.task.train.init_from_checkpoint_rules = {trained(): rules}

    monkeypatch.setattr(OwnStep, "checked", recording)
    job = make_job(tmp_path, customize=customize)
    start_checks.check_training(job)
    assert not checked
    with Checkpointer(tmp_path / "checkpoints") as own:
        start_up.first_state(job, own)
    assert checked == [trained() / "checkpoints" / "8"]


# --- devices ----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_no_device_is_touched():
    program = f"""
from etils import epath
from jax._src import xla_bridge
from spmd_trainer.training import experiment_config
from spmd_trainer.errors import UserError
from spmd_trainer.training import start_checks
from spmd_trainer.training.run_config import TrainConfig
resolved = experiment_config.resolve({TINY!r}, ["{EMA}=True"])
try:
    start_checks.check_settings(TrainConfig(resolved, epath.Path("/nonexistent/run")))
except UserError as error:
    print("refused:", error)
print("devices:", xla_bridge.backends_are_initialized())
"""
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300, env=os.environ
    )
    assert result.returncode == 0, result.stderr
    assert "refused: task.train.eval_use_ema_states" in result.stdout
    assert "devices: False" in result.stdout


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([f"--fdl.set={EMA}=True"], ["task.train.eval_use_ema_states", "task.train.learner", "ema_decay"]),
        pytest.param(["--mode=decode"], ["--mode=decode", "no decode datasets"], marks=pytest.mark.full),
        pytest.param(
            ["--fdl.set=task.train.max_inflight_steps=0"],
            ["task.train.max_inflight_steps is 0", "of 1 or more"],
            marks=pytest.mark.full,
        ),
    ],
)
def test_a_command_ends_with_status_2_and_writes_nothing(tmp_path, arguments, says):
    directory, read_from = tmp_path / "run", checkpoints_in(tmp_path / "other", 4)
    flags = [f"--exp={TINY}", f"--job_log_dir={directory}", f"--restore_checkpoint_dir={read_from}", *arguments]
    command = [sys.executable, "-m", "spmd_trainer.main", *flags]
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=os.environ)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    for words in says:
        assert words in result.stderr
    assert not directory.exists()
