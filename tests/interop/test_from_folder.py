"""`lm.hf.FromFolder`: what its attributes mean, and settings that differ from the folder's."""

from __future__ import annotations

import gzip
import json
import shutil

import pytest
from etils import epath
from facts import assert_names, raises_naming
from hf_models import DATA, make_job, mesh_of
from praxis import base_hyperparams

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


TEXTS = ["one", "two words", "{} is no JSON", "\n", "the last"]


def write_jsonl(folder, key):
    content = "".join(json.dumps({"id": str(n), key: text}) + "\n" for n, text in enumerate(TEXTS))
    (folder / "a.jsonl").write_text(content)


def write_compressed(folder, key):
    write_jsonl(folder, key)
    (folder / "a.jsonl.gz").write_bytes(gzip.compress((folder / "a.jsonl").read_bytes()))
    (folder / "a.jsonl").unlink()


def write_parquet(folder, key):
    import pyarrow as pa
    import pyarrow.parquet

    pyarrow.parquet.write_table(pa.table({"id": TEXTS, key: TEXTS}), folder / "a.parquet")


def write_separated(folder, key):
    (folder / "a.txt").write_text("<END>".join(TEXTS))
    return f"SEPARATOR={'<END>'!r}"


def write_texts(folder, key):
    for n, content in enumerate(TEXTS):
        (folder / f"{n}.txt").write_text(content)


@pytest.mark.parametrize("write", [write_jsonl, write_compressed, write_parquet, write_separated, write_texts])
@pytest.mark.parametrize("name", ["lm.hf.FromFolder", "lm.finetune.LoraFromFolder"])
def test_files_of_every_kind_give_the_labels_of_their_texts(write, name, tmp_path):
    found = [f"FILES={tmp_path}", f"EVAL_FILES={tmp_path}", "COLUMN=body", "SEQ_LEN=8", "GLOBAL_BATCH_SIZE=2"]
    found += [more] if (more := write(tmp_path, "body")) else []
    config = experiment_config.resolve(name, [f"FOLDER={FOLDER}", *found]).config
    heldout = base_hyperparams.instantiate(config.eval_datasets[0])
    labels = []
    while len(labels) < 100:
        try:
            batch = heldout.get_next()
        except StopIteration:
            break
        labels += batch.labels[batch.weights > 0].tolist()
    expected = [heldout.tokenizer.eos_id] * len(TEXTS)
    for content in TEXTS:
        expected += heldout.tokenizer.encode(content.encode(), "").tolist()
    assert sorted(labels) == sorted(expected)
    train = base_hyperparams.instantiate(config.train_datasets[0])
    assert set(train.get_next().labels[0].tolist()) <= {0, *labels}


def test_a_key_that_is_not_there_is_asked_for(tmp_path):
    write_jsonl(tmp_path, "body")
    config = resolved(f"FILES={tmp_path}/a.jsonl", "SEQ_LEN=8", "GLOBAL_BATCH_SIZE=2").config
    with raises_naming(UserError, "a.jsonl:", "no key 'text'", "known: body, id", "`column`", "COLUMN"):
        base_hyperparams.instantiate(config.train_datasets[0]).get_next()


def test_files_that_are_empty_are_not_those_of_the_library():
    with raises_naming(UserError, "`files` has no paths"):
        base_hyperparams.instantiate(resolved("FILES=[]").config.train_datasets[0])


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
