"""JSON lines: which lines are records, where they are, bounded memory, damaged files."""

import gzip
import json
import os
import tracemalloc

import numpy as np
import pytest
from absl import logging
from corpus_files import TEXTS, cache_in, damage, write_jsonl
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import text_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.storage import local_copies


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    cache_in(monkeypatch, folder)
    return folder


def opened(path, **fields):
    return open_documents(Documents(str(path), **fields))


def all_records(source):
    return [record for chunk in range(source.num_chunks) for record in source.read_chunk(chunk, 0)]


def by_number(source):
    return source.read(np.arange(int(source.chunk_sizes().sum())))


def places(records):
    """The number of the line and the content of each record."""
    return [(int(record.where.rpartition(":")[2]), bytes(record.content).decode()) for record in records]


LINES = {
    b'{"text": "a"}\n{"text": "b"}\n': [(1, "a"), (2, "b")],
    b'{"text": "a"}\n{"text": "b"}': [(1, "a"), (2, "b")],
    b'{"text": "a"}\r\n{"text": "b"}\r\n': [(1, "a"), (2, "b")],
    b'\n\n{"text": "a"}\n\r\n\n{"text": "b"}\n\n': [(3, "a"), (6, "b")],
    b' \n  {"text": "a"}\n \t \r\n  {"text": "b"}\n   ': [(2, "a"), (4, "b")],
    b'{"text": "a"}\n\r': [(1, "a")],
    b'\xef\xbb\xbf{"text": "a"}\n': [(1, "a")],
    b'{"text": "a\\n\\u00e4\\ud83d\\ude00"}\n': [(1, "a\nä😀")],
    b'{"text": "a\xe2\x80\xa8\x0c\x85b"}\n'.replace(b"\x85", "\x85".encode()): [],  # a form feed must be escaped
    '{"text": "a\u2028\x85b"}\n'.encode(): [(1, "a\u2028\x85b")],  # line ends of Unicode don't end a line
    b'{"text": "x", "text": "y"}\n': [(1, "y")],
}


@pytest.mark.parametrize("content", LINES)
@pytest.mark.parametrize("block", [1, 2, 3, 7, 2**22])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_lines(tmp_path, monkeypatch, content, block, suffix):
    monkeypatch.setattr(text_files, "_BLOCK", block)
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    source = opened(path)
    good = [record for record in all_records(source) if isinstance(record, Document)]
    assert places(good) == LINES[content]
    if good:
        assert good == all_records(source)
    for start in range(len(good) + 1):
        assert list(source.read_chunk(0, start))[: len(good)] == good[start:] or not good
    if not suffix:
        assert by_number(source) == all_records(source)


def test_blocks_of_any_size_give_the_same_index(tmp_path, monkeypatch):
    random = np.random.default_rng(3)
    path = tmp_path / "a.jsonl"
    for _ in range(100):
        path.write_bytes(random.choice(np.frombuffer(b"\n\n\r{ x", np.uint8), 60).tobytes())
        whole = text_files.index_lines(str(path), 60)
        lines = path.read_bytes().split(b"\n")
        kept = [number for number, line in enumerate(lines, 1) if line.strip()]
        assert [whole.line_number(n) for n in range(len(whole.starts) - 1)] == kept
        for block in (1, 2, 5, 31):
            with monkeypatch.context() as patch:
                patch.setattr(text_files, "_BLOCK", block)
                for one, other in zip(text_files.index_lines(str(path), 60), whole, strict=True):
                    np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("line", "facts"),
    [
        (b'{"text": "a"', ["not JSON", "','", "character 12"]),
        (b'["a"]', ["a list", "an object", "key 'text'"]),
        (b'"a"', ["a string", "an object", "key 'text'"]),
        (b'{"txt": "a"}', ["key 'text'", "txt?"]),
        (b'{"text": null}', ["null"]),
        (b'{"text": 7}', ["'text'", "7", "a string"]),
        (b'{"text": ["a"]}', ["'text'", "a list", "a string"]),
        (b'{"text": "\\ud800"}', ["surrogate"]),
        (b'{"text": "\xed\xa0\x80"}', ["not UTF-8", "byte 10"]),
        (b'{"text": "\xff"}', ["not UTF-8", "byte 10"]),
        (b'{"text": "a"} {"text": "b"}', ["not JSON", "Extra data"]),
        (b"[" * 100_000, ["not JSON"]),
        (b'{"text": ' + b"9" * 5000 + b"}", ["not JSON"]),
    ],
)
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_bad_line_is_named(tmp_path, line, facts, suffix):
    content = b'{"text": "a"}\n' + line + b'\n{"text": "c"}\n'
    path = tmp_path / f"a.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    first, bad, last = all_records(opened(path))
    assert places([first, last]) == [(1, "a"), (3, "c")]
    assert isinstance(bad, BadRecord)
    assert bad.where == f"{path}:2"
    assert_names(bad.problem, *facts)


def test_nested_columns(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"doc": {"body": "x"}}\n{"doc": {"bdy": "x"}}\n{"doc": 3}\n{"doc.body": "y"}\n')
    records = all_records(opened(path, column="doc.body"))
    assert [type(record) for record in records] == [Document, BadRecord, BadRecord, Document]
    assert_names(records[1].problem, "bdy?")


def test_a_line_longer_than_a_block(tmp_path):
    path = write_jsonl(tmp_path, ["a", "x" * 5_000_000, "c"])
    source = opened(path)
    assert [len(record.content) for record in all_records(source)] == [1, 5_000_000, 1]
    assert [len(record.content) for record in source.read(np.array([1, 0]))] == [5_000_000, 1]


def test_more_files_than_are_open_at_a_time(tmp_path):
    for number in range(30):
        write_jsonl(tmp_path, [f"{number} {line}" for line in range(5)], name=f"{number:02}")
    source = opened(tmp_path)
    open_before = len(os.listdir("/proc/self/fd"))
    numbers = np.random.default_rng(0).permutation(150)
    expected = [f"{number // 5} {number % 5}" for number in numbers]
    assert [record.content.decode() for record in source.read(numbers)] == expected
    assert len(os.listdir("/proc/self/fd")) <= open_before + 8
    del source
    assert len(os.listdir("/proc/self/fd")) <= open_before


@pytest.mark.parametrize("change", [b"", b'{"text": "a"}\n' * 30])
@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_file_of_another_size_is_an_error(tmp_path, change, suffix):
    path = write_jsonl(tmp_path, TEXTS, suffix)
    source = opened(path)
    first = next(source.read_chunk(0, 0))
    assert isinstance(first, Document)
    size = path.stat().st_size
    path.write_bytes(change)
    with raises_naming(UserError, path, f"{size} bytes", "has changed"):
        all_records(source)


def test_a_file_that_is_gone_is_an_error(tmp_path):
    path = write_jsonl(tmp_path, TEXTS)
    source = opened(path)
    path.unlink()
    with raises_naming(UserError, path, "can't be read", "No such file"):
        all_records(source)


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_cut_file_gives_its_whole_lines_and_then_an_error(tmp_path, suffix):
    texts = [str(number) + os.urandom(300).hex() for number in range(500)]
    path = write_jsonl(tmp_path, texts, suffix)
    path.write_bytes(path.read_bytes()[:-1000])
    given = []
    with pytest.raises(UserError, match=rf"a\.jsonl\{suffix} is damaged: .*the last is (\d+)\.") as raised:
        given.extend(opened(path).read_chunk(0, 0))
    assert 0 < len(given) < 500
    assert [record.content.decode() for record in given] == texts[: len(given)]
    assert f"the last is {len(given)}." in str(raised.value)


@pytest.mark.full
def test_the_index_of_a_large_file_is_kept_until_the_file_changes(tmp_path, cache):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "' + b"x" * 2000 + b'"}\n\n' * 1 + b'{"text": "b"}\n' * 100_000)
    expected = by_number(opened(path))[:50]
    (index,) = (cache / "index").iterdir()
    made = index.stat().st_mtime_ns
    again = opened(path)
    assert again.read(np.arange(50)) == expected
    assert (expected[1].where, expected[1].content) == (f"{path}:3", b"b")
    assert index.stat().st_mtime_ns == made
    for broken in (b"", index.read_bytes()[:1000], b"no array"):
        index.write_bytes(broken)
        assert opened(path).read(np.arange(50)) == expected
    path.write_bytes(path.read_bytes()[:-14])
    assert len(by_number(opened(path))) == 100_000
    assert len(list((cache / "index").iterdir())) == 2


@pytest.mark.full
def test_a_cache_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch):
    warnings = []
    monkeypatch.setattr(logging, "log_first_n", lambda level, text, n, *args: warnings.append((n, text % args)))
    monkeypatch.setenv(local_copies.VARIABLE, str(write_jsonl(tmp_path, ["no folder"], name="file")))
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "b"}\n' * 100_000)
    assert len(by_number(opened(path))) == 100_000
    ((count, text),) = warnings
    assert count == 1
    assert "a.jsonl" in text
    assert "can't be kept" in text


def test_small_files_are_not_cached(tmp_path, cache):
    opened(write_jsonl(tmp_path, TEXTS))
    assert not (cache / "index").exists()


@pytest.mark.parametrize("suffix", ["", *(pytest.param(s, marks=pytest.mark.full) for s in (".gz", ".zst"))])
def test_20_megabytes_are_never_in_memory_at_once(tmp_path, suffix):
    texts = [np.random.default_rng(number).bytes(750).hex() for number in range(14_000)]
    path = write_jsonl(tmp_path, texts, suffix)
    tracemalloc.start()
    source = opened(path)
    size = sum(len(record.content) for record in source.read_chunk(0, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert size == sum(map(len, texts)) > 20 * 2**20
    assert peak < 12 * 2**20


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_200_damaged_files_end_in_bad_records_or_an_error(tmp_path, suffix):
    path = write_jsonl(tmp_path, TEXTS * 3, suffix)
    content, random = path.read_bytes(), np.random.default_rng(11)
    ends = {"whole": 0, "bad": 0, "refused": 0}
    for number in range(200):
        damaged = tmp_path / f"damaged{number}.jsonl{suffix}"
        damaged.write_bytes(damage(content, random))
        try:
            records = all_records(opened(damaged, kind="jsonl"))
            bad = [record for record in records if isinstance(record, BadRecord)]
            assert all(record.where.startswith(f"{damaged}:") for record in bad)
            ends["bad" if bad else "whole"] += 1
        except UserError as error:
            assert str(damaged) in str(error)  # noqa: PT017
            ends["refused"] += 1
    assert ends["bad"] + ends["refused"] > 60, ends
    if suffix == ".gz":  # gzip has checksums
        assert ends["refused"] > 150, ends


def test_files_of_one_json_value_are_refused(tmp_path):
    path = tmp_path / "a.json"
    for indent in (0, 2):
        path.write_text(json.dumps([{"text": text} for text in TEXTS], indent=indent))
        with raises_naming(UserError, path, "one JSON value", "many lines", "jq"):
            opened(path)
    path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    (record,) = all_records(opened(path))
    assert "not an object" in record.problem


def test_the_streamed_source_reads_plain_files_too(tmp_path):
    path = write_jsonl(tmp_path, TEXTS)
    streamed = text_files.StreamedJsonLines([str(path)])
    assert all_records(streamed) == all_records(opened(path))
    assert not streamed.random_access
    assert streamed.chunk_sizes() is None


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_a_line_that_is_too_long_is_a_bad_record(tmp_path, suffix):
    texts = ["first", "x" * 300, "last"]
    path = write_jsonl(tmp_path, texts, suffix=suffix)
    source = open_documents(Documents(str(path), max_record_bytes=100))
    first, bad, last = all_records(source)
    assert not source.random_access or by_number(source) == [first, bad, last]
    assert (first.content, last.content) == (b"first", b"last")
    assert isinstance(bad, BadRecord)
    assert bad.where == f"{path}:2"
    assert_names(bad.problem, "max_record_bytes=100")
    found = all_records(open_documents(Documents(str(path), max_record_bytes=400)))
    assert [record.content.decode() for record in found] == texts


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_a_line_without_an_end_is_not_read_whole(tmp_path, suffix):
    path = write_jsonl(tmp_path, ["x" * 2**26], suffix=suffix)
    tracemalloc.start()
    source = open_documents(Documents(str(path), max_record_bytes=2**20))
    with raises_naming(UserError, f"{path}:1", "max_record_bytes=1,048,576"):
        list(source.read_chunk(0, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2**26


def test_a_plain_line_without_an_end_is_refused_when_its_file_is_opened(tmp_path, monkeypatch):
    monkeypatch.setattr(text_files, "_BLOCK", 1000)
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"text": "a"}\n\n' + b"x" * 2**16 + b"\n")
    with raises_naming(UserError, f"{path}:3", "max_record_bytes=1,000"):
        opened(path, max_record_bytes=1000)
    _, bad = all_records(opened(path, max_record_bytes=10_000))  # its end is found
    assert_names(bad.problem, "65,537 bytes", "max_record_bytes=10,000")


def test_records_of_a_small_corpus_are_parsed_once(tmp_path, monkeypatch):
    parsed = []
    record_of = text_files.record_of
    monkeypatch.setattr(text_files, "record_of", lambda *arguments: parsed.append(1) or record_of(*arguments))
    path = write_jsonl(tmp_path, ["one", "two"])
    source = opened(path)
    for _ in range(3):
        assert [bytes(record.content) for record in by_number(source)] == [b"one", b"two"]
    assert len(parsed) == 2
    path.write_bytes(path.read_bytes().replace(b"two", b"six"))
    assert [bytes(record.content) for record in by_number(source)] == [b"one", b"six"]


@pytest.mark.parametrize("wrong", [0, -1, "1 MB"])
def test_a_limit_that_is_none_is_refused(tmp_path, wrong):
    with raises_naming(UserError, f"max_record_bytes={wrong!r}"):
        open_documents(Documents(str(write_jsonl(tmp_path, ["a"])), max_record_bytes=wrong))
