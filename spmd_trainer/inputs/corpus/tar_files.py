"""Tar shards in webdataset's layout: a sample's members share a name and differ in extension ('001.txt', '001.json')."""

from __future__ import annotations

import functools
import tarfile
from collections.abc import Callable, Collection, Iterator
from typing import Any, BinaryIO, TypeVar, cast

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record, too_long
from spmd_trainer.inputs.corpus.file_kinds import DAMAGE, decompressed, open_bytes
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource
from spmd_trainer.storage import reading

# Tar files end with two empty blocks of 512 bytes.
_END = bytes(1024)
# Exceptions of damaged tar files.
TAR_DAMAGE: tuple[type[Exception], ...] = (*DAMAGE, tarfile.TarError)
_USTAR, _USTAR_AT = b"ustar", 257
# Headers whose content describes the next member: names and attributes, which tarfile reads whole.
_DESCRIBING = (*tarfile.GNU_TYPES, tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE)
_LONGEST_DESCRIPTION = 2**20

T = TypeVar("T")


class Header(tarfile.TarInfo):
    """Header of a tar member. Raises tarfile.ReadError if the header is damaged.

    tarfile's own class treats a damaged header, or a single empty block, as the end of the file.
    """

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

    @classmethod
    def frombuf(cls, buf: Any, encoding: str, errors: str) -> Any:
        found = super().frombuf(buf, encoding, errors)
        describes = found.type in _DESCRIBING and found.type != tarfile.GNUTYPE_SPARSE
        if found.size < 0 or (describes and found.size > _LONGEST_DESCRIPTION):
            raise tarfile.ReadError(f"a header declares a size of {found.size:,} bytes")
        return found


def samples(
    archive: tarfile.TarFile,
    path: str,
    wanted: Collection[str],
    take: Callable[[tarfile.TarFile, tarfile.TarInfo], T],
    size: int | None,
) -> Iterator[tuple[str, dict[str, T | None]]]:
    """Yields (sample name, {extension of a member: result of `take`}) for each sample of a tar file.

    Args:
      archive: the tar file, opened with `tarinfo=Header`.
      path: path of the file, for messages.
      wanted: extensions of the members to read with `take`. Other members have None instead of a result.
      take: reads a member.
      size: size of the file in bytes; None if the file is compressed.

    Raises:
      tarfile.ReadError: according to its declared size, a member ends after the end of the file.
      UserError: a sample has two members with the same extension, or a wanted member is a link.
    """
    current: tuple[str, dict[str, T | None]] | None = None
    for member in archive:
        archive.members = []  # type: ignore[attr-defined] # tarfile would keep the headers of all members
        stored = 0 if member.issparse() else member.size
        if size is not None and member.offset_data + stored > size:
            raise tarfile.ReadError(
                f"{member.name!r} has {member.size:,} bytes by its header, and the file ends {size - member.offset_data:,} bytes "
                "after it"
            )
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


def _content(longest: int, archive: tarfile.TarFile, member: tarfile.TarInfo) -> bytes | int:
    """Returns the content of a member, or only its size in bytes if the size is above `longest`."""
    if member.size > longest:
        return int(member.size)
    return cast(tarfile.ExFileObject, archive.extractfile(member)).read()


class _Stream:
    """A file that raises EOFError at its end. tarfile would otherwise keep reading for all the bytes that a header declares."""

    def __init__(self, file: BinaryIO):
        self._file = file

    def read(self, size: int) -> bytes:
        """Returns up to `size` bytes, at least one."""
        if not (found := self._file.read(size)):
            raise EOFError("the file ends before what its headers declare; it may have been cut off")
        return found


def is_plain(path: str) -> bool:
    """Returns True if a tar file is uncompressed."""
    return reading.read(path, _USTAR_AT, _USTAR_AT + len(_USTAR)) == _USTAR


def refuse_without_end(path: str, size: int) -> None:
    """Checks that an uncompressed tar file of `size` bytes was not cut off between two members, which tarfile doesn't notice.

    Compressed files aren't checked: their checksums show the damage.

    Raises:
      tarfile.ReadError: the file was cut off.
    """
    if is_plain(path) and reading.read(path, size - len(_END), size) != _END:
        raise tarfile.ReadError("the file lacks the empty blocks at its end, so it may have been cut off")


# Bytes per read.
_BLOCK = 2**20


class TarDocuments(FileSource):
    """Source whose documents are the texts in tar files, compressed or not, read in order. Each file is a chunk."""

    kind = "tar"

    def __init__(self, paths: FilesOrPaths, column: str = "text"):
        """Stores the files. `column`: extension of the text members, i.e. what follows the first dot of a member's file name.

        The extension 'text', which is the default, also accepts 'txt'.
        """
        super().__init__(paths)
        self._extensions = ("text", "txt") if column == "text" else (column,)

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        path, number = self.paths[chunk], 0
        self.refuse_changed(chunk)
        try:
            with open_bytes(path) as file:
                unpacked = decompressed(file, path)
                archive = tarfile.TarFile.open(fileobj=cast(Any, _Stream(unpacked)), mode="r|", tarinfo=Header)
                take = functools.partial(_content, self.max_record_bytes)
                size = self.sizes[chunk] if unpacked is file else None
                for number, (name, members) in enumerate(samples(archive, path, self._extensions, take, size)):
                    if number >= start:
                        yield self._record(f"{path} sample {name!r}", members)
                while unpacked.read(_BLOCK):  # checksums of compressed files are at their end
                    pass
            refuse_without_end(path, self.sizes[chunk])
        except TAR_DAMAGE as error:
            raise UserError(
                f"{path} is damaged after sample {number}: {error or type(error).__name__}. Write the file again, or leave it out"
            ) from error

    def _record(self, where: str, members: dict[str, bytes | int | None]) -> Record:
        content = next((members[one] for one in self._extensions if one in members), None)
        if content is None:
            wanted = " or ".join(map(repr, self._extensions))
            return BadRecord(where, f"has no member {wanted}{did_you_mean(self._extensions[0], list(members))}")
        if isinstance(content, int):
            return too_long(where, self.max_record_bytes, content)
        return Document(content, where)
