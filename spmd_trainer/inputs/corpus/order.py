"""The order of the documents of one source: epochs, each either in order, shuffled globally, or shuffled within windows.

The order is a pure function of the source, the seed and the settings. A position is four integers. A stream can begin at any
position. To do so, it reads at most one window of documents again.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import permutations
from spmd_trainer.inputs.corpus.documents import BadRecord, LeftOut, Record
from spmd_trainer.inputs.corpus.file_source import FileSource

GLOBAL, AUTO = "global", "auto"
# The window of `shuffle='auto'` for a source that can only be read in order: this many documents, or fewer if they have this many
# bytes, because a window is held in memory.
AUTO_WINDOW, AUTO_WINDOW_BYTES = 10_000, 2**26
# Permutations of up to this many numbers are stored: those of a Feistel network are far from uniform if there are few numbers.
_STORED_SIZE = 2**16


class Position(NamedTuple):
    """Position in a `DocumentStream`.

    Attributes:
      epoch: number of the epoch, from 0.
      chunk: index of the current chunk in the epoch's order of chunks; 0 if documents are read by number.
      block: number of the current window's first document within its chunk; 0 if there are no windows.
      taken: number of documents already taken from the current window; if there are no windows, from the chunk; if documents
        are read by number, from the epoch.
    """

    epoch: int = 0
    chunk: int = 0
    block: int = 0
    taken: int = 0


class Taken(NamedTuple):
    """A record taken from a `DocumentStream`.

    Attributes:
      record: the record.
      after: the stream's position after the record.
      place: where the record is: (its chunk, its number in the chunk); if it was read by number, (0, its number in the source).
    """

    record: Record
    after: Position
    place: tuple[int, int]


def resolve_shuffle(source: FileSource, shuffle: str | int | None) -> str | int | None:
    """Replaces 'auto' with 'global' for a source that can be read by number, and validates other values.

    Raises:
      UserError: the value is unknown, or is 'global' for a source that can only be read in order.
    """
    if shuffle == AUTO:
        return GLOBAL if source.random_access else AUTO
    if shuffle == GLOBAL and not source.random_access:
        raise UserError(
            f"shuffle='global' needs documents that can be read by number, and {source.size_text} can be read in order only; "
            f"set shuffle={AUTO_WINDOW} to shuffle within windows of documents, or convert the files with --mode=tokenise"
        )
    if shuffle is None or shuffle in (GLOBAL, AUTO):
        return shuffle
    if isinstance(shuffle, bool) or not isinstance(shuffle, int) or shuffle < 1:
        raise UserError(f"shuffle={shuffle!r}; set it to 'auto', 'global', a number of documents (1 or more) or None")
    return shuffle


class DocumentStream:
    """Stream of the records of one source, in the order that `shuffle`, `seed` and `epochs` define."""

    def __init__(
        self,
        source: FileSource,
        *,
        shuffle: str | int | None,
        seed: int,
        epochs: int | None,
        auto_window_bytes: int = AUTO_WINDOW_BYTES,
        position: Position = Position(),  # noqa: B008  (immutable)
    ):
        """Begins the stream at `position`.

        Args:
          source: the documents.
          shuffle: 'global': a random order of all documents. An integer: a random order of the chunks, whose documents are
            shuffled within windows of this many documents. 'auto': the same with windows of `AUTO_WINDOW` documents, or of
            fewer due to `auto_window_bytes`. None: in order.
          seed: seed of the shuffles, 0 or more.
          epochs: number of epochs; None: endless.
          auto_window_bytes: with 'auto', a window ends with the document that brings it to this many bytes.
          position: where to begin.
        """
        self._source = source
        self._shuffle = shuffle
        self._seed = seed
        self._epochs = epochs
        self._auto_window_bytes = auto_window_bytes
        self._wanted = 1
        self.position = position
        self._records = self._from(position)
        self._problem: Exception | None = None

    def take(self, count: int) -> list[Taken]:
        """Returns the next `count` records, or fewer if the last epoch ends or an error occurs before that.

        Raises:
          UserError: an epoch has no records, or the source can't be read. Records before the error are returned first.
        """
        self._wanted = count
        found: list[Taken] = []
        try:
            if self._problem is not None:
                raise self._problem
            for taken in itertools.islice(self._records, count):
                found.append(taken)
        except Exception as error:
            self._problem = error
            if not found:
                raise
        if found:
            self.position = found[-1].after
        return found

    def _from(self, position: Position) -> Iterator[Taken]:
        while self._epochs is None or position.epoch < self._epochs:
            is_empty, is_whole = True, position == Position(position.epoch)
            for taken in self._epoch(position):
                is_empty = False
                yield taken
            if is_empty and is_whole:  # an endless stream would search forever
                raise UserError(f"{self._source.size_text} hold no document; give at least one")
            position = Position(position.epoch + 1)

    def _epoch(self, position: Position) -> Iterator[Taken]:
        if self._shuffle == GLOBAL:
            yield from self._by_number(position)
            return
        chunks = self._source.num_chunks
        order = None if self._shuffle is None else permutation(chunks, self._seed, position.epoch)
        for ordinal in range(position.chunk, chunks):
            chunk = ordinal if order is None else int(order(np.array([ordinal]))[0])
            begin = position if ordinal == position.chunk else Position(position.epoch, ordinal)
            yield from self._in_order(chunk, begin) if order is None else self._in_windows(chunk, begin)

    def _by_number(self, position: Position) -> Iterator[Taken]:
        sizes = self._source.chunk_sizes()
        size = 0 if sizes is None else int(sizes.sum())
        if not size:
            return
        order = permutation(size, self._seed, position.epoch)
        first = position.taken
        while first < size:
            numbers = order(np.arange(first, min(first + self._wanted, size), dtype=np.int64))
            for number, record in zip(numbers.tolist(), self._source.read(numbers), strict=True):
                first += 1
                yield Taken(record, position._replace(taken=first), (0, number))

    def _in_order(self, chunk: int, begin: Position) -> Iterator[Taken]:
        for taken, record in enumerate(self._source.read_chunk(chunk, begin.taken), begin.taken + 1):
            yield Taken(record, begin._replace(taken=taken), (chunk, taken - 1))

    def _in_windows(self, chunk: int, begin: Position) -> Iterator[Taken]:
        records = self._source.read_chunk(chunk, begin.block)
        while window := self._read_window(records):
            order = permutation(len(window), self._seed, begin.epoch, chunk, begin.block)(np.arange(len(window)))
            for taken in range(begin.taken, len(window)):
                place = (chunk, begin.block + int(order[taken]))
                yield Taken(window[order[taken]], begin._replace(taken=taken + 1), place)
            begin = begin._replace(block=begin.block + len(window), taken=0)

    def _read_window(self, records: Iterator[Record]) -> list[Record]:
        if isinstance(self._shuffle, int):
            return list(itertools.islice(records, self._shuffle))
        window, size = [], 0
        for record in itertools.islice(records, AUTO_WINDOW):
            window.append(record)
            size += size_of(record)
            if size >= self._auto_window_bytes:
                break
        return window


def size_of(record: Record) -> int:
    """Returns a record's size: the bytes of a document's content, `LeftOut.size`, or the length of a BadRecord's `problem`."""
    if isinstance(record, LeftOut):
        return record.size
    if isinstance(record, BadRecord):
        return len(record.problem)
    return len(record.content) if isinstance(record.content, bytes) else record.content.nbytes


def permutation(size: int, *seeds: int) -> Callable[[np.ndarray], np.ndarray]:
    """Returns a permutation of 0 to size - 1, as a function that maps indices, int64 [n], to their entries, int64 [n].

    Args:
      size: 1 or more. If it is above 65,536, entries are computed on demand and not stored.
      *seeds: integers, 0 or more, that determine the permutation.
    """
    if size == 1:  # in a source of one document, each document begins an epoch
        return np.zeros_like
    # numpy guarantees that SeedSequence, MT19937 and RandomState never change.
    seed = np.random.SeedSequence(seeds)
    if size > _STORED_SIZE:
        return permutations.KeyedPermutation(size, int(seed.generate_state(1, np.uint64)[0]), 0)
    entries = np.random.RandomState(np.random.MT19937(seed)).permutation(size)
    return lambda indices: entries[indices]
