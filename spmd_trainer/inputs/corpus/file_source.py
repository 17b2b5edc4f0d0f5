"""Base of the sources over files."""

from __future__ import annotations

import collections
import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus.documents import Record, Source
from spmd_trainer.inputs.corpus.open_files import changed
from spmd_trainer.inputs.numbering import Numbering
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import reading

# Files that a saved position names with their sizes; of more files it has a checksum only.
_NAMED = 64


class FileSource(Source):
    """A source over files whose sizes are those when it was opened. `paths` and `sizes` are in the order of the documents.

    Attributes:
      kind: how the files are read, one of `file_kinds.KINDS`. A change of it is a change of the data.
    """

    kind: ClassVar[str]

    def __init__(self, paths: Sequence[str]):
        """Takes the sizes of the files.

        Args:
          paths: existing files, in the order of their documents.

        Raises:
          UserError: a file can't be read; names it.
        """
        self.paths = tuple(paths)
        self.sizes = reading.for_each(self.paths, _size)

    @property
    def num_chunks(self) -> int:
        return len(self.paths)

    @property
    def random_access(self) -> bool:
        return False

    @property
    def num_bytes(self) -> int:
        return sum(self.sizes)

    @property
    def size_text(self) -> str:
        return f"{count_text(len(self.paths), 'file')} of {self.num_bytes:,} bytes"

    def chunk_sizes(self) -> np.ndarray | None:
        return None

    def read(self, numbers: np.ndarray) -> list[Record]:
        raise NotImplementedError(f"{type(self).__name__} reads documents in order only")

    def refuse_changed(self, index: int) -> None:
        """Refuses a file whose size has changed since the source was opened.

        Args:
          index: the file.

        Raises:
          UserError: its size has changed, or it can't be read; names it.
        """
        if _size(self.paths[index]) != self.sizes[index]:
            raise changed(self.paths[index], self.sizes[index])

    @functools.cached_property
    def _named(self) -> list[tuple[str, int]]:
        return [(os.path.basename(path), size) for path, size in zip(self.paths, self.sizes, strict=True)]

    def fingerprint(self) -> dict[str, Any]:
        checksum = zlib.crc32(repr(self._named).encode())
        found: dict[str, Any] = {"kind": self.kind, "checksum": checksum, "size": self.size_text}
        if len(self.paths) <= _NAMED:
            found["named"] = [list(one) for one in self._named]
        return found

    def changed_text(self, before: Mapping[str, Any]) -> str:
        kind = before.get("kind")
        parts = [] if kind in (None, self.kind) else [f"they were read as {kind!r} and are read as {self.kind!r}"]
        if before["checksum"] != self.fingerprint()["checksum"]:
            parts.append(self._changed_files(before))
        return ", ".join(parts) or f"their kind was not saved, and is {self.kind!r}"

    def _changed_files(self, before: Mapping[str, Any]) -> str:
        if "named" not in before or len(self.paths) > _NAMED:
            return f"{before['size']}, now {self.size_text}"
        old, new = collections.Counter(map(tuple, before["named"])), collections.Counter(self._named)
        # Files in different folders may have the same name.
        gone, added = sorted((old - new).elements()), sorted((new - old).elements())
        sizes = dict(added)
        resized = {name: size for name, size in gone if name in sizes}
        parts = [f"{name} is gone" for name, _ in gone if name not in resized]
        parts += [f"{name} is new" for name, _ in added if name not in resized]
        parts += [f"{name} had {size:,} bytes and has {sizes[name]:,}" for name, size in resized.items()]
        return ", ".join(parts) or "their order"


class NumberedFiles(FileSource):
    """A source over files whose documents can be read by their number.

    Attributes:
      numbering: the documents of each chunk.
    """

    numbering: Numbering

    @property
    def random_access(self) -> bool:
        return True

    def chunk_sizes(self) -> np.ndarray:
        return self.numbering.counts


def _size(path: str) -> int:
    try:
        return reading.size(path)
    except OSError as error:
        raise UserError(f"{path} can't be read: {reading.problem(path, error)}") from error
