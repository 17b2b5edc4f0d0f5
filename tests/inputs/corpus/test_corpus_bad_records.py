"""Bad records, errors of sources, and the thread that makes windows."""

import json

import numpy as np
import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, take
from memory_documents import MemoryDocuments, documents, make, mixture, segments, texts

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents
from spmd_trainer.inputs.corpus.encoding import Encoder

GOOD = texts(60)
BAD = [*GOOD[:20], None, *GOOD[20:50], None, None, *GOOD[50:], None]


def test_a_bad_record_is_an_error_that_names_it():
    with raises_naming(UserError, "CorpusInput '", "m0:21", "broken", "bad_records='skip'"):
        drain(make(documents(BAD), is_training=False))


def test_batches_before_the_bad_record_come_first_and_the_error_comes_again():
    good = drain(make(documents(GOOD), is_training=False, window_rows=4))
    source = make(documents(BAD), is_training=False, window_rows=4)
    found = []
    for _ in range(2):
        with pytest.raises(UserError, match="m0:21"):
            found.extend(iter(source.get_next, None))
    assert len(found) >= 2
    assert_same(found, good[: len(found)])
    state = source.get_state()
    source.set_state(state)
    with pytest.raises(UserError, match="m0:21"):
        source.get_next()


@pytest.mark.parametrize("shuffle", ["global", 7, None])
def test_skip_leaves_bad_records_out_and_counts_them(shuffle):
    source = make(documents(BAD, shuffle=shuffle, epochs=2), bad_records="skip", seq_len=64)
    state = source.get_state()
    found = drain(source)
    assert sorted(segments(found)) == sorted(text + b"\n" for text in GOOD * 2)
    assert source.skipped == {"documents": 8}
    for taken in (1, 5, len(found)):
        source.set_state(state)
        take(source, taken)
        source.set_state(source.get_state())
        assert_same(drain(source), found[taken:])
        assert source.skipped == {"documents": 8}


def test_skipped_records_of_each_source_are_counted_in_the_position():
    source = make(mixture(a=(documents(BAD), 1), b=(documents(GOOD), 1)), bad_records="skip")
    while not source.skipped["a"]:
        source.get_next()
    take(source, 8)
    position = json.loads(source.get_state())["position"]
    assert 0 < position["sources"]["a"][-1] <= source.skipped["a"]
    assert source.skipped["b"] == 0


@pytest.mark.parametrize("shuffle", ["global", 3, None])
def test_nothing_but_bad_records_or_empty_documents_is_an_error_and_not_a_hang(shuffle):
    for some in ([None] * 30, [b""] * 30, [b"", None]):
        with raises_naming(UserError, "no record", "with text", "last is m0:"):
            make(documents(some, shuffle=shuffle), bad_records="skip").get_next()
        with raises_naming(UserError, "the sources", "no document", "text"):
            make(documents(some, shuffle=shuffle), bad_records="skip", is_training=False).get_next()


def test_one_good_document_among_bad_ones_is_enough():
    source = make(documents([None] * 30 + [b"good"] + [None] * 30), bad_records="skip")
    assert set(segments(take(source, 5))) == {b"good\n"}


def test_ids_outside_of_the_vocabulary_are_bad_records():
    some = [b"ab", b"a\xf0b", b"cd"]
    source = make(documents(some), is_training=False)
    source.limit_vocabulary(257)
    assert len(drain(source)) == 1
    source = make(documents(some), is_training=False, eos_id=100)
    source.limit_vocabulary(200)
    with raises_naming(UserError, "m0:2", "token 240", "0 to 199"):
        drain(source)


def test_text_that_the_tokenizer_refuses_is_a_bad_record_with_its_byte(hf_tokenizer):
    source = make(documents([b"a b", b"c \xff", b"d"]), tokenizer=hf_tokenizer, is_training=False)
    with pytest.raises(UserError, match=r"m0:2 is not UTF-8: byte 2 \(line 1\) is 0xff"):
        drain(source)
    source = make(documents([b"a b", b"c \xff", b"d"]), tokenizer=hf_tokenizer, is_training=False, bad_records="skip")
    assert source.ids_to_strings(*_labels(drain(source))) == ["a bd"]
    assert source.skipped == {"documents": 1}


def test_texts_encoded_together_have_the_tokens_of_each_alone_and_only_the_bad_one_is_bad(hf_tokenizer):
    class Together:
        """A tokenizer that encodes several texts at once, and refuses them all if one is bad."""

        vocab_size, batches = hf_tokenizer.vocab_size, []

        def encode(self, text, path):
            return hf_tokenizer.encode(text, path)

        def encode_batch(self, some, wheres):
            self.batches.append(len(some))
            return [hf_tokenizer.encode(text, where) for text, where in zip(some, wheres, strict=True)]

    some = [Document(text, f"x:{i}") for i, text in enumerate([b"a b", b"", b"c \xff", b"d"])]
    for tokenizer in (hf_tokenizer, Together()):
        found = Encoder(tokenizer, tokenizer.vocab_size).encode([*some, BadRecord("y", "is broken")])
        assert found[2].where == "x:2"
        assert found[2].problem.startswith("is not UTF-8: byte 2")
        assert found[4] == BadRecord("y", "is broken")
        for index in (0, 1, 3):
            np.testing.assert_array_equal(found[index], hf_tokenizer.encode(some[index].content, ""))
            assert found[index].dtype == np.uint16
    assert Together.batches == [4, 1, 1, 1, 1]


def _labels(batches):
    rows = [row[row > 0] for batch in batches for row in batch.labels if (row > 0).any()]
    return rows, [len(row) for row in rows]


@pytest.fixture
def hf_tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE({**{"</s>": 0}, **{symbol: i + 1 for i, symbol in enumerate(alphabet)}}, []))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    from tokenizers import decoders

    made.decoder = decoders.ByteLevel()
    made.add_special_tokens(["</s>"])
    return HuggingFaceTokenizer(made)


class Failing(MemoryDocuments):
    """Fails when record 70 is read, whatever the error."""

    def read_chunk(self, chunk, start):
        for number, record in enumerate(super().read_chunk(chunk, start), start):
            if number == 70:
                raise RuntimeError("the disk is gone")
            yield record


def test_any_error_of_a_source_reaches_the_caller_in_its_batch():
    some = texts(100)
    expected = drain(make(documents(some), is_training=False, window_rows=4))
    source = make(Documents(Failing([some]), shuffle=None), is_training=False, window_rows=4)
    found = []
    with raises_naming(RuntimeError, "disk is gone"):
        found.extend(iter(source.get_next, None))
    assert len(found) > 4
    assert_same(found, expected[: len(found)])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"packing": "bestfit"}, "packing='bestfit'.*did you mean"),
        ({"bad_records": "ignore"}, "bad_records='ignore'"),
        ({"seq_len": 0}, "seq_len=0"),
        ({"window_rows": 0}, "window_rows=0"),
        ({"batch_size": 0}, "batch_size=0"),
        ({"start": "bos"}, "no beginning-of-text"),
        ({"tokenizer": "nowhere.json"}, "no such file"),
        ({"infeed_host_index": 3}, "infeed_host_index=3"),
    ],
)
def test_settings_that_can_not_be_are_errors(fields, message):
    with pytest.raises(UserError, match=message):
        make(documents(GOOD), **fields)


def test_documents_that_are_tokens_already_must_be_of_this_tokenizer():
    class Tokens(MemoryDocuments):
        def check_made_by(self, fingerprint, processor):
            raise UserError(f"made with another tokenizer than {fingerprint}")

    with raises_naming(UserError, "another tokenizer", "{'eos_id': 256}"):
        make(Documents(Tokens([GOOD])))


def test_bad_records_behind_the_last_row_are_counted():
    source = make(
        documents([*GOOD[:2], None, None]), is_training=False, bad_records="skip", packing="pad", window_rows=1
    )
    drain(source)
    assert source.skipped == {"documents": 2}
    source.reset()
    assert source.skipped == {"documents": 0}


@pytest.mark.parametrize("shuffle", ["yes", 10_000, 1])
def test_a_window_in_the_wrong_place_is_refused(shuffle):
    with raises_naming(
        UserError, f"CorpusInput 'train': shuffle={shuffle!r}", "True", "False", "None", "Documents(shuffle="
    ):
        make(documents(GOOD), shuffle=shuffle)
