"""Reads the files of inputs and tokenizers, on disk or in an object store. Paths are texts, as users give them.

`problem` says in words what a file system or an object store raises.
"""

from __future__ import annotations

import concurrent.futures
import glob as glob_lib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from spmd_trainer.storage import access, backends, retry

# Requests that wait for an object store at a time.
_REQUESTS = 16

T = TypeVar("T")


def exists(path: str) -> bool:
    """Returns True if there is a file, a directory or a broken link."""
    scheme = backends.scheme_of(path)
    return os.path.lexists(path) if scheme is None else backends.object_store(scheme).exists(path)


def is_dir(path: str) -> bool:
    """Returns True for a directory."""
    scheme = backends.scheme_of(path)
    return os.path.isdir(path) if scheme is None else backends.object_store(scheme).isdir(path)


def size(path: str) -> int:
    """Returns the size of a file in bytes.

    Raises:
      OSError: there is no such file. A directory in an object store is an IsADirectoryError.
    """
    scheme = backends.scheme_of(path)
    return os.stat(path).st_size if scheme is None else backends.object_store(scheme).size(path)


def for_each(paths: Sequence[str], call: Callable[[str], T]) -> tuple[T, ...]:
    """Returns the results of a function of a path, e.g. of `size`, in order. Several requests wait for an object store at a time.

    Raises:
      Exception: what the function raises for the first path for which it raises.
    """
    if all(backends.scheme_of(path) is None for path in paths):
        return tuple(map(call, paths))
    with concurrent.futures.ThreadPoolExecutor(_REQUESTS) as pool:
        return tuple(pool.map(call, paths))


def names(folder: str) -> list[str]:
    """Returns the names of the entries of a folder, sorted.

    Raises:
      OSError: there is no such folder, or it can't be read.
    """
    scheme = backends.scheme_of(folder)
    if scheme is None:
        return sorted(os.listdir(folder))
    return [os.path.basename(path) for path in backends.object_store(scheme).listdir(folder)]


def glob(pattern: str) -> list[str]:
    """Returns the paths that a pattern matches, sorted; '**' is folders of any depth. Hidden ones are left out."""
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
    """Returns the bytes of a file from `start` up to `end`, or to its last; fewer where the file ends before.

    Raises:
      OSError: the file can't be read.
    """
    scheme = backends.scheme_of(path)
    if scheme is not None:
        if end is not None and end <= start:
            return b""
        return backends.object_store(scheme).read(path, start or None, end)
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if end is None else file.read(end - start)


def problem(path: str, error: Exception) -> str:
    """Returns why a file can't be read, as a clause, e.g. 'No such file or directory'."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    if backends.scheme_of(path) is None and isinstance(error, OSError) and error.strerror:
        return error.strerror
    explained = access.explain(path, error)
    return retry.summary(error) if explained is None else explained.removeprefix("can't be used: ")
