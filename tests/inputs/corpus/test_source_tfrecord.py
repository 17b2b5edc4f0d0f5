"""Records of TFRecord files: read many at a time, from files that are mapped or not, found by a kept index; and as documents."""

import os
import struct

import numpy as np
import pytest
from corpus_files import TEXTS, cache_in, write_tfrecord
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import record_files, tfrecord
from spmd_trainer.inputs.corpus.documents import BadRecord, Document
from spmd_trainer.inputs.corpus.record_documents import TfRecordDocuments
from spmd_trainer.storage import local_copies


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    cache_in(monkeypatch, tmp_path_factory.mktemp("cache"))


def write(path, records):
    """A TFRecord file as its definition says."""

    def crc(data):
        return struct.pack("<I", record_files.masked_crc(data))

    with open(path, "wb") as file:
        for data in records:
            length = struct.pack("<Q", len(data))
            file.write(length + crc(length) + data + crc(data))
    return str(path)


def three_files(folder):
    parts = [[b"a" * n for n in range(5)], [], [bytes([n]) * 100 for n in range(7)]]
    paths = [write(folder / f"{n}.tfrecord", part) for n, part in enumerate(parts)]
    return paths, [record for part in parts for record in part]


def test_many_records_in_any_order(tmp_path, monkeypatch):
    monkeypatch.setattr(record_files.RecordFiles, "most_open", 1)
    paths, records = three_files(tmp_path)
    found = record_files.RecordFiles(paths)
    numbers = np.array([11, 0, 4, 4, 5, 10, 1])
    assert found.data(numbers) == [records[number] for number in numbers]
    assert found.data(range(12)) == records
    assert found.data(np.zeros(0, np.int64)) == []
    assert (len(found), found.counts) == (12, [5, 0, 7])


def test_the_broken_one_of_many_records_is_named(tmp_path):
    paths, _ = three_files(tmp_path)
    found = record_files.RecordFiles(paths)
    with open(paths[2], "r+b") as file:
        file.seek(116 + 50)
        file.write(b"!")
    with raises_naming(UserError, paths[2], "record 1", "byte 116", "broken", "data don't match"):
        found.data(np.array([0, 5, 6, 7]))
    assert found.data(np.array([5, 7])) == [b"\0" * 100, b"\2" * 100]


def test_a_file_that_is_cut_off_while_it_is_used_does_not_end_the_process(tmp_path):
    paths, _ = three_files(tmp_path)
    found = record_files.RecordFiles(paths)
    assert found.data([11])[0] == b"\6" * 100
    os.truncate(paths[2], 0)
    with raises_naming(UserError, paths[2], "has changed", "start the run again"):
        found.data([11])
    with raises_naming(UserError, paths[2], "has changed", "start the run again"):
        found.data(np.array([0, 5, 11]))


def test_large_records_among_small_ones_are_found(tmp_path):
    sizes = [10, 3 * 2**20, 5, 2**20 - 30, 100, 0, 70_000, 70_000, 1, 2**20]
    path = write(tmp_path / "a.tfrecord", [bytes([n]) * size for n, size in enumerate(sizes)])
    found = record_files.RecordFiles(path)
    assert [len(record) for record in found.data(np.arange(len(sizes)))] == sizes
    with open(path, "r+b") as file:
        file.truncate(os.path.getsize(path) - 2**20 - 10)
    with raises_naming(UserError, path, "record 9", "broken", "ends inside", "9 records before"):
        record_files.RecordFiles(path)


def test_the_index_of_a_large_file_is_made_once(tmp_path, monkeypatch):
    records = [b"%d" % n * 300 for n in range(2000)]
    path = write(tmp_path / "a.tfrecord", records)
    first = record_files.RecordFiles(path)
    with monkeypatch.context() as patch:
        patch.setattr(record_files, "_find_records", lambda *_: pytest.fail("the index is made again"))
        again = record_files.RecordFiles(path)
    assert again.data([1999])[0] == records[1999]
    assert again.checksum == first.checksum
    write(path, records[:1500])
    changed = record_files.RecordFiles(path)
    assert len(changed) == 1500
    assert changed.checksum != first.checksum


def test_an_index_that_is_damaged_in_the_cache_is_made_again(tmp_path):
    path = write(tmp_path / "a.tfrecord", [b"x" * 1000] * 2000)
    record_files.RecordFiles(path)
    (kept,) = list((local_copies.cache_folder() / "index").iterdir())
    kept.write_bytes(kept.read_bytes()[:200])
    assert len(record_files.RecordFiles(path)) == 2000


def test_documents_of_several_files(tmp_path):
    paths = [str(write_tfrecord(tmp_path, part, name=name)) for name, part in (("a", TEXTS[:3]), ("b", TEXTS[3:]))]
    source = TfRecordDocuments(paths)
    assert source.chunk_sizes().tolist() == [3, len(TEXTS) - 3]
    records = source.read(np.array([7, 3, 0]))
    assert [record.content.decode() for record in records] == [TEXTS[7], TEXTS[3], TEXTS[0]]
    assert [record.content.decode() for record in source.read_chunk(1, 2)] == TEXTS[5:]


def test_records_without_the_text_are_bad(tmp_path):
    path = write_tfrecord(tmp_path, TEXTS)
    bad = TfRecordDocuments([str(path)], "id").read(np.array([2]))[0]
    assert isinstance(bad, BadRecord)
    assert "a.tfrecord, record 2 " in bad.where
    assert_names(bad.problem, "numbers", "feature 'id'", "text")
    whole = record_files.RecordFiles(str(path)).data([0])[0]
    garbled = write(tmp_path / "b.tfrecord", [b"\xff\xff\xff", b"", whole[:-1], whole])
    records = list(TfRecordDocuments([garbled]).read_chunk(0, 0))
    assert [type(record) for record in records] == [BadRecord, BadRecord, BadRecord, Document]
    assert_names(records[0].problem, "not a tf.train.Example")
    assert "has no feature 'text'" in records[1].problem


def test_damaged_data_are_a_bad_record_and_the_others_are_read(tmp_path):
    path = write_tfrecord(tmp_path, TEXTS)
    content = bytearray(path.read_bytes())
    content[content.index(b"zwei")] ^= 1
    path.write_bytes(content)
    records = list(TfRecordDocuments([str(path)]).read_chunk(0, 0))
    assert [number for number, record in enumerate(records) if isinstance(record, BadRecord)] == [1]
    assert_names(records[1].problem, "data don't match", "checksum")


def test_a_disk_that_fails_is_an_error_that_names_the_file(tmp_path, monkeypatch):
    paths, _ = three_files(tmp_path)
    found = record_files.RecordFiles(paths)

    def fails(*_):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", fails)
    with raises_naming(UserError, paths[0], "can't be read", "Input/output error"):
        found.data([3])


def test_a_shape_may_be_a_list(tmp_path):
    import tensorflow as tf

    value = tf.train.Feature(float_list=tf.train.FloatList(value=[1, 2]))
    example = tf.train.Example(features=tf.train.Features(feature={"x": value})).SerializeToString()
    parsed = tfrecord.ExampleParser({"x": tfrecord.Feature([2], "float32")}, str).parse([example, example])
    assert parsed["x"].tolist() == [[1, 2], [1, 2]]


def test_a_file_that_changed_is_no_bad_record(tmp_path):
    path = write_tfrecord(tmp_path, TEXTS)
    source = TfRecordDocuments([str(path)])
    os.truncate(path, path.stat().st_size - 20)
    with raises_naming(UserError, path, "has changed", "start the run again"):
        source.read(np.array([0, 7]))
