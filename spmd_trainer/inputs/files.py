"""Finding and reading the files of a text input, with one clear error for each thing that can be wrong with them."""

from __future__ import annotations

import dataclasses
import functools
import os
import zlib
from collections.abc import Callable, Sequence

from spmd_trainer.errors import UserError

Paths = Sequence[str | os.PathLike[str]]
# What an input's `files` field may hold.
FileSource = Paths | Callable[[], Paths] | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Files that exist, and their sizes at the time they were found.

    Attributes:
      paths: in the order given.
      sizes: bytes, one for each path.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def total_bytes(self) -> int:
        """Bytes in all files together."""
        return sum(self.sizes)

    @functools.cached_property
    def checksum(self) -> int:
        """A number that changes when a file is added, removed, moved in the order, or changes its size."""
        return zlib.crc32(",".join(map(str, self.sizes)).encode())

    def read(self, index: int, limit: int | None = None) -> bytes:
        """The file's bytes, or its first `limit`.

        Raises:
          UserError: it can no longer be read, or has changed its size since it was found.
        """
        path, size = self.paths[index], self.sizes[index]
        try:
            with open(path, "rb") as file:
                data = file.read(size + 1 if limit is None else limit)
        except OSError as error:
            raise UserError(f"{path} can't be read: {error.strerror}. {_FIX}") from error
        if len(data) != (size if limit is None else min(size, limit)):
            raise UserError(f"{path} had {size} bytes when this run started, and has changed; start the run again")
        return data


_FIX = "Make it readable, or leave it out of `files`"


def find_files(files: FileSource | None) -> TextFiles:
    """Resolves an input's `files` field and looks at every file, without reading any.

    Args:
      files: paths, one path, or a function without arguments that returns paths.

    Raises:
      UserError: there are no paths, a path is missing, a directory or unreadable, or all the files are empty.
    """
    given = files() if callable(files) else files
    if isinstance(given, str | os.PathLike):
        given = [given]
    paths = tuple(os.fspath(path) for path in given or ())
    if not paths:
        name = f"{getattr(files, '__name__', files)}() returned" if callable(files) else "`files` has"
        raise UserError(f"{name} no paths; give at least one text file")
    sizes = tuple(_size(path) for path in paths)
    if not any(sizes):
        raise UserError(f"all {len(paths)} files are empty, the first is {paths[0]}; give at least one with text in it")
    return TextFiles(paths, sizes)


def _size(path: str) -> int:
    try:
        size = os.stat(path).st_size
    except OSError as error:
        raise UserError(f"{path} can't be read: {error.strerror}. {_FIX}") from error
    if os.path.isdir(path):
        raise UserError(f"{path} is a directory; list the files in it instead, e.g. with glob.glob")
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} can't be read: permission denied. {_FIX}")
    return size
