"""Tar shards: samples of several members, folders, and samples without a text."""

import io
import os
import tarfile
import tracemalloc

import pytest
from corpus_files import write_tar
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.tar_files import TarDocuments


def write(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            member = tarfile.TarInfo(name)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
    return str(path)


def test_members_of_a_name_are_one_sample(tmp_path):
    members = [
        ("x/1.json", b"{}"),
        ("x/1.txt", b"one"),
        ("x/2.txt", b"two"),
        ("y/2.txt", b"three"),
        ("y/2.seg.txt", b"no"),
    ]
    path = write(tmp_path / "a.tar", members)
    records = list(TarDocuments([path], "txt").read_chunk(0, 0))
    assert [record.content for record in records] == [b"one", b"two", b"three"]
    (bad, *_, last) = TarDocuments([path], "seg.txt").read_chunk(0, 0)
    assert isinstance(bad, BadRecord)
    assert last.content == b"no"


def test_a_sample_without_the_text_is_bad_and_the_others_are_read(tmp_path):
    path = write(tmp_path / "a.tar", [("1.txt", b"one"), ("2.text", b"two"), ("3.txt", b"three")])
    first, bad, last = TarDocuments([path], "txt").read_chunk(0, 0)
    assert (first.content, last.content) == (b"one", b"three")
    assert isinstance(bad, BadRecord)
    assert bad.where.startswith(f"{path} sample '2'")
    assert_names(bad.problem, "member 'txt'", "text?")


def test_without_a_column_both_usual_extensions_are_read(tmp_path):
    write(
        tmp_path / "a.tar",
        [("1.txt", b"one"), ("2.text", b"two"), ("3.txt", b"no"), ("3.text", b"three"), ("4.a", b"")],
    )
    *texts, bad = open_documents(Documents(str(tmp_path / "*.tar"))).read_chunk(0, 0)
    assert [record.content for record in texts] == [b"one", b"two", b"three"]
    assert_names(bad.problem, "'text' or 'txt'")


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_a_truncated_shard_gives_the_samples_before_and_then_an_error(tmp_path, suffix):
    texts = [str(n) * 3000 for n in range(10)]
    path = write_tar(tmp_path, texts, suffix=suffix)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    given: list[str] = []
    records = TarDocuments([str(path)], "text").read_chunk(0, 0)
    with raises_naming(UserError, path, "damaged after sample"):
        given.extend(record.content.decode() for record in records)
    assert given == texts[: len(given)]
    assert given or suffix


def test_a_shard_that_changes_is_an_error(tmp_path):
    path = write(tmp_path / "a.tar", [("1.txt", b"one")])
    source = TarDocuments([path], "txt")
    size = os.path.getsize(path)
    write(path, [(f"{n}.txt", b"x" * 5000) for n in range(9)])
    with raises_naming(UserError, path, f"{size} bytes", "has changed"):
        list(source.read_chunk(0, 0))


def test_two_members_of_a_sample_with_one_extension_are_an_error(tmp_path):
    path = write(tmp_path / "a.tar", [("0.txt", b"zero"), ("1.txt", b"one"), ("1.txt", b"another")])
    with raises_naming(UserError, path, "sample '1'", "two members", "'txt'"):
        list(TarDocuments([path], "txt").read_chunk(0, 0))


@pytest.mark.parametrize("kind", [tarfile.SYMTYPE, tarfile.LNKTYPE])
def test_links_are_an_error_where_the_text_should_be(tmp_path, kind):
    path = write(tmp_path / "a.tar", [("1.txt", b"one")])
    with tarfile.open(path, "a") as archive:
        link = tarfile.TarInfo("2.txt")
        link.type, link.linkname = kind, "1.txt"
        archive.addfile(link)
    with raises_naming(UserError, path, "'2.txt'", "link", "`tar --dereference --hard-dereference`"):
        list(TarDocuments([path], "txt").read_chunk(0, 0))
    other = list(TarDocuments([path], "json").read_chunk(0, 0))  # the link is not needed
    assert [record.where for record in other] == [f"{path} sample '1'"]


def test_a_shard_of_many_members_takes_little_memory(tmp_path):
    path = write(tmp_path / "a.tar", [(f"{n}.txt", b"x") for n in range(3000)])
    tracemalloc.start()
    count = sum(1 for _ in TarDocuments([path], "txt").read_chunk(0, 0))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 3000
    assert peak < 2 * 2**20  # the headers of all members would take more
