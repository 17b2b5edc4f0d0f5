"""Tar shards in webdataset's layout: the members of a sample have one name and different extensions ('001.txt', '001.json')."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from typing import ClassVar

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.compression import decompressed
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.line_index import open_bytes
from spmd_trainer.inputs.corpus.tar_members import TAR_DAMAGE, Header, content, refuse_without_end, samples

# Bytes that are read at a time.
_BLOCK = 2**20


class TarDocuments(FileSource):
    """Samples of tar files, also compressed ones, read in order. A chunk is a file."""

    kind: ClassVar[str] = "tar"

    def __init__(self, paths: Sequence[str], column: str = "txt"):
        """Takes the files; they are opened when they are read.

        Args:
          paths: the files.
          column: extension of the member that is the text, e.g. 'txt'. A sample's name ends at the first dot of its file name.
        """
        super().__init__(paths)
        self._column = column

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        path, number = self.paths[chunk], 0
        self.refuse_changed(chunk)
        try:
            with open_bytes(path) as file:
                unpacked = decompressed(file, path)
                archive = tarfile.TarFile.open(fileobj=unpacked, mode="r|", tarinfo=Header)
                for number, (name, members) in enumerate(samples(archive, path, {self._column}, content)):
                    if number >= start:
                        yield self._record(f"{path} sample {name!r}", members)
                while unpacked.read(_BLOCK):  # checksums of compressed files are at their end
                    pass
            refuse_without_end(path, self.sizes[chunk])
        except TAR_DAMAGE as error:
            raise UserError(
                f"{path} is damaged after sample {number}: {error or type(error).__name__}. Write the file again, or leave it out"
            ) from error

    def _record(self, where: str, members: dict[str, bytes | None]) -> Record:
        content = members.get(self._column)
        if content is None:
            return BadRecord(where, f"has no member {self._column!r}{did_you_mean(self._column, list(members))}")
        return Document(content, where)
