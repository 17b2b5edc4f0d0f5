"""`--mode=data`: what it prints of inputs of several kinds."""

from __future__ import annotations

import json
import types

import jax
import numpy as np
import pytest
from facts import raises_naming
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ArrayInput, ChatInput, TextInput
from spmd_trainer.watch.pages import show_data

PLAIN = show_data.Style(colours=False)
TEMPLATE = "{% for m in messages %}<{{ m.role[0] }}>{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"


def build(kind, **fields):
    return base_hyperparams.instantiate(pax_fiddle.Config(kind, name="mine", batch_size=2, **fields))


def chat_lines(tmp_path, tokenizer, *contents, style=PLAIN, **fields):
    path = tmp_path / "a.jsonl"
    rows = [{"messages": [{"role": "assistant", "content": content}]} for content in contents]
    path.write_text("\n".join(map(json.dumps, rows)))
    settings = {"seq_len": 64, **fields}
    source = build(ChatInput, files=str(path), tokenizer=tokenizer, chat_template=TEMPLATE, **settings)
    return list(show_data.describe(source, style))


@pytest.fixture
def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    found = Tokenizer(models.BPE({symbol: i for i, symbol in enumerate(alphabet)}, []))
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    found.add_special_tokens(["</s>"])
    return found


def test_a_conversation_is_shown_with_what_counts(tmp_path, tokenizer):
    assert chat_lines(tmp_path, tokenizer, "é 🙂\n", "b") == [
        "mine: ChatInput",
        "row  labels  count  share  padding  segments  lengths",
        "  0      13      9  69.2%    79.7%         2  10 3",
        "",
        "row 0",
        "segment 1: 10 labels, 8 count",
        "<a>⟦é 🙂\n⟧",
        "segment 2: 3 labels, 1 count",
        "<a>⟦b⟧",
    ]


def test_control_characters_don_t_reach_the_terminal(tmp_path, tokenizer):
    text = "\n".join(chat_lines(tmp_path, tokenizer, "\x1b[2J\r\x9b", style=show_data.Style(colours=True)))
    assert "<a>\x1b[30;42m\\x1b[2J\\r\\x9b\x1b[0m" in text


def test_the_text_of_a_row_has_a_limit_that_is_told(tmp_path, tokenizer):
    lines = chat_lines(tmp_path, tokenizer, "x" * 9000, "y" * 3000, seq_len=13000)
    assert lines[6] == "<a>⟦" + "x" * 7997 + "⟧... (1,003 more characters)"
    assert lines[7:] == ["(1 more segment)"]


def test_text_files_are_shown_too(tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("hello")
    lines = list(show_data.describe(build(TextInput, files=str(path), seq_len=8), PLAIN))
    assert lines == [
        "mine: TextInput",
        "row  labels  count   share  padding  segments  lengths",
        "  0       6      6  100.0%    25.0%         1  6",
        "",
        "row 0",
        "segment 1: 6 labels, 6 count",
        "⟦hello⟧",
    ]


def test_of_other_batches_the_shapes_are_shown():
    images = {"image": np.zeros((3, 4, 5), np.float32), "label": np.zeros(3, np.int32)}
    lines = list(show_data.describe(build(ArrayInput, arrays=lambda: images), PLAIN))
    assert lines[:3] == ["mine: ArrayInput", "a batch:", "  eval_sample_weights: float32 [2]"]
    assert lines[3:] == ["  image: float32 [2, 4, 5]", "  label: int32 [2]"]


def test_datasets_that_show_nothing_are_refused():
    def job(*datasets):
        config = types.SimpleNamespace(train_datasets=list(datasets), eval_datasets=[])
        experiment = types.SimpleNamespace(config=config, label="lm.mine")
        return types.SimpleNamespace(
            config=types.SimpleNamespace(experiment=experiment), build_input=lambda input_p: input_p
        )

    with raises_naming(UserError, "experiment lm.mine", "no datasets", "datasets()"):
        show_data.show_data(job())

    class Empty:
        name = "mine"

        def get_next(self):
            raise StopIteration

    with raises_naming(UserError, "dataset mine", "empty"):
        show_data.show_data(job(Empty()))


@pytest.mark.parametrize("large", [{"seq_len": 10**11}, {"batch_size": 10**9}])
def test_batches_too_large_to_be_shown_are_refused_before_they_and_the_model_are_built(tmp_path, large):
    (tmp_path / "a.txt").write_text("some text")
    settings = {"seq_len": 8, "batch_size": 2, "files": str(tmp_path / "a.txt"), **large}
    config = types.SimpleNamespace(
        train_datasets=[pax_fiddle.Config(TextInput, name="mine", **settings)], eval_datasets=[]
    )
    run = types.SimpleNamespace(experiment=types.SimpleNamespace(config=config, label="x"))
    with raises_naming(UserError, "dataset mine", f"{next(iter(large.values())):,}", *large):
        show_data.build_job(run)


def rows_in_all(rows):
    return rows


def test_a_batch_size_that_is_computed_is_refused_too(tmp_path):
    config = types.SimpleNamespace(
        train_datasets=[
            pax_fiddle.Config(TextInput, name="mine", seq_len=8, batch_size=pax_fiddle.Config(rows_in_all, 10**9))
        ],
        eval_datasets=[],
    )
    run = types.SimpleNamespace(experiment=types.SimpleNamespace(config=config, label="x"))
    with raises_naming(UserError, "dataset mine", f"{10**9:,}", "batch_size"):
        show_data.build_job(run)


def test_the_first_process_prints(monkeypatch, capsys, tmp_path):
    path = tmp_path / "a.txt"
    path.write_text("hello")
    source = build(TextInput, files=str(path), seq_len=8)
    config = types.SimpleNamespace(train_datasets=[source], eval_datasets=[])
    job = types.SimpleNamespace(
        config=types.SimpleNamespace(experiment=types.SimpleNamespace(config=config, label="lm.mine")),
        build_input=lambda input_p: input_p,
    )
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    show_data.show_data(job)
    assert capsys.readouterr().out == ""
    source.reset()
    monkeypatch.setattr(jax, "process_index", lambda: 0)
    show_data.show_data(job)
    assert "⟦hello⟧" in capsys.readouterr().out
