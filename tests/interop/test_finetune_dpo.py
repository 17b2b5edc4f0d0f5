"""`lm.finetune.DpoFromFolder`: what its attributes mean, and a short run on a folder."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from etils import epath
from hf_models import DATA

from spmd_trainer import sharding
from spmd_trainer.decoder.preferences.model import PreferenceModel
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ChatPromptInput
from spmd_trainer.inputs.preferences import PreferenceInput
from spmd_trainer.step import pjit
from spmd_trainer.training import experiment_config, train
from spmd_trainer.training.job import Job
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.training.summary_writers import read_metrics

FOLDER = DATA / "llama_tokenizer"
PAIRS = [{"prompt": f"def f{i}(x):", "chosen": " return x", "rejected": f" raise ValueError({i})"} for i in range(6)]


@pytest.fixture
def pairs(tmp_path):
    path = tmp_path / "pairs.jsonl"
    path.write_text("\n".join(map(json.dumps, PAIRS)) + "\n")
    return path


def resolved(pairs, *overrides):
    return experiment_config.resolve(
        "lm.finetune.DpoFromFolder", [f"FOLDER={FOLDER}", f"FILES={pairs}", "SEQ_LEN=48", *overrides]
    )


def test_the_datasets_and_the_loss(pairs):
    (train_p,) = resolved(pairs).config.train_datasets
    assert train_p.cls is PreferenceInput
    assert (train_p.reference, train_p.is_training, train_p.seq_len, train_p.start) == ("file", True, 48, "tokenizer")
    assert resolved(pairs).config.eval_datasets == []
    fields = ["LOSS=sigmoid_norm", "BETA=2.0", "LABEL_SMOOTHING=0.1", f"EVAL_FILES={pairs}", "TOO_LONG=drop"]
    other = resolved(pairs, *fields)
    (heldout,) = other.config.eval_datasets
    assert (heldout.name, heldout.is_training, heldout.too_long, heldout.reference) == (
        "heldout",
        False,
        "drop",
        "file",
    )
    model_p = other.task_p.model
    assert model_p.cls is PreferenceModel
    preference = model_p.preference
    assert (preference.loss, preference.beta, preference.label_smoothing) == ("sigmoid_norm", 2.0, 0.1)
    assert resolved(pairs, "LOSS=simpo", "TARGET_MARGIN=0.5").config.train_datasets[0].reference is None


def test_pairs_and_prompts_get_the_same_template(pairs):
    given = ["CHAT_TEMPLATE=other.jinja", "TEMPLATE_VARIABLES={'brief': True}", "DATE=2024-07-26", f"PROMPTS={pairs}"]
    config = resolved(pairs, *given, f"EVAL_FILES={pairs}").config
    (prompts_p,) = config.decode_datasets
    assert prompts_p.cls is ChatPromptInput
    for input_p in (*config.train_datasets, *config.eval_datasets, prompts_p):
        assert (input_p.chat_template, input_p.template_variables) == ("other.jinja", {"brief": True})
    assert [input_p.date for input_p in (*config.train_datasets, *config.eval_datasets)] == ["2024-07-26"] * 2


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["REFERENCE=live"], "REFERENCE='live' needs adapters, .*--fdl.LORA_TARGETS=all-linear.*REFERENCE='file'"),
        (["REFERENCE=flie"], "REFERENCE='flie'; give 'file' or 'live'"),
        (["FILES=None"], "DpoFromFolder needs pairs"),
    ],
)
def test_attributes_that_are_refused(overrides, message, pairs):
    with pytest.raises(UserError, match=message):
        resolved(pairs, *overrides)


def run(directory, pairs, mesh, *overrides):
    """Trains; returns the losses."""
    steps = ["NUM_TRAIN_STEPS=4", "EVAL_INTERVAL_STEPS=0", "GLOBAL_BATCH_SIZE=3", "LEARNING_RATE=1e-3", "BETA=0.5"]
    found = resolved(pairs, *steps, "task.train.summary_interval_steps=1", *overrides)
    axes = list(zip(("replica", "data", "mdl"), mesh, strict=True))
    found.experiment.partitioner = lambda: pjit.PjitPartitioner(sharding.create_device_mesh(axes))
    train.train(Job.build(TrainConfig(found, epath.Path(directory))))
    return [record["loss"] for _, record in sorted(read_metrics(epath.Path(directory), "train").items())]


@pytest.mark.full
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ([], []),
        (
            ["LORA_TARGETS=all-linear", "LORA_RANK=3", "REFERENCE=live"],
            ["LORA_TARGETS=all-linear", "LORA_RANK=3", "REFERENCE=file"],
        ),
    ],
    ids=["whole", "adapters"],
)
def test_training_from_a_folder(first, second, pairs, tmp_path):
    """On two meshes; with adapters also with the reference of both kinds."""
    losses = run(tmp_path / "first", pairs, (1, 4, 2), *first)
    assert losses[0] == pytest.approx(math.log(2), rel=1e-4)
    assert losses[-1] < losses[0] - 0.01
    np.testing.assert_allclose(run(tmp_path / "second", pairs, (2, 1, 4), *second), losses, rtol=1e-3)
    assert (tmp_path / "first/reference_logps").exists() == ("REFERENCE=live" not in first)
