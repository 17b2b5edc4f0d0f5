"""Finds and reads the files of an input, with a specific error message for each kind of mistake in the field `files`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import glob
import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from etils import epath

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import is_remote, reading
from spmd_trainer.storage.files import files_below
from spmd_trainer.storage.paths import file_or_pattern

Paths = Sequence[str | os.PathLike[str]]
# Types of an input's `files` field.
FileSource = Paths | Callable[[], Paths] | str | os.PathLike[str]


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """The files of an input, and the size that each file had when the input found it.

    Attributes:
      paths: paths of the files, in the order in which they are read.
      sizes: size of each file in bytes, in the order of `paths`.
    """

    paths: tuple[str, ...]
    sizes: tuple[int, ...]

    @functools.cached_property
    def total_bytes(self) -> int:
        return sum(self.sizes)

    @functools.cached_property
    def checksum(self) -> int:
        """Checksum of the files' sizes, in order. It stays the same if two files of equal size are swapped."""
        return zlib.crc32(",".join(map(str, self.sizes)).encode())

    @property
    def size_text(self) -> str:
        """The number of files and their total size, for messages: '3 files of 15,000 bytes'."""
        return f"{count_text(len(self.sizes), 'file')} of {self.total_bytes:,} bytes"

    def read(self, index: int, limit: int | None = None) -> bytes:
        """Returns the content of file `paths[index]`, or its first `limit` bytes.

        Raises:
          UserError: the file can no longer be read, or its size differs from `sizes[index]`.
        """
        path, size = self.paths[index], self.sizes[index]
        with readable(path, fix=f". {_FIX}"):
            data = reading.read(path, 0, size + 1 if limit is None else limit)
        if len(data) != (size if limit is None else min(size, limit)):
            raise UserError(f"{path} had {size} bytes when this run started, and has changed; start the run again")
        return data


_FIX = "Make it readable, or leave it out of `files`"
# Maximum number of file names in an error message.
_MAX_NAMES = 8


@contextlib.contextmanager
def readable(path: str, *, name: str = "", fix: str = "") -> Iterator[None]:
    """Context manager that turns an OSError in its body into a UserError.

    The message begins with `name` if given, otherwise with `path`, and ends with `fix`. If `path` is a folder, and a file in
    this folder caused the error (such as a broken link), the message names that file.
    """
    try:
        yield
    except OSError as error:
        failed = str(error.filename or "")
        path = failed if failed.startswith(os.path.join(path, "")) else path
        raise UserError(f"{name or path} can't be read: {reading.problem(path, error)}{fix}") from error


def find_files(
    files: FileSource | None, inside: Callable[[str], Sequence[str] | None] = lambda folder: None
) -> TextFiles:
    """Resolves an input's `files` field and checks that every file is readable.

    Args:
      files: a path, folder or glob pattern; a list of these; or a function without arguments that returns one of them or a
        list. A pattern ('*', '?', '[a-z]', and '**' for folders of any depth) stands for the files that match it, sorted by
        path, without hidden files. A folder stands for all files below it, sorted, without hidden files, and without empty
        files whose names begin with '_'. An existing path is never treated as a pattern.
      inside: function that is called with each folder in `files`. It returns the list of the folder's data files if it knows
        the folder's layout (e.g. of a saved dataset), and None if it doesn't.

    Raises:
      UserError: there are no paths; a pattern or a folder stands for no file; a pattern or a folder overlaps with a different
        entry; a path is missing or unreadable; or all files are empty.
    """
    entries = entries_of(files)
    plain = [entry for entry in entries if not glob.has_magic(entry) or reading.exists(entry)]
    sizes = dict(zip(plain, reading.for_each(plain, _size_unless_folder), strict=True))
    found: list[tuple[str, int]] = []
    given_by: dict[str, int] = {}
    for number, entry in enumerate(entries):
        given = _files_of(entry, sizes, inside)
        for path, _ in given:
            first = given_by.setdefault(path if is_remote(path) else os.path.abspath(path), number)
            other = entries[first]
            # The same path twice is taken as intended: the file is read twice. Any other overlap is taken as a mistake.
            are_files = sizes.get(entry) is not None and sizes.get(other) is not None
            is_same_pattern = other == entry and entry not in sizes
            if first != number and not are_files and not is_same_pattern:
                raise UserError(
                    f"`files` gives {path} twice, by {other!r} and by {entry!r}; give entries that don't overlap"
                )
        found += given
    if not found:
        raise UserError(f"{entries[0]} holds no data file; give at least one")
    if not any(size for _, size in found):
        raise UserError(
            f"all {len(found)} files are empty, the first is {found[0][0]}; give at least one with data in it"
        )
    return TextFiles(tuple(path for path, _ in found), tuple(size for _, size in found))


def read_text(path: str, name: str) -> str:
    """Returns the text of a UTF-8 file, without a byte order mark.

    Args:
      path: the file.
      name: name of the file in error messages.

    Raises:
      UserError: the file can't be read, or is not UTF-8.
    """
    try:
        return reading.read(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(f"{name} can't be read: {reading.problem(path, error)}{nearby_names(path)}") from error
    except UnicodeDecodeError as error:
        raise UserError(f"{name} is not UTF-8: {error}") from error


def nearby_names(path: str) -> str:
    """Returns a suffix for an error about a missing path: ' (did you mean b.txt?)', or the names of files in its folder."""
    folder = os.path.dirname(path) or "."
    try:
        if reading.exists(path):
            return ""
        names = reading.names(folder)
    except OSError:
        return f" (there is no folder {folder})"
    near = did_you_mean(os.path.basename(path), names).removeprefix("; ")
    return f" ({near})" if near.startswith("did you mean") else f" ({folder} holds {listed(names)})"


def listed(names: Sequence[str]) -> str:
    """Lists the first few names and counts the rest: 'a, b and 5 more'. Hidden files come last."""
    names = sorted(names, key=lambda name: name.startswith("."))
    shown = ", ".join(names[:_MAX_NAMES])
    more = len(names) - _MAX_NAMES
    return f"{shown} and {more} more" if more > 0 else shown or "nothing"


def entries_of(files: object) -> list[str]:
    """Returns the paths, patterns and folders of a `files` field: a list, a single entry, or a function that returns either.

    Raises:
      UserError: `files` has no entries, or an entry is not a path.
    """
    given = files() if callable(files) else files
    if isinstance(given, str | bytes | os.PathLike):
        given = [given]
    if given is not None and not isinstance(given, Iterable):
        raise UserError(
            f"files={given!r}; give paths, a glob such as 'corpus/*.txt', a directory, or a function that returns paths"
        )
    entries = [_path(entry) for entry in (() if given is None else given)]
    if not entries:
        name = (
            f"the function of `files`, {getattr(files, '__name__', files)}(), returned"
            if callable(files)
            else "`files` has"
        )
        raise UserError(f"{name} no paths; give at least one file")
    return entries


def _path(entry: object) -> str:
    if isinstance(entry, str | bytes | os.PathLike):
        return file_or_pattern("files", os.fsdecode(entry))
    raise UserError(f"`files` has {entry!r}, which is not a path; give paths, or globs such as 'corpus/*.txt'")


def _files_of(
    entry: str, sizes: Mapping[str, int | None], inside: Callable[[str], Sequence[str] | None]
) -> list[tuple[str, int]]:
    """Returns (path, size) for each file that `entry` (a path, folder or pattern) stands for. `inside`: see `find_files`.

    `sizes` has the size of each entry that is a file, in bytes, and None for each entry that is a folder; it has no patterns.
    """
    if entry not in sizes:
        return _matches(entry)
    size = sizes[entry]
    return _inside(entry, inside(entry)) if size is None else [(entry, size)]


def _inside(folder: str, known: Sequence[str] | None) -> list[tuple[str, int]]:
    """Returns (path, size) for each of the files `known`, or for each file below the folder if `known` is None."""
    if known is not None:
        return list(zip(known, reading.for_each(known, _size), strict=True))
    with readable(folder):
        below = files_below(epath.Path(folder))
        found = {
            os.path.join(folder, name): info.size for name, info in below.items() if not _is_hidden(name, info.size)
        }
        if not found:
            raise UserError(
                f"{folder} has no files that are not hidden; it holds {listed(reading.names(folder))}; give a folder with files"
            )
    return list(found.items()) if is_remote(folder) else [(path, _size(path)) for path in found]


def _is_hidden(name: str, size: int) -> bool:
    parts = name.split("/")
    return any(part.startswith(".") for part in parts) or (parts[-1].startswith("_") and not size)


def _matches(pattern: str) -> list[tuple[str, int]]:
    with readable(pattern, fix=f". {_FIX}"):
        matched = reading.glob(pattern)
    sizes = reading.for_each(matched, _size_unless_folder)
    if found := [(path, size) for path, size in zip(matched, sizes, strict=True) if size is not None]:
        return found
    if matched:
        raise UserError(
            f"{pattern} matches folders only, e.g. {matched[0]}; write {os.path.join(pattern, '*')} for their files"
        )
    folder = os.path.dirname(pattern)
    while glob.has_magic(folder):
        folder = os.path.dirname(folder)
    folder = folder or "."
    try:
        held = listed(reading.names(folder))
    except FileNotFoundError as error:
        raise UserError(f"{pattern} matches no file: there is no folder {folder}{nearby_names(folder)}") from error
    except OSError as error:
        raise UserError(
            f"{pattern} matches no file: {folder} can't be read: {reading.problem(folder, error)}"
        ) from error
    raise UserError(f"{pattern} matches no file; {folder} holds {held}")


def _size(path: str) -> int:
    size = _size_unless_folder(path)
    if size is None:
        raise UserError(f"{path} is a directory; give a file in its place")
    return size


def _size_unless_folder(path: str) -> int | None:
    """Returns the size of a file in bytes; None for a folder. In an object store, this takes a single request."""
    try:
        size = reading.size(path)
    except IsADirectoryError:
        return None
    except OSError as error:
        fix = "Correct the path, or leave it out of `files`" if isinstance(error, FileNotFoundError) else _FIX
        raise UserError(f"{path} can't be read: {reading.problem(path, error)}{nearby_names(path)}. {fix}") from error
    if is_remote(path):
        return size
    if os.path.isdir(path):
        return None
    with readable(path, fix=f". {_FIX}"):
        reading.require_regular(path)
    if not os.access(path, os.R_OK):
        raise UserError(f"{path} can't be read: permission denied. {_FIX}")
    return size
