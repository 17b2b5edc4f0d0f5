"""The bytes of tokens: together they are the text, for each kind of tokenizer."""

import copy

import pytest
from facts import raises_naming
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.token_bytes import token_bytes
from spmd_trainer.inputs.tokenizers import ByteTokenizer, SentencePieceTokenizer

TEXTS = ["def add(a, b):\n    return a + b\n" * 5, "Größe, naïve, 東京 und so weiter\n" * 5]
TRAINING = {"vocab_size": 400, "special_tokens": ["<unk>", "</s>"], "show_progress": False}


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    tokenizer.train_from_iterator(TEXTS, trainers.BpeTrainer(initial_alphabet=alphabet, **TRAINING))
    tokenizer.add_tokens([AddedToken("added word"), AddedToken("ünï", normalized=False)])
    return tokenizer


def llama_2():
    """Characters with a mark for spaces, and bytes for all others."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")])
    every_byte = [f"<0x{i:02X}>" for i in range(256)]
    trainer = trainers.BpeTrainer(**{**TRAINING, "vocab_size": 700, "special_tokens": ["<unk>", "</s>", *every_byte]})
    tokenizer.train_from_iterator(TEXTS, trainer)
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer


def metaspace():
    tokenizer = Tokenizer(models.Unigram())
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.train_from_iterator(TEXTS, trainers.UnigramTrainer(unk_token="<unk>", **TRAINING))
    return tokenizer


KINDS = {kind.__name__: kind() for kind in (byte_level, llama_2, metaspace)}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_bytes_of_tokens_together_are_their_text(kind, data):
    tokenizer = KINDS[kind]
    ours = HuggingFaceTokenizer(tokenizer)
    texts = token_bytes(ours)
    choice = st.integers(0, ours.vocab_size - 1)
    if kind == "llama_2":
        # Of neighbours that are bytes, the library shows none if one of them is no UTF-8: take ASCII bytes alone.
        choice = choice.filter(lambda token: not 2 + 128 <= token < 2 + 256)
    ids = data.draw(st.lists(choice, max_size=12))
    text = b"".join(texts[token] for token in ids).decode(errors="replace")
    decoded = tokenizer.decode(ids, skip_special_tokens=False)
    # Where bytes are no UTF-8, the number of replacement characters is a matter of taste.
    assert squeeze(decoded) in (squeeze(text), squeeze(text.removeprefix(" ")))


def squeeze(text):
    return "\ufffd".join(part for part in text.split("\ufffd") if part) + "\ufffd" * ("\ufffd" in text)


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_s_tokens_have_its_bytes(kind):
    ours = HuggingFaceTokenizer(KINDS[kind])
    texts = token_bytes(ours)
    for text in (*TEXTS, "東京 added word", " two  spaces"):
        if kind != "metaspace" or text in TEXTS:
            found = b"".join(texts[token] for token in ours.encode(text.encode(), ""))
            assert found in (text.encode(), b" " + text.encode())  # SentencePiece puts a space before a text


def test_unused_ids_have_no_bytes():
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 3}, unk_token="</s>"))
    assert token_bytes(HuggingFaceTokenizer(tokenizer)) == [b" </s>", b"", b"", b" a"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.WordPiece(),
        decoders.BPEDecoder(),
        decoders.Sequence([decoders.Strip(" ", 1, 0), decoders.Fuse()]),
        decoders.Sequence([decoders.Fuse(), decoders.ByteLevel()]),
    ],
)
def test_a_decoder_that_looks_at_neighbours_is_refused(decoder):
    tokenizer = copy.deepcopy(KINDS["byte_level"])
    tokenizer.decoder = decoder
    with pytest.raises(UserError, match=r"the decoder '\w+', .*neighbours.*eos_ids"):
        token_bytes(HuggingFaceTokenizer(tokenizer))


def test_bytes_of_a_byte_tokenizer():
    assert token_bytes(ByteTokenizer()) == [*(bytes([i]) for i in range(256)), b""]
    assert token_bytes(ByteTokenizer(eos_id=3))[2:5] == [b"\2", b"", b"\4"]
    assert token_bytes(ByteTokenizer(eos_id=300))[254:258] == [b"\xfe", b"\xff", b"", b""]


def test_bytes_of_a_sentencepiece_model(tmp_path):
    import sentencepiece

    (tmp_path / "text").write_text("".join(TEXTS))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(tmp_path / "m"),
        vocab_size=288,
        byte_fallback=True,
        minloglevel=2,
    )
    ours = SentencePieceTokenizer(tmp_path / "m.model")
    texts = token_bytes(ours)
    for text in ("Größe, naïve", "def add(a, b)", "\U0001f600 x"):
        assert b"".join(texts[token] for token in ours.encode(text.encode(), "")).decode() == f" {text}"
    assert texts[ours.eos_id] == b""
    assert ours.bos_id == 1


def test_a_tokenizer_of_another_kind_is_refused():
    with raises_naming(UserError, "object", "the bytes", "not known", "HuggingFaceTokenizer"):
        token_bytes(object())
