"""Detects the kind of a corpus's files (e.g. JSON lines) from their names and first bytes, and decompresses files.

Files may be compressed with gzip or Zstandard. Zstandard needs pyarrow (`pip install 'spmd-trainer[data]'`).
"""

from __future__ import annotations

import collections
import gzip
import io
import os
import re
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO

from etils import epath

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import file_formats, files, record_files
from spmd_trainer.storage import is_remote, reading

SUFFIXES = {
    "jsonl": (".jsonl", ".ndjson", ".json"),
    "parquet": (".parquet", ".pq"),
    "arrow": (".arrow", ".feather"),
    "arrayrecord": (".arrayrecord", ".array_record", ".riegeli"),
    "tfrecord": (".tfrecord", ".tfrecords"),
    "tar": (".tar", ".tgz"),
    "text": (".txt", ".md", ".py", ".text", ".html"),
}
TOKENS = "tokens"
KINDS = (*SUFFIXES, TOKENS)
_COMPRESSED = (".gz", ".zst")
# Shard number after the suffix: 'c4.tfrecord-00000-of-01024'.
_SHARD = re.compile(r"-\d+-of-\d+(?=(\.gz|\.zst)?$)")
_UNREAD = {".csv": "comma", ".tsv": "tab"}
_GZIP, _ZSTANDARD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# Skippable frames of Zstandard begin with a byte from 0x50 to 0x5f, followed by the bytes of _SKIPPED.
# https://github.com/facebook/zstd/blob/dev/doc/zstd_compression_format.md
_SKIPPED_FIRST, _SKIPPED = range(0x50, 0x60), b"\x2a\x4d\x18"
_HEAD_BYTES = 4
# Buffer size for reading the decompressed content of Zstandard files, in bytes.
_BLOCK = 2**16
# Exceptions of damaged files: gzip raises EOFError, zlib.error and BadGzipFile (an OSError).
DAMAGE: tuple[type[Exception], ...] = (OSError, EOFError, zlib.error)


def kind_of_all(paths: Sequence[str]) -> str:
    """Returns the common kind of all files.

    Raises:
      UserError: the files are of several kinds, or the kind of a file can't be detected; the message names files.
    """
    kinds: dict[str, list[str]] = collections.defaultdict(list)
    for path in paths:
        if (kind := _kind(path)) is not None:
            kinds[kind].append(path)
    if not kinds:
        raise UserError(f"{paths[0]} is empty, and its name doesn't tell its kind; set kind to one of {_listed(KINDS)}")
    if len(kinds) > 1:
        listed = "; ".join(f"{len(found)} of {kind!r}, e.g. {found[0]}" for kind, found in kinds.items())
        most = max(kinds.values(), key=len)[0]
        pattern = os.path.join(os.path.dirname(most), "*" + os.path.splitext(most)[1])
        raise UserError(
            f"the files are of several kinds: {listed}. Choose those of one kind by a pattern, e.g. files={pattern!r}; "
            "or make a Documents of each kind, and a Mixture of them"
        )
    return next(iter(kinds))


def is_compressed(head: bytes) -> bool:
    """Returns True if the first bytes of a file are those of gzip or Zstandard."""
    return head.startswith(_GZIP) or _is_zstandard(head)


def read_head(path: str) -> bytes:
    """Returns the first 4 KiB of a file. Raises UserError if the file can't be read."""
    with files.readable(path):
        return reading.read(path, 0, file_formats.HEAD_BYTES)


def kind_of_name(path: str) -> str | None:
    """Returns the kind that the suffix of a file's name indicates, or None if the suffix is unknown."""
    name = _plain_name(path)
    return next((kind for kind, suffixes in SUFFIXES.items() if name.endswith(suffixes)), None)


def _plain_name(path: str) -> str:
    """Returns a file's name in lower case, without its folder, its shard number and the suffixes .gz and .zst."""
    name = _SHARD.sub("", os.path.basename(path).lower())
    for suffix in _COMPRESSED:
        name = name.removesuffix(suffix)
    return name


def _kind(path: str) -> str | None:
    """Returns the kind of a file by its name, or else by its first bytes; None for an empty file without a known suffix."""
    if (named := kind_of_name(path)) is not None:
        return named
    suffix = os.path.splitext(_plain_name(path))[1]
    if suffix in _UNREAD:
        raise UserError(
            f"{path} holds rows with {_UNREAD[suffix]}s between the columns, which no kind reads. Convert it to Parquet or JSON "
            "lines, e.g. with pandas; kind='text' takes the file for one document"
        )
    head = _read_content_head(path)
    if not head:
        return None
    # Checked first: a TFRecord of 123 bytes begins with the byte of '{'. Only TFRecords begin with a length and its checksum.
    if record_files.begins_with_record(head):
        return "tfrecord"
    if head.lstrip().startswith(b"{"):
        return "jsonl"
    if (found := file_formats.identify(head)) is not None:
        if found.kind is not None:
            return found.kind
        raise UserError(f"{path} is {found.name}, which no kind reads. {found.instead}")
    known = [one for suffixes in SUFFIXES.values() for one in suffixes]
    near = did_you_mean(suffix, known) if suffix else ""
    raise UserError(
        f"neither the name of {path} nor its first bytes tells its kind; set kind to one of {_listed(KINDS)}{near}"
    )


def _read_content_head(path: str) -> bytes:
    head = read_head(path)
    if not is_compressed(head):
        return head
    try:
        with open_bytes(path) as file:
            return decompressed(file, path).read(file_formats.HEAD_BYTES)
    except DAMAGE as error:
        raise UserError(f"{path} is damaged: {error}. Write the file again, or leave it out") from error


def _listed(kinds: Sequence[str]) -> str:
    return ", ".join(map(repr, kinds))


def open_bytes(path: str) -> BinaryIO:
    """Opens a local or remote file for reading."""
    file: BinaryIO = epath.Path(path).open("rb") if is_remote(path) else open(path, "rb", opener=reading.opened)  # noqa: SIM115
    return file


def _is_zstandard(head: bytes) -> bool:
    is_skipped = head[1:_HEAD_BYTES] == _SKIPPED and head[0] in _SKIPPED_FIRST
    return is_skipped or head.startswith(_ZSTANDARD)


def decompressed(file: BinaryIO, path: str) -> BinaryIO:
    """Returns a reader of a file's content, decompressed if the first bytes are those of gzip or Zstandard.

    Raises:
      UserError: the file is compressed by Zstandard, and pyarrow isn't installed.
    """
    head = file.read(_HEAD_BYTES)
    file.seek(0)
    if head.startswith(_GZIP):
        return gzip.GzipFile(fileobj=file)  # type: ignore[return-value]
    if _is_zstandard(head):
        pyarrow = imported("pyarrow", f"{path}: .zst files need pyarrow: pip install 'spmd-trainer[data]'")
        return io.BufferedReader(
            _Unpacked(pyarrow.CompressedInputStream(pyarrow.PythonFile(file, "r"), "zstd")), _BLOCK
        )
    return file


class _Unpacked(io.RawIOBase):
    """Reader for a decompressing pyarrow stream. Raises EOFError for damaged content (pyarrow raises OSError without errno)."""

    def __init__(self, stream: Any):
        self._stream = stream

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            count: int = self._stream.readinto(buffer)
        except OSError as error:
            if error.errno is None:
                raise EOFError(str(error)) from error
            raise
        return count
