"""A Hugging Face folder where a run reads checkpoints: `--restore_checkpoint_dir`, warm starts, evaluation, the command line."""

from __future__ import annotations

import types

import jax
import numpy as np
import pytest
from absl import flags
from absl.testing import flagsaver
from etils import epath
from facts import raises_naming
from hf_models import DATA, make_job, mesh_of

from spmd_trainer import hf
from spmd_trainer import main as _main  # noqa: F401  (defines the flags)
from spmd_trainer.checkpointing import LOAD_ALL, CheckpointLoadingRules, CheckpointMismatchError, loading_rules, restore
from spmd_trainer.cli import run_flags
from spmd_trainer.errors import UserError
from spmd_trainer.hf import export_mode
from spmd_trainer.training import checkpoint_sources, start_checks, start_up
from spmd_trainer.training.job import Job

LLAMA = DATA / "llama_biases"


@pytest.fixture(scope="module")
def job():
    return make_job(LLAMA, mesh_of(1, 2, 2))


@pytest.mark.full
def test_training_begins_with_the_folder_and_a_fresh_optimizer(job):
    state, position, origin = start_up._restore_from(epath.Path(LLAMA), None, job)
    assert position is None
    assert origin == {"hugging_face_folder": {"path": str(LLAMA)}}
    assert int(state.step) == 0
    moments = [leaf for leaf in jax.tree.leaves(state.opt_states) if leaf.ndim > 1]
    assert moments
    assert not any(np.asarray(leaf).any() for leaf in moments)
    padded = job.partitioner.metadata.variables.mdl_vars["params"]["lm"]["token_emb"]["w"]
    assert padded.logical_shape == (89, 15)
    assert padded.padded_shape == (90, 16)
    found = np.asarray(state.mdl_vars["params"]["lm"]["token_emb"]["w"])
    assert not found[89:].any()
    assert not found[:, 15:].any()
    assert found[:89, :15].all()


def test_rules_name_parts_of_a_folder(job):
    rules = {
        str(LLAMA): CheckpointLoadingRules(load_rules=[LOAD_ALL], ignore_rules=[".*token_emb.*"]),
    }
    variables = job.partitioner.metadata.variables
    resolved = loading_rules.resolve_rules(
        variables, rules, check_contents=False, open_foreign=checkpoint_sources.open_source
    )
    ((source, paths),) = resolved.parts
    assert source.name == f"Hugging Face folder {LLAMA}"
    assert "mdl_vars/params/lm/token_emb/w" not in paths
    assert len(paths) == len(jax.tree.leaves(variables.mdl_vars)) - 1
    other = {str(DATA / "llama_untied"): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    with raises_naming(
        CheckpointMismatchError,
        "init_from_checkpoint_rules",
        f"Hugging Face folder {DATA / 'llama_untied'}",
        "token_emb/w",
    ):
        loading_rules.resolve_rules(variables, other, check_contents=False, open_foreign=checkpoint_sources.open_source)


def test_a_folder_has_no_steps_and_no_optimizer_states(job):
    with raises_naming(UserError, "step 3", LLAMA, "no steps"):
        hf.open_source(epath.Path(LLAMA), 3)
    with raises_naming(UserError, LLAMA, "no optimizer states", "moving averages"):
        restore(hf.open_source(epath.Path(LLAMA), None), job.partitioner.metadata)


def test_a_damaged_folder_is_named_before_the_run_begins(job, tmp_path):
    (tmp_path / "config.json").write_text('{"architectures": ["T5ForConditionalGeneration"]}')
    rules = {str(tmp_path): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
    with raises_naming(UserError, tmp_path / "config.json", "T5ForConditionalGeneration", "not supported"):
        loading_rules.resolve_rules(
            job.partitioner.metadata.variables, rules, check_contents=False, open_foreign=checkpoint_sources.open_source
        )


def command(*arguments):
    """Parses a command line into a run's config."""
    with flagsaver.flagsaver():
        flags.FLAGS(["spmd-trainer", "--exp=lm.stdlib.StdlibBytesTiny", "--job_log_dir=nowhere", *arguments])
        run_flags.refuse_other_modes(flags.FLAGS)
        return run_flags.run_config_from_flags(flags.FLAGS, lambda mode: 1)


def test_export_on_the_command_line(tmp_path):
    config = command("--mode=export", f"--export_dir={tmp_path / 'out'}", "--export_dtype=bfloat16")
    assert config.directory == tmp_path / "out"
    assert (config.dtype, config.eval_averages) == ("bfloat16", None)
    with pytest.raises(UserError, match="--mode=export needs --export_dir=DIR"):
        command("--mode=export")
    with pytest.raises(UserError, match="--export_dir goes with --mode=export"):
        command("--mode=train", f"--export_dir={tmp_path}")
    assert not config.adapter
    assert command("--mode=export", f"--export_dir={tmp_path / 'out'}", "--export_adapter").adapter
    with pytest.raises(UserError, match="--export_adapter writes float32; leave --export_dtype out"):
        command("--mode=export", f"--export_dir={tmp_path / 'out'}", "--export_adapter", "--export_dtype=bfloat16")
    with pytest.raises(UserError, match="--export_adapter goes with --mode=export"):
        command("--mode=train", "--export_adapter")


def test_the_folder_of_another_vocabulary_is_not_copied_into_an_export(job, monkeypatch):
    untied = epath.Path(DATA / "llama_untied")
    of_run = types.SimpleNamespace(task=job.task, config=types.SimpleNamespace(restore_checkpoint_dir=untied))
    # The rules of the experiment name the folder that the model came from.
    assert export_mode._imported_from(of_run, {}) == epath.Path(LLAMA)
    # The folder that the checkpoint names comes before them.
    noted = {"hugging_face_folder": {"path": str(DATA / "llama_linear_rope")}}
    monkeypatch.setattr(export_mode, "_fits", lambda *_: True)
    of_run.config.restore_checkpoint_dir = None
    assert export_mode._imported_from(of_run, noted) == epath.Path(DATA / "llama_linear_rope")


@pytest.mark.parametrize(("directory", "is_opened"), [("out", True), ("s3://bkt/out", False)])
def test_how_to_open_an_export_is_logged_for_local_ones(job, tmp_path, monkeypatch, caplog, directory, is_opened):
    directory = directory if "://" in directory else str(tmp_path / directory)
    config = command("--mode=export", f"--export_dir={directory}", f"--job_log_dir={tmp_path / 'run'}")
    restored = types.SimpleNamespace(step=3, state=None, metadata={"metadata": {}})
    monkeypatch.setattr(export_mode.checkpoints, "restore_for_inference", lambda *_, **__: restored)
    monkeypatch.setattr(export_mode.hf, "export", lambda *_, **__: None)
    with caplog.at_level("INFO", logger="absl"):
        assert export_mode.export(Job(config, job.task, job.partitioner, None)) == 3
    assert f"exporting step 3 of {tmp_path / 'run' / 'checkpoints'}" in caplog.text
    assert ("from_pretrained" in caplog.text) == is_opened


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("file", "--export_dir=.*file can't be written: .*file is a file; give a directory"),
        ("file/below", "--export_dir=.*below can't be written: .*file is a file; give a directory"),
        ("full", "--export_dir=.*full is not empty; give a new directory"),
    ],
)
def test_the_directory_of_an_export_is_checked_at_the_start(tmp_path, name, message):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    config = command("--mode=export", f"--export_dir={tmp_path / name}", f"--job_log_dir={tmp_path / 'run'}")
    with pytest.raises(UserError, match=message):
        start_checks.check_directories(config)


def test_the_step_of_an_export_with_the_flags_of_training(tmp_path):
    arguments = [
        "--mode=export",
        f"--export_dir={tmp_path / 'out'}",
        f"--job_log_dir={tmp_path / 'run'}",
        f"--restore_checkpoint_dir={LLAMA}",
    ]
    start_checks.check_directories(command(*arguments))
    with pytest.raises(UserError, match=f"no step 7 in {LLAMA}; there are 0"):
        start_checks.check_directories(command(*arguments, "--restore_checkpoint_step=7"))
