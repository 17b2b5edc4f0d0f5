"""TFRecord files of tf.train.Example with a text feature, read by number, without TensorFlow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import ClassVar

import numpy as np

from spmd_trainer.errors import did_you_mean
from spmd_trainer.inputs import record_files
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record
from spmd_trainer.inputs.corpus.file_source import FileSource

# Wire types of protocol buffers: https://protobuf.dev/programming-guides/encoding/.
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Field numbers: Example.features, Features.feature, the key and the value of a map's entry, Feature.bytes_list, BytesList.value.
_FEATURES, _FEATURE, _KEY, _VALUE, _BYTES_LIST, _BYTES_VALUE = 1, 1, 1, 2, 1, 1

# Files that are open at a time: a mixture has many sources.
_MAX_OPEN = 8
# Records that are read at a time where documents are read in order.
_BLOCK = 64


class TfRecordDocuments(FileSource):
    """Examples of TFRecord files. A chunk is a file."""

    kind: ClassVar[str] = "tfrecord"

    def __init__(self, paths: Sequence[str], column: str = "text"):
        """Finds the records.

        Args:
          paths: the files; not compressed.
          column: key of a bytes feature with one value, the text.

        Raises:
          UserError: a file can't be read, is compressed or is broken; names the file, the record and its byte.
        """
        super().__init__(paths)
        self._column = column
        self._records = record_files.RecordFiles(list(paths), max_open=_MAX_OPEN)
        self._counts = np.array(self._records.counts, np.int64)
        self._ends = np.cumsum(self._counts)

    @property
    def random_access(self) -> bool:
        return True

    def chunk_sizes(self) -> np.ndarray:
        return self._counts

    def read(self, numbers: np.ndarray) -> list[Record]:
        numbers = np.asarray(numbers)
        try:
            found = self._records.read_many(numbers)
        except record_files.BrokenRecord:
            return [self._read_one(number) for number in numbers.tolist()]
        return [self._document(number, data) for number, data in zip(numbers.tolist(), found, strict=True)]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        end = int(self._ends[chunk])
        for first in range(end - int(self._counts[chunk]) + start, end, _BLOCK):
            yield from self.read(np.arange(first, min(first + _BLOCK, end)))

    def _read_one(self, number: int) -> Record:
        try:
            return self._document(number, self._records.read(number))
        except record_files.BrokenRecord as error:
            where = self._records.describe(number)
            return BadRecord(where, str(error).removeprefix(where).strip())

    def _document(self, number: int, data: bytes) -> Record:
        where = self._records.describe(number)
        try:
            features = example_bytes(data)
        except ValueError as error:
            return BadRecord(where, f"is not a tf.train.Example: {error}")
        if self._column not in features:
            return BadRecord(where, f"has no feature {self._column!r}{did_you_mean(self._column, list(features))}")
        values = features[self._column]
        if values is None or len(values) != 1:
            found = "numbers" if values is None else f"{len(values)} values"
            return BadRecord(where, f"has {found} in the feature {self._column!r} instead of one text")
        return Document(values[0], where)


def example_bytes(data: bytes) -> dict[str, list[bytes] | None]:
    """Returns the bytes features of a serialized tf.train.Example by name; None for features of numbers.

    Raises:
      ValueError: it is not a tf.train.Example.
    """
    found: dict[str, list[bytes] | None] = {}
    for number, features in _fields(data):
        if number != _FEATURES:
            continue
        for inner, entry in _fields(_message(features)):
            if inner != _FEATURE:
                continue
            parts = dict(_fields(_message(entry)))
            kinds = dict(_fields(_message(parts.get(_VALUE, b""))))
            name = _message(parts.get(_KEY, b"")).decode()
            values = kinds.get(_BYTES_LIST)
            found[name] = (
                None if values is None else [_message(v) for n, v in _fields(_message(values)) if n == _BYTES_VALUE]
            )
    return found


def _message(value: bytes | int) -> bytes:
    if isinstance(value, int):
        raise ValueError("a number stands where a message should be")
    return value


def _fields(data: bytes) -> Iterator[tuple[int, bytes | int]]:
    """Yields number and value of each field of a message."""
    place = 0
    while place < len(data):
        tag, place = _varint(data, place)
        kind = tag & 7
        if kind == _VARINT:
            value, place = _varint(data, place)
            yield tag >> 3, value
            continue
        size = {_FIXED64: 8, _FIXED32: 4}.get(kind)
        if kind == _BYTES:
            size, place = _varint(data, place)
        if size is None or place + size > len(data):
            raise ValueError(f"the field at byte {place} is cut off" if size is not None else f"wire type {kind}")
        yield tag >> 3, data[place : place + size]
        place += size


def _varint(data: bytes, place: int) -> tuple[int, int]:
    value, shift = 0, 0
    while place < len(data) and shift < 64:
        byte = data[place]
        value, place, shift = value | (byte & 0x7F) << shift, place + 1, shift + 7
        if byte < 0x80:
            return value, place
    raise ValueError(f"a number at byte {place} is cut off")
