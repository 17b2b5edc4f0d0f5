"""Finds the text of a record with named fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record


def document_of(record: Any, column: str, where: str) -> Record:
    """Makes a document of a record.

    Args:
      record: a mapping; any other value gives a BadRecord.
      column: key of the text; 'a.b' is key b of the object in a. Keys that contain dots are tried first.
      where: file and record, for messages.
    """
    if isinstance(record, dict | Mapping) and column in record:
        return text_document(record[column], column, where)
    if not isinstance(record, Mapping):
        return BadRecord(where, f"is {_kind_of(record)}, not an object with the key {column!r}")
    value: Any = record
    for name in column.split("."):
        if not isinstance(value, Mapping) or name not in value:
            keys = [key for key in value if isinstance(key, str)] if isinstance(value, Mapping) else []
            return BadRecord(where, f"has no key {column!r}{did_you_mean(name, keys)}")
        value = value[name]
    return text_document(value, column, where)


def text_document(value: Any, column: str, where: str) -> Record:
    """Makes a document of a string or UTF-8 bytes; any other value gives a BadRecord."""
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


def documents_of(batch: Any, column: str, where: Callable[[int], str]) -> Iterator[Record]:
    """Yields the documents of a pyarrow.RecordBatch.

    Args:
      batch: the rows.
      column: as in `Documents`.
      where: maps a row number of the batch to its file and row, for messages.
    """
    try:
        rows = batch.to_pylist()
    except UnicodeDecodeError:
        if len(batch) == 1:
            yield BadRecord(where(0), "is not UTF-8")
            return
        for number in range(len(batch)):
            yield from documents_of(batch.slice(number, 1), column, functools.partial(_same, where(number)))
        return
    for number, row in enumerate(rows):
        yield document_of(row, column, where(number))


def _same(where: str, row: int) -> str:
    del row
    return where


def no_column(path: str, column: str, names: Sequence[str]) -> UserError:
    """Error for a file without `column`; lists the columns it has."""
    listed = ", ".join(map(repr, names))
    return UserError(f"{path} has no column {column!r}{did_you_mean(column, names)}; its columns are {listed}")


def damage() -> tuple[type[Exception], ...]:
    """Exceptions that pyarrow raises for files it can't read."""
    try:
        import pyarrow
    except ImportError:
        return (OSError,)
    return (pyarrow.ArrowException, OSError, UnicodeDecodeError)
