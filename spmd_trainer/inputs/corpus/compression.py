"""Reads files that may be compressed by gzip or Zstandard. Zstandard needs the package zstandard: extra `data`."""

from __future__ import annotations

import gzip
import io
import zlib
from typing import Any, BinaryIO

from etils import epath

from spmd_trainer.errors import UserError
from spmd_trainer.storage import is_remote

_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# Skippable frames begin with a byte from 0x50 to 0x5f, then these.
# https://github.com/facebook/zstd/blob/dev/doc/zstd_compression_format.md
_SKIPPED_FIRST, _SKIPPED = range(0x50, 0x60), b"\x2a\x4d\x18"
_HEAD_BYTES = 4
# Compressed bytes per read; their content can be many times larger.
_BLOCK = 2**16
# Exceptions of damaged files: gzip raises EOFError, zlib.error and BadGzipFile (an OSError).
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)


def open_bytes(path: str) -> BinaryIO:
    """Opens a local or remote file for reading."""
    file: BinaryIO = epath.Path(path).open("rb") if is_remote(path) else open(path, "rb")  # noqa: SIM115
    return file


def is_zstandard(head: bytes) -> bool:
    """True if a file begins with a Zstandard frame or a skippable frame."""
    is_skipped = head[1:_HEAD_BYTES] == _SKIPPED and head[0] in _SKIPPED_FIRST
    return is_skipped or head.startswith(_ZSTANDARD)


def is_compressed(head: bytes) -> bool:
    """True if a file begins as gzip or Zstandard."""
    return head.startswith(_GZIP) or is_zstandard(head)


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """Returns a reader of the uncompressed content. The file's first bytes decide.

    Raises:
      UserError: the file is compressed by Zstandard, and zstandard isn't installed.
    """
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if is_zstandard(head):
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path}: .zst files need zstandard: pip install 'spmd-trainer[data]'") from error
        return io.BufferedReader(_ZstandardFrames(zstandard, file), _BLOCK)
    return file


class _ZstandardFrames(io.RawIOBase):
    """Content of all frames of a Zstandard file. Raises inside an incomplete frame, which the library ignores."""

    def __init__(self, zstandard: Any, file: BinaryIO):
        self._zstandard = zstandard
        self._file = file
        self._frame: Any = None
        self._compressed = b""
        self._ready = memoryview(b"")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while not self._ready:
            if not self._compressed and not (read := self._file.read(_BLOCK)):
                if self._frame is not None:
                    raise EOFError("the file ends inside a Zstandard frame")
                return 0
            elif not self._compressed:
                self._compressed = read
            if self._frame is None:
                self._frame = self._zstandard.ZstdDecompressor().decompressobj()
            try:
                self._ready = memoryview(self._frame.decompress(self._compressed))
            except self._zstandard.ZstdError as error:
                raise EOFError(str(error)) from error
            self._compressed = self._frame.unused_data
            if self._frame.eof:
                self._frame = None
        count = min(len(buffer), len(self._ready))
        buffer[:count] = self._ready[:count]
        self._ready = self._ready[count:]
        return count
