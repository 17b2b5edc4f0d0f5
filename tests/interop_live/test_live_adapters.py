"""Adapters, live against PEFT: what is exported opens there, with the same logits; 20 steps of training give the same losses."""

from __future__ import annotations

import dataclasses
import pathlib

import jax
import numpy as np
import optax
import pytest
from hf_models import expected, lm_batch, make_job, mesh_of

from spmd_trainer import hf
from spmd_trainer.checkpointing import frozen_base, records
from spmd_trainer.decoder import lora
from spmd_trainer.hf import peft
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import step_fns

pytestmark = pytest.mark.slow  # runs by `make interop`
TORCH_SIDE = pathlib.Path(__file__).parent / "torch_side.py"
UNEVEN = (1, 2, 4)
STEPS = 20
# Those of torch_side.py.
SETTINGS = {"learning_rate": 1e-3, "b1": 0.9, "b2": 0.95, "eps": 1e-6, "weight_decay": 0.1}
GPT2 = ["output/w", "mlp/.*/w"]
CASES = {
    "llama_untied": lora.Lora(rank=3, alpha=6),
    "llama_biases": lora.Lora(["attention/.*/w"], rank=2, alpha=3, rslora=True),
    "qwen2": lora.Lora(rank=2, alpha=8, dora=True),
    "qwen3": lora.Lora(["query/w", "down/w"], rank=5, alpha=5),
    "mistral_wide_heads": lora.Lora(rank=1, alpha=1, dora=True),
    "gemma2": lora.Lora(rank=4, alpha=8),
    "gemma3": lora.Lora(["layer_1/.*/(key|value)/w", "gate/w"], rank=2, alpha=4, dora=True),
    "gemma3_untied": lora.Lora(["logits/w"], rank=2, alpha=4),
    "olmo2": lora.Lora(rank=3, alpha=3),
    "gpt2": lora.Lora(GPT2, rank=3, alpha=6, dora=True),
}


def begin(folder, settings, optimizer=None):
    """A job on an uneven mesh and its first state: the folder's model with random adapters, whose b is not 0."""
    job = make_job(folder, mesh_of(*UNEVEN), lora=settings, optimizer=optimizer)
    state, metadata = hf.load(folder, job), job.partitioner.metadata
    random = np.random.default_rng(0)

    def fill(path, spec, old):
        if not lora.is_adapter(path) or path.endswith("/magnitude"):
            return old
        values = np.zeros(spec.padded_shape, np.float32)
        values[tuple(map(slice, spec.logical_shape))] = random.normal(0, 0.1, spec.logical_shape)
        return jax.device_put(values, old.sharding)

    leaves = [
        fill(path, spec, old)
        for (path, spec), old in zip(named_leaves(metadata.variables), jax.tree.leaves(state), strict=True)
    ]
    state = jax.tree.unflatten(jax.tree.structure(state), leaves)

    def prepare(padded):
        logical = metadata.slice(padded)
        fitted = job.task.model_for_steps.prepare(logical.mdl_vars)
        return metadata.pad(dataclasses.replace(logical, mdl_vars=fitted))

    return job, jax.jit(prepare, out_shardings=metadata.shardings)(state)


@pytest.mark.parametrize("name", CASES)
def test_what_is_exported_opens_in_peft(name, folders, torch_side, tmp_path):
    folder = folders / name
    job, state = begin(folder, CASES[name])
    peft.export(state, job, tmp_path / "adapter", base=folder)
    np.save(tmp_path / "ids.npy", expected(folder)["ids"])
    torch_side(TORCH_SIDE, "logits", tmp_path / "adapter", tmp_path / "ids.npy", tmp_path / "logits.npy")
    found, _ = job.logits_and_loss(state.to_eval_state())
    np.testing.assert_allclose(np.load(tmp_path / "logits.npy"), found, rtol=0, atol=1e-4)
    assert np.abs(found - expected(folder)["logits"]).max() > 1e-2


@pytest.mark.parametrize("name", CASES)
def test_twenty_steps_of_training_and_a_base_unchanged_after_a_hundred(name, folders, torch_side, tmp_path):
    folder = folders / name
    rows, length = expected(folder)["ids"].shape
    vocab = expected(folder)["logits"].shape[-1]
    batches = np.random.default_rng(0).integers(1, vocab, (STEPS, rows, length)).astype(np.int32)
    np.save(tmp_path / "batches.npy", batches)
    job, state = begin(folder, CASES[name], optax.adamw(**SETTINGS))
    peft.export(state, job, tmp_path / "adapter", base=folder)
    torch_side(TORCH_SIDE, "train", tmp_path / "adapter", tmp_path / "batches.npy", tmp_path / "losses.npy")
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), job.batch)
    step = job.partitioner.partition(step_fns.train_step, shapes, is_eval=False)
    before = _base_of(job, state)
    losses = []
    for ids in batches:
        batch = job.partitioner.layout.put(lm_batch(ids))
        state, output = step(state, job.prng_key, batch)
        losses.append(float(output.loss))
    np.testing.assert_allclose(losses, np.load(tmp_path / "losses.npy"), rtol=0, atol=1e-3)
    for ids in [*batches] * 4:  # 100 steps in all
        batch = job.partitioner.layout.put(lm_batch(ids))
        state, output = step(state, job.prng_key, batch)
        float(output.loss)
    assert int(state.step) == 100
    after = _base_of(job, state)
    for path, values in before.items():
        np.testing.assert_array_equal(after[path], values, err_msg=path)


def _base_of(job, state):
    paths = records.by_path(job.partitioner.metadata.variables)
    leaves = zip(paths, jax.tree.leaves(state), strict=True)
    return {path: np.array(leaf) for path, leaf in leaves if frozen_base.is_base(path)}
