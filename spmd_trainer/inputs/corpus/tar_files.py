"""Tar shards in webdataset's layout: a sample's members share a name and differ in extension ('001.txt', '001.json')."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record
from spmd_trainer.inputs.corpus.file_kinds import DAMAGE, decompressed, open_bytes
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.storage import reading

# Tar files end with two empty blocks of 512 bytes.
_END = bytes(1024)
# Exceptions of damaged tar files.
TAR_DAMAGE: tuple[type[Exception], ...] = (*DAMAGE, tarfile.TarError)
_USTAR, _USTAR_AT = b"ustar", 257

T = TypeVar("T")


class Header(tarfile.TarInfo):
    """A tar header that must be intact: tarfile treats a damaged one, or a single empty block, as the end of the file."""

    @classmethod
    def fromtarfile(cls, archive: Any) -> Any:
        try:
            return super().fromtarfile(archive)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
                raise tarfile.ReadError("an empty block precedes the end, or the end is cut off") from None
            raise
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            raise tarfile.ReadError("the file lacks the empty blocks at its end, so it may have been cut off") from None
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"the header at byte {archive.offset} can't be read: {error}") from error


def samples(
    archive: tarfile.TarFile,
    path: str,
    wanted: Collection[str],
    take: Callable[[tarfile.TarFile, tarfile.TarInfo], T],
) -> Iterator[tuple[str, dict[str, T | None]]]:
    """Yields each sample's name and its members by extension.

    Args:
      archive: opened with `Header`.
      path: the file, for errors.
      wanted: extensions to read; other members are None.
      take: reads a member.

    Raises:
      UserError: a sample has two members with one extension, or a wanted member is a link.
    """
    current: tuple[str, dict[str, T | None]] | None = None
    for member in archive:
        archive.members = []  # type: ignore[attr-defined] # tarfile would keep the headers of all members
        folder, _, name = member.name.rpartition("/")
        stem, _, extension = name.partition(".")
        if extension in wanted and (member.issym() or member.islnk()):
            raise UserError(
                f"{path}: {member.name!r} is a link; pack the shard with `tar --dereference --hard-dereference`"
            )
        if not member.isfile():
            continue
        sample = f"{folder}/{stem}" if folder else stem
        taken = take(archive, member) if extension in wanted else None
        if current is None or current[0] != sample:
            if current is not None:
                yield current
            current = (sample, {})
        if extension in current[1]:
            raise UserError(
                f"{path}: sample {sample!r} has two members with the extension {extension!r}; give each sample its own name"
            )
        current[1][extension] = taken
    if current is not None:
        yield current


def content(archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    return cast(tarfile.ExFileObject, archive.extractfile(member)).read()


def is_plain(path: str) -> bool:
    """True if a tar file is uncompressed."""
    return reading.read(path, _USTAR_AT, _USTAR_AT + len(_USTAR)) == _USTAR


def refuse_without_end(path: str, size: int) -> None:
    """Refuses an uncompressed tar file of `size` bytes that was cut off between two members; tarfile accepts it as
    complete.

    Compressed files have checksums instead.

    Raises:
      tarfile.ReadError: the file was cut off.
    """
    if is_plain(path) and reading.read(path, size - len(_END), size) != _END:
        raise tarfile.ReadError("the file lacks the empty blocks at its end, so it may have been cut off")


# Bytes per read.
_BLOCK = 2**20


class TarDocuments(FileSource):
    """Text samples of tar files, compressed or not, read in order. A chunk is a file."""

    kind: ClassVar[str] = "tar"

    def __init__(self, paths: Sequence[str], column: str = "txt"):
        """`column` is the text member's extension, e.g. 'txt'. A sample's name ends at the file name's first dot."""
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
