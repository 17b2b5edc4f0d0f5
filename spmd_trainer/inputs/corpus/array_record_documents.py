"""ArrayRecord files whose records are texts, read by number. Needs the package array_record: extra `data`."""

from __future__ import annotations

import collections
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Document, Record
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.local_copies import local_copy

# The settings that the library recommends for reading by number; they start no threads.
_OPTIONS = "readahead_buffer_size:0,max_parallelism:0"
# Files that are open at a time: a global shuffle goes back and forth between all files, and opening one costs much more than
# reading a record. A reader holds its file's index in memory, so the records of all open files are bounded too.
_MAX_OPEN = 64
_MAX_OPEN_RECORDS = 2**22
# Records that are read at a time where documents are read in order.
_BLOCK = 256


class ArrayRecordDocuments(FileSource):
    """Records of ArrayRecord files. A chunk is a file. A file in an object store is copied to the cache folder first."""

    kind: ClassVar[str] = "arrayrecord"

    def __init__(self, paths: Sequence[str]):
        """Opens each file once.

        Raises:
          UserError: array_record isn't installed, or a file is empty, damaged or of another format; names it.
        """
        super().__init__(paths)
        self._open: collections.OrderedDict[int, Any] = collections.OrderedDict()
        self._counts = np.array([self._reader(index).num_records() for index in range(len(self.paths))], np.int64)
        self._ends = np.cumsum(self._counts)

    @property
    def random_access(self) -> bool:
        return True

    def chunk_sizes(self) -> np.ndarray:
        return self._counts

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: list[Record | None] = [None] * len(numbers)
        files = np.searchsorted(self._ends, numbers, side="right")
        for index in np.unique(files):
            places = np.flatnonzero(files == index)
            first = int(self._ends[index] - self._counts[index])
            inside = (np.asarray(numbers)[places] - first).tolist()
            for place, record in zip(places, self._records(int(index), inside), strict=True):
                found[place] = record
        return [record for record in found if record is not None]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        count = int(self._counts[chunk])
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
        if index not in self._open:
            self.refuse_changed(index)
            opened = _open(self.paths[index])
            room = _MAX_OPEN_RECORDS - opened.num_records()
            while self._open and (len(self._open) >= _MAX_OPEN or self._open_records() > room):
                self._open.popitem(last=False)[1].close()
            self._open[index] = opened
        self._open.move_to_end(index)
        return self._open[index]

    def _open_records(self) -> int:
        return sum(reader.num_records() for reader in self._open.values())


def _open(path: str) -> Any:
    try:
        from array_record.python import array_record_module
    except ImportError as error:
        raise UserError(f"{path}: ArrayRecord files need array_record: pip install 'spmd-trainer[data]'") from error
    try:
        reader = array_record_module.ArrayRecordReader(local_copy(path), _OPTIONS)
        if not reader.ok():  # it would give no records, without a word
            reader.read_all()
            raise RuntimeError("its end is damaged or missing")
    except Exception as error:  # the library raises plain exceptions of several kinds
        raise UserError(
            f"{path} can't be read as ArrayRecord: {_first_line(error)}. Write the file again, or leave it out"
        ) from error
    return reader


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0].partition("; ")[0]
