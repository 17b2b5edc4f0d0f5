"""Sources over Parquet files, read one row group at a time. They need pyarrow (`pip install 'spmd-trainer[data]'`)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs.corpus.documents import Column, Record
from spmd_trainer.inputs.corpus.file_kinds import open_bytes
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource, columns_of, damage, documents_of, no_column
from spmd_trainer.inputs.shards import ShardIndex


class ParquetFiles(FileSource):
    """Base class of sources over Parquet files. Each row group is one chunk (see `FileSource`)."""

    kind = "parquet"
    shards: ShardIndex

    def __init__(self, paths: FilesOrPaths, columns: Sequence[str]):
        """Reads the files' footers. Every file must have all `columns`; 'a.b' is field b of the struct column a.

        Raises:
          UserError: pyarrow isn't installed, or a file is unreadable, damaged, or lacks a column; the message names the file.
        """
        super().__init__(paths)
        self._columns = tuple(columns)
        self.shards = self.count_groups(self._group_sizes)

    @contextlib.contextmanager
    def opened(self, index: int) -> Iterator[Any]:
        """Context manager that opens file `index` as a pyarrow.parquet.ParquetFile.

        Raises:
          UserError: the file has changed since the source was opened, or pyarrow isn't installed.
        """
        path = self.paths[index]
        self.refuse_changed(index)
        imported("pyarrow", f"{path}: Parquet files need pyarrow: pip install 'spmd-trainer[data]'")
        from pyarrow import parquet

        # Few programs write page checksums; without them, a changed byte within a value goes unnoticed.
        settings = {"pre_buffer": False, "page_checksum_verification": True}
        with open_bytes(path) as handle, parquet.ParquetFile(handle, **settings) as file:
            yield file

    def _group_sizes(self, index: int) -> list[int]:
        path = self.paths[index]
        try:
            with self.opened(index) as file:
                leaves = leaves_of(file)
                for column in self._columns:
                    if column not in file.schema_arrow.names and column not in leaves:
                        raise no_column(path, column, leaves)
                rows = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
                total = file.metadata.num_rows
        except damage() as error:
            raise UserError(
                f"{path} can't be read as Parquet: {first_line(error)}. Write the file again, or leave it out"
            ) from error
        if sum(rows) != total:
            raise UserError(
                f"{path} says that it has {total} rows, and its row groups have {sum(rows)}; write the file again"
            )
        return rows


def leaves_of(file: Any) -> list[str]:
    """Returns the leaf columns of a pyarrow.parquet.ParquetFile: 'a.b' for field b of the struct column a."""
    return [file.schema.column(i).path for i in range(len(file.schema))]


def first_line(error: Exception) -> str:
    """Returns the first line of a pyarrow error's message."""
    return str(error).partition("\n")[0].rstrip(".")


# Rows decoded at a time.
_ROWS = 256


class ParquetDocuments(ParquetFiles):
    """Source whose documents are the rows of Parquet files. Each row group is a chunk, and is decoded from its first row."""

    def __init__(self, paths: FilesOrPaths, column: Column = "text"):
        """Opens the files; `column` is as in `Documents`. Raises the errors of `ParquetFiles`."""
        super().__init__(paths, [column] if isinstance(column, str) else [])
        self._column = column

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        index, group = self.groups[chunk]
        path, number = self.paths[index], 0
        where = f"{path} row group {group + 1}, row "
        try:
            with self.opened(index) as file:
                given = self._column
                columns = [given] if isinstance(given, str) else columns_of(path, given, file.schema_arrow.names)
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=columns, use_threads=False):
                    if number + len(batch) <= start:
                        number += len(batch)
                        continue
                    wanted = batch.slice(max(0, start - number))
                    first, number = number + len(batch) - len(wanted), number + len(batch)
                    wheres = [f"{where}{row}" for row in range(first + 1, number + 1)]
                    yield from documents_of(wanted, given, wheres)
        except damage() as error:
            raise UserError(
                f"{where}{number + 1} can't be read: {first_line(error)}. Write the file again, or leave it out"
            ) from error
        if number < self.shards.counts[chunk]:
            raise UserError(
                f"{path} row group {group + 1} has {number} rows instead of {self.shards.counts[chunk]}; write the file again"
            )
