"""Keeps the last used of many things that take time to open: files, readers, tables."""

from __future__ import annotations

import collections
import os
import threading
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")


class LastUsed(Generic[T]):
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
