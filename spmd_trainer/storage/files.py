"""Writes files atomically, and lists files with their sizes."""

from __future__ import annotations

import contextlib
import datetime
import os
import uuid
from collections.abc import Iterable, Iterator

from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import backends, paths, reading
from spmd_trainer.storage.listing import Entry

# Suffix of files that are being written. A file that keeps it is left from a killed process.
UNFINISHED_SUFFIX = ".writing"


def check_target(name: str, path: epath.Path, example: str) -> None:
    """Checks the path of a file that the user wants written. Paths in object stores always pass.

    The file's directory must exist. A missing directory is probably a typing error, so it is not created.

    Args:
      name: the flag or argument that gave the path, for messages, e.g. '--page_file'.
      path: the file; if it exists, it must be a regular file.
      example: an example of a file name, for messages, e.g. 'run.html'.

    Raises:
      UserError: the file's directory doesn't exist, or the path is a directory, a named pipe, a socket or a device.
    """
    if paths.is_remote(path):
        return
    if path.is_dir():
        raise UserError(f"{name}={path} is a directory; give the file to write, e.g. {path / example}")
    try:
        reading.require_regular(path)
    except OSError as error:
        raise UserError(f"{name}={path} can't be written: {error.strerror}; give another name") from error
    if not path.parent.is_dir():
        raise UserError(f"{name}={path} can't be written: make the directory {path.parent} first")


def write_atomically(path: epath.Path, lines: Iterable[str]) -> None:
    """Writes lines, given without line ends, into a text file. Creates the file's directory if it is missing.

    The write is atomic, even if the machine loses power. On a file system, a temporary file is written and renamed. In an
    object store, one put writes the object.

    Raises:
      OSError: the file can't be written, or is a device or a named pipe. The error names the file, which keeps its old content.
    """
    if paths.is_remote(path):
        with path.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
        return
    reading.require_regular(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with replacing(path) as unfinished, unfinished.open("w", encoding="utf-8") as file:
            for line in lines:
                file.write(line + "\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        # The error of a failed write names no file, and that of a failed open names the unfinished file.
        error.filename = os.fspath(path)
        raise


@contextlib.contextmanager
def replacing(path: epath.Path) -> Iterator[epath.Path]:
    """Context manager that yields a temporary path next to `path`, then renames it to `path`; deletes it on an error."""
    # Threads may write the same file, and so may processes with equal ids in containers that share a disk.
    unfinished = path.parent / f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}{UNFINISHED_SUFFIX}"
    try:
        yield unfinished
        unfinished.replace(path)
    except BaseException:
        unfinished.unlink(missing_ok=True)
        raise


def write_if_changed(path: epath.Path, lines: Iterable[str]) -> bool:
    """Calls `write_atomically` unless the file already has this content. Returns True if the file was written.

    In an object store, the file is always written, because reading it first would cost another request.
    """
    wanted = list(lines)
    if paths.is_remote(path):
        write_atomically(path, wanted)
        return True
    try:
        if reading.read(os.fspath(path)).decode() == "".join(line + "\n" for line in wanted):
            return False
    except (FileNotFoundError, UnicodeDecodeError):
        pass
    write_atomically(path, wanted)
    return True


def files_below(directory: epath.Path) -> dict[str, Entry]:
    """Returns {path relative to the directory, with slashes: `Entry`} for all files at any depth, sorted.

    In an object store, takes one request per 1,000 files. For a missing directory, returns {}.

    Raises:
      OSError: the directory can't be listed.
    """
    scheme = backends.scheme_of(directory)
    if scheme is None:
        return dict(sorted(_local_files(os.fspath(directory), "")))
    start = len(os.fspath(directory).rstrip("/")) + 1
    # An empty object whose name ends with a slash stands for a directory.
    return {
        f"{scheme}://{entry.name}"[start:]: entry
        for entry in backends.object_store(scheme).objects(directory)
        if not entry.name.endswith("/")
    }


def sizes_below(directory: epath.Path) -> dict[str, int]:
    """Returns {path relative to the directory, with slashes: size in bytes}. Otherwise like `files_below`."""
    return {name: info.size for name, info in files_below(directory).items()}


def _local_files(folder: str, prefix: str) -> Iterator[tuple[str, Entry]]:
    try:
        entries = os.scandir(folder)
    except FileNotFoundError:
        return
    with entries:
        for entry in entries:
            if entry.is_dir():
                yield from _local_files(entry.path, f"{prefix}{entry.name}/")
            else:
                found = entry.stat()
                modified = datetime.datetime.fromtimestamp(found.st_mtime, datetime.UTC)
                yield f"{prefix}{entry.name}", Entry(entry.path, found.st_size, modified)
