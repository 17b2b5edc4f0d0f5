"""What `files` may be, which kind of file is found, and what is said of files that don't fit."""

import gzip
import os

import numpy as np
import pytest
import store_fixtures
from corpus_files import TEXTS, WRITERS, cache_in, write_arrow, write_jsonl, write_parquet, write_text, write_tfrecord
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import file_kinds
from spmd_trainer.inputs.corpus.documents import Documents
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.storage.files import write_atomically

gs_address, address_of, use = store_fixtures.gs_address, store_fixtures.address_of, store_fixtures.use


@pytest.fixture(autouse=True)
def cache(tmp_path_factory, monkeypatch):
    cache_in(monkeypatch, tmp_path_factory.mktemp("cache"))


def contents(source):
    records = [record for chunk in range(source.num_chunks) for record in source.read_chunk(chunk, 0)]
    return [record.content.decode() for record in records]


def test_paths_patterns_directories_and_functions(tmp_path):
    (tmp_path / "in").mkdir()
    a, b = write_jsonl(tmp_path, ["a"], name="a"), write_jsonl(tmp_path / "in", ["b"], name="b")
    for given in (
        str(a),
        a,
        os.fsencode(a),
        [a],
        str(tmp_path / "*.jsonl"),
        lambda: [a],
        lambda: str(a),
    ):
        assert contents(open_documents(Documents(given))) == ["a"]
    for given in (str(tmp_path), f"{tmp_path}/", f"{tmp_path}/**/*.jsonl", [a, tmp_path / "in"], [str(a), b]):
        assert contents(open_documents(Documents(given))) == ["a", "b"]
    source = open_documents(Documents(a))
    assert open_documents(Documents(source)) is source


def test_hidden_files_and_empty_markers_of_a_directory_are_left_out(tmp_path):
    write_parquet(tmp_path, TEXTS)
    (tmp_path / "_SUCCESS").write_text("")
    (tmp_path / ".a.parquet.crc").write_bytes(b"\x01")
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "x.json").write_text("{}")
    assert contents(open_documents(Documents(str(tmp_path)))) == TEXTS


@pytest.mark.parametrize("kind", sorted(set(WRITERS) - {"saved dataset", "text", "jsonl.zst"}))
def test_a_name_without_suffix_is_told_by_the_first_bytes(tmp_path, kind):
    path = WRITERS[kind](tmp_path, TEXTS)
    named = path.rename(tmp_path / "corpus")
    assert contents(open_documents(Documents(str(named)))) == TEXTS


@pytest.mark.parametrize(
    ("files", "facts"),
    [
        (None, ["`files` has no paths"]),
        ([], ["`files` has no paths"]),
        (lambda: [], ["function of `files`", "no paths"]),
        (7, ["files=7;", "paths", "a glob"]),
        ([7], ["`files` has 7", "not a path"]),
        ("{0}/b.jsonl", ["{0}/b.jsonl", "can't be read", "No such file", "a.jsonl?"]),
        ("{0}/*.parquet", ["{0}/*.parquet", "no file", "{0} holds a.jsonl"]),
        (["{0}/a.jsonl", "{0}"], ["`files`", "a.jsonl twice"]),
        (["{0}", "{0}/a.jsonl"], ["`files`", "a.jsonl twice"]),
        (["{0}", "{0}/*.jsonl"], ["`files`", "a.jsonl twice"]),
        (["{0}", "{0}/empty/../a.jsonl"], ["`files`", "a.jsonl twice"]),
        ("{0}/empty", ["{0}/empty has no", "hidden", "it holds .hidden"]),
    ],
)
def test_wrong_files_are_explained(tmp_path, files, facts):
    write_jsonl(tmp_path, TEXTS)
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty" / ".hidden").write_text("x")
    if isinstance(files, str | list):
        listed = [files] if isinstance(files, str) else files
        files = [entry.format(tmp_path) if isinstance(entry, str) else entry for entry in listed]
    with raises_naming(UserError, *(fact.format(tmp_path) for fact in facts)):
        open_documents(Documents(files))


def test_files_of_several_kinds_are_listed(tmp_path):
    write_parquet(tmp_path, TEXTS, name="a")
    write_parquet(tmp_path, TEXTS, name="b")
    write_text(tmp_path, TEXTS, name="README")
    with pytest.raises(UserError, match=r"1 of 'text', e\.g\. .*README\.txt; 2 of 'parquet'.*files='.*/\*\.parquet'"):
        open_documents(Documents(str(tmp_path)))
    assert contents(open_documents(Documents(f"{tmp_path}/*.parquet"))) == TEXTS * 2


@pytest.mark.parametrize(
    ("name", "content", "facts"),
    [
        ("a.jsnol", b"\x01\x02", ["neither the name", "mean .jsonl"]),
        ("corpus", b"\x01\x02", ["neither the name", "set kind", "'jsonl', 'parquet'"]),
        ("corpus.gz", gzip.compress(b"no JSON", mtime=0), ["neither the name"]),
        ("corpus.gz", gzip.compress(b"no JSON", mtime=0)[:9], ["is damaged"]),
        ("a.jsonl.xz", b"\xfd7zXZ\0\0", ["compressed by xz", "`unxz`"]),
        ("a.jsonl.lz4", b"\x04\x22\x4d\x18\x60", ["compressed by LZ4", "`unlz4`"]),
        ("a.csv", b"text,id\na,1\n", ["commas", "Parquet", "JSON lines"]),
    ],
)
def test_files_of_no_known_kind_are_refused(tmp_path, name, content, facts):
    (tmp_path / name).write_bytes(content)
    with raises_naming(UserError, tmp_path / name, *facts):
        open_documents(Documents(str(tmp_path / name)))


def test_empty_files_among_others_are_read(tmp_path):
    write_jsonl(tmp_path, ["a"], name="a")
    (tmp_path / "b.jsonl").write_text("")
    (tmp_path / "c.jsonl").write_text("\n\n")
    source = open_documents(Documents(str(tmp_path)))
    assert contents(source) == ["a"]
    assert source.chunk_sizes().tolist() == [1, 0, 0]
    with pytest.raises(UserError, match="all 1 files are empty"):
        open_documents(Documents(str(tmp_path / "b.jsonl")))


def test_saved_datasets(tmp_path):
    write_arrow(tmp_path, TEXTS, name="train")
    assert contents(open_documents(Documents(str(tmp_path / "train")))) == TEXTS
    (tmp_path / "dataset_dict.json").write_text('{"splits": ["train"]}')
    with raises_naming(UserError, "several splits: train;", tmp_path / "train"):
        open_documents(Documents(str(tmp_path)))


def test_a_folder_of_tokens_is_given_alone(tmp_path):
    (tmp_path / "corpus.json").write_text("{}")
    other = write_jsonl(tmp_path, TEXTS)
    with raises_naming(UserError, tmp_path, "prepared corpus", "`files`", "other entries", "Mixture"):
        open_documents(Documents([tmp_path, other]))
    with raises_naming(UserError, "kind='tokens'", "`files`", "folder", "corpus.json", other):
        open_documents(Documents(str(other), kind="tokens"))


def test_changed_files_are_named(tmp_path):
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        write_jsonl(tmp_path / folder, ["a"], name="0")
    write_jsonl(tmp_path, ["b"], name="1")
    before = open_documents(Documents(str(tmp_path)))
    saved = before.fingerprint()
    assert open_documents(Documents(str(tmp_path))).fingerprint() == saved

    def text():
        now = open_documents(Documents(str(tmp_path)))
        assert now.fingerprint() != saved
        return now.changed_text(saved)

    write_jsonl(tmp_path, ["bb"], name="1")
    assert text() == "1.jsonl had 23 bytes and has 24"
    (tmp_path / "1.jsonl").rename(tmp_path / "2.jsonl")
    assert text() == "1.jsonl is gone, 2.jsonl is new"
    write_jsonl(tmp_path, ["b"], name="1")
    (tmp_path / "2.jsonl").unlink()
    (tmp_path / "y" / "0.jsonl").unlink()  # x has a file of the same name and size
    assert text() == "0.jsonl is gone"
    backwards = open_documents(Documents([tmp_path / "1.jsonl", tmp_path / "x/0.jsonl"]))
    forwards = open_documents(Documents([tmp_path / "x/0.jsonl", tmp_path / "1.jsonl"]))
    assert forwards.changed_text(backwards.fingerprint()) == "their order"


def test_files_of_many_names_have_a_checksum(tmp_path):
    for number in range(65):
        write_jsonl(tmp_path, ["a"], name=str(number))
    saved = open_documents(Documents(str(tmp_path))).fingerprint()
    assert "named" not in saved
    write_jsonl(tmp_path, ["a"], name="more")
    now = open_documents(Documents(str(tmp_path)))
    assert now.fingerprint() != saved
    assert now.changed_text(saved) == "65 files of 1,495 bytes, now 66 files of 1,518 bytes"


def test_files_in_an_object_store(tmp_path, address_of, use):
    from etils import epath

    use("gs", address_of("gs"))
    remote = epath.Path("gs://bkt/corpus")
    lines = write_jsonl(tmp_path, TEXTS).read_text().splitlines()
    for name in ("a.jsonl", "deep/b.jsonl", ".hidden/c.txt"):
        write_atomically(remote / "lines" / name, lines)
    for given, times in ((remote / "lines", 2), (remote / "lines/*.jsonl", 1), (remote / "lines/a.jsonl", 1)):
        source = open_documents(Documents(os.fspath(given)))
        assert contents(source) == TEXTS * times
        assert not source.random_access  # every line would take a request
        assert [record.content.decode() for record in source.read_chunk(0, 5)] == TEXTS[5:]
    (remote / "lines/a.jsonl").write_text("short")
    with pytest.raises(UserError, match=r"gs://bkt/corpus/lines/a\.jsonl had \d+ bytes .* has changed"):
        contents(source)
    (remote / "texts").mkdir(parents=True)
    (remote / "texts/a.txt").write_text("one|two|three")
    assert contents(open_documents(Documents(f"{remote}/texts"))) == ["one|two|three"]
    by_separator = open_documents(Documents(f"{remote}/texts", separator="|"))
    assert contents(by_separator) == ["one", "two", "three"]
    assert by_separator.read(np.array([1]))[0].where == "gs://bkt/corpus/texts/a.txt document 2"
    with raises_naming(UserError, "b.txt", "can't be read", "No such file", "a.txt?"):
        open_documents(Documents(f"{remote}/texts/b.txt"))


def test_a_tfrecord_file_that_begins_like_json_is_told_by_its_checksum(tmp_path):
    text = next(text for text in ("x" * n for n in range(123)) if _first_byte(tmp_path, text) == b"{")
    path = write_tfrecord(tmp_path, [text]).rename(tmp_path / "corpus")
    assert contents(open_documents(Documents(str(path)))) == [text]


def _first_byte(folder, text):
    return write_tfrecord(folder, [text]).read_bytes()[:1]


@pytest.mark.parametrize("kind", ["jsonl", "jsonl.gz", "parquet", "arrayrecord", "tfrecord"])
def test_the_number_of_a_shard_may_follow_the_suffix(tmp_path, kind):
    path = WRITERS[kind](tmp_path, TEXTS)
    plain, _, compressed = path.name.removeprefix("a.").partition(".")
    named = path.rename(tmp_path / f"a.{plain}-00003-of-01000{'.' if compressed else ''}{compressed}")
    (tmp_path / f"a.{plain}-00004-of-01000").write_bytes(b"")  # only its name tells its kind
    assert file_kinds.kind_of_all([str(named)]) == plain
    assert file_kinds.kind_of_all([f"{tmp_path}/a.{plain}-00004-of-01000"]) == plain
    assert contents(open_documents(Documents(str(named)))) == TEXTS


@pytest.mark.parametrize("column", ["", None, 3])
def test_a_column_without_a_name_is_refused(tmp_path, column):
    path = write_jsonl(tmp_path, TEXTS)
    with raises_naming(UserError, f"column={column!r}", "name", "'text'"):
        open_documents(Documents(str(path), column=column))


@pytest.mark.parametrize("kind", [None, "arrow"])
@pytest.mark.parametrize("name", ["tokens-00000-of-00002.arrow", "tokens-00000-of-00002.json"])
def test_parts_of_a_prepared_corpus_are_not_text(tmp_path, name, kind):
    write_jsonl(tmp_path, TEXTS).rename(tmp_path / name)
    for given in (str(tmp_path), f"{tmp_path}/tokens-*"):
        with raises_naming(
            UserError,
            tmp_path / name,
            "prepared corpus",
            f"files='{tmp_path}'",
            "corpus.json",
            "--mode=tokenise",
        ):
            open_documents(Documents(given, kind=kind))


def test_a_zstandard_file_may_begin_with_a_frame_to_skip(tmp_path):
    path = write_jsonl(tmp_path, TEXTS, ".zst")
    path.write_bytes(b"\x5f\x2a\x4d\x18" + (3).to_bytes(4, "little") + b"abc" + path.read_bytes())
    assert contents(open_documents(Documents(str(path)))) == TEXTS
    named = path.rename(tmp_path / "corpus")
    assert contents(open_documents(Documents(str(named)))) == TEXTS


def test_another_kind_is_a_change(tmp_path):
    path = str(write_jsonl(tmp_path, TEXTS))
    lines, text = open_documents(Documents(path)), open_documents(Documents(path, kind="text"))
    saved = lines.fingerprint()
    assert text.fingerprint() != saved
    assert_names(text.changed_text(saved), "'jsonl'", "'text'")
    assert "a.jsonl" not in text.changed_text(saved)
    write_jsonl(tmp_path, ["a"])
    both = open_documents(Documents(path, kind="text")).changed_text(saved)
    assert_names(both, "'jsonl'", "'text'", "a.jsonl had")
    del saved["kind"]
    assert_names(text.changed_text(saved), "kind", "not saved", "'text'")
    assert open_documents(Documents(path)).changed_text(saved).startswith("a.jsonl had ")
