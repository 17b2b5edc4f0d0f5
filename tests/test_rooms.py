"""The core trains without the other rooms: each is left out of a copy of the package in turn, and all of them at once."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1] / "spmd_trainer"
CORE = {
    *("sharding", "multihost", "storage", "models", "step", "checkpointing", "training", "errors", "inputs"),
    *("settings", "train_states", "tasks_lib", "base_experiment", "experiment_registry", "experiment_modules"),
    *("callbacks", "__init__"),
}
# praxis needs its bridge, which lies in pax/.
NEEDED = {"pax"}
# Of inputs/: batches, positions, prefetching and arrays in memory. Texts, conversations, corpora, images and records are readers.
INPUTS = {
    *("__init__", "batches", "batch_checks", "examples", "indexed", "permutations", "prefetch", "text_settings"),
}


def names_in(folder):
    return {path.stem for path in folder.iterdir() if path.is_dir() or path.suffix == ".py"} - {"__pycache__"}


READERS = sorted(f"inputs/{name}" for name in names_in(ROOT / "inputs") - INPUTS)
OTHERS = sorted(names_in(ROOT) - CORE - NEEDED | {"pax/import_names"})


def is_core(path):
    """True for a file of the package that `test_a_tiny_model_trains_without` leaves in all its cases."""
    name = path.relative_to(ROOT).with_suffix("").as_posix()
    return name.split("/")[0] in CORE and not any(f"{name}/".startswith(f"{reader}/") for reader in READERS)


TRAINS = """
import importlib.util, pathlib, sys, types
directory, *absent = sys.argv[1:]
for room in absent:
    assert importlib.util.find_spec(f"spmd_trainer.{room.replace('/', '.')}") is None, room

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from praxis import pax_fiddle

from spmd_trainer import base_experiment, experiment_registry, models, tasks_lib
from spmd_trainer.checkpointing import LOAD_ALL, CheckpointLoadingRules
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ArrayInput
from spmd_trainer.training import checkpoint_sources
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import make_run_config
from spmd_trainer.training.train import train

def rows():
    x = np.random.default_rng(0).normal(size=(64, 6)).astype(np.float32)
    return {"x": x, "y": np.tanh(x)}

def loss(outputs, batch):
    squared = jnp.mean((outputs - batch["y"]) ** 2, axis=-1)
    return {"loss": (jnp.mean(squared), jnp.asarray(squared.size, jnp.float32))}

class Tiny(base_experiment.BaseExperiment):
    def datasets(self):
        return [pax_fiddle.Config(ArrayInput, name="train", is_training=True, arrays=rows, batch_size=16)]

    def task(self):
        model = pax_fiddle.Config(models.NnxModel, inputs="x", loss=loss)
        model.module = pax_fiddle.Config(nnx.Linear, in_features=6, out_features=6)
        model.mesh_axis_names, model.ici_mesh_shape = ["data", "mdl"], [4, 2]
        task_p = pax_fiddle.Config(tasks_lib.SingleTask, name="tiny", model=model)
        task_p.train.num_train_steps = 3
        task_p.train.learner.loss_name = "loss"
        task_p.train.learner.optimizer = optax.adam(0.1)
        return task_p

# As from a module of the user's, so that the end of the run looks for commands to name.
Tiny.__module__ = "mine"
sys.modules["mine"] = types.ModuleType("mine")
experiment_registry.register(Tiny)
assert jax.device_count() == 8
result = train(Job.build(make_run_config(Tiny, directory)))
assert result.step == 3 and np.isfinite(result.metrics["loss"])
assert (pathlib.Path(directory) / "checkpoints" / "3").is_dir()
# From its own checkpoint, and no step more.
assert train(Job.build(make_run_config(Tiny, directory))).step == 3

class Warm(Tiny):
    def task(self):
        task_p = super().task()
        task_p.train.init_from_checkpoint_rules = {directory: CheckpointLoadingRules(load_rules=[LOAD_ALL])}
        return task_p

assert train(Job.build(make_run_config(Warm, directory + "_warm"))).step == 3
(folder := pathlib.Path(directory + "_folder")).mkdir()
(folder / "config.json").write_text("{}")
absent = sorted({"decoder", "hf"} & set(absent))
try:
    checkpoint_sources.is_hf_folder(folder)
    assert not absent
except UserError as error:
    assert f"spmd_trainer/{absent[-1]}/" in str(error) and str(folder) in str(error)
"""


COMMANDS = """
import sys

from spmd_trainer import main
from spmd_trainer.cli import flag_parsing
from spmd_trainer.errors import UserError
from spmd_trainer.training.run_config import make_run_config

def says(call):
    try:
        call()
    except (UserError, SystemExit) as error:
        sys.stderr.write(f"{error}\\n")

assert "--mode=lm_eval" in flag_parsing.help_page("all")
for setting in ({"hang_seconds": 900}, {"check_repeat_every": 2}, {"track": ["wandb"]}):
    says(lambda: make_run_config("lm.stdlib.StdlibBytesTiny", sys.argv[1], **setting))
for command in (["--mode=lm_eval", "--tasks=a"], ["--mode=plan", "--topology=v5e:2x2"], ["--mode=page"], ["--exp=x"]):
    sys.argv = ["spmd-trainer", *command]
    says(main.run)
    main.flags.FLAGS.unparse_flags()
    main.flags.FLAGS.mode = "train"
"""


def link(folder, copy, absent):
    """Links what a folder of the package holds, without these rooms, e.g. 'hf' or 'pax/import_names'."""
    copy.mkdir(parents=True)
    for path in folder.iterdir():
        name = path.relative_to(ROOT).with_suffix("").as_posix()
        if path.name == "__pycache__" or name in absent:
            continue
        if any(other.startswith(f"{name}/") for other in absent):
            link(path, copy / path.name, absent)
        else:
            (copy / path.name).symlink_to(path)


def run_without(absent, program, directory):
    """Runs a program on a copy of the package without these rooms."""
    package = directory / "trainer" / "spmd_trainer"
    link(ROOT, package, absent)
    environment = {
        **os.environ,
        "PYTHONPATH": str(package.parent),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
    }
    done = subprocess.run(
        [sys.executable, "-c", program, str(directory / "run"), *absent],
        cwd=directory,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stderr


def test_the_command_line_says_which_room_is_missing(tmp_path):
    said = run_without(["lm_eval", "planner", "watch"], COMMANDS, tmp_path)
    for asked, room in (
        ("--hang_seconds", "watch"),
        ("--check_repeat_every", "watch"),
        ("--track", "watch"),
        ("--mode=lm_eval", "lm_eval"),
        ("--mode=plan", "planner"),
        ("--mode=page", "watch"),
        ("this", "watch"),
    ):
        assert f"{asked} needs spmd_trainer/{room}/" in said
    assert "Traceback" not in said


@pytest.mark.parametrize(
    "absent",
    [[*OTHERS, *READERS], *(pytest.param([room], marks=pytest.mark.full) for room in OTHERS)],
    ids=["all", *OTHERS],
)
def test_a_tiny_model_trains_without(tmp_path, absent):
    run_without(absent, TRAINS, tmp_path)
