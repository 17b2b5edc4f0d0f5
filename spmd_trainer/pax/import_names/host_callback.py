"""Pax's `host_callback`: repositories of strings, so that a device program can pass a string to host code by its number."""

from __future__ import annotations

import collections
import threading


class Repository:
    """Thread-safe {number: string} with at most `max_size` entries; a full repository drops its oldest string."""

    MAX_SIZE = 10000

    def __init__(self, max_size: int = MAX_SIZE):
        self._max_size = max_size
        self._lock = threading.Lock()
        self._strings: collections.OrderedDict[int, str] = collections.OrderedDict()
        self._next_id = 0

    def add(self, value: str) -> int:
        """Adds a string and returns its number."""
        with self._lock:
            number = self._next_id
            self._next_id += 1
            self._strings[number] = value
            if len(self._strings) > self._max_size:
                self._strings.popitem(last=False)
            return number

    def pop(self, value_id: int) -> bool:
        """Removes a string; returns False if the number is unknown."""
        with self._lock:
            return self._strings.pop(value_id, None) is not None

    def get(self, value_id: int) -> str:
        """Returns the string of a number.

        Raises:
          KeyError: the number is unknown.
        """
        with self._lock:
            return self._strings[value_id]

    @property
    def size(self) -> int:
        """Number of strings held."""
        with self._lock:
            return len(self._strings)


_lock = threading.Lock()
_repositories: dict[str, Repository] = collections.defaultdict(Repository)


def repository(namespace: str) -> Repository:
    """Returns this process's repository for a namespace; creates it at the first call."""
    with _lock:
        return _repositories[namespace]
