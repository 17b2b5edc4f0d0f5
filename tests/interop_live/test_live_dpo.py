"""DPO, live against TRL's DPOTrainer: tokens, losses, rewards, the first gradient, and five steps of training."""

from __future__ import annotations

import json
import pathlib

import jax
import numpy as np
import optax
import pytest
import safetensors.numpy
from etils import epath
from hf_models import FolderJob, mesh_of
from praxis import base_layer

from spmd_trainer import hf, tasks_lib
from spmd_trainer.checkpointing import restore
from spmd_trainer.step import pjit, step_fns
from spmd_trainer.training import experiment_config

pytestmark = pytest.mark.slow  # runs by `make interop`
TRL_SIDE = pathlib.Path(__file__).parent / "trl_side.py"
FOLDER = "llama_tokenizer"
MESHES = [(1, 1, 1), (1, 2, 4)]
LEARNING_RATE, STEPS = 5e-4, 5  # those of trl_side.py
SETTINGS = [
    {"loss_type": ["sigmoid"], "beta": 0.5},
    {"loss_type": ["sigmoid_norm"], "beta": 3.0},
    {"loss_type": ["ipo"], "beta": 0.2},
    {"loss_type": ["robust"], "beta": 0.5, "label_smoothing": 0.2},
]


def said(role, text):
    return [{"role": role, "content": text}]


TEXTS = [
    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green and red."},
    {"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3, or so"},
    {"prompt": "def f(x):", "chosen": "\n  return x", "rejected": " pass"},
]
IMPLICIT = [
    {"chosen": f"{row['prompt']}{row['chosen']}", "rejected": f"{row['prompt']}{row['rejected']}"} for row in TEXTS
]
TALKS = [
    {
        "prompt": said("user", row["prompt"]),
        "chosen": said("assistant", row["chosen"]),
        "rejected": said("assistant", row["rejected"]),
    }
    for row in TEXTS
]
TURNS = [
    {side: [*row["prompt"], *row["chosen"], *said("user", "Why?"), *row[side]] for side in ("chosen", "rejected")}
    for row in TALKS
]
PAIRS = {"texts": TEXTS, "implicit": IMPLICIT, "talks": TALKS, "turns": TURNS}


@pytest.fixture(scope="module", params=PAIRS)
def trl_run(request, torch_side, folders, tmp_path_factory):
    """The folder, the pairs, and the directory with what TRL computed."""
    directory = tmp_path_factory.mktemp(request.param)
    pairs, settings = directory / "pairs.jsonl", directory / "settings.json"
    pairs.write_text("\n".join(map(json.dumps, PAIRS[request.param])) + "\n")
    settings.write_text(json.dumps(SETTINGS))
    torch_side(TRL_SIDE, folders / FOLDER, pairs, directory, settings)
    return folders / FOLDER, pairs, directory


def make_job(folder, pairs, settings, sizes):
    """The job of `DpoFromFolder` with plain SGD, and a batch of all pairs, without a reference."""
    fields = {
        "FOLDER": str(folder),
        "FILES": str(pairs),
        "SEQ_LEN": 64,
        "GLOBAL_BATCH_SIZE": len(TEXTS),
        "LOSS": settings["loss_type"][0],
        "BETA": settings["beta"],
        "LABEL_SMOOTHING": settings.get("label_smoothing", 0.0),
    }
    resolved = experiment_config.resolve(
        "lm.finetune.DpoFromFolder", [f"{name}={value}" for name, value in fields.items()]
    )
    resolved.task_p.train.learner.optimizer = optax.sgd(LEARNING_RATE)
    task = tasks_lib.build_task(resolved.task_p)
    data = resolved.config.train_datasets[0].clone().set(is_training=False, reference=None).Instantiate()
    batch = data.get_next()
    partitioner = pjit.PjitPartitioner()
    partitioner.use_mesh(mesh_of(*sizes))
    partitioner.setup(task, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch))
    return FolderJob(task, partitioner, batch)


def with_reference(job, folder):
    """The batch with the log-probabilities by the folder's own model."""
    state = restore(hf.open_source(epath.Path(folder), None), job.partitioner.layout.without_opt_states()).state

    def step(layout, state, key, inputs, *rest):
        del key, rest
        task = layout.task
        with base_layer.JaxContext.new_context():
            found, _ = task.model.apply(state.mdl_vars, inputs, method=task.model.with_reference, mutable=True)
        return None, found

    partitioned = job.partitioner.partition(step, shapes(job.batch), is_eval=True)
    inputs = job.partitioner.layout.put(job.batch)
    found = jax.tree.map(np.asarray, partitioned(state, job.prng_key, inputs)[1])
    for side in (found.chosen, found.rejected):
        side.reference_logps = side.reference_logps.view(np.int32)
    return found


def shapes(batch):
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)


def test_the_tokens_are_trls(trl_run):
    folder, pairs, directory = trl_run
    batch = make_job(folder, pairs, SETTINGS[0], (1, 1, 1)).batch
    for row, tokens in enumerate(json.loads((directory / "tokens.json").read_text())):
        for side in ("chosen", "rejected"):
            inside = batch[side].paddings[row] == 0
            labels, counted = batch[side].labels[row][inside], batch[side].weights[row][inside] > 0
            whole = [*tokens["prompt_ids"], *tokens[f"{side}_ids"]]
            assert [batch[side].ids[row, 0], *labels] == whole
            assert labels[counted].tolist() == tokens[f"{side}_ids"]


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("number", range(len(SETTINGS)), ids=lambda n: SETTINGS[n]["loss_type"][0])
def test_losses_rewards_and_gradients_are_trls(number, sizes, trl_run, tmp_path):
    folder, pairs, directory = trl_run
    job = make_job(folder, pairs, SETTINGS[number], sizes)
    batch = with_reference(job, folder)
    job.partitioner.setup(job.task, shapes(batch))
    step = job.partitioner.partition(step_fns.train_step, shapes(batch), is_eval=False)
    state, losses, expected = hf.load(directory / "policy", job), [], np.load(directory / f"{number}.npz")
    for count in range(STEPS):
        inputs = job.partitioner.layout.put(batch)
        state, output = step(state, job.prng_key, inputs)
        losses.append(float(output.loss))
        if count == 0:
            scalars = output.weighted_scalars
            for name in ("chosen", "rejected", "accuracies", "margins"):
                assert float(scalars[f"rewards/{name}"][0]) == pytest.approx(
                    float(expected[f"rewards_{name}"]), rel=1e-5, abs=2e-5
                )
            for name in ("chosen", "rejected"):
                assert float(scalars[f"logps/{name}"][0]) == pytest.approx(float(expected[f"logps_{name}"]), rel=1e-5)
            assert_same_variables(job, state, folder, directory / str(number), tmp_path / "ours")
    assert losses[0] == pytest.approx(expected["losses"][0], rel=1e-5)
    assert losses[-1] < losses[0] - 1e-3
    np.testing.assert_allclose(losses, expected["losses"], rtol=1e-4, atol=1e-4)


def assert_same_variables(job, state, folder, expected, exported):
    """Compares the variables after one step of SGD, which shows the whole gradient."""
    hf.export(state, job, exported, imported_from=folder, architecture="LlamaForCausalLM")
    ours, theirs = (safetensors.numpy.load_file(path / "model.safetensors") for path in (exported, expected))
    before = safetensors.numpy.load_file(expected.parent / "policy" / "model.safetensors")
    assert sorted(ours) == sorted(theirs)
    largest = max(np.abs(before[name] - theirs[name]).max() for name in theirs)
    assert largest > 1e-4
    for name, found in ours.items():
        np.testing.assert_allclose(found, theirs[name], rtol=0, atol=1e-7 + 1e-4 * largest, err_msg=name)
