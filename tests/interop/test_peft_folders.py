"""Adapters in PEFT's format: what PEFT wrote is read and written again bit for bit, and gives PEFT's logits."""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import shutil

import jax
import numpy as np
import pytest
import safetensors.numpy
from etils import epath
from facts import raises_naming
from hf_models import DATA, expected, make_job, mesh_of, read

from spmd_trainer.checkpointing import CheckpointError, DamagedCheckpointError, frozen_base, records
from spmd_trainer.decoder import lora
from spmd_trainer.hf import peft
from spmd_trainer.hf.safetensors_file import read_header
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.training import checkpoint_sources

PEFT = DATA.parent / "peft"
ATTENTION = ("attention/(query|value|output)/w", "mlp/down/w")
# name: the model, and the settings with which its adapters are used.
CASES = {
    "lora": ("llama_tokenizer", lora.Lora(ATTENTION, rank=3, alpha=5)),
    "dora": ("qwen2", lora.Lora(rank=2, alpha=8, dora=True)),
    "rslora_gpt2": ("gpt2", lora.Lora(["output/w", "mlp/.*/w"], rank=4, alpha=6, rslora=True)),
    "dora_head": ("gemma3_untied", lora.Lora(["key/w", "logits/w"], rank=2, alpha=2, dora=True)),
}
MESHES = [(1, 1, 1), (1, 2, 4)]


def adapted_job(name, sizes=(1, 2, 4), **settings):
    model, given = CASES[name]
    return make_job(DATA / model, mesh_of(*sizes), lora=dataclasses.replace(given, **settings))


def read_adapters(folder, job, model):
    """The state of a job with the base of a folder and adapters of PEFT, without optimizer states."""
    variables, mesh = job.partitioner.layout.without_opt_states().variables, job.partitioner.mesh
    source = peft.open_source(epath.Path(folder), None, variables, job.task)
    specs = {path: spec for path, spec in records.by_path(variables).items() if lora.is_adapter(path)}
    assert all(source.fits(path, spec.logical_shape) for path, spec in specs.items())
    arrays = source.read(specs, mesh, {path: path for path in specs})
    base = read(DATA / model, job)
    trained = frozen_base.trained_part(variables, variables)
    step, *rest = jax.tree.leaves(trained)
    adapters = jax.tree.unflatten(jax.tree.structure(trained), [base.step, *(arrays[spec.path] for spec in rest)])
    assert step.path == "step"
    names = frozen_base.base_specs(variables)
    return frozen_base.joined(adapters, dict(zip(names, jax.tree.leaves(base.mdl_vars), strict=True)), variables)


def tensors_in(folder):
    """All tensors of adapters by name."""
    tensors = read_header(str(folder / "adapter_model.safetensors"))
    return {name: tensor.read_rows(0, tensor.shape[0]) for name, tensor in tensors.items()}


@pytest.mark.parametrize("sizes", [pytest.param(MESHES[0], marks=pytest.mark.full), MESHES[1]], ids=str)
@pytest.mark.parametrize("name", [n if n == "dora_head" else pytest.param(n, marks=pytest.mark.full) for n in CASES])
def test_logits_are_those_of_peft(name, sizes):
    job = adapted_job(name, sizes)
    with np.load(PEFT / name / "expected.npz") as file:
        golden = file["logits"]
    plain = expected(DATA / CASES[name][0])["logits"]
    logits, _ = job.logits_and_loss(read_adapters(PEFT / name, job, CASES[name][0]))
    assert np.abs(golden - plain).max() > 0.1  # the adapters matter
    np.testing.assert_allclose(logits, golden, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    "name", [n if n in ("lora", "dora_head") else pytest.param(n, marks=pytest.mark.full) for n in CASES]
)
@pytest.mark.full
def test_what_was_read_is_written_bit_for_bit(name, tmp_path):
    job, model = adapted_job(name), DATA / CASES[name][0]
    peft.export(read_adapters(PEFT / name, job, CASES[name][0]), job, tmp_path / "out", base=model)
    before, after = tensors_in(PEFT / name), tensors_in(tmp_path / "out")
    assert after.keys() == {tensor for tensor in before if "base_layer" not in tensor}
    for tensor, array in after.items():
        assert array.dtype == np.float32
        np.testing.assert_array_equal(array, before[tensor])
    golden, config = (json.loads((d / "adapter_config.json").read_text()) for d in (PEFT / name, tmp_path / "out"))
    assert config["base_model_name_or_path"] == str(model)
    assert sorted(golden["target_modules"]) == config["target_modules"]
    different = {key for key, value in config.items() if golden[key] != value}
    assert different <= {"base_model_name_or_path", "target_modules"}


@pytest.mark.full
def test_modules_are_named_in_full_where_others_of_their_name_have_no_adapters(tmp_path):
    job = make_job(DATA / "gemma2", mesh_of(1, 1, 1), lora=lora.Lora(["layer_1/.*/query/w", "/up/w"], rank=2))
    state = job.partitioner.initialize_train_state(job.prng_key, with_opt_states=False)
    peft.export(state, job, tmp_path / "out")
    modules = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert modules == ["model.layers.1.self_attn.q_proj", "up_proj"]


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "targets", "modules"),
    [
        ("deepseek_v3", ["attention/.*/w"], ["kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "q_a_proj", "q_b_proj"]),
        (
            "qwen3_5",
            ["layer_0/attention/(gate|output)/w", "layer_3/attention/key/w"],
            ["in_proj_z", "k_proj", "out_proj"],
        ),
    ],
)
def test_adapters_of_latent_and_linear_attention_come_back(model, targets, modules, tmp_path):
    job = make_job(DATA / model, mesh_of(1, 2, 4), lora=lora.Lora(targets, rank=2))
    state = job.partitioner.initialize_train_state(job.prng_key, with_opt_states=False)
    peft.export(state, job, tmp_path / "out")
    named = json.loads((tmp_path / "out" / "adapter_config.json").read_text())["target_modules"]
    assert sorted({name.rpartition(".")[2] for name in named}) == modules
    again = read_adapters(tmp_path / "out", job, model)
    found, wanted = (dict(named_leaves(one.mdl_vars["params"]["lora"])) for one in (again, state))
    for path, array in wanted.items():
        np.testing.assert_array_equal(found[path], array, err_msg=path)


@pytest.mark.full
def test_adapters_trained_on_a_whole_have_longer_names(tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    tensors = safetensors.numpy.load_file(folder / "adapter_model.safetensors")
    longer = {name.replace("model.model.", "model.model.language_model."): x for name, x in tensors.items()}
    assert longer.keys() != tensors.keys()
    safetensors.numpy.save_file(longer, folder / "adapter_model.safetensors")
    job = adapted_job("lora")
    found, wanted = (read_adapters(given, job, "llama_tokenizer") for given in (folder, PEFT / "lora"))
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.full
def test_several_adapters_of_one_base(tmp_path):
    """A directory of folders holds several adapters; each row would choose one."""
    for adapter, golden in (("poet", "lora"), ("lawyer", "lora_again")):
        shutil.copytree(PEFT / golden, tmp_path / "both" / adapter)
    job = adapted_job("lora", adapters=("poet", "lawyer"))
    state = read_adapters(tmp_path / "both", job, "llama_tokenizer")
    peft.export(state, job, tmp_path / "out")
    for adapter, golden in (("poet", "lora"), ("lawyer", "lora_again")):
        before, after = tensors_in(PEFT / golden), tensors_in(tmp_path / "out" / adapter)
        assert after.keys() == before.keys()
        for tensor, array in after.items():
            np.testing.assert_array_equal(array, before[tensor])
    with pytest.raises(CheckpointError, match=r"both/notary/adapter_config.json is missing"):
        read_adapters(tmp_path / "both", adapted_job("lora", adapters=("poet", "notary")), "llama_tokenizer")


@functools.cache
def opening_job(**settings):
    return adapted_job("lora", (1, 1, 1), **settings)


def opened(folder, **settings):
    job = opening_job(**settings)
    return peft.open_source(epath.Path(folder), None, job.partitioner.metadata.variables, job.task)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"alpha": 16.0}, r"trained with alpha=5.0, and task.lora has alpha=16.0.* Set task.lora.alpha=5.0"),
        ({"rank": 4, "dora": True}, r"Set task.lora.rank=3; task.lora.dora=False"),
        (
            {"targets": ("attention/query/w",)},
            r"(?s)surplus: .*o_proj.lora_A.* modules that it adapts: down_proj, o_proj",
        ),
        (
            {"targets": (*ATTENTION, "key/w")},
            r"(?s)missing: base_model.model.model.layers.0.self_attn.k_proj.lora_A.weight",
        ),
    ],
)
def test_settings_that_are_not_those_of_the_folder_are_refused(settings, message):
    with pytest.raises(CheckpointError, match=message):
        opened(PEFT / "lora", **settings)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "peft_type is 'LOHA'; only 'LORA'"),
        ({"modules_to_save": ["lm_head"]}, r"not supported: modules_to_save=\['lm_head'\]\. Merge the adapters"),
        ({"rank_pattern": {"q_proj": 8}, "bias": "all"}, r"rank_pattern=\{'q_proj': 8\}, bias='all'"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
        ({"r": None}, "r is None, not a whole number"),
        ({"r": 2.5}, "r is 2.5, not a whole number"),
        ({"lora_alpha": None}, "lora_alpha is None; it must be a number"),
    ],
)
def test_configs_that_are_refused(changes, message, tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    config = json.loads((folder / "adapter_config.json").read_text())
    (folder / "adapter_config.json").write_text(json.dumps({**config, **changes}))
    with pytest.raises(CheckpointError, match=message):
        opened(folder)


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[" * 200_000, ["64"]),
        ('{"peft_type": "LORA", "lora_alpha": 1e400}', ["lora_alpha", "1e400"]),
        ("[]", ["list"]),
    ],
)
def test_a_config_that_is_absurd_json(text, facts, tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    (folder / "adapter_config.json").write_text(text)
    with raises_naming(CheckpointError, folder / "adapter_config.json", *facts) as raised:
        opened(folder)
    assert raised.value.exit_status == 5


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_named_pipe_is_not_waited_for(name, tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    (folder / name).unlink()
    os.mkfifo(folder / name)
    with raises_naming(DamagedCheckpointError, folder / name, "named pipe"):
        opened(folder)


def test_other_faults_of_a_folder_are_named(tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    with raises_naming(CheckpointError, "step 3", "PEFT", folder, "no steps"):
        peft.open_source(epath.Path(folder), 3, None, None)
    job = make_job(DATA / "llama_tokenizer", mesh_of(1, 1, 1))
    with pytest.raises(
        CheckpointError, match=r"task.lora is None.* Set task.lora to .* rank=3, alpha=5.0, rslora=False"
    ):
        checkpoint_sources.open_source(epath.Path(folder), None, job.partitioner.metadata.variables, task=job.task)
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with raises_naming(CheckpointError, folder, "adapter_model.safetensors", "adapter_model.bin", "pickled"):
        opened(folder)
    assert peft.open_source(epath.Path(tmp_path / "none"), None, None, None) is None


@pytest.mark.parametrize(
    ("model", "targets", "message"),
    [
        (
            "gpt2",
            ["query/w"],
            r"transformers keeps several matrices in one tensor \(transformer.h.0.attn.c_attn.weight",
        ),
        ("mixtral", ["moe/up/w"], "transformers keeps the experts of a layer"),
    ],
)
def test_adapters_that_peft_has_no_place_for(model, targets, message, tmp_path):
    job = make_job(DATA / model, mesh_of(1, 1, 1), lora=lora.Lora(targets, rank=2))
    with pytest.raises(CheckpointError, match=message):
        peft.export(None, job, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_layer_without_adapters_is_missed():
    job = make_job(DATA / "olmo2", mesh_of(1, 1, 1), lora=lora.Lora(["key/w"], rank=5, alpha=10))
    with pytest.raises(
        CheckpointError, match=r"(?s)missing: base_model.model.model.layers.1.self_attn.k_proj.lora_A.weight"
    ):
        peft.open_source(epath.Path(PEFT / "one_layer"), None, job.partitioner.metadata.variables, job.task)


def test_the_base_that_a_folder_names(tmp_path):
    folder = shutil.copytree(PEFT / "lora", tmp_path / "adapters")
    config = json.loads((folder / "adapter_config.json").read_text())
    for name, found in (("meta-llama/Llama-3.1-8B", None), (str(DATA / "qwen2"), epath.Path(DATA / "qwen2"))):
        (folder / "adapter_config.json").write_text(json.dumps({**config, "base_model_name_or_path": name}))
        assert peft.base_of(folder) == found
