"""Records of several files, or of other parts, numbered through."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np


class Numbering:
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
