"""Documents: what a corpus holds, how users name it (`Documents`), and how the pipeline reads it (`Source`)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
      content: its text, UTF-8 (not checked yet); or its tokens, unsigned [n], if the corpus was tokenised ahead.
      where: the file and the record, for messages: 'a.jsonl:3', 'x.parquet row group 2, row 17', 'a.arrayrecord record 5'. Lines
        and rows count from 1, records from 0.
    """

    content: bytes | np.ndarray
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that gives no document.

    Attributes:
      where: the file and the record, as in `Document`.
      problem: a clause about it, e.g. 'is not JSON: ...' or 'has no column "text"'.
    """

    where: str
    problem: str


Record = Document | BadRecord


class Source(abc.ABC):
    """Documents in chunks (files, row groups, record batches), numbered from 0 in each chunk and in all chunks together.

    Reading a source at the same place gives the same records. It may be used by one thread at a time.
    """

    @property
    @abc.abstractmethod
    def num_chunks(self) -> int:
        """Number of chunks, 1 or more."""

    @property
    @abc.abstractmethod
    def random_access(self) -> bool:
        """Whether any document can be read by its number, without reading those before it."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Bytes of all files together."""

    @property
    @abc.abstractmethod
    def size_text(self) -> str:
        """What the source is, for messages: '3 files of 15,000 bytes'."""

    @abc.abstractmethod
    def chunk_sizes(self) -> np.ndarray | None:
        """Returns the records of each chunk, int64 [num_chunks]; None if only reading them all would tell."""

    @abc.abstractmethod
    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        """Yields a chunk's records from number `start` on, with bounded memory.

        Raises:
          UserError: the file can't be read any further; names the file, and the record or row group.
        """

    @abc.abstractmethod
    def read(self, numbers: np.ndarray) -> list[Record]:
        """Returns records by their number in all chunks together.

        Args:
          numbers: int64 [n], in any order.

        Raises:
          UserError: a file can't be read, or has changed since it was opened; names the file.
          NotImplementedError: the source has no `random_access`.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON values that change when a file is added, removed, reordered or resized. Reads no file."""

    @abc.abstractmethod
    def changed_text(self, before: Mapping[str, Any]) -> str:
        """Returns what has changed since `fingerprint` gave other values, for a message: names files where it can."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """A corpus as users name it.

    Example: `Documents("gs://bucket/web/*.parquet", column="content")`.

    Attributes:
      files: paths, globs and directories, one of them, or a function without arguments that returns them; local, gs:// or s3://.
        A directory stands for all files below it that are not hidden; empty files whose names begin with '_' are left out.
      column: the column or key that holds the text; 'a.b' is key b of the object in a. In tar shards, the member's extension.
      kind: 'jsonl', 'parquet', 'arrow', 'arrayrecord', 'tfrecord', 'tar', 'text' or 'tokens'; None finds out by the names and the
        first bytes of the files.
      shuffle: 'global': any order of all documents; 'auto': global where documents can be read by number, otherwise a
        window (also for JSON lines in object stores: each document would take a request); a number of documents: a window of so
        many, in shuffled chunks; None: in order. Training shuffles, unless the input says otherwise.
      epochs: times that each document is given; None: without end in training, once otherwise.
      separator: text between the documents of a text file; None makes each file one document.
    """

    files: Any
    column: str = "text"
    kind: str | None = None
    shuffle: str | int | None = "auto"
    epochs: int | None = None
    separator: str | None = None
