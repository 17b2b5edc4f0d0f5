"""Rows of Arrow's tables as documents: shared by Parquet and Arrow files."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.columns import document_of
from spmd_trainer.inputs.corpus.documents import BadRecord, Record


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
