"""`lm.finetune.ChatFromFolder`: training on conversations, and what `--mode=data` prints of them."""

from __future__ import annotations

import contextlib
import io
import json
import sys

import jax
import numpy as np
import pytest
from etils import epath
from facts import assert_names
from hf_models import DATA
from praxis import base_hyperparams, base_layer

import spmd_trainer as st
from spmd_trainer import tasks_lib
from spmd_trainer.callbacks import Callback
from spmd_trainer.cli import launch
from spmd_trainer.cli.modes import MODES
from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ChatPromptInput
from spmd_trainer.training import experiment_config
from spmd_trainer.training.run_config import RunConfig

NAME = "lm.finetune.ChatFromFolder"
FOLDER = DATA / "llama_tokenizer"
ROWS = [
    [("user", "hi there"), ("assistant", "the trainer pads")],
    [("system", "be brief"), ("user", "and?"), ("assistant", "slice by slice"), ("user", "ok"), ("assistant", "yes")],
    [("user", "why"), ("assistant", "A model never sees padding.")],
    [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")],
]


@pytest.fixture
def chats(tmp_path):
    path = tmp_path / "chats.jsonl"
    rows = [{"messages": [{"role": role, "content": text} for role, text in row]} for row in ROWS]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def overrides(chats, *more):
    return [f"FOLDER={FOLDER}", f"FILES={chats}", "SEQ_LEN=48", "GLOBAL_BATCH_SIZE=2", "NUM_TRAIN_STEPS=3", *more]


class Recorded(Callback):
    """The variables before each step, and the loss of each step."""

    def __init__(self):
        self.variables, self.losses = [], []

    def on_start(self, run):
        def logical(variable, array):
            return np.asarray(array)[tuple(map(slice, variable.logical_shape))]

        of = run.partitioner.metadata.variables.mdl_vars
        self.variables.append(jax.tree.map(logical, of, jax.device_get(run.state.mdl_vars)))

    def after_dispatch(self, run, step):
        assert int(run.state.step) == step
        self.on_start(run)

    def after_step(self, run, step, scalars):
        self.losses.append(scalars["loss"])


def logits_of(task, variables, batch):
    def forward(variables, batch):
        with base_layer.JaxContext.new_context():
            keys = {"params": jax.random.key(0), "random": jax.random.key(0)}
            output, _ = task.model.apply(
                variables, batch, method=task.model.compute_predictions, mutable=True, rngs=keys
            )
        return output.logits

    return np.asarray(jax.jit(forward)(variables, batch), np.float64)


def assistants_labels(source, batch):
    """Which labels are between <|assistant|> and <|end|>, or that <|end|>; bool [B, T]."""
    begin, end = (source.tokenizer.vocabulary[token] for token in ("<|assistant|>", "<|end|>"))
    counted = np.zeros(batch.labels.shape, bool)
    for row, (ids, labels, positions) in enumerate(zip(batch.ids, batch.labels, batch.segment_pos, strict=True)):
        own = False
        for at in np.flatnonzero(batch.segment_ids[row]):
            own = ids[at] == begin or bool(own and positions[at] and ids[at] != end)
            counted[row, at] = own
        assert labels[counted[row]].tolist().count(end) == ids.tolist().count(begin)
    return counted


@pytest.mark.full
def test_the_loss_is_the_cross_entropy_of_what_the_assistant_wrote(chats, tmp_path):
    given = overrides(chats, "LEARNING_RATE=0.01", "task.train.summary_interval_steps=1")
    recorded = Recorded()
    mesh = {"replica": 1, "data": 2, "mdl": 4}
    st.train(NAME, tmp_path / "run", overrides=given, mesh=mesh, callbacks=[recorded])
    assert len(recorded.losses) == 3
    resolved = experiment_config.resolve(NAME, given)
    source = base_hyperparams.instantiate(resolved.config.train_datasets[0])
    task = tasks_lib.build_task(resolved.task_p)
    for variables, loss in zip(recorded.variables[:3], recorded.losses, strict=True):
        batch = source.get_next()
        logits = logits_of(task, variables, batch)
        normaliser = np.log(np.exp(logits).sum(-1))
        entropy = normaliser - np.take_along_axis(logits, batch.labels[..., None], -1)[..., 0]
        counted = assistants_labels(source, batch)
        assert 0 < counted.sum() < (batch.segment_ids > 0).sum()
        assert loss == pytest.approx(entropy[counted].mean(), abs=1e-5)
    assert recorded.losses[2] < recorded.losses[0]


def test_evaluation_gives_each_conversation_once(chats):
    resolved = experiment_config.resolve(NAME, overrides(chats, f"EVAL_FILES={chats}", "TURNS=last"))
    (source,) = map(base_hyperparams.instantiate, resolved.config.eval_datasets)
    assert (source.is_training, source.turns) == (False, "last")
    found = []
    with contextlib.suppress(StopIteration):
        while batch := source.get_next():
            for labels, weights, segments in zip(batch.labels, batch.weights, batch.segment_ids, strict=True):
                counted = [labels[(segments == n) & (weights > 0)] for n in range(1, segments.max() + 1)]
                found += map(source.tokenizer.spell, counted)
    assert sorted(found) == sorted(f"{row[-1][1]}<|end|>" for row in ROWS)


class Terminal(io.StringIO):
    """A stdout that is a terminal."""

    def isatty(self):
        return True


def show(given, tmp_path, monkeypatch, name=NAME, stdout=None):
    """Runs `--mode=data`; returns its output."""
    config = RunConfig(
        experiment=experiment_config.resolve(name, given, None, lambda: 1),
        job_log_dir=epath.Path(tmp_path),
        mode="data",
    )
    stdout = stdout or io.StringIO()
    monkeypatch.setattr(sys, "stdout", stdout)
    MODES["data"].program()(launch.build_job(config))
    return stdout.getvalue()


def test_mode_data_shows_what_counts(chats, tmp_path, monkeypatch):
    lines = show(overrides(chats, f"EVAL_FILES={chats}"), tmp_path, monkeypatch).splitlines()
    assert lines[0] == "train: ChatInput"
    start = lines.index("heldout: ChatInput")
    assert_names(lines[start + 1], "64 tokens", "66.7% of the positions", "4 segments", "39.1% of the labels count")
    assert lines[start + 4].split() == ["row", "labels", "count", "share", "padding", "segments", "lengths"]
    text = "\n".join([*lines[start:], ""])
    for row in ROWS:
        shown = "".join(
            f"<|{role}|>" + (f"\u27e6{content}<|end|>\u27e7" if role == "assistant" else f"{content}<|end|>")
            for role, content in row
        )
        assert text.count(f"\n{shown}\n") == 1


def test_mode_data_colours_on_a_terminal(chats, tmp_path, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    text = show(overrides(chats), tmp_path, monkeypatch, stdout=Terminal())
    written = [content for row in ROWS for role, content in row if role == "assistant"]
    assert any(f"\x1b[30;42m{content}<|end|>\x1b[0m" in text for content in written)
    assert "\u27e6" not in text
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\x1b" not in show(overrides(chats), tmp_path, monkeypatch, stdout=Terminal())


@pytest.mark.parametrize(
    ("more", "message"), [(["FILES=None"], "needs conversations"), (["FOLDER="], "needs a folder")]
)
def test_a_missing_attribute_is_named(more, message, chats):
    with pytest.raises(UserError, match=message):
        experiment_config.resolve(NAME, overrides(chats, *more))


def test_prompts_get_the_same_template(chats):
    resolved = experiment_config.resolve(NAME, overrides(chats, f"PROMPTS={chats}", "CHAT_TEMPLATE=other.jinja"))
    (prompts,) = resolved.config.decode_datasets
    assert prompts.__fn_or_cls__ is ChatPromptInput
    assert prompts.chat_template == "other.jinja"
