"""Hugging Face tokenizers: values of the `tokenizer` field, special tokens, encoding and decoding."""

import copy
import itertools
import json
import os
import pathlib
import pickle
import shutil
import sys

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, take, write_files
from praxis import base_hyperparams, pax_fiddle
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import __version__ as tokenizers_version
from tokenizers.implementations import ByteLevelBPETokenizer

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, huggingface_tokenizer, text, tokenizer_field, tokenizers

HuggingFaceTokenizer = huggingface_tokenizer.HuggingFaceTokenizer
TEXTS = [
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n" * 20,
    "Größe, naïve, 東京: words of several scripts.\n" * 10,
    "    indented\tand  spaced   out \n" * 5,
]


def train(*special_tokens, vocab_size=330):
    """A byte-level BPE tokenizer, as GPT-2's; the special tokens have the first ids."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=list(special_tokens), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXTS, trainer)
    return tokenizer


@pytest.fixture(scope="module")
def trained():
    tokenizer = train("<pad>", "<s>", "</s>")
    # As Llama's: the library's own encode adds <s>, and the inputs don't ask it to.
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


@pytest.fixture(scope="module")
def folder(trained, tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    trained.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return write_files(tmp_path_factory.mktemp("corpus"), *(content.encode() for content in TEXTS))


class FastTokenizer:
    """What is used of transformers' PreTrainedTokenizerFast: its inner tokenizer and the tokens that it states."""

    def __init__(self, backend_tokenizer, **special_tokens_map):
        self.backend_tokenizer = backend_tokenizer
        self.special_tokens_map = special_tokens_map

    def convert_tokens_to_ids(self, token):
        return self.backend_tokenizer.token_to_id(token)


def config(files, tokenizer, kind=text.TextInput, **kwargs):
    length = {"prefix_len": 6} if kind is text.PromptInput else {"seq_len": 8}
    return pax_fiddle.Config(kind, files=files, tokenizer=tokenizer, **{"batch_size": 3, **length, **kwargs})


def make(*args, **kwargs):
    return base_hyperparams.instantiate(config(*args, **kwargs))


def kinds_of(folder, trained):
    """All that a field may hold for one and the same tokenizer."""
    return {
        "file": str(folder / "tokenizer.json"),
        "path": folder / "tokenizer.json",
        "folder": str(folder),
        "object": trained,
        "fast": FastTokenizer(trained, eos_token="</s>"),
        "ours": HuggingFaceTokenizer(folder),
        "config": pax_fiddle.Config(HuggingFaceTokenizer, str(folder), eos="</s>"),
    }


@pytest.mark.parametrize("kind", ["file", "path", "folder", "object", "fast", "ours", "config"])
def test_each_kind_gives_the_library_s_own_tokens(kind, folder, trained, corpus):
    source = make(corpus, kinds_of(folder, trained)[kind])
    assert (source.vocab_size, source.tokenizer.eos_id) == (trained.get_vocab_size(), 2)
    labels = np.concatenate([batch.labels[batch.weights > 0] for batch in drain(source)])
    expected = [[*trained.encode(content, add_special_tokens=False).ids, 2] for content in TEXTS]
    assert labels.tolist() == [*itertools.chain(*expected)]
    assert source.num_tokens == len(labels)
    texts = np.split(labels, np.flatnonzero(labels == 2) + 1)[:-1]
    assert [source.ids_to_strings(ids[None], [len(ids)])[0] for ids in texts] == TEXTS


def test_the_position_is_that_of_the_tokenizer_however_it_is_given(folder, trained, corpus):
    source = make(corpus, str(folder), is_training=True)
    take(source, 2)
    state = source.get_state()
    for given in kinds_of(folder, trained).values():
        resumed = make(corpus, given, is_training=True)
        resumed.set_state(state)
        assert_same(take(resumed, 2), [source.batch_at(position) for position in (2, 3)])


def test_a_position_of_another_tokenizer_is_refused(folder, corpus):
    state = make(corpus, str(folder), is_training=True).get_state()
    with pytest.raises(ValueError, match=r"huggingface_tokenizer was \d+ and is \d+"):
        make(corpus, train("<pad>", "<s>", "</s>", vocab_size=300), is_training=True).set_state(state)
    with pytest.raises(ValueError, match=r"eos_id was 2 and is 0"):
        make(corpus, str(folder), eos_id=0, is_training=True).set_state(state)
    with pytest.raises(ValueError, match=r"huggingface_tokenizer was \d+ and is None"):
        make(corpus, None, is_training=True).set_state(state)


@pytest.mark.parametrize("kind", [text.PackedTextInput, text.PromptInput])
def test_the_other_text_inputs_take_it(kind, folder, trained, corpus):
    source = make(corpus, str(folder), kind)
    batches = drain(source)
    first = [trained.encode(content, add_special_tokens=False).ids for content in TEXTS]
    if kind is text.PromptInput:
        assert batches[0].ids.tolist() == [[2, *ids[:5]] for ids in first]
    else:
        assert sum(batch.weights.sum() for batch in batches) == sum(map(len, first)) + len(first)


def test_a_tokenizer_object_goes_through_copies_of_its_config(trained, corpus):
    expected = drain(make(corpus, trained))
    made = config(corpus, trained)
    for other in (made.clone(), copy.deepcopy(made.clone())):
        assert_same(drain(base_hyperparams.instantiate(other)), expected)
    ours = HuggingFaceTokenizer(trained, encode_special_tokens=True)
    for other in (copy.deepcopy(ours), pickle.loads(pickle.dumps(ours))):
        assert other.encode(b"a</s>", "").tolist() == ours.encode(b"a</s>", "").tolist()
        assert other.fingerprint() == ours.fingerprint()
    assert len(repr(ours)) < 100


def test_stored_padding_and_truncation_have_no_effect(trained, corpus, tmp_path):
    cutting = copy.deepcopy(trained)
    cutting.enable_truncation(3)
    cutting.enable_padding(length=8)
    cutting.save(str(tmp_path / "tokenizer.json"))
    expected = drain(make(corpus, trained))
    for given in (cutting, tmp_path / "tokenizer.json"):
        assert_same(drain(make(corpus, given)), expected)
    assert HuggingFaceTokenizer(cutting).fingerprint() == HuggingFaceTokenizer(trained).fingerprint()
    # The object is the user's own.
    assert cutting.truncation["max_length"] == 3
    assert cutting.padding["length"] == 8


def test_a_text_that_spells_a_special_token_gets_it_unless_told_otherwise(trained):
    content = "a</s>b"
    assert 2 in HuggingFaceTokenizer(trained).encode(content.encode(), "").tolist()
    split = HuggingFaceTokenizer(trained, encode_special_tokens=True)
    ids = split.encode(content.encode(), "")
    assert 2 not in ids.tolist()
    assert split.decode([ids], [len(ids)]) == [content]
    own = copy.deepcopy(trained)
    own.encode_special_tokens = True
    assert HuggingFaceTokenizer(own).encode(content.encode(), "").tolist() == ids.tolist()
    assert HuggingFaceTokenizer(own).fingerprint() != HuggingFaceTokenizer(trained).fingerprint()


def test_decode_leaves_out_what_is_no_text(trained):
    tokenizer = HuggingFaceTokenizer(trained)
    ids = [1, *tokenizer.encode("né".encode(), ""), 2, 0, -1, tokenizer.vocab_size, 99999, *tokenizer.encode(b"!", "")]
    assert tokenizer.decode([ids, ids], [len(ids), 0]) == ["né!", ""]


def test_the_vocabulary_reaches_to_the_highest_id(tmp_path):
    words = {"<unk>": 0, "a": 1, "b": 7}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    assert HuggingFaceTokenizer(tokenizer, eos="a").vocab_size == 8
    tokenizer.add_special_tokens(["</s>"])
    added = tokenizer.token_to_id("</s>")
    ours = HuggingFaceTokenizer(tokenizer)
    assert ours.eos_id == added
    assert ours.vocab_size == max(7, added) + 1
    assert ours.vocab_size > tokenizer.get_vocab_size()
    (path,) = write_files(tmp_path, b"a b c b")
    assert max(batch.labels.max() for batch in drain(make(path, tokenizer))) < ours.vocab_size


def with_token_beyond(trained):
    """The tokenizer with a special token added beside its vocabulary, as published models have for chats."""
    tokenizer = copy.deepcopy(trained)
    tokenizer.add_special_tokens(["<|user|>"])
    return tokenizer


def test_special_tokens_beside_the_vocabulary_are_not_what_a_model_needs(trained, corpus):
    tokenizer = with_token_beyond(trained)
    ours, own_size = HuggingFaceTokenizer(tokenizer), trained.get_vocab_size()
    assert (ours.vocab_size, ours.encoded_vocab_size) == (own_size + 1, own_size)
    assert make(corpus, tokenizer).encoded_vocab_size == own_size
    # The end-of-text is appended to every text, and a plain added word is found in any text.
    assert HuggingFaceTokenizer(tokenizer, eos="<|user|>").encoded_vocab_size == own_size + 1
    tokenizer.add_tokens(["whole word"])
    assert HuggingFaceTokenizer(tokenizer).encoded_vocab_size == own_size + 2
    assert make(corpus, None).encoded_vocab_size == 257


@pytest.mark.parametrize("kind", [text.TextInput, text.PackedTextInput, text.PromptInput])
def test_a_token_that_the_model_has_not_got_is_refused_where_a_text_spells_it(kind, trained, tmp_path):
    tokenizer, size = with_token_beyond(trained), trained.get_vocab_size()
    paths = write_files(tmp_path, b"hello", b"hi <|user|>")
    source = make(paths, tokenizer, kind)
    source.limit_vocabulary(size)
    message = rf"1\.txt gives token {size}, and the model's vocabulary is 0 to {size - 1}\..*encode_special_tokens=True"
    with pytest.raises(UserError, match=message):
        drain(source)
    for fits in (
        make(paths[:1], tokenizer, kind),
        make(paths, HuggingFaceTokenizer(tokenizer, encode_special_tokens=True), kind),
    ):
        fits.limit_vocabulary(size)
        assert drain(fits)
    source = make(paths, tokenizer, kind)
    source.limit_vocabulary(size + 1)
    assert drain(source)


def byte_level(*texts, **settings):
    """A byte-level BPE with the bytes of these texts alone."""
    tokenizer = Tokenizer(models.BPE(**settings))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel()
    specials = ["</s>", *filter(None, [settings.get("unk_token")])]
    tokenizer.train_from_iterator(
        texts, trainers.BpeTrainer(vocab_size=400, special_tokens=specials, show_progress=False)
    )
    return tokenizer


def test_a_character_that_a_bpe_would_leave_out_is_refused(tmp_path):
    paths = write_files(tmp_path, b"hello world\n", "h\u00e9llo w\u00f6rld".encode())
    lossy = byte_level("hello world\n")
    assert drain(make(paths[:1], lossy))
    with raises_naming(UserError, "1.txt:", "tokenizers Tokenizer", "no token", "'é'", "U+00E9"):
        drain(make(paths, lossy))
    # As normalizers and added tokens change the text, so they change what is missing.
    lossy.normalizer = normalizers.Sequence([normalizers.NFD(), normalizers.StripAccents()])
    assert make(paths, lossy).num_tokens == 2 * make(paths[:1], lossy).num_tokens - 1
    lossy.normalizer = None
    lossy.add_tokens(["h\u00e9llo", "w\u00f6rld"])
    assert drain(make(paths, lossy))


def test_a_bpe_of_characters_that_would_leave_one_out_is_refused(tmp_path):
    tokenizer = Tokenizer(models.BPE({"</s>": 0, "a": 1, "b": 2}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    paths = write_files(tmp_path, b"a b\nab", b"a c")
    assert drain(make(paths[:1], tokenizer))
    with raises_naming(UserError, "1.txt:", "no token", "'c'"):
        drain(make(paths, tokenizer))


@pytest.mark.parametrize(
    "tokenizer", [train("</s>"), byte_level(TEXTS[0], unk_token="<unk>")], ids=["all bytes", "unknown token"]
)
def test_a_bpe_that_leaves_nothing_out_reads_any_text(tokenizer, tmp_path):
    content = "".join(map(chr, [*range(1, 0xD800, 7), *range(0xE000, 0x110000, 0x777)]))
    (path,) = write_files(tmp_path, content.encode())
    assert make(path, tokenizer).num_tokens > 1


def test_an_error_of_the_library_names_the_file(tmp_path):
    tokenizer = Tokenizer(models.WordLevel({"</s>": 0, "a": 1}))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    paths = write_files(tmp_path, b"a a", b"a b")
    with raises_naming(UserError, "1.txt:", "tokenizers Tokenizer", "can't encode", "Missing [UNK]"):
        drain(make(paths, tokenizer))


def save_beside(directory, trained, **stated):
    trained.save(str(directory / "tokenizer.json"))
    for name, content in stated.items():
        (directory / f"{name}.json").write_text(json.dumps(content))
    return directory


def test_special_tokens_are_those_that_the_files_state(tmp_path):
    tokenizer = train("<|endoftext|>", "</s>", "<|im_end|>", "<one>")
    added = {str(i): {"content": tokenizer.id_to_token(i), "special": True} for i in range(4)}
    save_beside(
        tmp_path,
        tokenizer,
        tokenizer_config={
            "eos_token": {"__type": "AddedToken", "content": "<|im_end|>"},
            "bos_token": None,
            "added_tokens_decoder": added,
        },
        special_tokens_map={"eos_token": "</s>", "bos_token": "<one>", "pad_token": {"content": "<|endoftext|>"}},
    )
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        ours = HuggingFaceTokenizer(path)
        assert (ours.eos_id, ours.bos_id, ours.pad_id) == (2, 3, 0)
    given = HuggingFaceTokenizer(tmp_path, eos="</s>", bos=0, pad=2)
    assert (given.eos_id, given.bos_id, given.pad_id) == (1, 0, 2)
    # Beside a file of another name, they are another tokenizer's.
    shutil.copy(tmp_path / "tokenizer.json", tmp_path / "other.json")
    with raises_naming(UserError, "end-of-text", "several", "</s>, <|endoftext|>", "set eos_id"):
        HuggingFaceTokenizer(tmp_path / "other.json")


def test_special_tokens_by_their_usual_spellings():
    ours = HuggingFaceTokenizer(train("<|endoftext|>", "[PAD]", "<|begin_of_text|>"))
    assert (ours.eos_id, ours.pad_id, ours.bos_id) == (0, 1, 2)
    assert HuggingFaceTokenizer(train("</s>")).pad_id is None


def test_an_end_of_text_that_is_unknown_is_asked_for(corpus):
    tokenizer = train("<stop>", "<go>")
    with raises_naming(
        UserError,
        "TextInput '",
        "tokenizers Tokenizer",
        "no end-of-text token",
        "none of",
        "set eos_id",
        "HuggingFaceTokenizer: eos",
        "<stop>, <go>",
    ):
        make(corpus, tokenizer)
    assert make(corpus, tokenizer, eos_id=0).tokenizer.eos_id == 0
    assert HuggingFaceTokenizer(tokenizer, eos="<go>").eos_id == 1
    assert make(corpus, FastTokenizer(tokenizer, eos_token="<stop>")).tokenizer.eos_id == 0


@pytest.mark.parametrize(
    ("given", "facts"),
    [
        ({"eos": "</S>"}, ["eos='</S>'", "not a token", "</s>?"]),
        ({"eos": 400}, ["eos=400", "not a token", "0 to 329"]),
        ({"eos": 1.5}, ["eos=1.5", "not a token"]),
        ({"bos": -1}, ["bos=-1", "not a token"]),
        ({"pad": "[PAD]"}, ["pad='[PAD]'", "not a token", "<pad>"]),
    ],
)
def test_a_special_token_that_is_none_is_refused(trained, given, facts):
    with raises_naming(UserError, *facts):
        HuggingFaceTokenizer(trained, **given)


def test_files_that_contradict_each_other_are_refused(trained, tmp_path):
    save_beside(tmp_path, trained, tokenizer_config={"eos_token": "<|im_end|>"})
    with raises_naming(UserError, "eos_token='<|im_end|>'", "tokenizer_config.json", "not a token"):
        HuggingFaceTokenizer(tmp_path)
    save_beside(tmp_path, trained, tokenizer_config={"added_tokens_decoder": {"400": {"content": "<|im_end|>"}}})
    with pytest.raises(UserError, match=r"adds the token '<\|im_end\|>' as id 400, and .* has None there"):
        HuggingFaceTokenizer(tmp_path)


@pytest.mark.parametrize("added", [None, [1], 3, {"x": {"content": "a"}}, {"9" * 14: {"content": "a"}}, {"-1": "a"}])
@pytest.mark.parametrize("name", ["tokenizer_config", "special_tokens_map"])
def test_added_tokens_without_ids_are_refused(name, added, trained, tmp_path):
    save_beside(tmp_path, trained, **{"special_tokens_map": {}, name: {"added_tokens_decoder": added}})
    with raises_naming(UserError, tmp_path / f"{name}.json", "added_tokens_decoder"):
        HuggingFaceTokenizer(tmp_path)


def test_prompts_are_exact_where_a_tokenizer_drops_text_or_reads_whole_words(tmp_path):
    words = {"<unk>": 0, "</s>": 1, "hello": 2, "there": 3}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.normalizer = normalizers.Lowercase()
    contents = ["hello there " * 30, " " * 5000 + "There hello there hello", "x" * 3000 + " hello there", "hello"]
    source = make(write_files(tmp_path, *(c.encode() for c in contents)), tokenizer, text.PromptInput, batch_size=4)
    for prefix_len in (2, 6, 11):
        source = make(source.paths, tokenizer, text.PromptInput, batch_size=4, prefix_len=prefix_len)
        (batch,) = drain(source)
        for row, content in enumerate(contents):
            expected = [1, *tokenizer.encode(content).ids[: prefix_len - 1]]
            assert batch.ids[row, : batch.prefix_lengths[row]].tolist() == expected


def test_a_file_that_is_not_utf8_is_named(folder, tmp_path):
    (path,) = write_files(tmp_path, b"fine\n" * 2000 + b"not fine\xff")
    with raises_naming(UserError, f"{path} is", "not UTF-8", "byte 10008", "line 2001", "0xff"):
        make(path, str(folder)).get_next()


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        (
            "tokenizr.json",
            ["tokenizr.json':", "no such file", "mean tokenizer.json"],
        ),
        ("nowhere/tokenizer.json", ["nowhere/tokenizer.json':", "no such file", "no folder", "nowhere)"]),
        ("org/model", ["org/model':", "no such file", "not downloaded"]),
        ("empty", ["empty has", "no tokenizer.json", "it holds vocab.txt"]),
        (
            "tokenizer_config.json",
            ["tokenizer_config.json is", "not a Hugging Face tokenizer.json", "no 'model'", "did you mean"],
        ),
        ("broken.json", ["broken.json is", "not JSON"]),
        ("strange.json", ["strange.json is", "not a tokenizer", f"tokenizers {tokenizers_version}"]),
        ("list", ["list/tokenizer_config.json", "list, not an object"]),
        ("words.txt", ["words.txt is", "not a SentencePiece"]),
    ],
)
def test_a_wrong_path_is_named(name, facts, trained, corpus, tmp_path):
    save_beside(tmp_path, trained, tokenizer_config={"eos_token": "</s>"}, strange={"model": {"type": "Strange"}})
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / "vocab.txt").write_text("a\n")
    (tmp_path / "broken.json").write_text('{"model"')
    (tmp_path / "words.txt").write_text("a\nb\n")
    (tmp_path / "list").mkdir()
    save_beside(tmp_path / "list", trained, tokenizer_config=[1])
    with raises_naming(UserError, "TextInput '", *facts):
        make(corpus, str(tmp_path / name))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("[" * 200_000, ["64"]),
        ('{"model": ' + '{"a":' * 200_000, ["model", "64"]),
        ('{"model": {"a": 1e400}}', ["model.a", "1e400"]),
    ],
)
def test_absurd_json_is_refused(name, text, facts, trained, corpus, tmp_path):
    save_beside(tmp_path, trained)
    (tmp_path / name).write_text(text)
    with raises_naming(UserError, tmp_path / name, *facts):
        make(corpus, str(tmp_path))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "chat_template.jinja"])
def test_a_named_pipe_is_not_waited_for(name, trained, corpus, tmp_path):
    save_beside(tmp_path, trained)
    (tmp_path / name).unlink(missing_ok=True)
    os.mkfifo(tmp_path / name)
    with raises_naming(UserError, tmp_path / name, "named pipe"):
        make(corpus, str(tmp_path))


@pytest.mark.parametrize(
    "given", [3, b"tokenizer.json", ["tokenizer.json"], {"eos_id": 1}, HuggingFaceTokenizer, object()]
)
def test_what_is_no_tokenizer_is_refused(given):
    with raises_naming(UserError, "tokenizer=", "can't be used", "SentencePiece .model", "tokenizer.json or"):
        tokenizer_field.make_tokenizer(given)


def test_a_slow_tokenizer_of_transformers_is_refused():
    class Slow:
        def convert_tokens_to_ids(self, token):
            return 0

    with raises_naming(UserError, "slow tokenizers", "AutoTokenizer.from_pretrained(name)"):
        tokenizer_field.make_tokenizer(Slow())


def test_a_tokenizer_that_draws_its_tokens_is_refused(trained):
    drawing = copy.deepcopy(trained)
    drawing.model.dropout = 0.1
    with pytest.raises(UserError, match=r"BPE dropout of 0\.1"):
        HuggingFaceTokenizer(drawing)


def test_a_tokenizer_with_parts_in_python_is_refused(trained):
    class Split:
        def pre_tokenize(self, text):
            pass

    own = copy.deepcopy(trained)
    own.pre_tokenizer = pre_tokenizers.PreTokenizer.custom(Split())
    with raises_naming(UserError, "can't be written", "tokenizer.json", "Custom PreTokenizer"):
        HuggingFaceTokenizer(own)


def test_an_error_of_a_tokenizer_s_config_has_no_configuration_behind_it(corpus, tmp_path):
    tokenizer_p = pax_fiddle.Config(HuggingFaceTokenizer, str(tmp_path / "tokenizer.json"))
    with raises_naming(UserError, f"{tmp_path}/tokenizer.json can't", "No such file") as refused:
        text.TextInput(files=corpus, tokenizer=tokenizer_p, seq_len=8, batch_size=1)
    assert "Fiddle context" not in str(refused.value)


def test_an_end_of_text_beside_a_tokenizer_that_has_one_is_refused(folder, corpus):
    with raises_naming(UserError, "eos_id=0, but", "end-of-text", "unset eos_id"):
        make(corpus, HuggingFaceTokenizer(folder), eos_id=0)


def test_without_the_library_the_extra_is_named(folder, corpus, monkeypatch):
    huggingface_tokenizer._load.cache_clear()
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with raises_naming(UserError, "Hugging Face's tokenizers", "pip install 'spmd-trainer[hf]'"):
        make(corpus, str(folder))


def test_a_text_too_large_to_encode_at_once_is_refused(trained, monkeypatch):
    monkeypatch.setattr(huggingface_tokenizer, "_MAX_TEXT_BYTES", 4)
    with raises_naming(UserError, "big.txt:", "5 bytes", "too large", "`split -C 2`"):
        HuggingFaceTokenizer(trained).encode(b"12345", "big.txt")


def test_the_library_s_own_wrappers_are_taken(corpus, tmp_path):
    wrapper = ByteLevelBPETokenizer()
    wrapper.train_from_iterator(TEXTS, vocab_size=300, special_tokens=["</s>"], show_progress=False)
    assert make(corpus, wrapper).vocab_size == 300


def test_a_sentencepiece_model_is_taken_by_its_path(corpus, tmp_path):
    import sentencepiece

    prefix = str(tmp_path / "words")
    sentencepiece.SentencePieceTrainer.train(
        input=corpus, model_prefix=prefix, vocab_size=40, character_coverage=1.0, minloglevel=2
    )
    for given in (f"{prefix}.model", pathlib.Path(f"{prefix}.model")):
        source = make(corpus, given)
        assert isinstance(source.tokenizer, tokenizers.SentencePieceTokenizer)
        assert source.vocab_size == 40
    with raises_naming(UserError, f"tokenizer='{tmp_path / 'word.model'}'", "no such file", "words.model?"):
        make(corpus, str(tmp_path / "word.model"))
    with raises_naming(UserError, tmp_path / "word.model", "can't be read", "No such file", "words.model?"):
        tokenizers.SentencePieceTokenizer(tmp_path / "word.model")
    assert files.nearby_names(f"{prefix}.model") == ""
