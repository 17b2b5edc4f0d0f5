"""The token before each text, by the field `start` of the text inputs and the files of the tokenizer."""

import json

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, take, write_files
from praxis import base_hyperparams, pax_fiddle
from tokenizers import Tokenizer, models, pre_tokenizers, processors

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import text
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer

BOS, EOS = 26, 27
TEXTS = (b"hello", b"ab", b"c")
NAMED = {"bos_token": "<s>", "eos_token": "</s>"}


def letters():
    """Tokens 0 to 25 are the letters."""
    tokenizer = Tokenizer(models.BPE({chr(97 + i): i for i in range(26)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    return tokenizer


def with_bos():
    tokenizer = letters()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer


def ids_of(content):
    return [byte - 97 for byte in content]


@pytest.fixture
def files(tmp_path):
    return write_files(tmp_path, *TEXTS)


def save(folder, tokenizer, **stated):
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({**NAMED, **stated}))
    return str(folder)


def make(kind, files, tokenizer, **kwargs):
    sizes = {"prefix_len": 5} if kind is text.PromptInput else {"seq_len": 4}
    return base_hyperparams.instantiate(
        pax_fiddle.Config(kind, files=files, tokenizer=tokenizer, **{"batch_size": 2, **sizes, **kwargs})
    )


def labels(source):
    return np.concatenate([batch.labels[batch.weights > 0] for batch in drain(source)]).tolist()


@pytest.mark.parametrize(
    ("start", "first"), [("eos", [EOS]), ("bos", [BOS]), ("none", []), ("tokenizer", [BOS])], ids=str
)
def test_a_prompt_begins_with_it(start, first, files, tmp_path):
    batch, last = drain(make(text.PromptInput, files, save(tmp_path / "t", with_bos()), start=start))
    for row, content in enumerate(TEXTS[:2]):
        expected = [*first, *ids_of(content)][:5]
        assert batch.ids[row, : batch.prefix_lengths[row]].tolist() == expected
    # Even a row that fills the batch has a token.
    assert (last.prefix_lengths[1], last.prompt_index[1], last.ids[1, 0]) == (1, -1, (first or [EOS])[0])


def test_without_a_start_token_an_empty_prompt_is_refused(tmp_path):
    files = write_files(tmp_path, b"a", b"")
    assert len(drain(make(text.PromptInput, files, letters(), start="bos"))) == 1
    with raises_naming(UserError, files[1], "no text", "start='none'"):
        drain(make(text.PromptInput, files, letters(), start="none"))


@pytest.mark.parametrize(("start", "first"), [("eos", []), ("bos", [BOS]), ("none", [])])
def test_the_stream_of_a_text_input_has_it_before_each_text(start, first, files):
    source = make(text.TextInput, files, letters(), start=start)
    expected = [token for content in TEXTS for token in [*first, *ids_of(content), EOS]]
    assert labels(source) == expected
    assert source.num_tokens == len(expected)
    assert drain(make(text.TextInput, files, letters(), start=start))[0].ids[0].tolist() == [EOS, *expected[:3]]


@pytest.mark.parametrize(("start", "first"), [("eos", EOS), ("bos", BOS), ("none", EOS)])
def test_a_packed_document_is_predicted_from_it(start, first, files):
    source = make(text.PackedTextInput, files, letters(), start=start, seq_len=8)
    rows = [(batch.ids[i], batch.segment_ids[i], batch.labels[i]) for batch in drain(source) for i in range(2)]
    found = sorted(
        (ids[segments == number].tolist(), targets[segments == number].tolist())
        for ids, segments, targets in rows
        for number in range(1, segments.max(initial=0) + 1)
    )
    assert found == sorted(([first, *ids_of(content)], [*ids_of(content), EOS]) for content in TEXTS)


@pytest.mark.parametrize(
    ("stated", "adds_by_itself", "expected"),
    [
        ({}, False, None),
        ({}, True, BOS),
        # transformers 5.23 does not read these beside a tokenizer.json.
        ({"add_bos_token": True}, False, None),
        ({"add_bos_token": False}, True, BOS),
        ({"bos_token": None, "eos_token": None}, True, BOS),
    ],
)
def test_what_the_tokenizer_does_itself(stated, adds_by_itself, expected, files, tmp_path):
    tokenizer = with_bos() if adds_by_itself else letters()
    source = make(text.PromptInput, files, save(tmp_path / "t", tokenizer, **stated), start="tokenizer")
    assert source.start_id == expected


def test_a_beginning_of_text_that_is_the_end_of_text_is_not_written_twice(files):
    given = HuggingFaceTokenizer(letters(), eos="</s>", bos="</s>")
    for kind in (text.TextInput, text.PackedTextInput, text.PromptInput):
        assert_same(drain(make(kind, files, given, start="bos")), drain(make(kind, files, letters())))


def test_positions_belong_to_a_start_token(files):
    source = make(text.TextInput, files, letters(), is_training=True)
    take(source, 1)
    with raises_naming(ValueError, "start_id", "None", 26):
        make(text.TextInput, files, letters(), is_training=True, start="bos").set_state(source.get_state())
    # Positions that were saved before there was a `start`.
    assert "start" not in source.get_state().decode()


def test_the_model_needs_an_embedding_for_it(files):
    tokenizer = HuggingFaceTokenizer(letters(), eos="z")
    assert make(text.TextInput, files, tokenizer).encoded_vocab_size == 26
    assert make(text.TextInput, files, tokenizer, start="bos").encoded_vocab_size == BOS + 1


def test_a_sentencepiece_model_can_begin_texts_too(files, tmp_path):
    import sentencepiece

    def train(name, **options):
        sentencepiece.SentencePieceTrainer.train(
            input=files[0],
            model_prefix=str(tmp_path / name),
            vocab_size=12,
            hard_vocab_limit=False,
            minloglevel=2,
            **options,
        )
        return str(tmp_path / f"{name}.model")

    assert make(text.PromptInput, files, train("with"), start="bos").get_next().ids[:, 0].tolist() == [1, 1]
    with raises_naming(UserError, "start='bos', but", "no beginning-of-text", "start='eos'"):
        make(text.PromptInput, files, train("without", bos_id=-1), start="bos")


@pytest.mark.parametrize(
    ("start", "facts"),
    [
        ("boss", ["start='boss';", "'eos', 'bos', 'none' or 'tokenizer'", "bos?"]),
        ("bos", ["start='bos', but", "no beginning-of-text"]),
        ("tokenizer", ["start='tokenizer', but", "a ByteTokenizer"]),
    ],
)
def test_a_start_that_can_t_be_is_named(start, facts, files):
    with raises_naming(UserError, "TextInput '", *facts):
        make(text.TextInput, files, None, start=start)
