"""SentencePiece models: training, encoding and decoding, and text inputs that use them."""

import pathlib

import numpy as np
import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from input_helpers import assert_same, drain, stack_processes, take, write_files
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.inputs import text, tokenizers
from spmd_trainer.inputs.text_settings import TokenizerConfig
from spmd_trainer.inputs.tokenizer_training import train_tokenizer

TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 20,
    "Größe, naïve, 東京: words of several scripts.\n" * 10,
    "    indented\tand  spaced   out \n" * 5,
]


def train(files, path, vocab_size=330):
    train_tokenizer(TokenizerConfig(files, output=path, vocab_size=vocab_size))
    return str(path)


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("corpus"), *(content.encode() for content in TEXTS))


@pytest.fixture(scope="module")
def model(corpus, tmp_path_factory):
    return train(corpus, tmp_path_factory.mktemp("model") / "words.model")


@pytest.fixture(scope="module")
def tokenizer(model):
    return tokenizers.SentencePieceTokenizer(model)


def make(files, model, kind=text.TextInput, **kwargs):
    tokenizer_p = pax_fiddle.Config(tokenizers.SentencePieceTokenizer, model=model)
    defaults = {"batch_size": 3, "tokenizer": tokenizer_p, **({"seq_len": 8} if kind is text.TextInput else {})}
    return base_hyperparams.instantiate(pax_fiddle.Config(kind, files=files, **{**defaults, **kwargs}))


@settings(deadline=None, max_examples=80)
@given(content=st.text(st.characters(exclude_characters="\u2581", exclude_categories=["Cs"]), max_size=60))
def test_every_text_comes_back(tokenizer, content):
    ids = tokenizer.encode(content.encode(), "a file")
    assert ((ids >= 0) & (ids < tokenizer.vocab_size) & (ids != tokenizer.eos_id)).all()
    padded = np.append(ids, [tokenizer.eos_id, 7])
    assert tokenizer.decode([padded], [len(ids) + 1]) == [content]


def test_known_words_take_fewer_tokens_than_bytes(tokenizer):
    content = TEXTS[0].encode()
    assert len(tokenizer.encode(content, "a file")) < len(content) / 2
    assert tokenizer.vocab_size == 330


def test_the_same_files_give_the_same_model(corpus, model, tmp_path):
    again = train(corpus, tmp_path / "again.model")
    assert pathlib.Path(again).read_bytes() == pathlib.Path(model).read_bytes()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_evaluation_counts_every_token_once(corpus, model, tokenizer, batch_size):
    source = make(corpus, model, batch_size=batch_size)
    batches = drain(source)
    labels = np.concatenate([batch.labels[batch.weights > 0] for batch in batches])
    ids = np.concatenate([batch.ids[batch.weights > 0] for batch in batches])
    assert len(labels) == source.num_tokens
    texts = np.split(labels, np.flatnonzero(labels == tokenizer.eos_id) + 1)[:-1]
    assert tokenizer.decode(texts, [len(x) for x in texts]) == TEXTS
    np.testing.assert_array_equal(ids, np.append(tokenizer.eos_id, labels[:-1]))


def test_a_saved_position_continues_with_the_same_batches(corpus, model):
    source = make(corpus, model, is_training=True)
    take(source, 7)
    resumed = make(corpus, model, is_training=True)
    resumed.set_state(source.get_state())
    assert_same(take(resumed, 6), take(source, 6))
    shares = [
        make(corpus, model, batch_size=1, is_training=True, num_infeed_hosts=3, infeed_host_index=i) for i in range(3)
    ]
    for share in shares:
        share.set_state(source.get_state())
    assert_same(stack_processes(*(take(share, 4) for share in shares)), take(source, 4))


def test_a_position_of_another_model_is_refused(corpus, model, tmp_path):
    other = train(corpus, tmp_path / "other.model", 320)
    state = make(corpus, model, is_training=True).get_state()
    with pytest.raises(ValueError, match=r"sentencepiece_model was \d+ and is \d+"):
        make(corpus, other, is_training=True).set_state(state)
    by_byte = make(corpus, model, is_training=True, tokenizer=None)
    source = make(corpus, model, is_training=True)
    with pytest.raises(ValueError, match="eos_id was 256 and is None"):
        source.set_state(by_byte.get_state())


def test_prompts_are_the_beginnings_of_the_files(corpus, model, tokenizer):
    source = make(corpus, model, text.PromptInput, prefix_len=6)
    (batch,) = drain(source)
    for row, content in enumerate(TEXTS):
        tokens = tokenizer.encode(content.encode(), "a file")[:5]
        np.testing.assert_array_equal(batch.ids[row], [tokenizer.eos_id, *tokens])
        assert content.startswith(
            source.ids_to_strings(batch.ids[row : row + 1], batch.prefix_lengths[row : row + 1])[0]
        )


def test_a_prompt_may_end_inside_a_character(model, tokenizer, tmp_path):
    limit = tokenizer.bytes_per_token
    files = write_files(tmp_path, b"x" * (limit - 1) + "é".encode() + b" more")
    (batch,) = drain(make(files, model, text.PromptInput, prefix_len=2, batch_size=1))
    assert batch.prefix_lengths.tolist() == [2]


def test_a_file_that_is_not_utf8_is_named(model, tmp_path):
    files = write_files(tmp_path, b"fine\n", b"line one\nline tw\xff\n")
    named = (f"{files[1]} is", "not UTF-8", "byte 16", "line 2", "0xff", "invalid start byte", "Convert")
    with raises_naming(ValueError, *named):
        make(files, model).get_next()
    with raises_naming(ValueError, *named):
        make(files, model, text.PromptInput, prefix_len=64).get_next()
    with raises_naming(ValueError, *named, "--bad_records=skip"):
        train(files, tmp_path / "x.model")
    assert not (tmp_path / "x.model").exists()


def test_a_model_replaces_no_device_and_makes_no_directory(corpus, tmp_path):
    (tmp_path / "full.model").symlink_to("/dev/full")
    (tmp_path / "a.model").mkdir()
    for name, fact in (("full.model", "device"), ("new/x.model", "directory"), ("a.model", "directory")):
        with raises_naming(ValueError, f"--output={tmp_path / name}", fact):
            train(corpus, tmp_path / name)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.model", "full.model"]
    assert (tmp_path / "full.model").is_symlink()


def test_what_is_wrong_with_a_model_is_said(corpus, model, tmp_path):
    import sentencepiece

    no_model, no_end = tmp_path / "no.model", tmp_path / "no_end"
    no_model.write_bytes(b"hello")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=str(no_end), vocab_size=41, eos_id=-1, character_coverage=1.0, minloglevel=2
    )
    for path, *facts in (
        ("", "no `model`"),
        (str(tmp_path / "missing.model"), "missing.model can't", "No such file", "--mode=tokenizer"),
        (str(no_model), "no.model is", "not a SentencePiece"),
        (f"{no_end}.model", "no_end.model has", "no end-of-text token", "train"),
    ):
        with raises_naming(ValueError, *facts):
            tokenizers.SentencePieceTokenizer(path)
    with raises_naming(ValueError, "eos_id=7, but", "end-of-text", "unset eos_id"):
        make(corpus, model, eos_id=7)


def test_a_vocabulary_that_the_text_does_not_carry_is_refused(corpus, tmp_path):
    with pytest.raises(ValueError, match="can't train 5000 pieces of bpe"):
        train(corpus, tmp_path / "x.model", 5000)
