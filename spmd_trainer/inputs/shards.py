"""Numbers the records of a data set that is split into shards (files), and keeps recently used files open."""

from __future__ import annotations

import bisect
import collections
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files
from spmd_trainer.storage import is_remote, reading

# Maximum number of open files per data source. It is small, because a mixture has many sources.
MAX_OPEN = 8


class ShardIndex:
    """Converts a record's number in the whole data set to its shard and its number within this shard, and vice versa.

    Attributes:
      counts: number of records in each shard, int64 [shards].
    """

    def __init__(self, counts: Sequence[int] | np.ndarray):
        self.counts = np.asarray(counts, np.int64)
        self._ends = np.cumsum(self.counts)
        self._end_list: list[int] = self._ends.tolist()

    def __len__(self) -> int:
        """Returns the number of records in all shards."""
        return self._end_list[-1] if self._end_list else 0

    def span(self, part: int) -> tuple[int, int]:
        """Returns the records of shard `part` as a half-open range: (number of its first record, number after its last)."""
        end = self._end_list[part]
        return end - int(self.counts[part]), end

    def locate(self, number: int) -> tuple[int, int]:
        """Returns the shard of record `number`, and the record's number within this shard."""
        part = bisect.bisect_right(self._end_list, number)
        return part, number - self.span(part)[0]

    def split(self, numbers: np.ndarray) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Groups record numbers, int64 [n] in any order, by shard.

        Yields:
          One tuple for each shard that has some of the records: the shard; the indices in `numbers` of its m records, int64
          [m]; and the numbers of these records within the shard, int64 [m].
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
    """Opens objects, such as files, by number and keeps the most recently used ones. Thread-safe.

    Evicted objects are not closed explicitly; they must close themselves when they are garbage-collected.
    """

    def __init__(self, most: int, *, size_of: Callable[[T], int] | None = None, most_size: int = 0):
        """Limits the number of objects to `most` (1 or more).

        If `size_of` is given, the sum of the objects' sizes is limited to `most_size`, too, unless only one object is left.
        """
        self._most, self._size_of, self._most_size = most, size_of, most_size
        self._kept: collections.OrderedDict[int, T] = collections.OrderedDict()
        self._lock = threading.Lock()

    @property
    def kept(self) -> list[int]:
        """Numbers of the objects in the cache, most recently used last."""
        return list(self._kept)

    def get(self, number: int, open_one: Callable[[int], T]) -> T:
        """Returns object `number`; opens it by `open_one(number)` if it isn't in the cache."""
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
    """A local file, open for reading and closed when this object is garbage-collected. Raises OSError if it can't be read.

    Attributes:
      number: the file descriptor.
    """

    def __init__(self, path: str):
        self.number = reading.opened(path, os.O_RDONLY)

    def __del__(self, close: Callable[[int], None] = os.close) -> None:  # `os` may be gone at interpreter exit
        if hasattr(self, "number"):
            close(self.number)


class OpenFiles:
    """Reads byte ranges of a data source's files, which are opened at their first read. Thread-safe."""

    def __init__(self, paths: Sequence[str], sizes: Sequence[int], most: int = MAX_OPEN):
        """Stores the files' paths, and their sizes in bytes when the data source was opened. Keeps up to `most` files open."""
        self._paths, self._sizes = tuple(paths), tuple(sizes)
        self._open: LRUCache[OpenFile] = LRUCache(most)

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Returns bytes [start, stop) of file `index`. Raises UserError if the file can't be read or its size has changed."""
        path = self._paths[index]
        with files.readable(path):
            content = reading.read(path, start, stop) if is_remote(path) else self._read_local(index, start, stop)
        if len(content) != stop - start:
            raise changed(self._paths[index], self._sizes[index])
        return content

    def _read_local(self, index: int, start: int, stop: int) -> bytes:
        # This reference keeps the file open during the read if another thread evicts it from the cache.
        opened = self._open.get(index, lambda index: OpenFile(self._paths[index]))
        file = opened.number
        if os.fstat(file).st_size != self._sizes[index]:
            raise changed(self._paths[index], self._sizes[index])
        parts, begin = [os.pread(file, stop - start, start)], start
        while parts[-1] and (begin := begin + len(parts[-1])) < stop:  # one call reads at most 2 GiB
            parts.append(os.pread(file, stop - begin, begin))
        return b"".join(parts)


def changed(path: str, size: int) -> UserError:
    """Returns the error for a file that had `size` bytes when the data source was opened, and has another size now."""
    return UserError(f"{path} had {size} bytes when this run started, and has changed; start the run again")
