"""Tar files whose headers are damaged: tarfile by itself takes them for shorter files."""

import io
import tarfile

import pytest

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Documents
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
