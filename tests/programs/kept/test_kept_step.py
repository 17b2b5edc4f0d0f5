"""A restart loads the compiled step that an earlier start kept: nothing is traced, and whatever has changed is noticed."""

import json
import os
import subprocess
import sys
import textwrap

import pytest
from facts import assert_names

LAYERS = """
import os

import jax.numpy as jnp

SCALE = float(os.environ.get("MY_SCALE", "1"))


def apply(variables, x):
    return jnp.tanh(x @ variables["up"]) @ variables["down"] * float(os.environ.get("MY_SCALE", "1"))
"""
EXPERIMENT = """
import jax
import jax.numpy as jnp
import numpy as np
import optax
from praxis import pax_fiddle

from my_pkg import layers
from spmd_trainer import base_experiment, experiment_registry, models, tasks_lib
from spmd_trainer.inputs import ArrayInput

Config = pax_fiddle.Config


def init(key):
    up, down = jax.random.split(key)
    return {"up": jax.random.normal(up, (4, 6)), "down": jax.random.normal(down, (6, 1))}


def loss(outputs, batch):
    return {"loss": (jnp.mean((outputs[:, 0] - batch.y) ** 2), 8.0)}


def numbers():
    x = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    return {"x": x, "y": x.sum(axis=1)}


@experiment_registry.register
class Net(base_experiment.BaseExperiment):
    def datasets(self):
        return [Config(ArrayInput, name="train", is_training=True, input_random_seed=1, arrays=numbers, batch_size=8)]

    def task(self):
        model_p = Config(models.FunctionModel, init=init, apply=layers.apply, inputs="x", loss=loss)
        model_p.ici_mesh_shape, model_p.mesh_axis_names = [4, 2], ["data", "mdl"]
        task_p = Config(tasks_lib.SingleTask, name="net", model=model_p)
        task_p.train.num_train_steps, task_p.train.summary_interval_steps, task_p.train.eval_interval_steps = 4, 1, 0
        task_p.train.save_interval_steps = 2
        task_p.train.learner.loss_name, task_p.train.learner.optimizer = "loss", optax.adam(1e-1)
        task_p.train.sharding_strategy = [(".*", 'fsdp(axis="data, mdl", min_size_to_shard_mb=0, allow_uneven=True)')]
        return task_p
"""
# The command, and at its end a line with the number of JAX's events of each kind, up to the end of the first step.
COMMAND = """
import atexit, collections, json, sys
from jax import monitoring
from spmd_trainer import main
from spmd_trainer.programs import in_flight

events, counts = collections.Counter(), {}
monitoring.register_event_duration_secs_listener(lambda name, *_, **__: events.update([name.rsplit("/", 1)[-1]]))
add = in_flight.StepsInFlight.add
def counted(self, step, packed):
    add(self, step, packed)
    counts.update(counts or {"first": 1, **events})
in_flight.StepsInFlight.add = counted
atexit.register(lambda: print(json.dumps(counts), file=sys.stderr))
main.run()
"""
TRACED = ("jaxpr_trace_duration", "jaxpr_to_mlir_module_duration", "backend_compile_duration")


class Project:
    """A user's folder with the package my_pkg, a cache and a run that was trained for 4 steps."""

    def __init__(self, folder):
        self.folder = folder
        (folder / "my_pkg").mkdir()
        (folder / "my_pkg" / "__init__.py").write_text("")
        (folder / "my_pkg" / "net.py").write_text(textwrap.dedent(EXPERIMENT))
        self.layers = folder / "my_pkg" / "layers.py"
        self.layers.write_text(LAYERS)

    def start(self, run, *flags, scale="1", cache="cache"):
        """Trains; returns (counts of events until the end of the first step, log)."""
        directory = f"--jax_cache_dir={self.folder / cache}" if cache else "--jax_cache_dir="
        repo = os.getcwd()
        # Every program goes through JAX's cache, also those that compile fast.
        env = {**os.environ, "PYTHONPATH": repo, "MY_SCALE": scale, "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
        env.pop("XLA_FLAGS")
        ran = subprocess.run(
            [sys.executable, "-c", COMMAND, "--exp=my_pkg.net.Net", f"--job_log_dir={run}", directory, *flags],
            cwd=self.folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )
        assert ran.returncode == 0, ran.stderr[-3000:]
        return json.loads(ran.stderr.splitlines()[-1]), ran.stderr

    def losses(self, run):
        lines = (self.folder / run / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
        return {record["step"]: record["loss"] for record in map(json.loads, lines)}


@pytest.fixture(scope="module")
def project(tmp_path_factory):
    made = Project(tmp_path_factory.mktemp("project"))
    _, log = made.start("first")
    assert_names(log, "traced: no earlier")
    return made


@pytest.mark.full
def test_another_start_traces_and_compiles_nothing(project):
    # Without saves: Orbax compiles slices of its own.
    counts, log = project.start("second", "--enable_checkpoint_saving=false")
    assert_names(log, "compiled train step", "an earlier start")
    # A run that begins compiles its initialisation, and nothing else.
    assert counts["jaxpr_trace_duration"] <= 2, counts
    assert project.losses("second") == project.losses("first")


@pytest.mark.full
def test_a_resumed_run_traces_and_compiles_nothing_and_continues_its_curve(project):
    directory, losses = project.folder / "first" / "checkpoints", project.losses("first")
    (directory / "4").rename(project.folder / "removed")
    counts, log = project.start("first", "--enable_checkpoint_saving=false")
    assert "training from step 2 to 4" in log
    assert not set(TRACED) & counts.keys(), counts
    assert project.losses("first") == losses


@pytest.mark.full
def test_an_environment_variable_that_a_layer_reads_is_traced_anew(project):
    _, log = project.start("scaled", "--enable_checkpoint_saving=false", scale="2")
    assert_names(log, "traced: the environment", "variable MY_SCALE")
    assert project.losses("scaled") != project.losses("first")


@pytest.mark.full
def test_an_edited_layer_is_traced_anew(project):
    text = project.layers.read_text()
    project.layers.write_text(text.replace("jnp.tanh(", "jnp.sin("))
    try:
        _, log = project.start("edited", "--enable_checkpoint_saving=false")
    finally:
        project.layers.write_text(text)
    assert_names(log, f"traced: {project.layers} has changed")
    assert project.losses("edited") != project.losses("first")


@pytest.mark.full
def test_a_changed_setting_is_named_and_its_step_kept_too(project):
    flags = ("--enable_checkpoint_saving=false", "--fdl.set=task.train.save_max_to_keep=7")
    _, log = project.start("changed", *flags)
    assert_names(log, "traced: task.train.save_max_to_keep was")
    # The same program, which JAX's cache has: XLA can't write the code of such a one.
    _, log = project.start("changed_again", *flags)
    assert_names(log, "compiled train step", "an earlier start")
    assert project.losses("changed_again") == project.losses("first")
