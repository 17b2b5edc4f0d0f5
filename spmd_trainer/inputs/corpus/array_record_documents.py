"""Text records of ArrayRecord files, read by number. Needs the package array_record: extra `data`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Document, Record
from spmd_trainer.inputs.corpus.file_source import NumberedFiles
from spmd_trainer.inputs.shards import LRUCache, ShardIndex
from spmd_trainer.storage.local_copies import local_copy

# The library's recommended settings for random access; they start no threads.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Most files open at a time: a global shuffle jumps between all files, and opening one costs much more than
# reading a record. A reader holds its file's index in memory, so the records of all open files are bounded too.
_MAX_OPEN = 64
_MAX_OPEN_RECORDS = 2**22
# Records per read when documents are read in order.
_BLOCK = 256


class ArrayRecordDocuments(NumberedFiles):
    """Records of ArrayRecord files. A chunk is a file. Remote files are copied to the cache folder first."""

    kind: ClassVar[str] = "arrayrecord"

    def __init__(self, paths: Sequence[str]):
        """Opens each file once.

        Raises:
          UserError: array_record isn't installed, or a file (named) is empty, damaged or of another format.
        """
        super().__init__(paths)
        self._open: LRUCache[Any] = LRUCache(
            _MAX_OPEN, size_of=lambda reader: reader.num_records(), most_size=_MAX_OPEN_RECORDS
        )
        self.shards = ShardIndex([self._reader(index).num_records() for index in range(len(self.paths))])

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: list[Record | None] = [None] * len(numbers)
        for index, places, inside in self.shards.split(numbers):
            for place, record in zip(places.tolist(), self._records(index, inside.tolist()), strict=True):
                found[place] = record
        return [record for record in found if record is not None]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        count = int(self.shards.counts[chunk])
        for begin in range(start, count, _BLOCK):
            yield from self._records(chunk, list(range(begin, min(begin + _BLOCK, count))))

    def _records(self, index: int, numbers: list[int]) -> list[Record]:
        path = self.paths[index]
        try:
            contents = self._reader(index).read(numbers)
        except Exception as error:  # the library raises plain exceptions of several kinds
            raise UserError(
                f"{path} is damaged at one of the records {min(numbers)} to {max(numbers)}: {_first_line(error)}. Write the file "
                "again, or leave it out"
            ) from error
        return [Document(content, f"{path} record {n}") for n, content in zip(numbers, contents, strict=True)]

    def _reader(self, index: int) -> Any:
        return self._open.get(index, self._open_file)

    def _open_file(self, index: int) -> Any:
        self.refuse_changed(index)
        return _open(self.paths[index])


def _open(path: str) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise UserError(f"{path}: ArrayRecord files need array_record: pip install 'spmd-trainer[data]'") from error
    try:
        reader = array_record_module.ArrayRecordReader(local_copy(path), _OPTIONS)
        if not reader.ok():  # else it silently yields no records
            reader.read_all()
            raise RuntimeError("its end is damaged or missing")
    except Exception as error:  # the library raises plain exceptions of several kinds
        raise UserError(
            f"{path} can't be read as ArrayRecord: {_first_line(error)}. Write the file again, or leave it out"
        ) from error
    return reader


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition("; ")[0]
