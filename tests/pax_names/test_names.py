"""Pax's import names: what works, what says what to use instead, and what experiments and tasks declare without effect."""

import functools
import importlib
import logging
import math
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from facts import raises_naming
from praxis import base_model, layers, pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer import (
    base_experiment,
    base_task,
    checkpoint_managers,
    checkpoint_paths,
    checkpoints,
    host_callback,
    parameterized_experiment,
    partitioning,
    programs,
    tasks_lib,
    trainer_lib,
)
from spmd_trainer.errors import UserError
from spmd_trainer.pax.absent_names import AbsentNameError
from spmd_trainer.tasks.lm import model_params

# What the files of others import from paxml.
OTHERS = {
    "JAX-Toolbox, ci_configs": {"": ["tasks_lib", "experiment_registry"]},
    "saxml, lm_cloud": {"": ["base_experiment", "tasks_lib", "checkpoints"]},
    "TimesFM, finetuning": {
        "": ["tasks_lib", "trainer_lib", "checkpoints", "learners", "partitioning", "checkpoint_types"],
        "trainer_lib": [
            "initialize_model_state",
            "replicate_model_state",
            "train_step_single_learner",
            "eval_step_single_learner",
        ],
        "checkpoint_types": ["CheckpointType"],
        "checkpoints": ["CheckpointType", "restore_checkpoint", "save_checkpoint"],
        "learners": ["Learner"],
        "tasks_lib": ["SingleTask"],
    },
    "an experiment written for an earlier version of this trainer": {
        "": ["learners", "shard_map_partitioning"],
        "callbacks": ["Callback", "CallbackError", "Run"],
        "metrics.early_stopping": ["EarlyStopping"],
        "metrics.writers": ["read_metrics"],
        "tasks.lm.cheaper_layers": ["use_cheaper_layers"],
        "tasks.lm.task_defaults": ["set_adam_with_cosine_decay", "batch_split_mapping"],
    },
}


class Linear(base_model.BaseModel):
    """y = x w, with a squared loss."""

    def setup(self):
        self.create_child("linear", pax_fiddle.Config(layers.Linear, input_dims=3, output_dims=1))

    def compute_predictions(self, input_batch):
        return self.linear(input_batch.x)

    def compute_loss(self, predictions, input_batch):
        error = predictions[:, 0] - input_batch.y
        weight = np.float32(error.shape[0])
        return NestedMap(loss=((error**2).mean(), weight)), NestedMap(error=error)


def task_config(**train):
    task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="t", model=pax_fiddle.Config(Linear, name="m"))
    task_p.train.learner.loss_name, task_p.train.learner.optimizer = "loss", optax.sgd(0.1)
    for name, value in train.items():
        setattr(task_p.train, name, value)
    return task_p


def batch(rows=16):
    rng = np.random.default_rng(0)
    return NestedMap(x=rng.normal(size=(rows, 3)).astype(np.float32), y=np.ones(rows, np.float32))


@pytest.mark.parametrize("who", OTHERS)
def test_the_files_of_others_find_their_names(who):
    for module, names in OTHERS[who].items():
        for name in names:
            if module:
                assert getattr(importlib.import_module(f"spmd_trainer.{module}"), name) is not None
            else:
                importlib.import_module(f"spmd_trainer.{name}")


def test_a_module_of_pax_has_one_name():
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("spmd_trainer.pax_names.trainer_lib")
    assert trainer_lib.__name__ == "spmd_trainer.trainer_lib"


def test_an_absent_name_says_at_first_use_what_to_use_instead():
    absent = checkpoints.save_checkpoint
    with raises_naming(AbsentNameError, "checkpoints.save_checkpoint", "Checkpointer"):
        absent("state", "dir")
    with pytest.raises(AbsentNameError, match="OrbaxCheckpointManager"):

        class Mine(checkpoint_managers.OrbaxCheckpointManager):
            pass

    with pytest.raises(AttributeError):
        _ = checkpoints.no_such_name


def test_a_step_under_pmap_is_the_step_of_the_whole_batch():
    task, rows, key = pax_fiddle.build(task_config()), batch(), jax.random.key(0)
    state, _ = trainer_lib.initialize_model_state(task, key, rows)
    whole, output = jax.jit(functools.partial(trainer_lib.train_step_single_learner, task))(state, key, rows)
    count = jax.local_device_count()
    split = jax.tree.map(lambda x: x.reshape(count, -1, *x.shape[1:]), rows)
    step = jax.pmap(lambda s, k, r: trainer_lib.train_step_single_learner(task, s, k, r), axis_name="batch")
    parts, outputs = step(trainer_lib.replicate_model_state(state), jax.random.split(key, count), split)
    assert float(outputs.loss[0]) == pytest.approx(float(output.loss), rel=1e-6)
    for ours, theirs in zip(jax.tree.leaves(whole.mdl_vars), jax.tree.leaves(parts.mdl_vars), strict=True):
        np.testing.assert_allclose(theirs[0], ours, rtol=1e-6)
    evaluate = jax.pmap(lambda s, k, r: trainer_lib.eval_step_single_learner(task, s, k, r), axis_name="batch")
    _, evaluated = evaluate(trainer_lib.replicate_model_state(state), jax.random.split(key, count), split)
    assert evaluated.per_example_out.error.shape == (count, 16)
    assert float(evaluated.weighted_scalars["loss"][1][0]) == 16


def test_ignored_fields_give_one_warning_that_says_what_happens_instead(caplog):
    task_p = task_config(async_summary_writing=False, profiler_max_num_hosts=3)
    task_p.decode.profiler_num_steps = 7
    with caplog.at_level(logging.WARNING):
        pax_fiddle.build(task_p)
    (record,) = [r for r in caplog.records if "no effect here" in r.getMessage()]
    for part in ("train.async_summary_writing=False", "train.profiler_max_num_hosts=3", "decode.profiler_num_steps=7"):
        assert part in record.getMessage()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("train.external_checkpoint_path", "/elsewhere"),
        ("train.restore_transformations", {"a": "b"}),
        ("vn.vn_scale", 0.1),
        ("loss_aggregator", "aggregator"),
    ],
)
def test_fields_without_which_the_numbers_would_differ_are_refused(field, value):
    task_p = task_config()
    *sections, name = field.split(".")
    setattr(functools.reduce(getattr, sections, task_p), name, value)
    with pytest.raises(ValueError, match=rf"task\.{field}=.* is not supported: "):
        pax_fiddle.build(task_p)


def test_pax_s_early_stopping_function_sees_pax_s_arguments():
    seen = []

    def stop(metrics, running_mode, global_step, is_last_ckpt, checkpoint_path):
        seen.append((metrics, running_mode, global_step, is_last_ckpt, checkpoint_path))
        return metrics["eval_test_C4Validation/metrics/log_pplx"] <= 2.0

    task_p = task_config()
    task_p.early_stopping_fn = stop
    task = pax_fiddle.build(task_p)
    assert task.early_stopping_fn({"C4Validation/log_pplx": 1.5, "train/loss": 3.0}, "eval", 8, False) is True
    metrics, mode, step, is_last, path = seen[0]
    assert metrics["eval_train/metrics/loss"] == 3.0
    assert (mode, step, is_last, path) == (trainer_lib.RunningMode.EVAL, 8, False, None)
    assert mode.has_eval
    assert not mode.has_train


class Mine(base_experiment.BaseExperiment):
    def datasets(self):
        return []

    def task(self):
        return task_config()


def test_pax_s_own_programs_stand_for_the_loops():
    base_experiment.check_overrides(Mine())
    (program,) = Mine().train_programs()
    assert isinstance(program, programs.SingleTaskTrainProgram)
    with pytest.raises(UserError, match="use callbacks"):
        program.run(None, 0)


def test_programs_of_one_s_own_are_refused():
    class Program(programs.SingleTaskTrainProgram):
        pass

    class WithProgram(Mine):
        def train_programs(self):
            return [Program()]

    class WithExecutor(Mine):
        def executor(self):
            return object()

    with pytest.raises(UserError, match=r"WithProgram\.train_programs\(\) returns \['Program'\]; .* use callbacks"):
        base_experiment.check_overrides(WithProgram())
    with pytest.raises(UserError, match=r"WithExecutor\.executor\(\) returns an executor"):
        base_experiment.check_overrides(WithExecutor())


def test_sub_experiments_give_one_warning(caplog):
    class WithOthers(Mine):
        def sub_experiments(self):
            return {}

    with caplog.at_level(logging.WARNING):
        base_experiment.check_overrides(WithOthers())
    (record,) = [r for r in caplog.records if "sub_experiments()" in r.getMessage()]
    assert "no effect" in record.getMessage()


def test_a_parameterized_experiment_is_made_of_configs():
    given = {"task": task_config(), "train_datasets": [NestedMap(name="a", is_training=True)]}
    experiment = parameterized_experiment.ParameterizedExperiment(**given)
    assert experiment.task() is given["task"]
    assert [p.name for p in experiment.datasets()] == ["a"]
    with raises_naming(UserError, "eval_datasets", "input 'a'", "is_training=True"):
        parameterized_experiment.ParameterizedExperiment(task=given["task"], eval_datasets=given["train_datasets"])


def test_paths_of_checkpoints_of_both_kinds(tmp_path):
    assert checkpoints.latest_checkpoint_if_exists(tmp_path / "none") is None
    for name in ("checkpoint_00000020", "checkpoint_00000008", "tmp_1.checkpoint_00000030"):
        (tmp_path / name).mkdir()
    assert checkpoints.latest_checkpoint(tmp_path).name == "checkpoint_00000020"
    assert checkpoints.retrieve_latest_checkpoint_step(tmp_path) == 20
    (tmp_path / "24").mkdir()
    assert checkpoints.retrieve_latest_checkpoint_step(tmp_path) == 24
    assert checkpoint_paths.make_checkpoint_step_dir(tmp_path, 5).name == "checkpoint_00000005"
    with raises_naming(ValueError, "elsewhere", "directory", "'checkpoint_00000020'"):
        checkpoints.get_step_from_checkpoint_asset("elsewhere")


def test_the_oldest_string_of_a_full_repository_is_dropped():
    repository = host_callback.Repository(max_size=2)
    first, second, third = (repository.add(text) for text in "abc")
    assert repository.size == 2
    assert (repository.get(second), repository.get(third)) == ("b", "c")
    assert not repository.pop(first)
    assert host_callback.repository("x") is host_callback.repository("x")


def test_create_partitioner_makes_the_default_one():
    task = pax_fiddle.build(task_config())
    assert isinstance(task, base_task.BaseTask)
    assert isinstance(partitioning.create_partitioner(task, reshard_inputs=True), partitioning.PjitPartitioner)
    with pytest.raises(UserError, match="sharding_strategy"):
        partitioning.create_partitioner(task, auto_sharding_mode=trainer_lib.RunningMode.TRAIN)


def test_moving_averages_of_a_state():
    task = pax_fiddle.build(task_config())
    assert not tasks_lib.has_ema(task)
    state, _ = trainer_lib.initialize_model_state(task, jax.random.key(0), batch())
    with pytest.raises(ValueError, match="holds no EMA"):
        tasks_lib.extract_ema(state)
    assert tasks_lib.CheckpointLoadingRules(load_rules=[tasks_lib.LOAD_ALL]).load_rules == [("(.*)", "{}")]
    assert math.isclose(float(state.step), 0)


def test_a_pipeline_with_two_kinds_of_microbatches_is_refused():
    class Both(model_params.TransformerLmSpmdPipelineAdafactor):
        ICI_MESH_SHAPE = (2, 1, 1, 1)
        DCN_MESH_SHAPE = (1, 1, 1, 1)
        NUM_STAGES, NUM_LAYERS = 2, 2
        NUM_MICROBATCHES, MICROBATCH_SIZE = 2, 4

        def datasets(self):
            return []

    with raises_naming(UserError, "NUM_MICROBATCHES=2", "MICROBATCH_SIZE=4", "both", "None"):
        Both().task()


def test_a_folder_left_of_a_package_that_is_a_table_now_hides_no_name(tmp_path):
    (tmp_path / "interop" / "__pycache__").mkdir(parents=True)  # as `git pull` leaves it
    code = f"import spmd_trainer; spmd_trainer.__path__.append({str(tmp_path)!r}); from spmd_trainer.interop import pax"
    subprocess.run([sys.executable, "-c", code], check=True)
