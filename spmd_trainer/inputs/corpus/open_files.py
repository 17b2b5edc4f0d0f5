"""Files that are read in pieces."""

from __future__ import annotations

import os
from collections.abc import Sequence

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.last_used import LastUsed, OpenFile
from spmd_trainer.storage import is_remote, reading

# Files that one source has open at a time. A mixture has many sources.
_MAX_OPEN = 8


class OpenFiles:
    """The files of a source, opened when they are first read. A file that changes its size while it is used is an error.

    Several threads may read at a time.
    """

    def __init__(self, paths: Sequence[str], sizes: Sequence[int]):
        """Opens nothing yet.

        Args:
          paths: the files.
          sizes: bytes of each, when the source was opened.
        """
        self._paths, self._sizes = tuple(paths), tuple(sizes)
        self._open: LastUsed[OpenFile] = LastUsed(_MAX_OPEN)

    def read(self, index: int, start: int, stop: int) -> bytes:
        """Returns the bytes of a file from `start` up to `stop`.

        Raises:
          UserError: the file can't be read, or its size has changed; names it.
        """
        path = self._paths[index]
        try:
            content = reading.read(path, start, stop) if is_remote(path) else self._read_local(index, start, stop)
        except OSError as error:
            raise UserError(f"{path} can't be read: {reading.problem(path, error)}") from error
        if len(content) != stop - start:
            raise self._changed(index)
        return content

    def _read_local(self, index: int, start: int, stop: int) -> bytes:
        # Held, so that it isn't closed while it is read.
        opened = self._open.get(index, lambda index: OpenFile(self._paths[index]))
        file = opened.number
        if os.fstat(file).st_size != self._sizes[index]:
            raise self._changed(index)
        content = os.pread(file, stop - start, start)
        if len(content) == stop - start:
            return content
        parts = [content]
        while content and start + sum(map(len, parts)) < stop:  # one call reads 2 GiB at most
            begin = start + sum(map(len, parts))
            content = os.pread(file, stop - begin, begin)
            parts.append(content)
        return b"".join(parts)

    def _changed(self, index: int) -> UserError:
        return changed(self._paths[index], self._sizes[index])


def changed(path: str, size: int) -> UserError:
    """Returns the error about a file that no longer has the size that it had when the source was opened."""
    return UserError(f"{path} had {size} bytes when this run started, and has changed; start the run again")
