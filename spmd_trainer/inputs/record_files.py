"""TFRecord files, read by record number, without TensorFlow.

A record is its length (8 bytes, little endian), a checksum of the length (4), the data, and a checksum of the data
(4); the checksums are masked CRC-32C (tensorflow.org/tutorials/load_data/tfrecord). All lengths are read at the start,
data on demand. The cache folder (`storage.local_copies`) keeps the index of a large file.
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
# Smaller files are faster to index again than to look up.
_CACHED_BYTES = 2**20
# Record sizes per block of `checksum`.
_SIZES_AT_ONCE = 2**20
_FIX = "Write the file again, or leave it out of `files`"
_CUT_OFF = "the file ends inside it"


class BrokenRecord(UserError):
    """The data of one record don't match their checksum. Other records of the file may be intact."""


class RecordSource(IndexedFiles):
    """Base of the sources over the records of TFRecord files. Several threads may read at a time."""

    kind = "tfrecord"

    def find_records(self, index: int) -> np.ndarray:
        return bounds_of(self.paths[index], self.sizes[index])

    def where(self, index: int, number: int) -> str:
        return describe(self.paths[index], number, int(self._starts[index][number]))


class RecordFiles(RecordSource):
    """The data of the records of TFRecord files, numbered from 0 in the order of the files."""

    max_record_bytes = sys.maxsize
    most_open = 64

    def __init__(self, source: files.FileSource | None):
        """Finds the records of all files.

        Args:
          source: paths, folders and glob patterns, one of them, or a function without arguments that returns them.

        Raises:
          UserError: there are no files or no records, or a file can't be read, is compressed or is broken (names the
            file, the record and its byte).
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
        """Checksum that changes when a file is added, removed or reordered, or when record sizes change."""
        crc = self.found.checksum
        for bounds in self._starts:
            for begin in range(0, len(bounds) - 1, _SIZES_AT_ONCE):
                sizes = np.diff(bounds[begin : begin + _SIZES_AT_ONCE + 1]) - _FRAME
                crc = zlib.crc32(sizes.tobytes(), crc)
        return crc

    def describe(self, record: int) -> str:
        """Formats a record's place for messages: 'FILE, record 7 (at byte 1234)', counted from 0."""
        return self.where(*self.shards.locate(record))

    def data(self, records: Sequence[int] | np.ndarray) -> list[bytes]:
        """Returns the data of records [n], in any order.

        Raises:
          BrokenRecord: a record doesn't match its checksum; names the file and the record.
          UserError: a file can't be read, or has changed since it was found; names it.
        """
        found = cast(list[Document], self.read(np.asarray(records, np.int64)))
        return [cast(bytes, one.content) for one in found]

    def record(self, index: int, number: int, content: bytes) -> Document:
        where = self.where(index, number)
        return Document(data_of(content, len(content), lambda: where), where)


def data_of(frame: bytes, size: int, where: Callable[[], str]) -> bytes:
    """Checks a record's frame of `size` bytes (length, checksums and data), and returns its data.

    Args:
      frame: the bytes read.
      size: bytes that the frame had when the file was indexed.
      where: returns the record's place, for errors.

    Raises:
      BrokenRecord: the data don't match their checksum.
      UserError: the bytes are no longer a frame of this size, because the file has changed.
    """
    if len(frame) != size or int.from_bytes(frame[:_LENGTH_BYTES], "little") != size - _FRAME:
        raise UserError(f"{where()} is no longer where this run found it; start the run again")
    data = frame[_HEADER.size : -_FOOTER.size]
    if int.from_bytes(frame[-_FOOTER.size :], "little") != masked_crc(data):
        raise BrokenRecord(f"{where()} is broken: its data don't match their checksum. {_FIX}")
    return data


def masked_crc(data: bytes) -> int:
    """Returns the format's checksum: CRC-32C, rotated right by 15 bits, plus 0xa282ead8, modulo 2**32."""
    crc = google_crc32c.value(data)
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF


def begins_with_record(head: bytes) -> bool:
    """True if a file's first bytes are a TFRecord length and its checksum."""
    return len(head) >= _HEADER.size and _length(head) is not None


def _length(frame: bytes) -> int | None:
    """Returns the length in a frame's header, or None if its checksum is wrong."""
    length, crc = _HEADER.unpack_from(frame)
    return length if crc == _length_crc(length) else None


@functools.lru_cache(maxsize=2**16)
def _length_crc(length: int) -> int:
    return masked_crc(length.to_bytes(_LENGTH_BYTES, "little"))


def bounds_of(path: str, total: int) -> np.ndarray:
    """Returns the first byte of each record of a file of `total` bytes, and the end of the last: int64 [records + 1]."""
    if total < _CACHED_BYTES:
        return _find_records(path, total)
    return local_copies.cached_index(path, "records", lambda: _find_records(path, total))


def _find_records(path: str, total: int) -> np.ndarray:
    """Finds the records of a file of `total` bytes. Reads only the headers of large records."""
    bounds = array.array("q", [0])
    if total:
        with epath.Path(path).open("rb") as file:
            _walk(file, path, total, bounds)
    return np.frombuffer(bounds, np.int64)


def _walk(file: BinaryIO, path: str, total: int, bounds: array.array[int]) -> None:
    """Appends the end of each record to `bounds`."""
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
    """Returns the error for the record that begins at the last of `bounds`."""
    whole = len(bounds) - 1
    return UserError(
        f"{describe(path, whole, bounds[-1])} is broken: {wrong}. The {whole} records before it are whole. {_FIX}"
    )


def describe(path: str, number: int, offset: int) -> str:
    """Formats a record's place for messages."""
    return f"{path}, record {number} (at byte {offset})"
