"""ArrayRecord files: many files with few open, and damage that names the file and the records."""

import os

import numpy as np
import pytest
from corpus_files import TEXTS, write_array_record
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import record_documents
from spmd_trainer.inputs.corpus.record_documents import ArrayRecordDocuments

pytest.importorskip("array_record.python.array_record_module")


def test_more_files_than_may_be_open(tmp_path):
    many = record_documents._MAX_OPEN + 3
    paths = [str(write_array_record(tmp_path, [f"{n} {i}" for i in range(3)], f"{n:02d}")) for n in range(many)]
    source = ArrayRecordDocuments(paths)
    assert source.chunk_sizes().tolist() == [3] * many
    numbers = np.random.default_rng(0).permutation(3 * many)
    records = source.read(numbers)
    assert [record.content.decode() for record in records] == [f"{n // 3} {n % 3}" for n in numbers]
    assert [record.where for record in source.read(np.array([4]))] == [f"{paths[1]} record 1"]
    assert len(source._open.kept) == record_documents._MAX_OPEN


def test_an_empty_file_among_others(tmp_path):
    parts = (("a", TEXTS[:3]), ("b", []), ("c", TEXTS[3:]))
    source = ArrayRecordDocuments([str(write_array_record(tmp_path, part, name)) for name, part in parts])
    assert source.chunk_sizes().tolist() == [3, 0, len(TEXTS) - 3]
    assert [record.content.decode() for record in source.read(np.array([3, 2]))] == [TEXTS[3], TEXTS[2]]
    assert list(source.read_chunk(1, 0)) == []


@pytest.mark.parametrize("size", [0, 100, 65536])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, size):
    path = write_array_record(tmp_path, TEXTS)
    path.write_bytes(path.read_bytes()[:size])
    with raises_naming(UserError, path, "can't be read", "as ArrayRecord"):
        ArrayRecordDocuments([str(path)])


def test_damaged_records_are_named(tmp_path):
    # Bytes that can't be compressed, so that the damage is in a text.
    texts = [np.random.default_rng(n).bytes(400).hex() for n in range(40)]
    path = write_array_record(tmp_path, texts)
    content = bytearray(path.read_bytes())
    content[5000:5004] = b"!!!!"
    path.write_bytes(content)
    source = ArrayRecordDocuments([str(path)])
    with raises_naming(UserError, path, "damaged", "records 0 to 39"):
        list(source.read_chunk(0, 0))
    assert source.read(np.array([39]))[0].content.decode() == texts[39]


def counted_opens(monkeypatch):
    opened, open_one = [], record_documents._open
    monkeypatch.setattr(record_documents, "_open", lambda path: opened.append(path) or open_one(path))
    return opened


def test_files_stay_open_in_a_global_shuffle(tmp_path, monkeypatch):
    paths = [str(write_array_record(tmp_path, [f"{n} {i}" for i in range(3)], f"{n:02d}")) for n in range(12)]
    opened = counted_opens(monkeypatch)
    source = ArrayRecordDocuments(paths)
    for number in np.random.default_rng(0).permutation(36):
        (record,) = source.read(np.array([number]))
        assert record.content.decode() == f"{number // 3} {number % 3}"
    assert opened == paths


def test_files_of_many_records_are_closed_earlier(tmp_path, monkeypatch):
    monkeypatch.setattr(record_documents, "_MAX_OPEN_RECORDS", 7)
    paths = [str(write_array_record(tmp_path, ["a", "b", "c"], f"{n}")) for n in range(4)]
    paths.append(str(write_array_record(tmp_path, list("0123456789"), "large")))
    source = ArrayRecordDocuments(paths)
    assert source._open.kept == [4]  # even a file of more records than the bound can be read
    records = source.read(np.array([0, 3, 6, 21]))
    assert [record.content for record in records] == [b"a", b"a", b"a", b"9"]
    source.read(np.array([0, 3, 6]))
    assert source._open.kept == [1, 2]


def test_a_file_that_changed_before_it_is_opened_again_is_an_error(tmp_path, monkeypatch):
    monkeypatch.setattr(record_documents, "_MAX_OPEN", 1)
    paths = [str(write_array_record(tmp_path, ["a"], name)) for name in "ab"]
    source = ArrayRecordDocuments(paths)
    size = os.path.getsize(paths[0])
    write_array_record(tmp_path, [np.random.default_rng(0).bytes(200_000).hex()], "a")
    with raises_naming(UserError, paths[0], f"{size} bytes", "has changed"):
        source.read(np.array([0]))
