"""JSON lines: a JSON object in each line. Also compressed by gzip or Zstandard; the latter needs the extra `data`.

A chunk is a file. Empty lines aren't records.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator, Sequence
from typing import ClassVar, NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.columns import document_of
from spmd_trainer.inputs.corpus.compression import decompressed, open_bytes
from spmd_trainer.inputs.corpus.documents import BadRecord, Record
from spmd_trainer.inputs.corpus.file_source import FileSource, IndexedFiles, changed
from spmd_trainer.storage import reading
from spmd_trainer.storage.local_copies import cached_index

# Bytes that are searched for newlines at a time.
_BLOCK = 2**22
# Indices of smaller files are quicker to make than to find.
_CACHED_BYTES = 2**20
_NEWLINE, _RETURN = b"\n\r"


class LineIndex(NamedTuple):
    """The lines of a file that aren't empty.

    Attributes:
      starts: where each line begins, and then the end of the file, int64 [lines + 1]. Empty lines count to the line before.
      empty: for each empty line, the index of the line that follows it, int64 [empty lines], ascending.
    """

    starts: np.ndarray
    empty: np.ndarray

    def line_number(self, index: int) -> int:
        """Returns the number of a line in the file, with the empty lines, from 1."""
        return index + 1 + (int(np.searchsorted(self.empty, index, side="right")) if len(self.empty) else 0)


def index_lines(path: str, size: int) -> LineIndex:
    """Returns the index of a file. That of a large file is made once, and mapped from the cache folder.

    Args:
      path: the file.
      size: its bytes.

    Raises:
      OSError: the file can't be read.
    """
    index = _find_lines(path) if size < _CACHED_BYTES else cached_index(path, "line-index", lambda: _find_lines(path))
    count = int(index[0])
    return LineIndex(index[1 : count + 2], index[count + 2 :])


def _find_lines(path: str) -> np.ndarray:
    """Returns the number of lines and the two arrays of a `LineIndex`, as one array."""
    with open_bytes(path) as file:
        starts, empty, count = [], [], 0
        begin = end = 0  # of the line that isn't complete; of what was read
        last = 0  # the byte before the block
        while block := file.read(_BLOCK):
            content = np.frombuffer(block, np.uint8)
            ends = np.flatnonzero(content == _NEWLINE)
            begins = np.append(begin, ends[:-1] + (end + 1)) if len(ends) else ends
            lengths = ends + end - begins
            is_empty = lengths == 0
            short = np.flatnonzero(lengths == 1)
            is_empty[short] = np.where(ends[short] > 0, content[ends[short] - 1], last) == _RETURN
            starts.append(begins[~is_empty])
            empty.append(count + np.cumsum(~is_empty)[is_empty])
            count += len(starts[-1])
            begin = int(ends[-1]) + end + 1 if len(ends) else begin
            end += len(block)
            last = int(content[-1])
    if begin < end:
        starts.append(np.array([begin]))
        count += 1
    return np.concatenate([[count], *starts, [end], *empty]).astype(np.int64, copy=False)


_EMPTY_LINES = (b"\n", b"\r\n")
_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class JsonLines(IndexedFiles):
    """Files of JSON lines on a disk, not compressed. Lines are read by number: where each begins is found once."""

    kind: ClassVar[str] = "jsonl"

    def __init__(self, paths: Sequence[str], column: str = "text"):
        """Finds the lines.

        Args:
          paths: the files.
          column: see `documents.Documents`.

        Raises:
          UserError: a file can't be read.
        """
        self._column = column
        self._lines: dict[int, LineIndex] = {}
        super().__init__(paths)

    def find_records(self, index: int) -> np.ndarray:
        path = self.paths[index]
        try:
            self._lines[index] = index_lines(path, self.sizes[index])
        except OSError as error:
            raise UserError(f"{path} can't be read: {reading.problem(path, error)}") from error
        starts = self._lines[index].starts
        if starts[-1] != self.sizes[index]:
            raise changed(path, self.sizes[index])
        return starts

    def record(self, index: int, number: int, content: bytes) -> Record:
        return record_of(content, self._column, f"{self.paths[index]}:{self._lines[index].line_number(number)}")


class StreamedJsonLines(FileSource):
    """Files of JSON lines that are read in order: compressed, or in an object store, where every line would take a request."""

    kind: ClassVar[str] = "jsonl"

    def __init__(self, paths: Sequence[str], column: str = "text"):
        """Takes the files; they are opened when they are read.

        Args:
          paths: the files.
          column: see `documents.Documents`.
        """
        super().__init__(paths)
        self._column = column

    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        path, line_number, number = self.paths[chunk], 0, 0
        try:
            self.refuse_changed(chunk)
            with open_bytes(path) as file:
                for line_number, line in enumerate(decompressed(file, path), 1):
                    if line in _EMPTY_LINES:
                        continue
                    number += 1
                    if number > start:
                        yield record_of(line, self._column, f"{path}:{line_number}")
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            raise UserError(
                f"{path} is damaged: {error or type(error).__name__}. The lines before are whole, the last is {line_number}. "
                "Write the file again, or leave it out"
            ) from error
        except OSError as error:
            raise UserError(f"{path} can't be read after line {line_number}: {reading.problem(path, error)}") from error


def record_of(line: bytes, column: str, where: str) -> Record:
    """Returns the document in a line."""
    try:
        return document_of(json.loads(line.removeprefix(_BYTE_ORDER_MARK).rstrip().decode()), column, where)
    except UnicodeDecodeError as error:
        return BadRecord(where, f"is not UTF-8 (byte {error.start} of the line)")
    except json.JSONDecodeError as error:
        return BadRecord(where, f"is not JSON: {error.msg} (character {error.pos} of the line)")
    except (ValueError, RecursionError) as error:
        return BadRecord(where, f"is not JSON that can be read: {error}")
