"""Pax checkpoints in training, evaluation, decoding, warm starts and conversion, as a user's commands read them."""

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from etils import epath
from facts import assert_names, raises_naming
from pax_models import EXPERIMENTS, assert_holds, job_on, snapshot
from warm_starts import init_from_rules

import spmd_trainer
from spmd_trainer import pax
from spmd_trainer.checkpointing import (
    LOAD_ALL,
    Checkpointer,
    CheckpointLoadingRules,
    CheckpointMismatchError,
    CheckpointNotFoundError,
)
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.training import checkpoints, run_directory

ADAM, ADAFACTOR, EMA = "UnevenRepeatedAdam", "UnevenRepeatedAdafactor", "PlainAdamEma"
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


def run(*command: object) -> subprocess.CompletedProcess:
    paths = [str(HERE), str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=300, env=env, check=False
    )


def refused(*command: object) -> str:
    result = run(*command)
    assert result.returncode == 2, result.stderr
    assert "Traceback" not in result.stderr
    return result.stderr


@pytest.mark.full
def test_training_starts_from_a_pax_checkpoint(pax_data, tmp_path):
    """Two further steps on the batches that come next, saved as this trainer's. The directory of Pax stays as it is."""
    directory = pax_data.checkpoints(ADAFACTOR, "ocdbt_1.2")
    before = snapshot(directory)
    result = run(
        "-m",
        "spmd_trainer.main",
        f"--exp=pax_models.{ADAFACTOR}",
        f"--job_log_dir={tmp_path / 'run'}",
        f"--restore_checkpoint_dir={directory}",
    )
    assert result.returncode == 0, result.stderr
    assert "restored step 20" in result.stderr
    lines = (tmp_path / "run" / "summaries" / "train" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [21, 22]
    record = json.loads((tmp_path / "run" / "checkpoints" / "22" / "record" / "record.json").read_text())
    assert "MjI=" in json.dumps(record["input_state"])  # "22": the input went on from batch 20
    assert snapshot(directory) == before


@pytest.mark.full
def test_a_pax_directory_is_no_job_log_dir(pax_data, tmp_path):
    directory = pax_data.checkpoints(ADAM)
    before = snapshot(directory)
    with raises_naming(
        UserError,
        f"--job_log_dir={directory}",
        "Pax run",
        f"--restore_checkpoint_dir={directory} --restore_checkpoint_step=20",
    ):
        run_directory.check_directory(epath.Path(directory / "checkpoint_00000020"), "any", trains=True)
    message = refused("-m", "spmd_trainer.main", f"--exp=pax_models.{ADAM}", f"--job_log_dir={directory}")
    assert_names(message, "Pax run", "only reads")
    assert f"--restore_checkpoint_dir={directory}" in message
    message = refused(
        "-m",
        "spmd_trainer.main",
        f"--exp=pax_models.{ADAM}",
        f"--job_log_dir={tmp_path / 'run'}",
        f"--restore_checkpoint_dir={directory}",
        "--restore_checkpoint_step=21",
    )
    assert "no step 21" in message
    assert "there are 20" in message
    assert "damaged" not in message
    assert snapshot(directory) == before
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="variables", marks=pytest.mark.full),
        pytest.param(("task.train.eval_use_ema_states=True",), id="averages"),
    ],
)
def test_evaluates_a_pax_checkpoint(pax_data, tmp_path, overrides):
    directory = pax_data.checkpoints(EMA)
    result = spmd_trainer.evaluate(
        EXPERIMENTS[EMA], tmp_path, overrides=overrides, restore_checkpoint_dir=directory / "checkpoint_00000020"
    )
    assert result.step == 20
    assert np.isfinite(result.metrics["held_out/total_loss"])


def test_averages_are_taken_for_inference(pax_data):
    expected = pax_data.expected(EMA)
    job = job_on(EMA, (1, 4, 2))
    config = dataclasses.replace(job.config, restore_checkpoint_dir=epath.Path(pax_data.checkpoints(EMA)))
    reading = dataclasses.replace(job, config=config)
    restored = checkpoints.restore_for_inference(reading, "ema")
    step, state = restored.step, restored.state
    assert step == 20
    for path, value in named_leaves(state.mdl_vars):
        np.testing.assert_array_equal(value, expected[f"state/opt_states/0/4/ema/{path}"])
    # The newest step, and no waiting for others.
    [restored] = list(checkpoints.follow(reading, "none"))
    step, state = restored.step, restored.state
    assert step == 20
    for path, value in named_leaves(state.mdl_vars):
        np.testing.assert_array_equal(value, expected[f"state/mdl_vars/{path}"])


@pytest.mark.full
def test_decodes_with_a_pax_checkpoint(pax_data, tmp_path):
    result = spmd_trainer.decode(EXPERIMENTS[ADAM], tmp_path, restore_checkpoint_dir=pax_data.checkpoints(ADAM))
    assert result.step == 20
    assert len(result.examples["prompts"]) == 16


def initialised(name, mesh=(1, 4, 2)):
    job = job_on(name, mesh)
    metadata = job.partitioner.metadata
    return job.partitioner.initialize_train_state(job.prng_key), metadata


@pytest.mark.parametrize("kind", ["zarr_0.0", "zarr_1.1", "ocdbt_1.2", "flax_1.1"])
def test_a_warm_start_takes_the_whole_state(pax_data, kind):
    state, metadata = initialised(ADAM)
    rules = CheckpointLoadingRules(load_rules=[LOAD_ALL], load_step=True, load_opt_states=True)
    directory = pax_data.checkpoints(ADAM, kind)
    state, report = init_from_rules(
        state, metadata.variables, metadata.mesh, {directory: rules}, open_foreign=pax.open_source
    )
    assert report.opt_states_loaded
    assert_holds(state, metadata.variables, pax_data.expected(ADAM))


@pytest.mark.full
def test_a_warm_start_by_rules(pax_data):
    """Averages instead of variables, under other names, and nothing else."""
    expected = pax_data.expected(EMA)
    state, metadata = initialised(EMA)
    fresh = dict(named_leaves(jax.tree.map(np.asarray, state)))
    rules = CheckpointLoadingRules(
        load_rules=[
            ("params/lm/transformer/x_layers_0/(.*)", "ema/params/lm/transformer/x_layers_1/{}"),
            ("params/lm/final_ln/(.*)", "params.lm.final_ln.{}"),
        ],
        ignore_rules=[".*/bias$"],
    )
    directory = pax_data.checkpoints(EMA) / "checkpoint_00000020"
    state, _ = init_from_rules(
        state, metadata.variables, metadata.mesh, {directory: rules}, open_foreign=pax.open_source
    )
    loaded = dict(named_leaves(jax.tree.map(np.asarray, state)))
    for path, value in loaded.items():
        if path == "mdl_vars/params/lm/final_ln/scale":
            wanted = expected[f"state/{path}"]
        elif path.startswith("mdl_vars/params/lm/transformer/x_layers_0/") and not path.endswith("/bias"):
            wanted = expected[
                f"state/opt_states/0/4/ema/{path.removeprefix('mdl_vars/')}".replace("x_layers_0", "x_layers_1")
            ]
        else:
            wanted = fresh[path]
        np.testing.assert_array_equal(value, wanted, err_msg=path)


def test_warm_starts_that_do_not_fit(pax_data):
    state, metadata = initialised(ADAM)

    def load(directory, **fields):
        rules = CheckpointLoadingRules(**fields)
        init_from_rules(state, metadata.variables, metadata.mesh, {directory: rules}, open_foreign=pax.open_source)

    with pytest.raises(
        CheckpointMismatchError, match=r"no 'params/lm/softmax/logits_fnn/linear/w'.*nearest .*logits_ffn"
    ):
        load(pax_data.checkpoints(ADAM), load_rules=[(".*/linear/w", "params/lm/softmax/logits_fnn/linear/w")])
    name = "params/lm/softmax/logits_ffn/linear/w"
    with raises_naming(CheckpointMismatchError, name, "(32, 256) in the checkpoint", "(15, 257) in the model"):
        load(pax_data.checkpoints(EMA), load_rules=[(name, name)])
    with pytest.raises(CheckpointMismatchError, match="load_opt_states"):
        load(pax_data.checkpoints(ADAFACTOR), load_rules=[LOAD_ALL], load_opt_states=True)
    with pytest.raises(CheckpointNotFoundError, match=r"no step 7 in .*there are 0, 20"):
        load(pax_data.checkpoints(ADAFACTOR, "ocdbt_1.2"), load_rules=[LOAD_ALL], step=7)


@pytest.mark.full
def test_the_tool_converts_with_and_without_the_experiment(pax_data, tmp_path):
    tool, source = ROOT / "tools" / "import_pax_checkpoint.py", pax_data.checkpoints(ADAM, "zarr_0.0")
    result = run(tool, "--exp", f"pax_models.{ADAM}", source, tmp_path / "ours")
    assert result.returncode == 0, result.stderr
    assert "step 20" in result.stdout
    job = job_on(ADAM, (1, 8, 1))
    metadata = job.partitioner.metadata
    with Checkpointer(tmp_path / "ours", read_only=True) as ours:
        assert_holds(ours.restore(metadata.variables, metadata.mesh).state, metadata.variables, pax_data.expected(ADAM))
    message = refused(tool, tmp_path, tmp_path / "none")
    assert_names(message, tmp_path, "no Pax checkpoint")
    assert "--exp" in run(tool, "--help").stdout
