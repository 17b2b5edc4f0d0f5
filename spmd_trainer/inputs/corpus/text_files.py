"""Sources over text files: JSON lines, and plain text with one document per file or several with a separator between them.

JSON lines have one JSON object per line, and may be compressed with gzip or Zstandard (which needs pyarrow). Lines with only
spaces aren't records. Each file is a chunk (see `FileSource`).
"""

from __future__ import annotations

import array
import functools
import gzip
import json
import zlib
from collections.abc import Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import file_formats, files, record_files
from spmd_trainer.inputs.corpus.documents import MAX_RECORD_BYTES, BadRecord, Column, Document, Record, too_long
from spmd_trainer.inputs.corpus.file_kinds import decompressed, open_bytes
from spmd_trainer.inputs.corpus.file_source import FilesOrPaths, FileSource, IndexedFiles, document_of
from spmd_trainer.inputs.shards import changed
from spmd_trainer.storage import is_remote, json_values, reading
from spmd_trainer.storage.local_copies import cached_index

# Bytes searched for newlines or separators at a time.
_BLOCK = 2**22
# A line longer than this multiple of `max_record_bytes` is an error. The end of a shorter line is searched for, so that a line
# over `max_record_bytes` is only a bad record.
_LONG_LINES = 8
# Files below this size are faster to index again than to look up in the cache.
_CACHED_BYTES = 2**20
_NEWLINE = b"\n"[0]
# For each byte: whether `bytes.isspace` counts it as a space.
_IS_SPACE = np.array([bytes([byte]).isspace() for byte in range(256)])


class LineIndex(NamedTuple):
    """Index of the non-empty lines of a file. A line with only spaces counts as empty.

    Attributes:
      starts: byte offset of each non-empty line, then the file's end, int64 [lines + 1]. So the range of a line includes empty
        lines after it.
      empty: for each empty line, the index of the next non-empty line, int64 [empty lines], ascending.
    """

    starts: np.ndarray
    empty: np.ndarray

    def line_number(self, index: int) -> int:
        """Returns the number, from 1, of non-empty line `index` among all lines of the file, including empty ones."""
        return index + 1 + (int(np.searchsorted(self.empty, index, side="right")) if len(self.empty) else 0)


def index_lines(path: str, size: int, longest: int = MAX_RECORD_BYTES) -> LineIndex:
    """Returns the line index of a file of `size` bytes. `longest` is the source's `max_record_bytes`.

    The index of a large file is built once, kept in the cache folder and memory-mapped from there.

    Raises:
      OSError: the file can't be read.
      UserError: a line has no end within about `8 * longest` bytes.
    """

    def find() -> np.ndarray:
        return _find_lines(path, longest)

    index = find() if size < _CACHED_BYTES else cached_index(path, "lines", find)
    count = int(index[0])
    return LineIndex(index[1 : count + 2], index[count + 2 :])


def _find_lines(path: str, longest: int) -> np.ndarray:
    """Returns the number of lines and both arrays of a `LineIndex`, concatenated. Raises the errors of `index_lines`."""
    with open_bytes(path) as file:
        starts: list[np.ndarray] = []
        empty: list[np.ndarray] = []
        count = 0
        begin = end = 0  # start of the incomplete line; end of the bytes read
        is_blank = True  # whether the incomplete line has nothing but spaces
        while block := file.read(_BLOCK):
            if b"\n" not in block:  # several times faster than the search for all ends
                end += len(block)
                is_blank = is_blank and block.isspace()
                _refuse_endless(path, count + sum(map(len, empty)) + 1, end - begin, longest)
                continue
            content = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(content == _NEWLINE)
            begins = np.append(begin, ends[:-1] + (end + 1))
            is_empty = _are_blank(content, ends)
            is_empty[0] &= is_blank
            starts.append(begins[~is_empty])
            empty.append(count + np.cumsum(~is_empty)[is_empty])
            count += len(starts[-1])
            begin = int(ends[-1]) + end + 1
            end += len(block)
            is_blank = bool(_IS_SPACE[content[ends[-1] :]].all())
    if not is_blank:
        starts.append(np.array([begin]))
        count += 1
    return np.concatenate([[count], *starts, [end], *empty]).astype(np.int64, copy=False)


def _are_blank(content: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Returns bool [lines]: whether each line in `content`, uint8 [bytes], is blank. `ends`: indices of the newlines."""
    begins = np.append(0, ends[:-1] + 1)
    # Looking at every byte would take longer than the rest of the indexing, and few files have lines that begin with a space.
    if not np.any(_IS_SPACE[content[begins]] & (begins < ends)):
        return begins == ends
    return np.logical_and.reduceat(_IS_SPACE[content[: ends[-1] + 1]], begins)


_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines(IndexedFiles):
    """Source over uncompressed local files of JSON lines. An index of the lines, built once, lets lines be read by number."""

    kind = "jsonl"

    def __init__(self, paths: FilesOrPaths, column: Column = "text", max_record_bytes: int = MAX_RECORD_BYTES):
        """Indexes the lines. `column` and `max_record_bytes` are as in `Documents`.

        Raises:
          UserError: a file can't be read, or has a line that is many times longer than `max_record_bytes`.
        """
        self._column = column
        self.max_record_bytes = max_record_bytes
        self._lines: dict[int, LineIndex] = {}
        super().__init__(paths)

    def find_records(self, index: int) -> np.ndarray:
        path = self.paths[index]
        with files.readable(path):
            self._lines[index] = index_lines(path, self.sizes[index], self.max_record_bytes)
        starts = self._lines[index].starts
        if starts[-1] != self.sizes[index]:
            raise changed(path, self.sizes[index])
        return starts

    def record(self, index: int, number: int, content: bytes) -> Record:
        return record_of(content, self._column, self.where(index, number))

    def where(self, index: int, number: int) -> str:
        return f"{self.paths[index]}:{self._lines[index].line_number(number)}"


class StreamedJsonLines(FileSource):
    """Source over JSON lines that are compressed, or in object stores, where each read is a request. They are read in order."""

    kind = "jsonl"

    def __init__(self, paths: FilesOrPaths, column: Column = "text"):
        """Stores the files. They are opened only when they are read. `column` is as in `Documents`."""
        super().__init__(paths)
        self._column = column

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        path, line_number, number = self.paths[chunk], 0, 0
        try:
            self.refuse_changed(chunk)
            with open_bytes(path) as file:
                for line_number, line in _lines(decompressed(file, path), path, self.max_record_bytes):
                    if line is not None and line.isspace():
                        continue
                    number += 1
                    if number > start:
                        where = f"{path}:{line_number}"
                        yield (
                            too_long(where, self.max_record_bytes)
                            if line is None
                            else record_of(line, self._column, where)
                        )
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is damaged: {error or type(error).__name__}. The lines before are whole, the last is {line_number}. "
                "Write the file again, or leave it out"
            ) from error
        except OSError as error:
            raise UserError(f"{path} can't be read after line {line_number}: {reading.problem(path, error)}") from error


def _lines(file: BinaryIO, path: str, longest: int) -> Iterator[tuple[int, bytes | None]]:
    """Yields (number, line) for each line, with its newline. Numbers count from 1; a line of over `longest` bytes gives None.

    Raises:
      UserError: a line has no end within about `8 * longest` bytes.
    """
    number = 0
    while line := file.readline(longest + 1):
        number += 1
        if len(line) <= longest:
            yield number, line
            continue
        yield number, None
        size = len(line)
        while line and not line.endswith(b"\n"):
            line = file.readline(_BLOCK)
            size += len(line)
            _refuse_endless(path, number, size, longest)


def _refuse_endless(path: str, number: int, size: int, longest: int) -> None:
    """Raises UserError if `size` bytes of line `number` were read without finding its end, and that is too many."""
    if size > _LONG_LINES * longest:
        raise UserError(
            f"{path}:{number} has more than {size:,} bytes, {_LONG_LINES} times max_record_bytes={longest:,}, and is not "
            "left out as a bad record. Leave the file out, or raise the limit: Documents(max_record_bytes=...)"
        )


def record_of(line: bytes, column: Column, where: str) -> Record:
    line = line.removeprefix(_BYTE_ORDER_MARK).rstrip()
    if isinstance(column, tuple):
        return Document(line, where)
    value = value_of(line, where)
    return value if isinstance(value, BadRecord) else document_of(value, column, where)


def value_of(line: bytes, where: str) -> Any:
    """Returns the value of a line of JSON, or a BadRecord if the line can't be parsed."""
    try:
        return json_values.parse(line.decode(), finite=False)
    except UnicodeDecodeError as error:
        return BadRecord(where, f"is not UTF-8 (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        return BadRecord(where, f"is not JSON: {error.msg} (character {error.pos} of the line)")
    except ValueError as error:
        return BadRecord(where, f"is not JSON that can be read: {error}")


class TextDocuments(IndexedFiles):
    """Source of documents in plain text files. Each file is a chunk."""

    kind = "text"

    def __init__(
        self, paths: FilesOrPaths, separator: str | None = None, *, json_too: bool = False, any_bytes: bool = False
    ):
        """Finds where the documents of all files begin.

        Args:
          paths: the files.
          separator: text between the documents of a file, not part of them; None: each file is one document.
          json_too: True reads JSON files too, as plain text; False refuses them.
          any_bytes: True also reads files that aren't text.

        Raises:
          UserError: a file can't be read, or its first bytes show that it isn't text; or `separator` is empty.
        """
        if separator is not None and not (isinstance(separator, str) and separator):
            raise UserError(
                f"separator={separator!r}; set it to the text between two documents, or to None: a file is one document"
            )
        self._separator = None if separator is None else separator.encode()
        self._json_too, self._any_bytes = json_too, any_bytes
        super().__init__(paths)
        # In an object store, every document of a large file would cost a request.
        self.random_access = separator is None or not any(map(is_remote, self.paths))

    def require_separator(self) -> None:
        """Raises UserError if a separator is set, and none of the files contains it."""
        # An empty file counts as one document too.
        if self._separator is not None and self.num_bytes and np.all(self.shards.counts == 1):
            raise UserError(
                f"separator={self._separator.decode()!r} is in none of the files; in a shell, a newline is $'\\n'"
            )

    def find_records(self, index: int) -> np.ndarray:
        size = self.sizes[index]
        head = self._files.read(index, 0, min(size, file_formats.HEAD_BYTES))
        if not self._any_bytes:
            refuse_unless_text(head, self.paths[index])
        if not self._json_too and file_formats.begins_as_json(head):
            raise UserError(
                f"{self.paths[index]} begins as JSON: kind='jsonl' reads the text under a key of each line, kind='text' reads "
                "the file as it is, with its braces and quotes"
            )
        if self._separator is None:
            return np.array([0, size], np.int64)
        find = functools.partial(self._find_separators, index, self._separator)
        return (
            find() if size < _CACHED_BYTES else cached_index(self.paths[index], f"text-{self._separator.hex()}", find)
        )

    def record(self, index: int, number: int, content: bytes) -> Record:
        return Document(
            content if self._separator is None else content.removesuffix(self._separator), self.where(index, number)
        )

    def where(self, index: int, number: int) -> str:
        path = self.paths[index]
        return path if self._separator is None else f"{path} document {number + 1}"

    def _find_separators(self, index: int, separator: bytes) -> np.ndarray:
        """Returns the byte offset of each document in file `index`, then the file's end: int64 [documents + 1]."""
        size, begin = self.sizes[index], 0
        starts = array.array("q", [0])
        while begin < size:
            # Blocks overlap, so that a separator across their border is found once.
            block = self._files.read(index, begin, min(size, begin + _BLOCK + len(separator) - 1))
            place = block.find(separator)
            while place >= 0:
                starts.append(begin + place + len(separator))
                place = block.find(separator, place + len(separator))
            begin = max(begin + _BLOCK, starts[-1])
        starts.append(size)
        return np.frombuffer(starts, np.int64)


def refuse_unless_text(head: bytes, path: str, *, is_utf8: bool = True) -> None:
    """Checks that a file is text.

    Args:
      head: the file's first `file_formats.HEAD_BYTES` bytes.
      path: path of the file, for messages.
      is_utf8: True also refuses UTF-16 and NUL bytes.

    Raises:
      UserError: the first bytes show that the file isn't text.
    """
    kind = file_formats.TFRECORD if record_files.begins_with_record(head) else file_formats.identify(head)
    if kind is not None:
        raise UserError(
            f"{path} is {kind.name}, not text. {kind.instead}. allow_binary=True reads its bytes as they are"
        )
    if is_utf8 and head.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise UserError(f"{path} is UTF-16; convert it with `iconv -f utf-16 -t utf-8`")
    if is_utf8 and b"\0" in head:
        raise UserError(
            f"{path} is not text: byte {head.index(0)} is NUL. Leave it out of `files`, or read it by byte; "
            "allow_binary=True takes NUL for a character"
        )
