"""The folder of a model for text and images gives its text model, bit for bit."""

import json
import logging
import shutil

import numpy as np
import pytest
import safetensors.numpy
from facts import assert_names, raises_naming
from hf_models import DATA, make_job, mesh_of, read

from spmd_trainer import hf
from spmd_trainer.errors import UserError
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.sharding.variables import named_leaves

WHOLES = {
    "qwen3_5": ("Qwen3_5ForConditionalGeneration", "model.language_model.", "model.visual."),
    "qwen3_5_moe": ("Qwen3_5MoeForConditionalGeneration", "model.language_model.", "model.visual."),
    "gemma3": ("Gemma3ForConditionalGeneration", "language_model.model.", "vision_tower."),
    "gemma4": ("Gemma4ForConditionalGeneration", "model.language_model.", "model.vision_tower."),
    "llama4": ("Llama4ForConditionalGeneration", "language_model.model.", "vision_model."),
}


def fused(tensors, prefix):
    """Replaces the matrices of a layer's experts by two tensors, as in the folders of Qwen 3.5."""
    layers = sorted({name.partition(".mlp.experts.")[0] for name in tensors if ".mlp.experts." in name})
    for layer in layers:
        of_experts = {part: [] for part in ("gate_proj", "up_proj", "down_proj")}
        for expert in range(3):
            for part, found in of_experts.items():
                found.append(tensors.pop(f"{layer}.mlp.experts.{expert}.{part}.weight"))
        gate, up, down = map(np.stack, of_experts.values())
        tensors |= {f"{layer}.mlp.experts.gate_up_proj": np.concatenate([gate, up], axis=1)}
        tensors |= {f"{layer}.mlp.experts.down_proj": down}
    return tensors


def whole(name, folder):
    """Writes the folder of a whole whose text model is that of a golden folder."""
    architecture, prefix, vision = WHOLES[name]
    shutil.copytree(DATA / name, folder)
    text = json.loads((folder / "config.json").read_text())
    config = {"architectures": [architecture], "text_config": text, "vision_config": {"depth": 1}}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    tensors = {
        prefix + key.removeprefix("model.") if key.startswith("model.") else key: x for key, x in tensors.items()
    }
    tensors |= {f"{vision}blocks.0.weight": np.ones((2, 2), np.float32)}
    if name.startswith("qwen"):
        tensors |= {"mtp.norm.weight": np.ones(3, np.float32)}
    safetensors.numpy.save_file(fused(tensors, prefix), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("name", WHOLES)
def test_the_text_model_is_that_of_its_own_folder(name, tmp_path, caplog):
    caplog.set_level(logging.WARNING)
    found, wanted = hf_folder.open_folder(whole(name, tmp_path / name)), hf_folder.open_folder(DATA / name)
    assert_names(caplog.text, "vision model is not")
    assert ("mtp." in caplog.text) == name.startswith("qwen")
    assert (found.family, found.spec) == (wanted.family, wanted.spec)
    assert set(found.tensors) == set(wanted.tensors)
    for key, tensor in wanted.tensors.items():
        rows = (tensor.shape[0] // 2, tensor.shape[0])
        np.testing.assert_array_equal(found.tensors[key].read_rows(*rows), tensor.read_rows(*rows), err_msg=key)


@pytest.mark.full
def test_an_export_has_the_text_model_alone(tmp_path):
    folder = whole("qwen3_5_moe", tmp_path / "whole")
    job = make_job(folder, mesh_of(1, 2, 4))
    state = read(folder, job)
    hf.export(state, job, tmp_path / "out", imported_from=folder)
    exported = hf_folder.open_folder(tmp_path / "out")
    assert exported.config["architectures"] == ["Qwen3_5MoeForCausalLM"]
    for (path, one), (_, other) in zip(
        named_leaves(state.mdl_vars), named_leaves(read(tmp_path / "out", job).mdl_vars), strict=True
    ):
        np.testing.assert_array_equal(one, other, err_msg=path)


def test_experts_in_one_tensor_in_fp8_are_refused(tmp_path):
    folder = whole("qwen3_5_moe", tmp_path / "whole")
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    name = next(name for name in tensors if name.endswith("gate_up_proj"))
    tensors[f"{name}_scale_inv"] = np.ones((3, 1, 1), np.float32)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors")
    with raises_naming(UserError, "gate_up_proj_scale_inv", "FP8"):
        hf_folder.open_folder(folder)


def test_a_whole_whose_text_config_is_missing_is_refused(tmp_path):
    folder = whole("gemma3", tmp_path / "gemma3")
    (folder / "config.json").write_text(json.dumps({"architectures": ["Gemma3ForConditionalGeneration"]}))
    with raises_naming(UserError, "Gemma3ForConditionalGeneration", "text_config"):
        hf_folder.open_folder(folder)
