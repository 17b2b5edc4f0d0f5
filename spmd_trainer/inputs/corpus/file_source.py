"""Base classes of sources that read documents from files, and functions that make documents from parsed records."""

from __future__ import annotations

import abc
import collections
import functools
import json
import os
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs import files
from spmd_trainer.inputs.corpus.documents import (
    MAX_RECORD_BYTES,
    BadRecord,
    Column,
    Document,
    Record,
    too_long,
)
from spmd_trainer.inputs.shards import MAX_OPEN, OpenFiles, ShardIndex, changed
from spmd_trainer.storage import reading

_ASKED = "set `column` (--column, or COLUMN of an experiment) to the one with the text"
# The files of a source: either found already, with their sizes, or only their paths.
FilesOrPaths = files.TextFiles | Sequence[str]
# A saved position lists the files by name if there are at most this many; otherwise it has only a checksum of all names.
_NAMED = 64


class FileSource(abc.ABC):
    """Base class of sources that read documents from files. Documents come in chunks: files, row groups or record batches.

    Each document has a number within its chunk, and a number across all chunks, both from 0. Reading a document again gives the
    same result. Only one thread at a time may use a source, unless its class says otherwise.

    Attributes:
      found: paths and sizes of the files when the source was opened, in the order of their documents.
      paths, sizes: these paths, and these sizes in bytes.
      groups: for each chunk, (number of its file, number of the chunk in this file). There is at least one chunk.
      kind: one of `file_kinds.KINDS`. A position saved with one kind is invalid if the same files are read as a different kind.
      random_access: True if any document can be read by number without reading the ones before it.
      shards: `ShardIndex` of the documents in all chunks; None if the documents can't be counted without reading them all.
      max_record_bytes: see `Documents`.
    """

    kind: str
    random_access: bool = False
    shards: ShardIndex | None = None
    max_record_bytes: int = MAX_RECORD_BYTES

    def __init__(self, paths: FilesOrPaths):
        """Stores the files. If only paths are given, gets the sizes of the files, which must exist.

        Raises:
          UserError: a file can't be read; the message names it.
        """
        if not isinstance(paths, files.TextFiles):
            paths = files.TextFiles(tuple(paths), reading.for_each(paths, _size))
        self.found = paths
        self.paths, self.sizes = paths.paths, paths.sizes
        self.groups = [(index, 0) for index in range(len(self.paths))]

    def count_groups(self, rows_of: Callable[[int], Sequence[int]]) -> ShardIndex:
        """Sets `groups` so that each row group or record batch is a chunk. Returns the index of the rows in all chunks.

        Args:
          rows_of: returns, for the number of a file, the number of rows in each of its row groups or record batches.

        Raises:
          UserError: the files hold no rows.
        """
        counts = [rows_of(index) for index in range(len(self.paths))]
        self.groups = [(index, number) for index, of_file in enumerate(counts) for number in range(len(of_file))]
        if not any(map(any, counts)):
            raise UserError(f"{self.size_text} hold no rows, the first is {self.paths[0]}; give at least one with rows")
        return ShardIndex([rows for of_file in counts for rows in of_file])

    @property
    def num_chunks(self) -> int:
        return len(self.groups)

    @property
    def num_bytes(self) -> int:
        """Total bytes of all files."""
        return self.found.total_bytes

    @property
    def size_text(self) -> str:
        """Number and size of the files, for messages: '3 files of 15,000 bytes'."""
        return self.found.size_text

    def chunk_sizes(self) -> np.ndarray | None:
        """Returns the number of records in each chunk, int64 [num_chunks]; None if counting them requires reading them all."""
        return None if self.shards is None else self.shards.counts

    @abc.abstractmethod
    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        """Yields the records of a chunk from the chunk's record `start` on, with bounded memory use.

        Raises:
          UserError: the file can't be read further; the message names the file, and the record or row group.
        """

    def read(self, numbers: np.ndarray) -> list[Record]:
        """Reads records by their numbers across all chunks, int64 [n] in any order.

        Raises:
          UserError: a file can't be read, or has changed since it was opened; the message names the file.
          NotImplementedError: the source has no `random_access`.
        """
        raise NotImplementedError(f"{type(self).__name__} reads documents in order only")

    def refuse_changed(self, index: int) -> None:
        """Checks that file `index` has the same size as when the source was opened.

        Raises:
          UserError: the size has changed, or the file can't be read; the message names the file.
        """
        if _size(self.paths[index]) != self.sizes[index]:
            raise changed(self.paths[index], self.sizes[index])

    @functools.cached_property
    def _named(self) -> list[tuple[str, int]]:
        return [(os.path.basename(path), size) for path, size in zip(self.paths, self.sizes, strict=True)]

    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON values that change if files are added, removed, renamed, reordered or resized. Reads no file."""
        checksum = zlib.crc32(repr(self._named).encode())
        found: dict[str, Any] = {"kind": self.kind, "checksum": checksum, "size": self.size_text}
        if len(self.paths) <= _NAMED:
            found["named"] = [list(one) for one in self._named]
        return found

    def changed_text(self, before: Mapping[str, Any]) -> str:
        """Describes what has changed since `fingerprint` returned `before`, with file names if they are known."""
        kind = before.get("kind")
        parts = [] if kind in (None, self.kind) else [f"they were read as {kind!r} and are read as {self.kind!r}"]
        if before["checksum"] != self.fingerprint()["checksum"]:
            parts.append(self._changed_files(before))
        return ", ".join(parts) or f"their kind was not saved, and is {self.kind!r}"

    def _changed_files(self, before: Mapping[str, Any]) -> str:
        if "named" not in before or len(self.paths) > _NAMED:
            return f"{before['size']}, now {self.size_text}"
        old, new = collections.Counter(map(tuple, before["named"])), collections.Counter(self._named)
        # Files in different folders may have the same name.
        gone, added = sorted((old - new).elements()), sorted((new - old).elements())
        sizes = dict(added)
        resized = {name: size for name, size in gone if name in sizes}
        parts = [f"{name} is gone" for name, _ in gone if name not in resized]
        parts += [f"{name} is new" for name, _ in added if name not in resized]
        parts += [f"{name} had {size:,} bytes and has {sizes[name]:,}" for name, size in resized.items()]
        return ", ".join(parts) or "their order"


def _size(path: str) -> int:
    with files.readable(path):
        return reading.size(path)


# Bytes per read when records are read in order; more if one record is larger.
_BYTES_AT_ONCE = 2**20
# A corpus is small if it has at most this many bytes and records; `IndexedFiles` keeps its records in memory.
_KEPT_BYTES, _KEPT_RECORDS = 2**24, 1024


class IndexedFiles(FileSource):
    """Base class of sources that know the byte offset of each record, so they can read records by number. Each file is a chunk.

    `most_open`: maximum number of files that are open at a time.
    """

    random_access = True
    shards: ShardIndex
    most_open: int = MAX_OPEN

    def __init__(self, paths: FilesOrPaths):
        """Finds the byte offsets of the records in all files. Raises UserError if a file can't be read."""
        super().__init__(paths)
        self._files = OpenFiles(self.paths, self.sizes, most=self.most_open)
        self._starts = [self.find_records(index) for index in range(len(self.paths))]
        self.shards = ShardIndex([len(starts) - 1 for starts in self._starts])
        # The bytes and the parsed form of a small corpus's records, so that they aren't parsed again in each epoch.
        self._kept: dict[tuple[int, int], tuple[bytes, Record]] = {}
        self._keeps = self.num_bytes <= _KEPT_BYTES and int(self.shards.counts.sum()) <= _KEPT_RECORDS

    @abc.abstractmethod
    def find_records(self, index: int) -> np.ndarray:
        """Returns the byte offset of each record in file `index`, then the end of the last record: int64 [records + 1]."""

    @abc.abstractmethod
    def record(self, index: int, number: int, content: bytes) -> Record:
        """Makes record `number` of file `index` from its bytes, `content`."""

    @abc.abstractmethod
    def where(self, index: int, number: int) -> str:
        """Returns the location of record `number` of file `index`, for messages, see `Document.where`."""

    def _refused(self, index: int, number: int, size: int) -> BadRecord | None:
        if size > self.max_record_bytes:
            return too_long(self.where(index, number), self.max_record_bytes, size)
        return None

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: dict[int, Record] = {}
        for index, places, inside in self.shards.split(numbers):
            starts, stops = self._starts[index][inside].tolist(), self._starts[index][inside + 1].tolist()
            for place, number, start, stop in zip(places.tolist(), inside.tolist(), starts, stops, strict=True):
                refused = self._refused(index, number, stop - start)
                found[place] = refused or self._record(index, number, self._files.read(index, start, stop))
        return [found[place] for place in range(len(numbers))]

    def _record(self, index: int, number: int, content: bytes) -> Record:
        if not self._keeps:
            return self.record(index, number, content)
        kept = self._kept.get((index, number))
        if kept is None or kept[0] != content:
            kept = self._kept[index, number] = (content, self.record(index, number, content))
        return kept[1]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        starts, count = self._starts[chunk], int(self.shards.counts[chunk])
        while start < count:
            stop = int(np.searchsorted(starts, starts[start] + _BYTES_AT_ONCE, side="right")) - 1
            stop = min(max(stop, start + 1), count)
            bounds = starts[start : stop + 1].tolist()
            # A block of several records is short enough to read; only a single record may be too long.
            is_read = stop > start + 1 or self._refused(chunk, start, bounds[-1] - bounds[0]) is None
            content = self._files.read(chunk, bounds[0], bounds[-1]) if is_read else b""
            for number in range(start, stop):
                begin, end = (bounds[number - start + i] - bounds[0] for i in (0, 1))
                yield self._refused(chunk, number, end - begin) or self.record(chunk, number, content[begin:end])
            start = stop


def document_of(record: Any, column: Column, where: str) -> Record:
    """Makes a document from a record with named fields.

    Args:
      record: a mapping; any other value gives a BadRecord.
      column: key of the text; 'a.b' is key b of the object under key a, unless the record has the key 'a.b' itself. If it is a
        tuple of keys, the document is a JSON object with the record's values for these keys, without nulls. (Parquet gives all
        messages in a column the same keys, and null for a key that a message lacks.)
      where: location of the record, for messages.
    """
    if isinstance(column, tuple):
        return _entries_document(record, column, where)
    if isinstance(record, dict | Mapping) and column in record:
        return text_document(record[column], column, where)
    if not isinstance(record, Mapping):
        return BadRecord(where, f"is {_kind_of(record)}, not an object with the key {column!r}")
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            keys = [key for key in value if isinstance(key, str)] if isinstance(value, Mapping) else []
            return BadRecord(where, f"has no key {column!r}{did_you_mean(name, keys)}; {_ASKED}")
        value = value[name]
    return text_document(value, column, where)


def _entries_document(record: Mapping[str, Any], entries: tuple[str, ...], where: str) -> Record:
    """Makes a document from a pyarrow row: a JSON object of the row's columns, where columns that aren't in `entries` are null.

    Bytes must be UTF-8 and become strings. Other values that JSON can't represent give a BadRecord.
    """
    texts = []
    for name, value in _without_nulls(record).items():
        try:
            # Other columns are there only if the file has none of the entries; an error then lists the names of its columns.
            text = json.dumps(value, default=_text_of_bytes) if name in entries else "null"
        except UnicodeDecodeError as error:
            return BadRecord(where, f"has bytes in the column {name!r} that are not UTF-8: {error.reason}")
        except TypeError as error:
            return BadRecord(where, f"has a value in the column {name!r} that JSON does not have: {error}")
        texts.append(f"{json.dumps(name)}: {text}")
    return Document(f"{{{', '.join(texts)}}}".encode(), where)


def _text_of_bytes(value: Any) -> str:
    if isinstance(value, bytes):
        return value.decode()
    raise TypeError(f"it is of the type {type(value).__name__}; write it as a text or a number")


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


def text_document(value: Any, column: str, where: str) -> Record:
    """Makes a document from a string or UTF-8 bytes; any other value gives a BadRecord."""
    if isinstance(value, bytes):
        return Document(value, where)
    if not isinstance(value, str):
        return BadRecord(where, f"has a {column!r} that is {_kind_of(value)}, not a string")
    try:
        return Document(value.encode(), where)
    except UnicodeEncodeError as error:
        return BadRecord(where, f"has a {column!r} with half a surrogate pair, at character {error.start}")


def _kind_of(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, str):
        return "a string"
    if isinstance(value, list | Mapping):
        return "a list" if isinstance(value, list) else "an object"
    return f"{value!r}" if isinstance(value, bool | int | float) else type(value).__name__


def documents_of(batch: Any, column: Column, wheres: Sequence[str]) -> Iterator[Record]:
    """Yields the documents of a pyarrow.RecordBatch.

    Args:
      batch: the rows.
      column: as in `Documents`.
      wheres: location of each row, for messages.
    """
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            yield BadRecord(wheres[0], "is not UTF-8")
            return
        for number, where in enumerate(wheres):
            yield from documents_of(batch.slice(number, 1), column, [where])
        return
    for row, where in zip(rows, wheres, strict=True):
        yield document_of(row, column, where)


def columns_of(path: str, column: Column, names: Sequence[str]) -> list[str]:
    """Returns the columns to read for `column`. `names`: the file's columns. Raises UserError if a text column is missing."""
    if isinstance(column, tuple):
        return [name for name in names if name in column] or list(names)
    for one in (column, column.partition(".")[0]):
        if one in names:
            return [one]
    raise no_column(path, column, names)


def no_column(path: str, column: str, names: Sequence[str]) -> UserError:
    """Returns the error for a file that lacks `column`. `names`: the file's columns, which the message lists."""
    listed = ", ".join(map(repr, names))
    near = did_you_mean(column, names, otherwise="")
    return UserError(f"{path} has no column {column!r}{near}; its columns are {listed}; {_ASKED}")


def damage() -> tuple[type[Exception], ...]:
    """Returns the exceptions that pyarrow raises for files it can't read."""
    try:
        import pyarrow
    except ImportError:
        return (OSError,)
    return (pyarrow.ArrowException, OSError, UnicodeDecodeError)
