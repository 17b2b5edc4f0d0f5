"""Reads files of inputs and tokenizers, on disk or in an object store, by their paths as strings."""

from __future__ import annotations

import concurrent.futures
import glob as glob_lib
import os
from collections.abc import Callable, Sequence
from typing import TypeVar

from spmd_trainer.storage import access, backends, retry

# Concurrent requests to an object store.
_REQUESTS = 16

T = TypeVar("T")


def exists(path: str) -> bool:
    """True for a file, a directory or a broken link."""
    scheme = backends.scheme_of(path)
    return os.path.lexists(path) if scheme is None else backends.object_store(scheme).exists(path)


def is_dir(path: str) -> bool:
    scheme = backends.scheme_of(path)
    return os.path.isdir(path) if scheme is None else backends.object_store(scheme).isdir(path)


def size(path: str) -> int:
    """Returns the size of a file in bytes.

    Raises:
      OSError: the file does not exist. A directory in an object store is an IsADirectoryError.
    """
    scheme = backends.scheme_of(path)
    return os.stat(path).st_size if scheme is None else backends.object_store(scheme).size(path)


def for_each(paths: Sequence[str], call: Callable[[str], T]) -> tuple[T, ...]:
    """Calls a function for each path, e.g. `size`, concurrently for object stores; returns the results in order.

    Raises:
      Exception: the error of the first failing path.
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
    """Returns the sorted non-hidden matches of a pattern; '**' is folders of any depth."""
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
    with open(path, "rb") as file:
        file.seek(start)
        return file.read() if end is None else file.read(end - start)


def problem(path: str, error: Exception) -> str:
    """Describes a read error as a clause, e.g. 'No such file or directory'."""
    if isinstance(error, FileNotFoundError):
        return "No such file or directory"
    if backends.scheme_of(path) is None and isinstance(error, OSError) and error.strerror:
        return error.strerror
    explained = access.explain(path, error)
    return retry.summary(error) if explained is None else explained.removeprefix("can't be used: ")
