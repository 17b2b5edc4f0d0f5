"""Parquet files with a text column, read row group by row group. Needs pyarrow: extra `data`."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.arrow_rows import damage, documents_of
from spmd_trainer.inputs.corpus.documents import Record
from spmd_trainer.inputs.corpus.parquet_files import ParquetFiles, first_line

# Rows that are decoded at a time.
_ROWS = 256


class ParquetDocuments(ParquetFiles):
    """Rows of Parquet files. A chunk is a row group. Rows are read in order: a row group is decoded from its beginning."""

    def __init__(self, paths: Sequence[str], column: str = "text"):
        """Reads the files' footers.

        Args:
          paths: the files.
          column: see `documents.Documents`.

        Raises:
          UserError: pyarrow isn't installed; or a file can't be read, is damaged, or has no such column; names the file.
        """
        super().__init__(paths, [column])
        self._column = column

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        index, group = self.groups[chunk]
        path, number = self.paths[index], 0
        where = f"{path} row group {group + 1}, row "
        try:
            with self.opened(index) as file:
                for batch in file.iter_batches(_ROWS, row_groups=[group], columns=[self._column], use_threads=False):
                    if number + len(batch) <= start:
                        number += len(batch)
                        continue
                    wanted = batch.slice(max(0, start - number))
                    first, number = number + len(batch) - len(wanted), number + len(batch)
                    yield from documents_of(wanted, self._column, functools.partial(_row, where, first + 1))
        except damage() as error:
            raise UserError(
                f"{where}{number + 1} can't be read: {first_line(error)}. Write the file again, or leave it out"
            ) from error
        if number < self.numbering.counts[chunk]:
            raise UserError(
                f"{path} row group {group + 1} has {number} rows instead of {self.numbering.counts[chunk]}; write the file again"
            )


def _row(where: str, first: int, row: int) -> str:
    return f"{where}{first + row}"
