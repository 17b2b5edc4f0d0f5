"""TFRecord files, read by record number, without TensorFlow.

In a file, a record consists of its length (8 bytes, little endian), a checksum of the length (4 bytes), the data, and a
checksum of the data (4 bytes). The checksums are masked CRC-32C (tensorflow.org/tutorials/load_data/tfrecord). All lengths
are read when the files are opened, data on demand. The index of a large file is kept in a cache (`storage.local_copies`).
"""

from __future__ import annotations

import array
import functools
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from typing import BinaryIO, cast

import google_crc32c
import numpy as np
from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import file_formats, files
from spmd_trainer.inputs.corpus.documents import Document
from spmd_trainer.inputs.corpus.file_source import IndexedFiles
from spmd_trainer.storage import local_copies

_HEADER = struct.Struct("<QI")
_LENGTH_BYTES = 8
_FOOTER = struct.Struct("<I")
_FRAME = _HEADER.size + _FOOTER.size
_GZIP = b"\x1f\x8b"
# Bytes per read while finding small records.
_BLOCK = 2**20
# The index of a smaller file is not cached: making it again is faster.
_CACHED_BYTES = 2**20
# Record sizes per block of `checksum`.
_SIZES_AT_ONCE = 2**20
_FIX = "Write the file again, or leave it out of `files`"
_CUT_OFF = "the file ends inside it"


class BrokenRecord(UserError):
    """The data of a record don't match its checksum. Other records of the file may be intact."""


class RecordSource(IndexedFiles):
    """Base class of the readers of TFRecord files. Several threads may read at the same time."""

    kind = "tfrecord"

    def find_records(self, index: int) -> np.ndarray:
        return bounds_of(self.paths[index], self.sizes[index])

    def where(self, index: int, number: int) -> str:
        return describe(self.paths[index], number, int(self._starts[index][number]))


class RecordFiles(RecordSource):
    """Reads the records of TFRecord files by number. Records are numbered from 0 across all files, in the files' order."""

    max_record_bytes = sys.maxsize
    most_open = 64

    def __init__(self, source: files.FileSource | None):
        """Finds the records of all files.

        Args:
          source: a path, folder or glob pattern; a list of these; or a function without arguments that returns one of them
            or a list.

        Raises:
          UserError: there are no files or no records; or a file can't be read, is compressed or is broken. For a broken
            file, the message names the file, the broken record, and the byte offset of this record.
        """
        super().__init__(files.find_files(source))

    def __len__(self) -> int:
        return len(self.shards)

    @property
    def counts(self) -> list[int]:
        """Number of records in each file."""
        return self.shards.counts.tolist()

    @functools.cached_property
    def checksum(self) -> int:
        """Checksum of the sizes of all files and records. It doesn't depend on the records' content."""
        crc = self.found.checksum
        for bounds in self._starts:
            for begin in range(0, len(bounds) - 1, _SIZES_AT_ONCE):
                sizes = np.diff(bounds[begin : begin + _SIZES_AT_ONCE + 1]) - _FRAME
                crc = zlib.crc32(sizes.tobytes(), crc)
        return crc

    def describe(self, record: int) -> str:
        """Returns the location of a record for messages: 'FILE, record 7 (at byte 1234)'. Both numbers count from 0."""
        return self.where(*self.shards.locate(record))

    def data(self, records: Sequence[int] | np.ndarray) -> list[bytes]:
        """Returns the data of the n records with these numbers, which may be in any order.

        Raises:
          BrokenRecord: a record doesn't match its checksum. The message names the file and the record.
          UserError: a file can't be read, or has changed since it was indexed. The message names the file.
        """
        found = cast(list[Document], self.read(np.asarray(records, np.int64)))
        return [cast(bytes, one.content) for one in found]

    def record(self, index: int, number: int, content: bytes) -> Document:
        where = self.where(index, number)
        return Document(data_of(content, len(content), lambda: where), where)


def data_of(frame: bytes, size: int, where: Callable[[], str]) -> bytes:
    """Checks the bytes of a record in a file, and returns the record's data.

    Args:
      frame: the record's bytes as read from the file: length, checksums and data.
      size: number of bytes that the record had when the file was indexed.
      where: returns where the record is, for error messages.

    Raises:
      BrokenRecord: the data don't match their checksum.
      UserError: `frame` is not a record of `size` bytes, because the file has changed.
    """
    if len(frame) != size or int.from_bytes(frame[:_LENGTH_BYTES], "little") != size - _FRAME:
        raise UserError(f"{where()} is no longer where this run found it; start the run again")
    data = frame[_HEADER.size : -_FOOTER.size]
    if int.from_bytes(frame[-_FOOTER.size :], "little") != masked_crc(data):
        raise BrokenRecord(f"{where()} is broken: its data don't match their checksum. {_FIX}")
    return data


def masked_crc(data: bytes) -> int:
    """Returns TFRecord's checksum of `data`: CRC-32C, rotated right by 15 bits, plus 0xa282ead8, modulo 2**32."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def begins_with_record(head: bytes) -> bool:
    """Returns True if a file's first bytes are a record's length and the matching checksum, as in a TFRecord file."""
    return len(head) >= _HEADER.size and _length(head) is not None


def _length(frame: bytes) -> int | None:
    """Returns the data length in the header with which `frame` begins; None if it doesn't match the header's checksum."""
    length, crc = _HEADER.unpack_from(frame)
    return length if crc == _length_crc(length) else None


@functools.lru_cache(maxsize=2**16)
def _length_crc(length: int) -> int:
    return masked_crc(length.to_bytes(_LENGTH_BYTES, "little"))


def bounds_of(path: str, total: int) -> np.ndarray:
    """Returns the byte offset of each record in a file of `total` bytes, and the end of the last one: int64 [records + 1]."""
    if total < _CACHED_BYTES:
        return _find_records(path, total)
    return local_copies.cached_index(path, "records", lambda: _find_records(path, total))


def _find_records(path: str, total: int) -> np.ndarray:
    """Finds the offsets that `bounds_of` returns. Doesn't read the data of large records."""
    bounds = array.array("q", [0])
    if total:
        with epath.Path(path).open("rb") as file:
            _walk(file, path, total, bounds)
    return np.frombuffer(bounds, np.int64)


def _walk(file: BinaryIO, path: str, total: int, bounds: array.array[int]) -> None:
    """Finds the records of a file. Appends each record's end offset to `bounds`, which has the single item 0 at first."""
    block = file.read(_BLOCK)
    if block[: len(_GZIP)] == _GZIP and (total < _FRAME or _length(block) is None):
        raise UserError(f"{path} is compressed, so its records can't be read by number; unpack it with `gunzip`")
    unpack, length_crc, header = _HEADER.unpack_from, _length_crc, _HEADER.size
    offset = block_begin = 0
    size = 0
    while offset < total:
        at = offset - block_begin
        if at + header > len(block):
            file.seek(offset)
            block = file.read(_BLOCK if size < _BLOCK // 16 else header)
            block_begin, at = offset, 0
        if at + header > len(block):
            raise _broken(path, bounds, _CUT_OFF)
        size, crc = unpack(block, at)
        if crc != length_crc(size):
            if not offset and (kind := file_formats.identify(block[: file_formats.HEAD_BYTES])) is not None:
                raise UserError(f"{path} is {kind.name}, not TFRecord. {kind.instead}")
            raise _broken(path, bounds, "its length doesn't match its checksum")
        offset += size + _FRAME
        if offset > total:
            raise _broken(path, bounds, _CUT_OFF)
        bounds.append(offset)


def _broken(path: str, bounds: array.array[int], wrong: str) -> UserError:
    """Returns the error for the broken record at offset `bounds[-1]`. `wrong` says why, e.g. 'the file ends inside it'."""
    whole = len(bounds) - 1
    return UserError(
        f"{describe(path, whole, bounds[-1])} is broken: {wrong}. The {whole} records before it are whole. {_FIX}"
    )


def describe(path: str, number: int, offset: int) -> str:
    """Returns the location of a record for messages: 'FILE, record 7 (at byte 1234)'."""
    return f"{path}, record {number} (at byte {offset})"
