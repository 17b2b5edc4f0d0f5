"""Rows of JSON values, from JSON lines and Parquet files."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from typing import Any

from spmd_trainer.errors import UserError

PARQUET_BEGINNING = b"PAR1"
PARQUET_SUFFIX = ".parquet"


def rows(content: bytes, path: str, entries: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Yields the rows of a file, and where each row is: 'pairs.jsonl:3' or 'pairs.parquet row 3', from 1.

    Empty lines are skipped. A Parquet file gives every message the same entries, with nulls where a message lacks one: entries
    that are null are left out.

    Args:
      content: what the file holds: Parquet, or a JSON value in each line.
      path: the file, for errors.
      entries: the columns to read of a Parquet file, where there are such columns.

    Raises:
      UserError: a line is not JSON, or the file can't be read; names the file and the line.
    """
    return _parquet_rows(content, path, entries) if content.startswith(PARQUET_BEGINNING) else _json_rows(content, path)


def _json_rows(content: bytes, path: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield json.loads(line), where
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}") from error


def _parquet_rows(content: bytes, path: str, entries: Collection[str]) -> Iterator[tuple[Any, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet files need pyarrow: pip install 'spmd-trainer[parquet]'") from error
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
        names = table.schema_arrow.names
        columns = [name for name in names if name in entries] or names
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _without_nulls(row), f"{path} row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} can't be read as Parquet after row {number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
