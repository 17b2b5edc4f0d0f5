"""Numbers the records of several shards, and keeps the recently used shards open."""

from __future__ import annotations

import bisect
import collections
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from spmd_trainer.storage import reading


class ShardIndex:
    """Maps record numbers across all shards to a shard and a number within it.

    Attributes:
      counts: number of records in each shard, int64 [shards].
    """

    def __init__(self, counts: Sequence[int] | np.ndarray):
        self.counts = np.asarray(counts, np.int64)
        self._ends = np.cumsum(self.counts)
        self._end_list: list[int] = self._ends.tolist()

    def __len__(self) -> int:
        """Number of records in all shards."""
        return self._end_list[-1] if self._end_list else 0

    def span(self, part: int) -> tuple[int, int]:
        """Returns the number of a shard's first record, and of the first record after the shard."""
        end = self._end_list[part]
        return end - int(self.counts[part]), end

    def locate(self, number: int) -> tuple[int, int]:
        """Returns a record's shard and its number there."""
        part = bisect.bisect_right(self._end_list, number)
        return part, number - self.span(part)[0]

    def split(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Groups record numbers, int64 [n] in any order, by shard.

        Yields:
          The shard; the places of its records in `numbers`, int64 [m]; and their numbers in the shard, int64 [m].
        """
        numbers = np.asarray(numbers)
        if not len(numbers):
            return
        parts = np.searchsorted(self._ends, numbers, side="right")
        order = np.argsort(parts, kind="stable")
        found, begins = np.unique(parts[order], return_index=True)
        for part, places in zip(found.tolist(), np.split(order, begins[1:]), strict=True):
            yield part, places, numbers[places] - self.span(part)[0]


T = TypeVar("T")


class LRUCache(Generic[T]):
    """Opens objects by number and keeps the most recently used. Thread-safe.

    Evicted objects are not closed explicitly; they must close themselves when collected.
    """

    def __init__(self, most: int, *, size_of: Callable[[T], int] | None = None, most_size: int = 0):
        """Keeps at most `most` (>= 1) objects. With `size_of`, several objects are kept only up to `most_size` in total."""
        self._most, self._size_of, self._most_size = most, size_of, most_size
        self._kept: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[int]:
        """Numbers of the open objects, most recently used last."""
        return list(self._kept)

    def get(self, number: int, open_one: Callable[[int], T]) -> T:
        """Returns object `number`, opened by `open_one` if necessary."""
        with self._lock:
            if number not in self._kept:
                while len(self._kept) >= self._most:
                    self._kept.popitem(last=False)
                self._kept[number] = open_one(number)
                while self._size_of is not None and len(self._kept) > 1 and self._size > self._most_size:
                    self._kept.popitem(last=False)
            self._kept.move_to_end(number)
            return self._kept[number]

    @property
    def _size(self) -> int:
        return 0 if self._size_of is None else sum(map(self._size_of, self._kept.values()))


class OpenFile:
    """A local file open for reading; closes itself when collected. Raises OSError if it can't be read.

    Attributes:
      number: its file descriptor.
    """

    def __init__(self, path: str):
        self.number = reading.opened(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at interpreter exit
        if hasattr(self, "number"):
            close(self.number)
