"""`lm.hf.FromFolder`: what its attributes mean, and settings that differ from the folder's."""

from __future__ import annotations

import json
import shutil

import pytest
from etils import epath
from facts import assert_names, raises_naming
from hf_models import DATA, make_job, mesh_of

from spmd_trainer import hf
from spmd_trainer.decoder.generation import settings
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ChatPromptInput, text
from spmd_trainer.training import experiment_config

FOLDER = DATA / "llama_tokenizer"


def resolved(*overrides):
    return experiment_config.resolve("lm.hf.FromFolder", [f"FOLDER={FOLDER}", *overrides])


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [("a.jsonl", ChatPromptInput), ("['a.jsonl', 'b.jsonl']", ChatPromptInput), ("['a.txt']", text.PromptInput)],
)
def test_the_kind_of_prompts(prompts, kind):
    (config,) = resolved(f"PROMPTS={prompts}").config.decode_datasets
    assert config.__fn_or_cls__ is kind


def test_prompts_of_two_kinds_are_refused():
    with raises_naming(UserError, "PROMPTS", "*.jsonl", "*.parquet", "one kind"):
        resolved("PROMPTS=['a.jsonl', 'b.txt']")


def test_another_tokenizer_has_other_ids(tmp_path):
    shutil.copytree(FOLDER, tmp_path / "folder")
    (tmp_path / "folder/generation_config.json").write_text(json.dumps({"eos_token_id": 2, "pad_token_id": 3}))
    own = experiment_config.resolve("lm.hf.FromFolder", [f"FOLDER={tmp_path / 'folder'}"]).task_p.model.generation
    assert (own.eos_ids, own.pad_id) == ((2,), 3)
    other = [f"FOLDER={tmp_path / 'folder'}", "TOKENIZER=words.model"]
    assert experiment_config.resolve("lm.hf.FromFolder", other).task_p.model.generation.eos_ids is None


def test_short_runs_have_a_shorter_warm_up():
    for steps in (1, 2, 3):
        assert resolved(f"NUM_TRAIN_STEPS={steps}").task_p.train.num_train_steps == steps


def test_a_model_with_another_rotary_base_is_not_that_of_the_folder(caplog):
    job = make_job(DATA / "llama_biases", mesh_of(1, 1, 1))
    job.task.model.lm_tpl.spec.rotary_base = 500_000.0
    with raises_naming(UserError, DATA / "llama_biases", "rotary_base", "10000.0 there", "500000.0 here"):
        hf.require_model(epath.Path(DATA / "llama_biases"), job.task)
    source = hf.open_source(epath.Path(DATA / "llama_biases"), None)
    hf.warn_of_differences(source, job.task)
    assert_names(caplog.text, DATA / "llama_biases", "differs", "rotary_base")


@pytest.mark.parametrize(
    ("config", "message"),
    [({"temperature": "x", "do_sample": True}, "wrong type"), ({"stop_strings": 5}, "wrong type")],
)
def test_a_malformed_generation_config_is_named(config, message):
    with pytest.raises(UserError, match=f"models/generation_config.json: .*{message}"):
        settings.from_generation_config(config, "models/generation_config.json")


def test_options_that_change_the_tokens_are_named(caplog):
    found = settings.from_generation_config(
        {"max_length": 4096, "num_return_sequences": 3, "pad_token_id": -1}, "g.json"
    )
    assert found.pad_id == 0
    assert "max_length=4096, num_return_sequences=3" in caplog.text
