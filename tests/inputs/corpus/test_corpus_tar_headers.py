"""Tar files whose headers are damaged: tarfile by itself takes them for shorter files."""

import gzip
import io
import tarfile

import pytest
from facts import assert_names, raises_naming

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
from spmd_trainer.inputs.corpus.open_source import open_documents


@pytest.mark.parametrize("damage", ["checksum", "empty block"])
def test_a_damaged_header_between_samples_is_an_error(tmp_path, damage):
    path = tmp_path / "x.tar"
    with tarfile.open(path, "w") as archive:
        for number in range(4):
            member = tarfile.TarInfo(f"{number}.txt")
            member.size = 5
            archive.addfile(member, io.BytesIO(b"hello"))
    content = bytearray(path.read_bytes())
    third = 2 * 1024  # each sample is a header and a block of content
    content[third : third + 512] = bytes(512) if damage == "empty block" else b"?" + content[third + 1 : third + 512]
    path.write_bytes(content)
    source = open_documents(Documents(str(path), column="txt"))
    with pytest.raises(UserError, match=r"x\.tar is damaged"):
        list(source.read_chunk(0, 0))


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    member = tarfile.TarInfo(name)
    member.size, member.type = size, kind
    return member.tobuf(tarfile.GNU_FORMAT)


@pytest.mark.parametrize("compress", [bytes, gzip.compress])
@pytest.mark.parametrize(
    ("second", "fact"),
    [
        (header("b.txt", 2**40), "1,099,511,627,776"),
        (header("b.png", 2**40), "1,099,511,627,776"),
        (header("b.png", -512), "-512"),
        (header("././@LongLink", 2**40, tarfile.GNUTYPE_LONGNAME), "1,099,511,627,776"),
    ],
    ids=["text", "picture", "negative", "name"],
)
def test_a_size_that_the_file_does_not_have_is_refused_at_once(tmp_path, second, fact, compress):
    path = tmp_path / ("a.tar" if compress is bytes else "a.tar.gz")
    path.write_bytes(compress(header("a.txt", 512) + b"x" * 512 + second + b"y" * 512 + bytes(1024)))
    source = open_documents(Documents(str(path), column="txt", max_record_bytes=2**50))
    # The size of a compressed file is not that of its content.
    is_known = compress is bytes or fact == "-512" or b"LongLink" in second
    with raises_naming(UserError, path, "damaged", fact if is_known else "ends before"):
        list(source.read_chunk(0, 0))


def test_a_text_longer_than_a_record_may_be_is_bad(tmp_path):
    path = tmp_path / "a.tar"
    path.write_bytes(header("a.txt", 512) + b"x" * 512 + header("b.txt", 5) + b"hello" + bytes(507 + 1024))
    bad, last = open_documents(Documents(str(path), column="txt", max_record_bytes=100)).read_chunk(0, 0)
    assert isinstance(bad, BadRecord)
    assert_names(bad.problem, "512 bytes", "max_record_bytes=100")
    assert last.content == b"hello"
