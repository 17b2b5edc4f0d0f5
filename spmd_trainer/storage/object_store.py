"""Wraps object stores as file systems for epath. Requests are retried after transient errors. One put writes an object.

`epath` uses an fsspec file system, which differs from a local file system in important ways: `isdir` is False when the service
refuses the request, names with '*' are patterns, making a directory may make a bucket, and a file closed by an error is still
uploaded. `ObjectStore` corrects these differences.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import errno
import functools
import glob as glob_lib
import io
import os
import tempfile
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import IO, Any, TypeVar, cast

from spmd_trainer.storage import listing
from spmd_trainer.storage.retry import OUTAGE_ATTEMPTS, FirstAnswer, StoreError, http_status, retry, summary

PathLike = str | os.PathLike[str]
_Result = TypeVar("_Result")

# Concurrent copy requests; the service does the copying.
_COPIES_AT_ONCE = 16
# Bytes per read request, unless the caller asks for more.
_READ_BYTES = 4 * 2**20
# Files up to this size are buffered in memory.
_MEMORY_BYTES = 16 * 2**20
# Requests with more bytes than this may take long even on a good network.
_BRIEF_BYTES = 64 * 1024
# Arguments of `cat_file` without which a read takes more requests or bytes: s3fs asks for the size first, to read large
# objects in pieces, and huggingface_hub reads megabytes ahead.
_READ_OPTIONS: dict[str, dict[str, Any]] = {"s3": {"max_concurrency": 1}, "hf": {"cache_type": "none"}}


class ObjectStore:
    """An object store, with the methods of fsspec file systems that epath calls, and further methods for the trainer.

    Paths may begin with the scheme. A "directory" is a common prefix of objects. It exists while there is an object below it.
    """

    def __init__(self, scheme: str, file_system: Callable[[], Any], attempts: int = OUTAGE_ATTEMPTS):
        """Wraps a file system.

        Args:
          scheme: 'gs', 's3' or 'hf'.
          file_system: function that makes a synchronous `fsspec.AbstractFileSystem` without a listings cache. It is called at
            the first request, because it may request credentials from a service.
          attempts: maximum number of attempts per request.
        """
        self.scheme = scheme
        self._make = file_system
        self._attempts = attempts
        self._first_answer = FirstAnswer(f"{scheme}://")

    @functools.cached_property
    def _fs(self) -> Any:
        return self._make()

    def info(self, path: PathLike) -> dict[str, Any]:
        """Returns {'name', 'type' ('file' or 'directory'), 'size' (bytes), 'mtime' (datetime), 'content' (see `listing.Entry`)}.

        Raises:
          FileNotFoundError: there is neither an object nor a directory at `path`.
        """
        key = self._key(path)
        if "/" not in key:
            return dict(self._try("reading about", path, lambda: self._fs.info(_text(path))))
        entry = self._try("reading about", path, lambda: listing.look_up(self._fs, self.scheme, key))
        if entry is None:
            raise FileNotFoundError(errno.ENOENT, "No such object", _text(path))
        kind = "directory" if entry.is_directory else "file"
        about = {"size": entry.size, "mtime": entry.modified, "content": entry.content}
        return {"name": entry.name, "type": kind, **about}

    def exists(self, path: PathLike) -> bool:
        """Returns True for an object or a directory. Raises errors of the service, which fsspec's `exists` hides."""
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def isdir(self, path: PathLike) -> bool:
        """Returns True for a directory. Raises errors of the service, which fsspec's `isdir` hides."""
        try:
            return bool(self.info(path)["type"] == "directory")
        except FileNotFoundError:
            return False

    def listdir(self, path: PathLike, detail: bool = False) -> list[str]:
        """Returns the paths of the entries of a directory, one level deep, whatever `detail` is.

        Raises:
          FileNotFoundError: the directory does not exist.
        """
        del detail
        own = self._key(path)
        found = self._entries(path, recursive=False)
        if not found:
            raise FileNotFoundError(errno.ENOENT, "No such directory", _text(path))
        # An empty object named like the directory stands for an empty directory.
        return sorted({entry.name.rstrip("/") for entry in found} - {own})

    def objects(self, path: PathLike) -> list[listing.Entry]:
        """Returns a `listing.Entry` for each object below a path, at any depth, sorted by name."""
        return sorted(self._entries(path, recursive=True), key=lambda entry: entry.name)

    def find(self, path: PathLike) -> list[str]:
        """Returns the paths of all objects below a path, at any depth."""
        return [f"{self.scheme}://{entry.name}" for entry in self.objects(path)]

    def _entries(self, path: PathLike, *, recursive: bool) -> list[listing.Entry]:
        key = self._key(path)
        return self._try("listing", path, lambda: listing.entries(self._fs, self.scheme, key, recursive=recursive))

    def glob(self, pattern: PathLike) -> list[str]:
        """Returns the sorted paths that match a glob pattern, without the scheme."""
        return sorted(self._try("listing", pattern, lambda: self._fs.glob(_text(pattern))))

    def walk(self, top: PathLike, **settings: Any) -> Iterator[tuple[str, list[str], list[str]]]:
        """Yields (directory, subdirectories, files) as `os.walk` does."""
        for root, directories, files in self._try("listing", top, lambda: list(self._fs.walk(_text(top), **settings))):
            yield f"{self.scheme}://{root}", directories, files

    def makedirs(self, path: PathLike, exist_ok: bool = False) -> None:
        """Does nothing, because a directory exists while it has objects, and users make buckets themselves."""

    def mkdir(self, path: PathLike, create_parents: bool = False) -> None:
        """Does nothing; see `makedirs`."""

    def rmdir(self, path: PathLike) -> None:
        """Removes the object that marks an empty directory. Never removes a bucket."""
        key = self._key(path)
        if "/" in key:
            self._remove_all([f"{key}/"])

    def rm(self, path: PathLike, recursive: bool = False) -> None:
        """Deletes an object; with `recursive`, everything below a directory.

        Raises:
          FileNotFoundError: the path does not exist. On S3, deleting a single missing object raises nothing.
        """
        if not recursive:
            self._try("deleting", path, lambda: self._fs.rm_file(_text(path)))
            return
        found = self.find(path)
        if not found:
            raise FileNotFoundError(_text(path))
        self._remove_all(found)

    def rename(self, path: PathLike, target: PathLike, recursive: bool = False) -> None:
        """Copies every object to the new path, then deletes the old objects. Not atomic: for a while, both exist."""
        del recursive
        source, goal = _text(path).rstrip("/"), _text(target).rstrip("/")
        found = self.find(path) or [source]

        def copy(name: str) -> None:
            self._try("copying", name, lambda: self._fs.cp_file(name, goal + name.removeprefix(source)))

        with concurrent.futures.ThreadPoolExecutor(_COPIES_AT_ONCE) as pool:
            list(pool.map(copy, found))
        self._remove_all(found)

    def open(self, path: PathLike, mode: str = "r") -> IO[Any]:
        """Opens an object to read ('r', 'rb') or to write ('w', 'wb').

        Closing a file that is open for writing writes the object. If its `with` block raises, nothing is written.

        Raises:
          FileNotFoundError: the object to read does not exist. A file opened with 'rb' raises it at the first read.
          OSError: `mode` is 'a', which object stores don't support; see `storage.append`.
        """
        kind = mode.replace("b", "").replace("t", "")
        if kind == "r" and "b" not in mode:
            # Text files are small, and asking for the size takes more requests than reading.
            return io.TextIOWrapper(io.BytesIO(self.read(path)), encoding="utf-8")
        if kind == "r":
            return io.BufferedReader(_Reader(self, _text(path)), _READ_BYTES)
        if kind == "w":
            return cast(IO[Any], _Writer(self, _text(path), mode))
        raise OSError(
            f"{_text(path)} is in an object store, where nothing can be appended; use storage.append.open_append"
        )

    def size(self, path: PathLike) -> int:
        """Returns the size of an object in bytes.

        Raises:
          FileNotFoundError: the object does not exist.
          IsADirectoryError: it is a directory.
        """
        if (found := self.info(path))["type"] == "directory":
            raise IsADirectoryError(f"{_text(path)} is a directory")
        return int(found["size"])

    def read(self, path: PathLike, start: int | None = None, end: int | None = None) -> bytes:
        """Returns an object's bytes from `start` (None: the beginning) to `end` (None: the end). Takes one request."""
        given = {"start": start, "end": end, **_READ_OPTIONS.get(self.scheme, {})}
        self._greet(path)
        data: bytes = self._try("reading", path, lambda: self._fs.cat_file(_text(path), **given))
        return data

    def put(self, path: PathLike, data: bytes, *, attempts: int | None = None) -> None:
        """Writes an object atomically. `attempts`: maximum number of attempts; None for the default."""
        if len(data) > _BRIEF_BYTES:
            self._greet(path)
        self._call(lambda: self._fs.pipe_file(_text(path), data), f"writing {_text(path)}", attempts or self._attempts)

    def put_file(self, path: PathLike, local: str) -> None:
        """Uploads a local file atomically."""
        self._greet(path)
        self._try("writing", path, lambda: self._fs.put_file(local, _text(path)))

    def create(self, path: PathLike, data: bytes) -> bool:
        """Creates an object atomically. Returns False if it already exists with content other than `data`.

        After a cut connection, the put is repeated, although the first put may have succeeded. Therefore the result is also
        True if the existing object's content is `data`.
        """
        try:
            self._try("writing", path, lambda: self._fs.pipe_file(_text(path), data, mode="create"))
        except OSError as error:
            if not (isinstance(error, FileExistsError) or 412 in (http_status(error), http_status(error.__cause__))):
                raise
            try:
                return self.read(path) == data
            except FileNotFoundError:  # its creator has deleted it meanwhile
                return False
        return True

    def remove(self, path: PathLike) -> None:
        """Deletes an object if it exists. Takes one request."""
        self._try("deleting", path, lambda: self._remove_if_there(_text(path)))

    def _remove_all(self, paths: list[str]) -> None:
        plain = [path for path in paths if not glob_lib.has_magic(path)]

        def remove() -> None:
            try:
                if plain:
                    self._fs.rm(plain)
            except FileNotFoundError:
                # Something was deleted meanwhile, and the rest may still be there.
                for path in plain:
                    self._remove_if_there(path)

        if plain:
            self._try("deleting", plain[0], remove)
        for path in paths:
            if glob_lib.has_magic(path):
                self.remove(path)

    def _remove_if_there(self, path: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            self._fs.rm_file(path)

    def _key(self, path: PathLike) -> str:
        """Returns 'bucket/name' for a path, without a slash at the end."""
        return _text(path).removeprefix(f"{self.scheme}://").rstrip("/")

    def _try(self, doing: str, path: PathLike, call: Callable[[], _Result]) -> _Result:
        return self._call(call, f"{doing} {_text(path)}", self._attempts)

    def _greet(self, path: PathLike) -> None:
        """Sends a brief request if the service has not answered yet, because `FirstAnswer` limits the first request's time."""
        if not self._first_answer.has_come:
            self.exists(path)

    def _call(self, call: Callable[[], _Result], what: str, attempts: int) -> _Result:
        try:
            if self._first_answer.has_come:
                return retry(call, what=what, attempts=attempts)
            return self._first_answer.wait_for(call, what=what, attempts=attempts)
        except OSError:
            raise
        except Exception as error:
            # Callers expect a file system's errors.
            raise StoreError(errno.EIO, f"{what} failed: {summary(error)}") from error


class _Reader(io.RawIOBase):
    """A readable file whose content is an object. Each read requests a range of bytes."""

    def __init__(self, store: ObjectStore, path: str):
        super().__init__()
        self._store, self._path = store, path
        self._position = 0

    @functools.cached_property
    def _size(self) -> int:
        return self._store.size(self._path)

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        if whence == io.SEEK_END:
            offset += self._size
        elif whence == io.SEEK_CUR:
            offset += self._position
        self._position = max(0, offset)
        return self._position

    def readall(self) -> bytes:
        """Reads the rest of the object in one request; the inherited method takes one request per 8 KiB."""
        if self._position == 0:
            data = self._store.read(self._path)
        elif self._position >= self._size:
            data = b""
        else:
            data = self._store.read(self._path, self._position, self._size)
        self._position += len(data)
        return data

    def readinto(self, buffer: Any) -> int:
        end = min(self._position + len(buffer), self._size)
        if end <= self._position:
            return 0
        data = self._store.read(self._path, self._position, end)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


class _Writer(io.IOBase):
    """A file that collects its content in memory or in a temporary file, and uploads it when it is closed."""

    def __init__(self, store: ObjectStore, path: str, mode: str):
        super().__init__()
        self._store, self._path, self._is_text = store, path, "b" not in mode
        self._content: Any = tempfile.SpooledTemporaryFile(_MEMORY_BYTES)  # noqa: SIM115  # closed in `close`

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        self._content.write(data.encode() if self._is_text else data)
        return len(data)

    def tell(self) -> int:
        return int(self._content.tell())

    def flush(self) -> None:
        """Does nothing: the whole object is written when the file is closed."""

    def close(self) -> None:
        if self.closed:
            return
        try:
            self._upload()
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the file without uploading it."""
        self._content.close()
        super().close()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            self.discard()

    def __del__(self) -> None:
        # A file that was left open by an error is half-written: it must not become an object.
        if not self.closed:
            self.discard()

    def _upload(self) -> None:
        size = self._content.tell()
        self._content.seek(0)
        if size <= _MEMORY_BYTES:
            self._store.put(self._path, self._content.read())
            return
        with tempfile.NamedTemporaryFile() as copy:
            while chunk := self._content.read(_READ_BYTES):
                copy.write(chunk)
            copy.flush()
            self._store.put_file(self._path, copy.name)


def _text(path: PathLike) -> str:
    """Returns the path without a trailing slash, because 'a/' and 'a' are different objects."""
    text = os.fspath(path)
    return text if text.endswith("://") else text.rstrip("/")
