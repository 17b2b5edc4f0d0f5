"""The same documents in files of several kinds give the same batches, and go on from the same positions."""

import json

import pytest
from facts import raises_naming
from input_helpers import assert_same, drain, take
from memory_documents import documents, make, mixture, segments, texts

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Documents

TEXTS = texts(130, longest=70)


def json_lines(folder):
    path = folder / "a.jsonl"
    path.write_text("".join(json.dumps({"id": i, "text": text.decode()}) + "\n" for i, text in enumerate(TEXTS)))
    return Documents(str(path), shuffle=None)


def parquet(folder):
    module = pytest.importorskip("pyarrow.parquet", reason="needs the extra `parquet`")
    import pyarrow

    path = folder / "a.parquet"
    module.write_table(pyarrow.table({"text": [text.decode() for text in TEXTS]}), path, row_group_size=40)
    return Documents(str(path), shuffle=None)


def array_record(folder):
    module = pytest.importorskip("array_record.python.array_record_module", reason="needs the package array_record")
    path = folder / "a.arrayrecord"
    writer = module.ArrayRecordWriter(str(path), "group_size:1")
    for text in TEXTS:
        writer.write(text)
    writer.close()
    return Documents(str(path), shuffle=None)


def plain_text(folder):
    path = folder / "a.txt"
    path.write_bytes(b"\n".join(TEXTS))
    return Documents(str(path), separator="\n", shuffle=None)


@pytest.mark.parametrize("write", [json_lines, parquet, array_record, plain_text])
def test_files_of_every_kind_give_the_batches_of_their_documents(tmp_path, write):
    expected = take(make(documents(TEXTS, shuffle=None)), 40)
    source = make(write(tmp_path))
    found = take(source, 13)
    again = make(write(tmp_path))
    again.set_state(source.get_state())
    assert_same(found + take(again, 27), expected)


@pytest.mark.parametrize("write", [json_lines, parquet, array_record, plain_text])
def test_files_of_every_kind_are_shuffled_by_default(tmp_path, write):
    named = write(tmp_path)
    fields = {name: getattr(named, name) for name in ("files", "separator")}
    batches = drain(make(Documents(**fields), is_training=False, shuffle=True, seq_len=128, packing="pad"))
    found = segments(batches)
    assert sorted(found) == sorted(text + b"\n" for text in TEXTS)
    assert found != [text + b"\n" for text in TEXTS]


def test_a_mixture_of_files_of_different_kinds_goes_on_from_its_position(tmp_path):
    def build():
        return make(mixture(a=(json_lines(tmp_path), 1), b=(parquet(tmp_path), 2), c=(array_record(tmp_path), 1)))

    source, other = build(), build()
    expected = take(source, 30)
    assert_same(take(other, 17), expected[:17])
    third = build()
    third.set_state(other.get_state())
    assert_same(take(third, 13), expected[17:])


def test_a_changed_file_is_named_when_a_position_is_restored(tmp_path):
    source = make(json_lines(tmp_path))
    take(source, 2)
    path = tmp_path / "a.jsonl"
    path.write_text(path.read_text() + '{"text": "one more"}\n')
    with pytest.raises(UserError, match=r"files have changed: .*a\.jsonl"):
        make(Documents(str(path), shuffle=None)).set_state(source.get_state())


def test_a_broken_line_is_named_with_its_file_or_skipped(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": \n{"text": "three"}\n')
    with pytest.raises(UserError, match=r"a\.jsonl:2 is not JSON"):
        drain(make(Documents(str(path)), is_training=False))
    source = make(Documents(str(path)), is_training=False, bad_records="skip")
    assert segments(drain(source)) == [b"one\n", b"three\n"]
    assert source.skipped == {"documents": 1}


def test_a_missing_file_is_an_error_that_names_the_input_and_the_source(tmp_path):
    with raises_naming(UserError, "CorpusInput 'train'", "source 'b'", "mixture", f"{tmp_path}/nothing.jsonl can't"):
        make(mixture(a=(json_lines(tmp_path), 1), b=(Documents(str(tmp_path / "nothing.jsonl")), 1)))


def test_fields_of_documents_can_be_overridden_in_a_config(tmp_path):
    from praxis import base_hyperparams, pax_fiddle

    from spmd_trainer.inputs import CorpusInput, Mixture

    named = pax_fiddle.Config(Documents, files="nowhere", shuffle=None)
    config = pax_fiddle.Config(
        CorpusInput,
        source=pax_fiddle.Config(Mixture, sources={"a": (named, 1.0)}),
        name="train",
        seq_len=16,
        batch_size=2,
        window_rows=8,
        is_training=True,
        input_random_seed=3,
    )
    named.files = json_lines(tmp_path).files
    built = base_hyperparams.instantiate(config)
    expected = make(mixture(a=(documents(TEXTS, shuffle=None), 1)))
    assert_same(take(built, 5), take(expected, 5))
    assert built.skipped == {"a": 0}
    assert 0.5 < built.fill <= 1
