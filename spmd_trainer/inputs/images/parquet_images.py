"""Images in Parquet files: a column of bytes, or of structs with the entry 'bytes' as in the library `datasets`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.columns import damage
from spmd_trainer.inputs.corpus.documents import BadRecord
from spmd_trainer.inputs.corpus.parquet_files import ParquetFiles, first_line, leaves_of
from spmd_trainer.inputs.images.images import Image, ImageRecord, ImageSource
from spmd_trainer.inputs.shards import LRUCache

_COLUMN, _BYTES = "image", "bytes"
# Row groups kept in memory: a batch may span two.
_HELD = 2


class ParquetImages(ParquetFiles, ImageSource):
    """Rows of Parquet files. A chunk is a row group; it is read as a whole, so rows are shuffled within row groups."""

    def __init__(self, paths: Sequence[str], column: str | None = None, label: str | None = None):
        """Reads the files' footers. `column` and `label` are as in `Images`. Raises as `ParquetFiles`."""
        self._column, self.label = column or _COLUMN, label
        super().__init__(paths, [self._column] if label is None else [self._column, label])
        self._tables: LRUCache[Any] = LRUCache(_HELD)

    def image(self, number: int) -> ImageRecord:
        chunk, row = self.shards.locate(number)
        index, group = self.groups[chunk]
        where = f"{self.paths[index]} row group {group + 1}, row {row + 1}"
        values = self._tables.get(chunk, self._read_group).slice(row, 1).to_pylist()[0]
        content = _value(values, self._column)
        if isinstance(content, Mapping):
            content = content.get(_BYTES)
        if not isinstance(content, bytes):
            found = "is null" if content is None else f"holds {type(content).__name__}, not bytes"
            return BadRecord(where, f"has a column {self._column!r} that {found}")
        label = None if self.label is None else _value(values, self.label)
        if self.label is not None and label is None:
            return BadRecord(where, f"has no {self.label!r}: it is null")
        return Image(content, label, where)

    def _read_group(self, chunk: int) -> Any:
        index, group = self.groups[chunk]
        try:
            with self.opened(index) as file:
                leaves = leaves_of(file)
                # Skip the path stored beside the bytes.
                inner = f"{self._column}.{_BYTES}"
                columns = [inner if inner in leaves else self._column, *filter(None, [self.label])]
                return file.read_row_group(group, columns=columns, use_threads=False)
        except damage() as error:
            raise UserError(
                f"{self.paths[index]} row group {group + 1} can't be read: {first_line(error)}. Write the file again, or leave "
                "it out"
            ) from error


def _value(row: Mapping[str, Any], column: str) -> Any:
    """Value of a column in a row; 'a.b' is entry b of the struct a."""
    if column in row:
        return row[column]
    value: Any = row
    for name in column.split("."):
        value = None if value is None else value.get(name)
    return value
