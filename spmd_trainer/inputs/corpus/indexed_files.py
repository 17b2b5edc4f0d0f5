"""Base of the sources over files where it is known at which byte each record begins."""

from __future__ import annotations

import abc
from collections.abc import Iterator, Sequence

import numpy as np

from spmd_trainer.inputs.corpus.documents import Record
from spmd_trainer.inputs.corpus.file_source import NumberedFiles
from spmd_trainer.inputs.corpus.open_files import OpenFiles
from spmd_trainer.inputs.numbering import Numbering

# Bytes that are read at a time where records are read in order; more if one record is larger.
_BYTES_AT_ONCE = 2**20


class IndexedFiles(NumberedFiles):
    """Records of files, read by number. A chunk is a file."""

    def __init__(self, paths: Sequence[str]):
        """Finds the records of all files.

        Args:
          paths: the files.

        Raises:
          UserError: a file can't be read; names it.
        """
        super().__init__(paths)
        self._files = OpenFiles(self.paths, self.sizes)
        self._starts = [self.find_records(index) for index in range(len(self.paths))]
        self.numbering = Numbering([len(starts) - 1 for starts in self._starts])

    @abc.abstractmethod
    def find_records(self, index: int) -> np.ndarray:
        """Returns where each record of a file begins, and then where the last one ends: int64 [records + 1]."""

    @abc.abstractmethod
    def record(self, index: int, number: int, content: bytes) -> Record:
        """Returns a record.

        Args:
          index: the file.
          number: the record's number in the file.
          content: the bytes from the record's beginning up to the next record's.
        """

    def read(self, numbers: np.ndarray) -> list[Record]:
        found: dict[int, Record] = {}
        for index, places, inside in self.numbering.split(numbers):
            starts, stops = self._starts[index][inside].tolist(), self._starts[index][inside + 1].tolist()
            for place, number, start, stop in zip(places.tolist(), inside.tolist(), starts, stops, strict=True):
                found[place] = self.record(index, number, self._files.read(index, start, stop))
        return [found[place] for place in range(len(numbers))]

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        starts, count = self._starts[chunk], int(self.numbering.counts[chunk])
        while start < count:
            stop = int(np.searchsorted(starts, starts[start] + _BYTES_AT_ONCE, side="right")) - 1
            stop = min(max(stop, start + 1), count)
            bounds = starts[start : stop + 1].tolist()
            content = self._files.read(chunk, bounds[0], bounds[-1])
            for number in range(start, stop):
                begin, end = (bounds[number - start + i] - bounds[0] for i in (0, 1))
                yield self.record(chunk, number, content[begin:end])
            start = stop
