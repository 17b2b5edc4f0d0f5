"""`--mode=tokenizer`: a tokenizer.json of any corpus, the same each time, whose decoding restores every text."""

import errno
import gzip
import json
import os
import sys

import pytest
from facts import assert_names, raises_naming
from hypothesis import example, given, settings
from hypothesis import strategies as st

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import token_bytes, tokenizer_training
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.inputs.tokenizers import SentencePieceTokenizer

ALGORITHMS = ("bpe", "unigram")
TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 20,
    "Größe, naïve, 東京: words of several scripts.\n" * 10,
    "    indented\tand  spaced   out \n" * 5,
]


def train(files, output, **given):
    tokenizer_training.train_tokenizer(TokenizerConfig([str(files)], output=output, **{"vocab_size": 315, **given}))
    return {path.name: path.read_text() for path in output.iterdir()}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    path = tmp_path_factory.mktemp("corpus") / "a.jsonl.gz"
    path.write_bytes(gzip.compress("".join(json.dumps({"body": text}) + "\n" for text in TEXTS).encode()))
    return path


@pytest.fixture(scope="module", params=ALGORITHMS)
def trained(corpus, request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "new"
    special = ["<pad>,<|im_start|>"]
    return folder, train(corpus, folder, column="body", algorithm=request.param, eos="<end>", special_tokens=special)


@settings(deadline=None, max_examples=80)
@given(content=st.text(st.characters(exclude_categories=["Cs"]), max_size=60))
@example(content="<0x41> <unk>\u2581 a\u2581b\n\n \t\r\n\0")
def test_every_text_comes_back(trained, content):
    tokenizer = HuggingFaceTokenizer(trained[0])
    ids = tokenizer.encode(content.encode(), "a file")
    assert tokenizer.decode([ids], [len(ids)]) == [content]
    spelled = token_bytes.token_bytes(tokenizer)
    assert b"".join(spelled[index] for index in ids) == content.encode()


def test_the_folder_says_what_is_special_and_how_many_there_are(trained):
    tokenizer = HuggingFaceTokenizer(trained[0])
    assert tokenizer.vocab_size == 315
    assert [tokenizer.spell([index]) for index in (tokenizer.eos_id, tokenizer.pad_id)] == ["<end>", "<pad>"]
    assert tokenizer.bos_id is None
    assert len(tokenizer.encode(b"<|im_start|>", "")) == 1
    exact = HuggingFaceTokenizer(trained[0], encode_special_tokens=True)
    ids = exact.encode(b"<|im_start|><end>", "")
    assert len(ids) > 2
    assert exact.spell(ids) == "<|im_start|><end>"
    assert len(tokenizer.encode(TEXTS[0].encode(), "")) < 0.9 * len(TEXTS[0])


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_the_same_texts_give_the_same_tokenizer_also_from_files_of_text(corpus, algorithm, tmp_path):
    for number, text in enumerate(TEXTS):
        (tmp_path / f"{number}.txt").write_text(text)
    one = train(corpus, tmp_path / "a", column="body", algorithm=algorithm)
    assert train(tmp_path / "*.txt", tmp_path / "b", algorithm=algorithm) == one
    assert train(tmp_path / "*.txt", tmp_path / "b", algorithm=algorithm) == one  # over the one before
    assert sorted(one) == ["tokenizer.json", "tokenizer_config.json"]


def test_a_chat_template_comes_beside_the_tokenizer(corpus, tmp_path):
    template = "{% for message in messages %}<{{ message.role }}>{{ message.content }}{% endfor %}"
    (tmp_path / "chat.jinja").write_text(template)
    given = {"column": "body", "special_tokens": ["<user>"]}
    for text in (template, str(tmp_path / "chat.jinja")):
        made = train(corpus, tmp_path / "new", chat_template=text, **given)
        assert made["chat_template.jinja"] == f"{template}\n"  # which Jinja leaves out
        assert HuggingFaceTokenizer(tmp_path / "new").chat_templates == {"default": f"{template}\n"}
    with raises_naming(UserError, f"--output={tmp_path / 'new'} holds other files", "chat_template.jinja"):
        train(corpus, tmp_path / "new", **given)
    with raises_naming(UserError, "is not a chat template"):
        train(corpus, tmp_path / "other", chat_template="{% for", **given)
    with raises_naming(UserError, "--chat_template", "words.model", "folder"):
        TokenizerConfig([str(corpus)], output=str(tmp_path / "words.model"), chat_template=template)


def test_long_texts_are_learned_from_in_parts_that_end_with_a_line(monkeypatch):
    monkeypatch.setattr(tokenizer_training, "_BLOCK_CHARACTERS", 10)
    parts = list(tokenizer_training._blocks(["one\ntwo\nthree\n", "", "x" * 25, "short"]))
    assert parts == ["one\ntwo\n", "three\n", "x" * 10, "x" * 10, "x" * 5, "short"]


def test_bad_records_are_named_or_left_out_and_counted(tmp_path, capsys):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS) + "{broken\n")
    with raises_naming(UserError, f"{path}:4 is not JSON", "--bad_records=skip"):
        train(path, tmp_path / "new")
    train(path, tmp_path / "new", bad_records="skip")
    assert_names(capsys.readouterr().out, "315 tokens of bpe", "3 documents", "1 left out")


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"vocab_size": 100_000}, ("--vocab_size=100000", "or give more text")),
        ({"vocab_size": 200}, ("--vocab_size=200", "257 tokens", "--vocab_size=257")),
        ({"vocab_size": 100_000, "algorithm": "unigram"}, ("can't train 100000 pieces of unigram",)),
        ({"vocab_size": 10**11}, ("--vocab_size=100000000000", "16777216")),
        ({"special_tokens": ["<unk>"], "algorithm": "unigram"}, ("'<unk>'", "special token")),
        ({"eos": "<0x41>", "algorithm": "unigram"}, ("'<0x41>'", "special token")),
        ({"bad_records": "rasie"}, ("bad_records='rasie'", "raise?")),
        ({"algorithm": "bpee"}, ("--algorithm=bpee", "bpe", "unigram")),
        ({"column": "bodi"}, ("bodi", "body?", "--bad_records=skip")),
    ],
)
def test_wrong_settings_are_refused(corpus, tmp_path, given, facts):
    with raises_naming(UserError, *facts):
        train(corpus, tmp_path / "new", **{"column": "body", **given})
    assert not (tmp_path / "new").exists()


def test_end_of_text_may_be_named_twice(corpus, tmp_path):
    path = tmp_path / "words.model"
    given = {"vocab_size": 400, "special_tokens": ["</s>,<pad>"], "column": "body"}
    tokenizer_training.train_tokenizer(TokenizerConfig([str(corpus)], output=str(path), **given))
    tokenizer = SentencePieceTokenizer(str(path))
    assert (tokenizer.eos_id, len(tokenizer.encode(b"<pad>", ""))) == (1, 1)
    assert os.listdir(tmp_path) == ["words.model"]


def test_a_tokenizer_stays_whole_on_a_disk_without_room_for_the_next(corpus, tmp_path, monkeypatch):
    before = train(corpus, tmp_path / "new", column="body")
    written = []

    def full(path, content):
        written.append(path.name)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(tokenizer_training.files, "write_atomically", full)
    with raises_naming(UserError, "No space left"):
        train(corpus, tmp_path / "new", column="body", eos="<end>")
    assert written == ["tokenizer.json"]  # the larger one
    assert {path.name: path.read_text() for path in (tmp_path / "new").iterdir()} == before


def test_what_else_a_folder_holds_is_not_touched(corpus, tmp_path):
    (tmp_path / "model.safetensors").write_text("")
    with raises_naming(UserError, f"--output={tmp_path} holds other files", "model.safetensors"):
        train(corpus, tmp_path, column="body")
    with raises_naming(UserError, "model.safetensors is a file"):
        train(corpus, tmp_path / "model.safetensors", column="body")
    with raises_naming(UserError, "x.json", "folder"):
        train(corpus, tmp_path / "x.json")
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_without_the_library_the_extra_is_named(corpus, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises_naming(UserError, "spmd-trainer[hf]"):
        train(corpus, tmp_path / "new", column="body")
