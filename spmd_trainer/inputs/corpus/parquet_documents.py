"""Parquet files with a text column, read row group by row group. Needs pyarrow: extra `data`."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs.corpus.arrow_rows import damage, documents_of
from spmd_trainer.inputs.corpus.documents import Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.line_index import open_bytes

# Rows that are decoded at a time.
_ROWS = 256


class ParquetDocuments(FileSource):
    """Rows of Parquet files. A chunk is a row group. Rows are read in order: a row group is decoded from its beginning."""

    kind: ClassVar[str] = "parquet"

    def __init__(self, paths: Sequence[str], column: str = "text"):
        """Reads the files' footers.

        Args:
          paths: the files.
          column: see `documents.Documents`.

        Raises:
          UserError: pyarrow isn't installed; or a file can't be read, is damaged, or has no such column; names the file.
        """
        super().__init__(paths)
        self._column = column
        self._groups: list[tuple[int, int]] = []
        counts: list[int] = []
        for index in range(len(self.paths)):
            for group, rows in enumerate(self._group_sizes(index)):
                self._groups.append((index, group))
                counts.append(rows)
        if not counts:
            raise UserError(
                f"{self.size_text} hold no rows, the first is {self.paths[0]}; give at least one with text in it"
            )
        self._counts = np.array(counts, np.int64)

    @property
    def num_chunks(self) -> int:
        return len(self._groups)

    def chunk_sizes(self) -> np.ndarray:
        return self._counts

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        index, group = self._groups[chunk]
        path, number = self.paths[index], 0
        where = f"{path} row group {group + 1}, row "
        try:
            with self._opened(index) as file:
                leaf = _leaf(file, self._column, path)
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[leaf], use_threads=False):
                    if number + len(batch) <= start:
                        number += len(batch)
                        continue
                    wanted = batch.slice(max(0, start - number))
                    first, number = number + len(batch) - len(wanted), number + len(batch)
                    yield from documents_of(wanted, self._column, functools.partial(_row, where, first + 1))
        except damage() as error:
            raise UserError(
                f"{where}{number + 1} can't be read: {_first_line(error)}. Write the file again, or leave it out"
            ) from error
        if number < self._counts[chunk]:
            raise UserError(
                f"{path} row group {group + 1} has {number} rows instead of {self._counts[chunk]}; write the file again"
            )

    def _group_sizes(self, index: int) -> list[int]:
        path = self.paths[index]
        try:
            with self._opened(index) as file:
                _leaf(file, self._column, path)
                rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
                total = file.metadata.num_rows
        except damage() as error:
            raise UserError(
                f"{path} can't be read as Parquet: {_first_line(error)}. Write the file again, or leave it out"
            ) from error
        if sum(rows) != total:
            raise UserError(
                f"{path} says that it has {total} rows, and its row groups have {sum(rows)}; write the file again"
            )
        return rows

    @contextlib.contextmanager
    def _opened(self, index: int) -> Iterator[Any]:
        self.refuse_changed(index)
        parquet = _pyarrow(self.paths[index]).parquet
        # Few writers add checksums of pages; without one, a changed byte within a text goes unnoticed.
        settings = {"pre_buffer": False, "page_checksum_verification": True}
        with open_bytes(self.paths[index]) as handle, parquet.ParquetFile(handle, **settings) as file:
            yield file


def _leaf(file: Any, column: str, path: str) -> str:
    """Returns the column to read: `column`, or the one that holds the object that it reaches into.

    Raises:
      UserError: there is none.
    """
    names = list(file.schema_arrow.names)
    leaves = [file.schema.column(i).path for i in range(len(file.schema))]
    if column in names or column in leaves:
        return column
    raise UserError(
        f"{path} has no column {column!r}{did_you_mean(column, leaves)}; its columns are {', '.join(map(repr, leaves))}"
    )


def _pyarrow(path: str) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet files need pyarrow: pip install 'spmd-trainer[data]'") from error
    return pyarrow


def _row(where: str, first: int, row: int) -> str:
    return f"{where}{first + row}"


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].rstrip(".")
