"""Hugging Face folders as they are opened and read: what is wrong with one is named, and every shard gets its values."""

from __future__ import annotations

import dataclasses
import json
import logging
import math
import os
import re
import shutil

import ml_dtypes
import numpy as np
import pytest
import safetensors
from facts import assert_names, raises_naming
from hf_models import DATA, NAMES, make_job, mesh_of, read
from jax.sharding import PartitionSpec

from spmd_trainer import hf
from spmd_trainer.checkpointing import DamagedCheckpointError
from spmd_trainer.errors import UserError
from spmd_trainer.hf import config_json, placing
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.hf.safetensors_file import Described, in_file_order, read_header, write
from spmd_trainer.sharding.variables import make_variable_spec
from spmd_trainer.storage import json_values


@pytest.fixture
def llama(tmp_path):
    """A copy of a folder, to be damaged."""
    return shutil.copytree(DATA / "llama_untied", tmp_path / "llama")


def contents(path):
    """The arrays of a file by name."""
    return {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in read_header(str(path)).items()}


def rewrite(path, arrays):
    """Writes arrays to a file."""
    order = in_file_order([Described(name, array.dtype, array.shape) for name, array in arrays.items()])
    with path.open("wb") as file:
        write(file, order, (arrays[tensor.name] for tensor in order))


def edit_config(folder, **changes):
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


def test_a_missing_a_surplus_and_a_misshapen_tensor_are_named(llama):
    arrays = contents(llama / "model.safetensors")
    arrays["model.layers.1.mlp.up_project.weight"] = arrays.pop("model.layers.1.mlp.up_proj.weight")
    arrays["model.norm.weight"] = arrays["model.norm.weight"][:-1]
    arrays["lm_head.weight"] = arrays["lm_head.weight"].astype(np.int32)
    rewrite(llama / "model.safetensors", arrays)
    with pytest.raises(hf.HfMismatchError) as raised:
        hf.open_folder(llama)
    message = str(raised.value)
    assert_names(message, "LlamaForCausalLM", "config.json", "missing: model.layers.1.mlp.up_proj.weight (26, 18)")
    assert_names(message, "mean model.layers.1.mlp.up_project.weight")
    assert "surplus: model.layers.1.mlp.up_project.weight (26, 18)" in message
    assert "misshapen: model.norm.weight, stored (17,), by config.json (18,)" in message
    assert "dtype: lm_head.weight is int32" in message


def test_another_number_of_layers(llama):
    edit_config(llama, num_hidden_layers=2)
    with pytest.raises(hf.HfMismatchError, match=r"surplus: model\.layers\.2\."):
        hf.open_folder(llama)


@pytest.mark.parametrize("setting", ["num_hidden_layers", "vocab_size", "hidden_size", "intermediate_size"])
def test_a_model_larger_than_the_folder_s_weights_is_refused(llama, setting):
    edit_config(llama, **{setting: 9000})
    held = (llama / "model.safetensors").stat().st_size
    for opened in (hf_folder.read_model, hf.open_folder):
        with raises_naming(hf.HfMismatchError, llama / "config.json", "values or more", f"{held:,} bytes"):
            opened(llama)
    (llama / "model.safetensors").unlink()
    hf_folder.read_model(llama)  # without weights, a model is only described


def test_a_file_that_is_cut_off(llama):
    content = (llama / "model.safetensors").read_bytes()
    (llama / "model.safetensors").write_bytes(content[:-1])
    with raises_naming(hf.HfDamagedError, "model.safetensors", "cut off", len(content) - 1, len(content)):
        hf.open_folder(llama)
    (llama / "model.safetensors").write_bytes(content[:100])
    with raises_naming(hf.HfDamagedError, "model.safetensors", "cut off", "100 bytes"):
        hf.open_folder(llama)
    (llama / "model.safetensors").write_bytes(content[:8] + b"?" + content[9:])
    with raises_naming(hf.HfDamagedError, "model.safetensors", "header", "malformed"):
        hf.open_folder(llama)


def with_header(path, header, data=bytes(64)):
    content = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + data)


def f32(start, end, **changes):
    return {"dtype": "F32", "shape": [(end - start) // 4], "data_offsets": [start, end], **changes}


@pytest.mark.parametrize(
    ("header", "facts"),
    [
        (b"[" * 200_000, [json_values.MOST_DEPTH]),
        (b'{"a": {"dtype": "F32", "shape": [1e400], "data_offsets": [0, 64]}}', ["a.shape[0]", "1e400"]),
        ({"a": f32(0, 64, shape=[16.0])}, ["a.shape[0]", "16.0"]),
        ({"a": f32(0, 64, shape=[-4, -4])}, ["a.shape[0]", "-4"]),
        ({"a": f32(0, 64, shape=[2**62, 2**62])}, ["a.shape"]),
        ({"a": f32(0, 64, data_offsets=[0.0, 64.0])}, ["a.data_offsets", "0.0"]),
        ({"a": f32(0, 64, dtype=["F32"])}, []),
        ({"a": f32(0, 32), "b": f32(0, 32), "c": f32(0, 64)}, ["b", "offset 0"]),
        ({"a": f32(0, 40), "b": f32(24, 64)}, ["b", "offset 24", "40"]),
        ({"a": f32(0, 24), "b": f32(40, 64)}, ["b", "offset 40", "24"]),
        ({"b": f32(8, 64)}, ["b", "offset 8"]),
        ({"a": f32(0, 40)}, ["end"]),
    ],
)
def test_headers_that_the_library_refuses_too(llama, header, facts):
    path = llama / "model.safetensors"
    with_header(path, header)
    with pytest.raises(safetensors.SafetensorError), safetensors.safe_open(path, "np"):
        pass
    with raises_naming(hf.HfDamagedError, path, *facts) as raised:
        hf.open_folder(llama)
    assert raised.value.exit_status == 5


def test_a_name_that_a_header_has_twice(llama):
    entry = json.dumps(f32(0, 64))
    with_header(llama / "model.safetensors", f'{{"a": {entry}, "b": {entry}, "a": {entry}}}'.encode())
    with raises_naming(hf.HfDamagedError, llama / "model.safetensors", "'a'"):
        hf.open_folder(llama)


def test_tensors_of_no_bytes_lie_between_others(llama):
    path = llama / "model.safetensors"
    with_header(path, {"a": f32(0, 64), "empty": f32(0, 0), "last": f32(64, 64)})
    with safetensors.safe_open(path, "np") as file:
        assert read_header(str(path)).keys() == set(file.keys())


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize(("text", "facts"), [("[" * 200_000, ["64"]), ('{"a": {"b": 1e400}}', ["a.b", "1e400"])])
def test_absurd_json_is_refused(llama, name, text, facts):
    (llama / "model.safetensors").rename(llama / "a.safetensors")
    (llama / name).write_text(text)
    with raises_naming(hf.HfDamagedError, llama / name, *facts) as raised:
        hf.open_folder(llama)
    assert raised.value.exit_status == 5


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json"])
def test_a_named_pipe_is_not_waited_for(llama, name):
    (llama / "model.safetensors").rename(llama / "a.safetensors")
    (llama / name).unlink(missing_ok=True)
    os.mkfifo(llama / name)
    with raises_naming(DamagedCheckpointError, llama / name, "named pipe"):
        hf.open_folder(llama)


def test_files_that_an_index_lists(llama):
    arrays = contents(llama / "model.safetensors")
    names = sorted(arrays)
    (llama / "model.safetensors").unlink()
    parts = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for file, inside in parts.items():
        rewrite(llama / file, {name: arrays[name] for name in inside})
    with raises_naming(hf.HfDamagedError, llama, "2 safetensors files", "model.safetensors.index.json"):
        hf.open_folder(llama)
    index = {"weight_map": {name: file for file, inside in parts.items() for name in inside}}
    (llama / "model.safetensors.index.json").write_text(json.dumps(index))
    assert sorted(hf.open_folder(llama).tensors) == names
    (llama / "b.safetensors").unlink()
    with pytest.raises(hf.HfDamagedError, match=r"lacks b\.safetensors, which model\.safetensors\.index\.json lists"):
        hf.open_folder(llama)


def test_the_single_file_comes_before_the_index(llama):
    names = sorted(contents(llama / "model.safetensors"))
    (llama / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": dict.fromkeys(names, "gone.safetensors")})
    )
    assert sorted(hf.open_folder(llama).tensors) == names


def test_values_out_of_the_range_of_the_models_dtype():
    values = np.array([1.0, 70_000.0, np.inf], np.float32)
    with raises_naming(hf.HfError, "norm.weight", 70000, "float16", 65504):
        placing.copy_in_range(np.empty(3, np.float16), values, "norm.weight")
    found = np.empty(3, ml_dtypes.bfloat16)
    placing.copy_in_range(found, values, "norm.weight")
    np.testing.assert_array_equal(found, values.astype(ml_dtypes.bfloat16))
    # What is infinite in the folder stays so.
    placing.copy_in_range(halves := np.empty(1, np.float16), values[2:], "norm.weight")
    assert np.isinf(halves[0])


def test_folders_without_safetensors(llama):
    (llama / "model.safetensors").rename(llama / "pytorch_model.bin")
    with raises_naming(hf.HfNotFoundError, llama, "model.safetensors", "pickled", "save_pretrained"):
        hf.open_folder(llama)
    (llama / "config.json").write_text("{")
    with raises_naming(hf.HfDamagedError, "config.json", "not JSON"):
        hf.open_folder(llama)
    (llama / "config.json").unlink()
    with pytest.raises(hf.HfNotFoundError, match=r"config\.json is missing"):
        hf.open_folder(llama)
    assert not hf.is_folder(llama)
    assert not hf.is_folder(llama / "nowhere")


def test_buffers_of_older_versions_and_names_without_the_models_prefix(tmp_path):
    folder = shutil.copytree(DATA / "gpt2", tmp_path / "gpt2")
    arrays = contents(folder / "model.safetensors")
    # As in the folder of the first GPT-2.
    older = {name.removeprefix("transformer."): array for name, array in arrays.items()}
    older["h.0.attn.bias"] = np.ones((1, 1, 96, 96), np.float32)
    rewrite(folder / "model.safetensors", older)
    assert sorted(hf.open_folder(folder).tensors) == sorted(arrays)


@pytest.fixture
def with_mtp(tmp_path):
    """A folder with a layer that predicts a further token, and copies of the model's embedding and output layer in it."""
    folder = shutil.copytree(DATA / "glm4_moe", tmp_path / "glm")
    arrays = contents(folder / "model.safetensors")
    last, further = "model.layers.2.", "model.layers.3."
    arrays |= {further + name.removeprefix(last): 2 * x for name, x in arrays.items() if name.startswith(last)}
    dims = arrays["model.norm.weight"].size
    arrays |= {
        f"{further}{name}.weight": np.full(dims, 0.5, np.float32) for name in ("enorm", "hnorm", "shared_head.norm")
    }
    arrays[f"{further}eh_proj.weight"] = np.arange(2 * dims * dims, dtype=np.float32).reshape(dims, 2 * dims)
    arrays[f"{further}embed_tokens.weight"] = arrays["model.embed_tokens.weight"]
    arrays[f"{further}shared_head.head.weight"] = arrays["lm_head.weight"]
    rewrite(folder / "model.safetensors", arrays)
    edit_config(folder, num_nextn_predict_layers=1)
    return folder


def test_layers_that_predict_further_tokens_are_read_if_the_model_has_them(with_mtp, tmp_path, caplog):
    job = make_job(with_mtp, mesh_of(1, 4, 2), MTP_LAYERS=1)
    state = read(with_mtp, job)
    assert "not read" not in caplog.text
    arrays = contents(with_mtp / "model.safetensors")
    layer, dims = state.mdl_vars["params"]["lm"]["mtp"]["layer_0"], arrays["model.norm.weight"].size
    joined = np.concatenate([np.asarray(layer[name]["w"])[:dims, :dims].T for name in ("token", "hidden")], axis=1)
    np.testing.assert_array_equal(joined, arrays["model.layers.3.eh_proj.weight"])
    hf.export(state, job, tmp_path / "out", imported_from=with_mtp)
    exported = contents(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(exported[name], array, err_msg=name)
    assert hf.open_folder(tmp_path / "out").config["num_nextn_predict_layers"] == 1


def test_layers_that_predict_further_tokens_are_left_out_with_a_warning(with_mtp, caplog):
    with caplog.at_level(logging.WARNING):
        state = read(with_mtp, make_job(with_mtp, mesh_of(1, 1, 1)))
    assert "mtp" not in state.mdl_vars["params"]["lm"]
    assert_names(caplog.text, "mtp/layer_0", "not read", "mtp_layers")
    edit_config(with_mtp, num_nextn_predict_layers=0)
    with raises_naming(hf.HfMismatchError, "surplus", "model.layers.3.eh_proj.weight"):
        hf.open_folder(with_mtp)


def test_a_family_without_such_layers_cannot_hold_them():
    spec = dataclasses.replace(hf.open_folder(DATA / "qwen2").spec, mtp_layers=1)
    with raises_naming(UserError, "Qwen2ForCausalLM", "mtp_layers=1"):
        config_json.config_of(spec, "Qwen2ForCausalLM")


def test_the_stored_projection_of_tied_embeddings_is_not_read(tmp_path):
    folder = shutil.copytree(DATA / "qwen2_tied", tmp_path / "qwen")
    arrays = contents(folder / "model.safetensors")
    rewrite(folder / "model.safetensors", {**arrays, "lm_head.weight": arrays["model.embed_tokens.weight"]})
    assert "mdl_vars/params/lm/logits/w" not in hf.open_folder(folder).variables


def whole(folder, variable):
    """A variable read the simple way: each tensor at once."""
    result = np.zeros(variable.shape, np.float32)
    tensors = hf.open_folder(folder).tensors
    for piece in variable.pieces:
        array, letters = tensors[piece.name].read_rows(0, piece.shape[0]).astype(np.float32), ""
        for group in piece.groups:
            axis, inner = len(letters), group.outer
            sizes = [piece.sizes[letter] for letter in inner]
            if group.parts:
                widths = [math.prod(piece.sizes[letter] for letter in part) for part in group.parts]
                array = array.reshape(*array.shape[:axis], *sizes, sum(widths), *array.shape[axis + 1 :])
                array = np.split(array, np.cumsum(widths)[:-1], axis=axis + len(sizes))[piece.part]
                inner = (*inner, *group.parts[piece.part])
            rest = array.shape[axis + len(sizes) + 1 :] if group.parts else array.shape[axis + 1 :]
            array = array.reshape(*array.shape[:axis], *(piece.sizes[letter] for letter in inner), *rest)
            letters += "".join(inner)
        equation = f"{letters}->{''.join(piece.order)}".replace("1", "z")
        result[piece.leading] = np.einsum(equation, array)
    return result


@pytest.mark.parametrize("name", NAMES)
def test_every_shard_holds_its_part(name, monkeypatch):
    # Blocks of a few rows: a tensor is read in several.
    monkeypatch.setattr(placing, "_BLOCK_BYTES", 300)
    folder, mesh = hf.open_folder(DATA / name), mesh_of(1, 4, 2)
    specs = {}
    for path, variable in folder.variables.items():
        rank = len(variable.shape)
        for number, spec in enumerate([PartitionSpec(*[None] * (rank - 1), ("data", "mdl")), PartitionSpec("mdl")]):
            key = f"{path}#{number}"
            specs[key] = make_variable_spec(key, variable.shape, np.float32, spec, dict(mesh.shape), "")
    variables = {key: folder.variables[key.partition("#")[0]] for key in specs}
    read_arrays = placing.read_onto_mesh(specs, variables, folder.tensors, mesh)
    for path, variable in folder.variables.items():
        wanted = whole(DATA / name, variable)
        assert np.abs(wanted).min() > 0
        for number in range(2):
            spec = specs[f"{path}#{number}"]
            padded = np.pad(wanted, [(0, padding) for padding in spec.paddings])
            np.testing.assert_array_equal(np.asarray(read_arrays[f"{path}#{number}"]), padded)


def test_a_stored_dtype_becomes_the_models(tmp_path):
    folder = shutil.copytree(DATA / "llama_untied", tmp_path / "llama")
    arrays = contents(folder / "model.safetensors")
    halved = {name: array.astype(ml_dtypes.bfloat16) for name, array in arrays.items()}
    rewrite(folder / "model.safetensors", halved)
    shutil.copy(DATA / "llama_untied" / "expected.npz", folder)
    norm = halved["model.norm.weight"]
    for asked, dtype in (("float32", np.float32), ("stored", ml_dtypes.bfloat16)):
        job = make_job(folder, mesh_of(1, 1, 1), VARIABLE_DTYPE=asked)
        found = read(folder, job).mdl_vars["params"]["lm"]["final_norm"]["scale"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(np.asarray(found), norm.astype(dtype))


def test_another_model_is_refused_before_an_array_is_read(monkeypatch):
    job = make_job(DATA / "llama_untied", mesh_of(1, 1, 1))
    monkeypatch.setattr(placing, "read_onto_mesh", lambda *_: pytest.fail("an array was read"))
    message = re.escape("num_heads (5 there, 3 here)")
    with pytest.raises(hf.HfMismatchError, match=message):
        hf.load(DATA / "llama3_rope", job)
    with raises_naming(
        hf.HfMismatchError, DATA / "llama3_rope", "lm.hf.FromFolder", "task.train.init_from_checkpoint_rules"
    ):
        read(DATA / "llama3_rope", job)
