"""Every kind of corpus gives what its own library wrote, in order, from any place, and says what is wrong with it."""

import json
import os
import subprocess
import sys
import textwrap

import numpy as np
import pytest
from corpus_files import (
    TEXTS,
    WRITERS,
    cache_in,
    damage,
    write_array_record,
    write_jsonl,
    write_parquet,
    write_tfrecord,
)
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import text_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents
from spmd_trainer.inputs.corpus.open_source import open_documents

KINDS = sorted(WRITERS)
NO_NUL = [text for text in TEXTS if "\0" not in text]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    cache_in(monkeypatch, tmp_path_factory.mktemp("cache"))


def texts_of(kind):
    return NO_NUL if kind == "text" else TEXTS


def opened(path, kind, **fields):
    return open_documents(Documents(str(path), separator="<END>" if kind == "text" else None, **fields))


def contents(records):
    assert all(isinstance(record, Document) for record in records), records
    return [bytes(record.content).decode() for record in records]


def all_records(source):
    return [record for chunk in range(source.num_chunks) for record in source.read_chunk(chunk, 0)]


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_gives_its_documents_in_order(tmp_path, kind):
    source = opened(WRITERS[kind](tmp_path, texts_of(kind)), kind)
    assert contents(all_records(source)) == texts_of(kind)
    assert contents(all_records(source)) == texts_of(kind)


@pytest.mark.parametrize("kind", KINDS)
def test_a_chunk_is_read_from_any_record_on(tmp_path, kind):
    source = opened(WRITERS[kind](tmp_path, texts_of(kind)), kind)
    for chunk in range(source.num_chunks):
        whole = list(source.read_chunk(chunk, 0))
        if source.chunk_sizes() is not None:
            assert len(whole) == source.chunk_sizes()[chunk]
        for start in range(len(whole) + 1):
            assert list(source.read_chunk(chunk, start)) == whole[start:]


@pytest.mark.parametrize("kind", KINDS)
def test_records_are_read_by_number(tmp_path, kind):
    source = opened(WRITERS[kind](tmp_path, texts_of(kind)), kind)
    numbers = np.array([5, 0, 3, 3, len(texts_of(kind)) - 1])
    if not source.random_access:
        with pytest.raises(NotImplementedError):
            source.read(numbers)
        return
    assert contents(source.read(numbers)) == [texts_of(kind)[number] for number in numbers]
    assert source.read(np.array([4])) == [all_records(source)[4]]


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "saved dataset"])
def test_several_files_follow_each_other(tmp_path, kind):
    texts = texts_of(kind)
    paths = [WRITERS[kind](tmp_path, part, name=name) for name, part in (("a", texts[:3]), ("b", texts[3:]))]
    source = open_documents(Documents([str(path) for path in paths], separator="<END>" if kind == "text" else None))
    assert contents(all_records(source)) == texts
    before = source.fingerprint()
    paths[1].write_bytes(paths[1].read_bytes() + b"\n")
    if kind in ("jsonl", "text"):
        changed = open_documents(
            Documents([str(path) for path in paths], separator="<END>" if kind == "text" else None)
        )
        assert changed.fingerprint() != before
        assert paths[1].name in changed.changed_text(before)


def test_a_folder_stands_for_its_files(tmp_path):
    (tmp_path / "in").mkdir()
    write_jsonl(tmp_path, TEXTS[:4], name="a")
    write_jsonl(tmp_path / "in", TEXTS[4:], name="b")
    (tmp_path / ".hidden").write_text("no JSON")
    assert contents(all_records(opened(tmp_path, "jsonl"))) == TEXTS
    write_parquet(tmp_path, TEXTS)
    with pytest.raises(UserError, match=r"several kinds: 1 of 'parquet'.*2 of 'jsonl'|2 of 'jsonl'.*1 of 'parquet'"):
        opened(tmp_path, "jsonl")


def test_a_column_inside_of_an_object(tmp_path):
    (tmp_path / "a.jsonl").write_text('{"doc": {"body": "x"}, "doc.title": "t"}\n')
    assert contents(all_records(opened(tmp_path / "a.jsonl", "jsonl", column="doc.body"))) == ["x"]
    assert contents(all_records(opened(tmp_path / "a.jsonl", "jsonl", column="doc.title"))) == ["t"]
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"doc": [{"body": "x", "n": 1}, {"body": "y", "n": 2}]}), tmp_path / "a.parquet")
    assert contents(all_records(opened(tmp_path / "a.parquet", "parquet", column="doc.body"))) == ["x", "y"]


def test_bad_lines_are_named(tmp_path):
    lines = [
        b'{"text": "a"}',
        b"{broken",
        b"[1]",
        b'{"txt": "a"}',
        b'{"text": null}',
        b'{"text": "\xff"}',
        b'{"text": "\\ud800"}',
        b"",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    records = all_records(opened(tmp_path / "a.jsonl", "jsonl"))
    assert [record.where.rpartition("/")[2] for record in records] == [f"a.jsonl:{n}" for n in range(1, 8)]
    expected = [
        ["not JSON"],
        ["not an object"],
        ["key 'text'", "txt?"],
        ["null"],
        ["not UTF-8", "byte 10"],
        ["surrogate"],
    ]
    assert isinstance(records[0], Document)
    for record, facts in zip(records[1:], expected, strict=True):
        assert isinstance(record, BadRecord)
        assert_names(record.problem, *facts)


@pytest.mark.parametrize(("kind", "column"), [("parquet", "txet"), ("saved dataset", "txet")])
def test_a_missing_column_is_an_error_at_once(tmp_path, kind, column):
    with raises_naming(UserError, "column 'txet'", "text?"):
        opened(WRITERS[kind](tmp_path, TEXTS), kind, column=column)


@pytest.mark.parametrize("kind", ["tfrecord", "tar"])
def test_a_missing_feature_or_member_is_a_bad_record(tmp_path, kind):
    for record in all_records(opened(WRITERS[kind](tmp_path, TEXTS), kind, column="texts")):
        assert isinstance(record, BadRecord)
        assert_names(record.problem, "'texts'", "text?")


@pytest.mark.parametrize("kind", ["parquet", "arrow file"])
def test_a_text_that_is_not_utf8_is_a_bad_record(tmp_path, kind):
    pyarrow = pytest.importorskip("pyarrow")
    text = pyarrow.array([b"a", b"\xff\xfe", b"c"]).view("string")
    records = all_records(opened(WRITERS[kind](tmp_path, text), kind))
    assert [type(record) for record in records] == [Document, BadRecord, Document]
    assert "row 2" in records[1].where


def test_nulls_are_bad_records(tmp_path):
    records = all_records(opened(write_parquet(tmp_path, ["a", None, "c"]), "parquet"))
    assert [type(record) for record in records] == [Document, BadRecord, Document]
    assert "row group 1, row 2" in records[1].where


@pytest.mark.parametrize("kind", ["jsonl.gz", "jsonl.zst", "parquet", "tar", "tar.gz"])
def test_a_truncated_file_is_an_error_that_names_it(tmp_path, kind):
    path = WRITERS[kind](tmp_path, TEXTS)
    content = path.read_bytes()
    cuts = {"tar": [600, 2000, 7000]}.get(kind, [len(content) - 5, len(content) // 2, len(content) * 3 // 4])
    for size in cuts:
        path.write_bytes(content[:size])
        with pytest.raises(UserError, match=path.name):
            all_records(opened(path, kind))


def test_a_tar_that_ends_between_two_members_is_an_error(tmp_path):
    path = WRITERS["tar"](tmp_path, TEXTS)
    content = path.read_bytes()
    path.write_bytes(content[: 2 * 1024])
    with raises_naming(UserError, path, "cut off"):
        all_records(opened(path, "tar"))


@pytest.mark.parametrize("kind", KINDS)
def test_files_without_documents(tmp_path, kind):
    if kind == "text":
        pytest.skip("an empty text file is one document without text")
    try:
        path = WRITERS[kind](tmp_path, [])
    except ValueError:
        pytest.skip("its library writes no empty file")
    try:
        assert all_records(opened(path, kind)) == []
    except UserError as error:
        assert str(path.name) in str(error) or "files" in str(error)  # noqa: PT017


def test_wrong_settings_are_explained(tmp_path):
    path = write_jsonl(tmp_path, TEXTS)
    with raises_naming(UserError, "kind='jsnl'", "'parquet'", "jsonl?"):
        open_documents(Documents(str(path), kind="jsnl"))
    with raises_naming(UserError, r"separator='\n'", "text files", "'jsonl'"):
        open_documents(Documents(str(path), separator="\n"))
    with pytest.raises(UserError, match=r"there is no|No such file"):
        opened(tmp_path / "b.jsonl", "jsonl")
    (tmp_path / "what").write_bytes(b"\x01\x02")
    with raises_naming(UserError, tmp_path / "what", "set kind", "'jsonl'"):
        opened(tmp_path / "what", "jsonl")
    write_jsonl(tmp_path, TEXTS, ".gz", name="z")
    with raises_naming(UserError, tmp_path / "z.jsonl.gz", "compressed", path, "Mixture"):
        open_documents(Documents([str(path), str(tmp_path / "z.jsonl.gz")]))


def test_a_file_that_changes_while_it_is_read_is_an_error(tmp_path):
    path = write_jsonl(tmp_path, TEXTS)
    source = opened(path, "jsonl")
    size = path.stat().st_size
    path.write_bytes(path.read_bytes()[:40])
    with raises_naming(UserError, path, f"{size} bytes", "has changed"):
        source.read(np.array([5]))


def test_the_index_of_a_large_file_is_kept(tmp_path, monkeypatch):
    path = tmp_path / "large.jsonl"
    path.write_text("".join(json.dumps({"text": f"{n} " + "x" * 200}) + "\n" for n in range(6000)))
    first = opened(path, "jsonl")
    assert contents(first.read(np.array([5999])))[0].startswith("5999 ")

    monkeypatch.setattr(text_files, "_find_lines", lambda path: pytest.fail("the index is made again"))
    again = opened(path, "jsonl")
    assert contents(again.read(np.array([17])))[0].startswith("17 ")
    monkeypatch.undo()
    monkeypatch.setenv("SPMD_TRAINER_CACHE", str(path / "no folder"))
    assert len(all_records(opened(path, "jsonl"))) == 6000


@pytest.mark.full
def test_reading_a_large_compressed_file_takes_little_memory(tmp_path):
    import tracemalloc

    path = write_jsonl(tmp_path, ["y" * 2000] * 10_000, ".gz")
    source = opened(path, "jsonl")
    tracemalloc.start()
    count = sum(1 for _ in source.read_chunk(0, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 10_000
    assert peak < 4 * 2**20  # of 20 MB


CHECKED = ("arrayrecord", "tfrecord")
FUZZ = """
    import sys, numpy as np
    sys.path[:0] = {paths!r}
    from corpus_files import TEXTS, damage
    from spmd_trainer.errors import UserError
    from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
    from spmd_trainer.inputs.corpus.open_source import open_documents
    content, random = open({source!r}, "rb").read(), np.random.default_rng(7)
    ends = dict(whole=0, bad=0, refused=0)
    for number in range(200):
        path = {folder!r} + f"/damaged{{number}}" + {suffix!r}
        open(path, "wb").write(damage(content, random))
        try:
            source = open_documents(Documents(path, kind={kind!r}))
            records = [r for c in range(source.num_chunks) for r in source.read_chunk(c, 0)]
            bad = any(isinstance(r, BadRecord) for r in records)
            ends["bad" if bad else "whole"] += 1
            if {checked!r}:  # these kinds have checksums: what they give is what was written, and nothing is missing
                given = [bytes(r.content).decode() for r in records if not isinstance(r, BadRecord)]
                assert set(given) <= set(TEXTS), given
                assert bad or given == TEXTS * 3, given
        except UserError as error:
            assert path in str(error) or "empty" in str(error), error
            ends["refused"] += 1
    print(ends)
"""


@pytest.mark.parametrize(
    ("kind", "write"),
    [
        ("jsonl", write_jsonl),
        pytest.param("parquet", write_parquet, marks=pytest.mark.full),
        pytest.param("arrayrecord", write_array_record, marks=pytest.mark.full),
        ("tfrecord", write_tfrecord),
    ],
)
def test_damaged_files_end_in_an_error_or_in_bad_records(tmp_path, kind, write):
    """In a process of its own: libraries in C++ could abort it."""
    path = write(tmp_path, TEXTS * 3)
    here = os.path.dirname(__file__)
    code = textwrap.dedent(FUZZ).format(
        paths=[here], source=str(path), folder=str(tmp_path), suffix=path.suffix, kind=kind, checked=kind in CHECKED
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    ends = eval(done.stdout)
    assert sum(ends.values()) == 200
    assert ends["refused"] + ends["bad"] > 60, ends


def test_damage_changes_a_file():
    random = np.random.default_rng(0)
    assert all(damage(b"0123456789" * 10, random) != b"0123456789" * 10 for _ in range(50))
