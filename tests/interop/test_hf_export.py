"""What is exported: the tensors that came in, bit for bit; other dtypes, several files, moving averages; nothing half-written."""

from __future__ import annotations

import json
import os
import shutil

import jax
import ml_dtypes
import numpy as np
import pytest
from facts import raises_naming
from hf_models import DATA, make_job, mesh_of, read

import spmd_trainer as st
from spmd_trainer import hf
from spmd_trainer.errors import UserError
from spmd_trainer.hf import export_folder

# One folder of each family, each with other sizes.
FAMILIES = [
    "llama_biases",
    "llama4",
    "llama4_two_of_four",
    "qwen2_tied",
    "qwen3",
    "qwen3_moe_wide",
    "mistral_wide_heads",
    "mixtral",
    "glm4_moe_groups",
    "deepseek_v3",
    "qwen3_next",
    "qwen3_5",
    "qwen3_5_moe",
    "gpt_oss",
    "gemma2_no_caps",
    "gemma3",
    "gemma4",
    "gemma4_own_values",
    "gpt2",
    "olmo2_wide",
    "olmo3_yarn",
]
# Those of `make test`.
SHORT = ("qwen2_tied", "mixtral", "gemma2_no_caps", "gpt2")


@pytest.fixture(scope="module")
def llama():
    """A job, and the state of its folder, with padding in most variables."""
    job = make_job(DATA / "llama_tokenizer", mesh_of(1, 2, 3))
    return job, read(DATA / "llama_tokenizer", job)


def values(folder):
    """All tensors of a folder by name."""
    tensors = hf.open_folder(folder).tensors
    return {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in tensors.items()}


@pytest.mark.parametrize("name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.full) for n in FAMILIES])
def test_what_was_imported_is_exported_bit_for_bit(name, tmp_path):
    folder, exported = DATA / name, tmp_path / "exported"
    job = make_job(folder, mesh_of(1, 4, 2))
    hf.export(read(folder, job), job, exported, imported_from=folder)
    for file in ("model.safetensors", "generation_config.json"):
        assert (exported / file).read_bytes().strip() == (folder / file).read_bytes().strip(), file
    wanted = json.loads((folder / "config.json").read_text())
    if "num_nextn_predict_layers" in wanted:
        wanted["num_nextn_predict_layers"] = 0  # these folders have none
    assert json.loads((exported / "config.json").read_text()) == wanted


def test_the_tokenizer_comes_along(llama, tmp_path):
    job, state = llama
    hf.export(state, job, tmp_path / "out", imported_from=DATA / "llama_tokenizer")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (DATA / "llama_tokenizer" / name).read_bytes()
    assert not (tmp_path / "out" / "expected.npz").exists()


def test_several_files_another_dtype_and_a_config_made_from_the_model(llama, tmp_path):
    job, state = llama
    hf.export(state, job, tmp_path / "out", "bfloat16", max_file_bytes=4000)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert files == [f"model-{i:05}-of-{len(files):05}.safetensors" for i in range(1, len(files) + 1)]
    assert len(files) > 2
    # The embedding alone is larger.
    assert all((tmp_path / "out" / file).stat().st_size < 4000 + 2000 for file in files[1:])
    folder = hf.open_folder(tmp_path / "out")
    assert folder.spec == hf.open_folder(DATA / "llama_tokenizer").spec
    assert folder.config["dtype"] == "bfloat16"
    originals, exported = values(DATA / "llama_tokenizer"), values(tmp_path / "out")
    assert index["metadata"]["total_size"] == sum(array.nbytes for array in exported.values())
    assert exported.keys() == originals.keys() == index["weight_map"].keys()
    for name, array in exported.items():
        np.testing.assert_array_equal(array, originals[name].astype(ml_dtypes.bfloat16))


def test_biases_of_experts_stay_float32(tmp_path):
    """In a model of bfloat16, too: they differ by less than it resolves."""
    job = make_job(DATA / "glm4_moe", mesh_of(1, 2, 1), VARIABLE_DTYPE="bfloat16")
    hf.export(read(DATA / "glm4_moe", job), job, tmp_path / "out")
    originals, exported = values(DATA / "glm4_moe"), values(tmp_path / "out")
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    np.testing.assert_array_equal(exported[name], originals[name])
    assert {array.dtype.name for key, array in exported.items() if "e_score" not in key} == {"bfloat16"}


@pytest.mark.full
def test_what_is_quantised_is_exported_without(tmp_path):
    folder = DATA / "gpt_oss_mxfp4"
    job = make_job(folder, mesh_of(1, 4, 2))
    hf.export(read(folder, job), job, tmp_path / "out", "bfloat16", imported_from=folder)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert "quantization_config" not in config
    originals, exported = values(folder), values(tmp_path / "out")
    assert originals.keys() == exported.keys()
    for name, array in originals.items():
        if name.endswith(("gate_up_proj", "down_proj")):
            np.testing.assert_array_equal(exported[name], array)


def test_a_failed_export_leaves_nothing(llama, tmp_path, monkeypatch):
    job, state = llama

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(export_folder, "_write_rest", full)
    with pytest.raises(OSError, match="No space left"):
        hf.export(state, job, tmp_path / "runs" / "out")
    assert list((tmp_path / "runs").iterdir()) == []


def test_an_empty_directory_stays_and_gets_the_folder(llama, tmp_path):
    job, state = llama
    (tmp_path / "mount").mkdir()
    (tmp_path / "mount" / ".mount.killed.writing").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "mount")
    inode = (tmp_path / "mount").stat().st_ino
    hf.export(state, job, tmp_path / "link")
    assert (tmp_path / "mount").stat().st_ino == inode
    assert (tmp_path / "link").is_symlink()
    assert hf.open_folder(tmp_path / "mount").family.model_type == "llama"
    # A killed export's own folder is left to its owner.
    assert [path.name for path in (tmp_path / "mount").glob(".*")] == [".mount.killed.writing"]


def test_what_a_killed_export_left_does_not_block_the_next(llama, tmp_path):
    job, state = llama
    (tmp_path / f".out.{os.getpid()}.writing").mkdir()
    hf.export(state, job, tmp_path / "out")
    umask = os.umask(0)
    os.umask(umask)
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o777 & ~umask
    assert (tmp_path / "out" / "config.json").exists()


def test_a_value_that_float16_does_not_hold(llama, tmp_path):
    job, state = llama
    scale = state.mdl_vars["params"]["lm"]["final_norm"]["scale"]
    large = jax.tree.map(lambda leaf: leaf * 0 + 1e5 if leaf is scale else leaf, state)
    with raises_naming(UserError, "model.norm.weight", 100000, "float16", 65504, "bfloat16"):
        hf.export(large, job, tmp_path / "out", "float16")
    assert list(tmp_path.iterdir()) == []
    hf.export(large, job, tmp_path / "out", "bfloat16")


def test_a_model_with_settings_changed_since_the_import(llama, tmp_path, caplog):
    job, state = llama
    folder = shutil.copytree(DATA / "llama_tokenizer", tmp_path / "folder")
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    config = json.loads((folder / "config.json").read_text())
    other = {**config, "eos_token_id": [2, 3], "rope_parameters": {"rope_type": "default", "rope_theta": 5e5}}
    (folder / "config.json").write_text(json.dumps(other))
    with caplog.at_level("WARNING"):
        hf.export(state, job, tmp_path / "out", imported_from=folder)
    assert "rotary_base differ" in caplog.text
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert exported["eos_token_id"] == [2, 3]
    assert exported["rope_parameters"]["rope_theta"] == 10_000
    assert exported["dtype"] == exported["torch_dtype"] == "float32"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (folder / "tokenizer.json").read_bytes()
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ messages }}"


def test_the_longest_sequence_is_the_models_own(llama, tmp_path):
    job, state = llama
    folder = shutil.copytree(DATA / "llama_tokenizer", tmp_path / "folder")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 64, "_comment": "mine"}))
    hf.export(state, job, tmp_path / "out", imported_from=folder)
    exported = json.loads((tmp_path / "out" / "config.json").read_text())
    assert (exported["max_position_embeddings"], exported["_comment"]) == (config["max_position_embeddings"], "mine")


def test_what_is_refused(llama, tmp_path):
    job, state = llama
    (tmp_path / "mine.txt").write_text("mine")
    with raises_naming(UserError, tmp_path, "not empty"):
        hf.export(state, job, tmp_path)
    with raises_naming(UserError, "dtype='float8'", "float32", "bfloat16", "float16"):
        hf.export(state, job, tmp_path / "out", "float8")
    with raises_naming(UserError, DATA / "llama_untied", "another model", "vocab_size"):
        hf.export(state, job, tmp_path / "out", imported_from=DATA / "llama_untied")
    with raises_naming(UserError, "Qwen2ForCausalLM", "qkv_bias"):
        hf.export(state, job, tmp_path / "out", architecture="Qwen2ForCausalLM")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine.txt"]


@pytest.mark.full
def test_training_from_a_folder_and_exporting_the_averages(tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("Tensors are read slice by slice, straight to the devices that hold them.\n" * 20)
    source = DATA / "llama_tokenizer"
    experiment = hf.experiment_from_folder(
        source,
        FILES=str(text),
        SEQ_LEN=16,
        GLOBAL_BATCH_SIZE=6,
        NUM_TRAIN_STEPS=3,
        LEARNING_RATE=1e-2,
        ICI_MESH_SHAPE=(1, 4, 2),
    )
    settings = {"overrides": ["task.train.learner.optimizer.ema_decay=0.5"]}
    st.train(experiment, tmp_path / "run", **settings)
    assert st.export(experiment, tmp_path / "run", tmp_path / "last", **settings) == 3
    st.export(experiment, tmp_path / "run", tmp_path / "averages", eval_averages="ema", **settings)
    # With the flags of training, too: the folder is where the run began, not what is exported.
    again = {**settings, "restore_checkpoint_dir": source}
    assert st.export(experiment, tmp_path / "run", tmp_path / "again", restore_checkpoint_step=3, **again) == 3
    assert (tmp_path / "again" / "model.safetensors").read_bytes() == (
        tmp_path / "last" / "model.safetensors"
    ).read_bytes()
    # A run that has not begun has the folder alone.
    assert st.export(experiment, tmp_path / "new", tmp_path / "first", dtype="float16", **again) == 0
    before, last, averages = values(source), values(tmp_path / "last"), values(tmp_path / "averages")
    for name, array in values(tmp_path / "first").items():
        np.testing.assert_array_equal(array, before[name].astype(np.float16))
        # The averages began at the folder's values, and follow the variables.
        moved = np.abs(last[name] - before[name]).max()
        assert 0 < np.abs(averages[name] - before[name]).max() < moved < 0.1, name
    assert (tmp_path / "last" / "tokenizer.json").exists()
    with raises_naming(UserError, "no optimizer states", "moving averages"):
        st.export(experiment, tmp_path / "new", tmp_path / "no", eval_averages="ema", **again)


def test_the_names_of_attributes(tmp_path):
    with raises_naming(UserError, "FromFolder", "SEQLEN", "SEQ_LEN"):
        hf.experiment_from_folder(tmp_path, SEQLEN=16)
