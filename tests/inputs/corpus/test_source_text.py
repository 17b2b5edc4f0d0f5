"""Text files: one document each, or several with a separator."""

import tracemalloc

import numpy as np
import pytest
from corpus_files import cache_in, write_parquet, write_tfrecord
from facts import raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import text_files
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.open_source import open_documents


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    folder = tmp_path_factory.mktemp("cache")
    cache_in(monkeypatch, folder)
    return folder


def opened(path, **fields):
    return open_documents(Documents(str(path), **fields))


def all_contents(source):
    return [record.content for chunk in range(source.num_chunks) for record in source.read_chunk(chunk, 0)]


def test_each_file_is_a_document(tmp_path):
    for name, content in (("a.txt", b"one\n\ntwo"), ("b.txt", b""), ("c.txt", b"\xff not UTF-8")):
        (tmp_path / name).write_bytes(content)
    source = opened(tmp_path)
    assert all_contents(source) == [b"one\n\ntwo", b"", b"\xff not UTF-8"]
    (record,) = source.read(np.array([2]))
    assert record.where == f"{tmp_path}/c.txt"
    assert source.chunk_sizes().tolist() == [1, 1, 1]


@pytest.mark.parametrize("separator", ["\n\n", "<END>", "aa", "ä"])
@pytest.mark.parametrize("block", [1, 2, 3, 10, 2**22])
def test_separators(tmp_path, monkeypatch, separator, block):
    monkeypatch.setattr(text_files, "_BLOCK", block)
    path = tmp_path / "a.txt"
    random = np.random.default_rng(1)
    for size in (1, 20, 200):
        parts = random.choice(["a", "\n", "<", "END>", "ä", separator], size)
        path.write_text("".join([*parts, separator]))
        source = opened(path, separator=separator)
        expected = path.read_text().split(separator)
        assert [content.decode() for content in all_contents(source)] == expected
        numbers = random.permutation(len(expected))
        assert [record.content.decode() for record in source.read(numbers)] == [expected[n] for n in numbers]
    assert next(source.read_chunk(0, 1)).where == f"{path} document 2"


@pytest.mark.parametrize("separator", ["", 3])
def test_a_separator_that_separates_nothing_is_refused(tmp_path, separator):
    (tmp_path / "a.txt").write_text("a")
    with raises_naming(UserError, f"separator={separator!r}", "between two documents", "None"):
        opened(tmp_path / "a.txt", separator=separator)


@pytest.mark.parametrize(
    ("write", "facts"),
    [
        (lambda folder: write_parquet(folder, ["a"]), ["Parquet file", "not text", "CorpusInput", "text column"]),
        (lambda folder: write_tfrecord(folder, ["a"]), ["TFRecord file", "not text"]),
        (lambda folder: _written(folder, "text".encode("utf-16")), ["UTF-16", "`iconv"]),
        (lambda folder: _written(folder, b"a\0b"), ["not text", "byte 1", "NUL"]),
    ],
)
def test_files_that_are_not_text_are_refused(tmp_path, write, facts):
    with raises_naming(UserError, tmp_path, *facts):
        opened(write(tmp_path), kind="text")


def test_json_lines_in_a_text_file_are_read_by_the_kind_that_is_set(tmp_path):
    lines = b'{"text": "one"}\n{"text": "two"}\n'
    path = _written(tmp_path, lines)
    with raises_naming(UserError, f"{path} begins as JSON", "kind='jsonl'", "kind='text'"):
        opened(path)
    assert all_contents(opened(path, kind="jsonl")) == [b"one", b"two"]
    assert all_contents(opened(path, kind="text")) == [lines]


def _written(folder, content):
    path = folder / "a.txt"
    path.write_bytes(content)
    return path


def test_a_file_that_changes_is_an_error(tmp_path):
    path = _written(tmp_path, b"one two")
    source = opened(path)
    path.write_bytes(b"one two three")
    with raises_naming(UserError, path, "7 bytes", "has changed"):
        all_contents(source)


def test_a_file_of_many_documents_is_not_in_memory_at_once(tmp_path, cache):
    path = tmp_path / "a.txt"
    path.write_bytes((b"x" * 2000 + b"\n<END>\n") * 10_000)
    tracemalloc.start()
    source = opened(path, separator="\n<END>\n")
    count = sum(1 for _ in source.read_chunk(0, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 10_001
    assert peak < 12 * 2**20  # of 20 MB
    (index,) = (cache / "index").iterdir()
    made = index.stat().st_mtime_ns
    assert all_contents(opened(path, separator="\n<END>\n"))[9_999] == b"x" * 2000
    assert index.stat().st_mtime_ns == made


def test_a_separator_that_is_in_no_file_is_an_error(tmp_path):
    (tmp_path / "a.txt").write_text("one\ntwo")
    (tmp_path / "b.txt").write_text("")
    with raises_naming(UserError, r"separator='\\n'", "in none", r"$'\n'"):
        opened(tmp_path, separator="\\n")
    (tmp_path / "b.txt").write_text(r"here\n")
    assert all_contents(opened(tmp_path, separator="\\n")) == [b"one\ntwo", b"here", b""]
