"""The text of a record with named fields."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record


def document_of(record: Any, column: str, where: str) -> Record:
    """Returns the document in a record.

    Args:
      record: a mapping; any other value is bad.
      column: the key of the text; 'a.b' is key b of the object in a. A key that contains dots itself is found too.
      where: the record, for messages.
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
    """Returns the document of a value that should be a text: a string, or UTF-8 bytes."""
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
      column: see `documents.Documents`.
      where: returns where row n of the batch is, for messages.
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
    """Returns the error about a file that has other columns: `names`."""
    listed = ", ".join(map(repr, names))
    return UserError(f"{path} has no column {column!r}{did_you_mean(column, names)}; its columns are {listed}")


def damage() -> tuple[type[Exception], ...]:
    """Returns what pyarrow raises for files that it can't read."""
    try:
        import pyarrow
    except ImportError:
        return (OSError,)
    return (pyarrow.ArrowException, OSError, UnicodeDecodeError)
