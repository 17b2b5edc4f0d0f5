"""Reads the files of inputs and tokenizers, from disk or from an object store. Paths are strings."""

from __future__ import annotations

import concurrent.futures
import errno
import glob as glob_lib
import os
import stat
from collections.abc import Callable, Sequence
from typing import TypeVar

from spmd_trainer.storage import access, backends, retry

# Concurrent requests to an object store.
_REQUESTS = 16

_KINDS = (
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)

T = TypeVar("T")


class NotRegularError(OSError):
    """A path is a named pipe, a socket or a device. Opening such a file may block forever, and reading it may never end."""


def exists(path: str) -> bool:
    """Returns True for a file, a directory or a broken link."""
    scheme = backends.scheme_of(path)
    return os.path.lexists(path) if scheme is None else backends.object_store(scheme).exists(path)


def is_dir(path: str) -> bool:
    scheme = backends.scheme_of(path)
    return os.path.isdir(path) if scheme is None else backends.object_store(scheme).isdir(path)


def size(path: str) -> int:
    """Returns the size of a file in bytes.

    Raises:
      OSError: the file does not exist, or (IsADirectoryError) it is a directory in an object store.
    """
    scheme = backends.scheme_of(path)
    return os.stat(path).st_size if scheme is None else backends.object_store(scheme).size(path)


def version(path: str) -> str:
    """Returns a text that changes with a file: its size and time of last write, or on the Hub (hf://), its size and hash.

    Raises:
      OSError: the file does not exist.
    """
    scheme = backends.scheme_of(path)
    if scheme is not None:
        found = backends.object_store(scheme).info(path)
        return f"{found['size']}:{found.get('content') or int(found['mtime'].timestamp())}"
    status = os.stat(path)
    return f"{status.st_size}:{status.st_mtime_ns}"


def require_regular(path: str | os.PathLike[str]) -> None:
    """Raises an error if a local path is not a regular file or folder. Missing paths and paths in object stores pass.

    Raises:
      NotRegularError: the path is a named pipe, a socket or a device.
      OSError: the path's folder can't be read.
    """
    if backends.scheme_of(path) is not None:
        return
    try:
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        return
    for is_kind, kind in _KINDS:
        if is_kind(mode):
            raise NotRegularError(errno.EINVAL, f"it is {kind}, not a regular file", os.fspath(path))


def require_regular_below(folder: str | os.PathLike[str]) -> None:
    """Calls `require_regular` for each file at any depth in a local folder, before a library opens these files itself."""
    if backends.scheme_of(folder) is not None:
        return
    for root, _, names in os.walk(folder):
        for name in names:
            require_regular(os.path.join(root, name))


def opened(path: str | os.PathLike[str], flags: int) -> int:
    """Opens a local file and returns its descriptor. Use it as the `opener` of `open`, to refuse files that are not regular.

    Raises:
      OSError: `require_regular` refuses the file, or it can't be opened.
    """
    require_regular(path)
    return os.open(path, flags, 0o666)


def for_each(paths: Sequence[str], call: Callable[[str], T]) -> tuple[T, ...]:
    """Calls a function, e.g. `size`, for each path, concurrently if a path is in an object store. Returns the results in order.

    Raises:
      Exception: the error for the first path that fails.
    """
    if all(backends.scheme_of(path) is None for path in paths):
        return tuple(map(call, paths))
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        return tuple(pool.map(call, paths))


def names(folder: str) -> list[str]:
    """Returns the sorted names of a folder's entries.

    Raises:
      OSError: the folder does not exist or can't be read.
    """
    scheme = backends.scheme_of(folder)
    if scheme is None:
        return sorted(os.listdir(folder))
    return [os.path.basename(path) for path in backends.object_store(scheme).listdir(folder)]


def glob(pattern: str) -> list[str]:
    """Returns the sorted non-hidden matches of a pattern; '**' matches folders at any depth."""
    scheme = backends.scheme_of(pattern)
    if scheme is None:
        return sorted(set(glob_lib.glob(pattern, recursive=True)))
    found = [f"{scheme}://{path}" for path in backends.object_store(scheme).glob(pattern)]
    parts = pattern.split("/")
    first = next((number for number, part in enumerate(parts) if glob_lib.has_magic(part)), len(parts))
    if any(part.startswith(".") for part in parts[first:]):
        return found
    return [path for path in found if not any(part.startswith(".") for part in path.split("/")[first:])]


def read(path: str, start: int = 0, end: int | None = None) -> bytes:
    """Returns the bytes of a file from `start` to `end` (None: to its end); fewer if the file is shorter.

    Raises:
      OSError: the file can't be read.
    """
    scheme = backends.scheme_of(path)
    if scheme is not None:
        if end is not None and end <= start:
            return b""
        return backends.object_store(scheme).read(path, start or None, end)
    with open(path, "rb", opener=opened) as file:
        file.seek(start)
        return file.read() if end is None else file.read(end - start)


def problem(path: str, error: Exception) -> str:
    """Describes a read error as a clause, e.g. 'No such file or directory'."""
    if isinstance(error, FileNotFoundError):
        return access.explain_missing(path, error) or "No such file or directory"
    if backends.scheme_of(path) is None and isinstance(error, OSError) and error.strerror:
        return error.strerror
    explained = access.explain(path, error)
    return retry.summary(error) if explained is None else explained.removeprefix("can't be used: ")
