"""Appends to files that grow during a run: metrics, event files, logs.

Object stores can't append, so a growing file is stored there as a series of objects, its parts: `NAME.part-000001-HOST-PID`,
... To append, a process rewrites its newest part. If this part is already large, the process begins a new part instead, so that
rewriting stays cheap. `read_joined` joins the parts. Parts that have been uploaded are complete even if the process is killed.
"""

from __future__ import annotations

import os
import re
import socket
import threading
import time
from typing import Protocol

from etils import epath

from spmd_trainer.storage import backends, paths, reading
from spmd_trainer.storage.object_store import ObjectStore

_PART = re.compile(r"(?P<file>.+)\.part-(?P<number>\d{6})-[^/]+")
# A part of this many bytes or more gets no further bytes.
_PART_BYTES = 256 * 1024
# Seconds between two puts of one part: services limit how often an object may be replaced (GCS: once a second).
_SECONDS_BETWEEN_PUTS = 5.0


class GrowingFile(Protocol):
    """A file that is open for appending."""

    def write(self, data: bytes) -> None:
        """Appends bytes. In an object store, other processes may see them only after `flush`.

        Raises:
          OSError: the bytes can't be written. None of them were added, so the call can be repeated.
        """

    def flush(self) -> None:
        """Makes all appended bytes visible to other processes.

        Raises:
          OSError: the bytes can't be written; they are kept for the next call.
        """


def open_append(
    path: epath.Path, *, header: bytes = b"", separate_files: bool = False, attempts: int | None = None
) -> GrowingFile:
    """Opens a file for appending. The first write creates it.

    Args:
      path: the file.
      header: bytes with which the file begins; in an object store, with which each part begins.
      separate_files: in an object store, name the parts like independent files ('NAME', 'NAME.000002', ...), for programs that
        don't join parts, e.g. TensorBoard.
      attempts: in an object store, maximum number of attempts per write; None for the default.
    """
    scheme = backends.scheme_of(path)
    if scheme is None:
        return _LocalFile(path, header)
    return _Parts(backends.object_store(scheme), path, header, separate_files=separate_files, attempts=attempts)


def read_joined(path: epath.Path) -> str:
    """Returns the text of a growing file, with its parts joined in order; '' if the file is missing."""
    if not paths.is_remote(path):
        try:
            return reading.read(os.fspath(path)).decode()
        except FileNotFoundError:
            return ""
    return "".join(part.read_text(encoding="utf-8") for part in parts(path))


def parts(path: epath.Path) -> list[epath.Path]:
    """Lists the parts of a growing file in an object store, in order."""
    try:
        entries = list(path.parent.iterdir())
    except FileNotFoundError:
        return []
    found = [
        (match["number"], entry.name, entry)
        for entry in entries
        if (match := _PART.fullmatch(entry.name)) and match["file"] == path.name
    ]
    whole = [entry for entry in entries if entry.name == path.name]  # copied here from a file system
    return whole + [entry for _, _, entry in sorted(found, key=lambda item: item[:2])]


class _LocalFile:
    """A local file. Each write opens it, appends without buffering, and closes it, so other processes see the bytes at once."""

    def __init__(self, path: epath.Path, header: bytes):
        self._path, self._header = path, header

    def write(self, data: bytes) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        reading.require_regular(self._path)
        # Without a buffer: otherwise closing the file, after it is truncated, would write what a full disk did not take.
        with open(os.fspath(self._path), "ab", buffering=0) as file:
            start = file.tell()
            left = memoryview(data if start else self._header + data)
            try:
                while left:
                    left = left[file.write(left) :]
            except OSError as error:
                error.filename = os.fspath(self._path)
                # A full disk may have accepted half a line. Truncating needs no space.
                os.truncate(self._path, start)
                raise

    def flush(self) -> None:
        pass


class _Parts:
    """A growing file in an object store: the parts that this process writes."""

    def __init__(
        self, store: ObjectStore, path: epath.Path, header: bytes, *, separate_files: bool, attempts: int | None
    ):
        self._store, self._path, self._header = store, path, header
        self._separate_files, self._attempts = separate_files, attempts
        self._number = 0
        self._content = bytearray()
        self._is_put = True
        self._last_put = -_SECONDS_BETWEEN_PUTS
        self._lock = threading.Lock()

    def write(self, data: bytes) -> None:
        with self._lock:
            if not self._number or len(self._content) >= _PART_BYTES:
                if not self._is_put:
                    self._put()
                self._number = self._number + 1 if self._number else self._first_number()
                self._content = bytearray(self._header)
            before, was_put = len(self._content), self._is_put
            self._content += data
            self._is_put = False
            if time.monotonic() - self._last_put >= _SECONDS_BETWEEN_PUTS:
                try:
                    self._put()
                except BaseException:
                    del self._content[before:]
                    self._is_put = was_put
                    raise

    def flush(self) -> None:
        with self._lock:
            if not self._is_put:
                self._put()

    def _put(self) -> None:
        self._store.put(self._part(), bytes(self._content), attempts=self._attempts)
        self._is_put, self._last_put = True, time.monotonic()

    def _part(self) -> epath.Path:
        if self._separate_files:
            return self._path if self._number == 1 else self._path.parent / f"{self._path.name}.{self._number:06}"
        name = f"{self._path.name}.part-{self._number:06}-{socket.gethostname()}-{os.getpid()}"
        return self._path.parent / name

    def _first_number(self) -> int:
        """Returns one more than the highest part number. Parts with the same number differ in the host or process id."""
        if self._separate_files:
            return 1
        numbers = [int(match["number"]) for part in parts(self._path) if (match := _PART.fullmatch(part.name))]
        return max(numbers, default=0) + 1
