"""Where the lines of a file are."""

from __future__ import annotations

from typing import BinaryIO, NamedTuple

import numpy as np
from etils import epath

from spmd_trainer.storage import is_remote
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


def open_bytes(path: str) -> BinaryIO:
    """Opens a file for reading, on a disk or in an object store."""
    file: BinaryIO = epath.Path(path).open("rb") if is_remote(path) else open(path, "rb")  # noqa: SIM115
    return file
