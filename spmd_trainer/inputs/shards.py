"""Records of several files, or of other parts, numbered through."""

from __future__ import annotations

import bisect
import collections
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np


class ShardIndex:
    """Numbers of records: from 0 in each part, and from 0 through all parts.

    Attributes:
      counts: records of each part, int64 [parts].
    """

    def __init__(self, counts: Sequence[int] | np.ndarray):
        """Takes the number of records of each part."""
        self.counts = np.asarray(counts, np.int64)
        self._ends = np.cumsum(self.counts)
        self._end_list: list[int] = self._ends.tolist()

    def __len__(self) -> int:
        """Returns the number of records in all parts."""
        return self._end_list[-1] if self._end_list else 0

    def span(self, part: int) -> tuple[int, int]:
        """Returns the number of the first record of a part, and of the first one after it."""
        end = self._end_list[part]
        return end - int(self.counts[part]), end

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the part that a record is in, and its number there."""
        part = bisect.bisect_right(self._end_list, number)
        return part, number - self.span(part)[0]

    def split(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yields each part that has some of the records, in order.

        Args:
          numbers: int64 [n], in any order.

        Yields:
          The part; the places of its records in `numbers`, int64 [m]; and their numbers in the part, int64 [m].
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
    """Opens things by number, and keeps those that were used last. Several threads may ask at a time.

    What is left out is only let go of: it must close itself when nobody uses it any longer.
    """

    def __init__(self, most: int, *, size_of: Callable[[T], int] | None = None, most_size: int = 0):
        """Opens nothing yet.

        Args:
          most: how many are kept, 1 or more.
          size_of: the size of an opened one; None: sizes don't count.
          most_size: of the sizes together, while more than one is kept.
        """
        self._most, self._size_of, self._most_size = most, size_of, most_size
        self._kept: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[int]:
        """The numbers of those that are open, the last used one last."""
        return list(self._kept)

    def get(self, number: int, open_one: Callable[[int], T]) -> T:
        """Returns one by its number.

        Args:
          number: its number.
          open_one: opens it, if it isn't open. Not kept: its object could otherwise not be freed at once when it is let go of.
        """
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
    """A file that is open for reading; closed when nobody uses it.

    Attributes:
      number: its file descriptor.
    """

    def __init__(self, path: str):
        """Opens a local file.

        Raises:
          OSError: it can't be read.
        """
        self.number = os.open(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone when Python ends
        if hasattr(self, "number"):
            close(self.number)
