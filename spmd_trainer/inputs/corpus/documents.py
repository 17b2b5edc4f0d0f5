"""Documents of a corpus: how users name them (`Documents`), and how the pipeline reads them (`Source`)."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np

if TYPE_CHECKING:
    from spmd_trainer.inputs.corpus.tokens import StoredTokens, Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
      content: its text, UTF-8 (not validated yet), or for a `Processor` the record as JSON; or where its tokens are, for a
        corpus tokenised ahead.
      where: file and record, for messages: 'a.jsonl:3', 'x.parquet row group 2, row 17', 'a.arrayrecord record 5'.
        Lines and rows count from 1, records from 0.
    """

    content: bytes | StoredTokens
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that gives no document.

    Attributes:
      where: file and record, as in `Document`.
      problem: a clause, e.g. 'is not JSON: ...' or 'has no column "text"'; or a sentence after a colon.
    """

    where: str
    problem: str

    @classmethod
    def of(cls, where: str, error: Exception) -> BadRecord:
        """Makes one of an error, whose message may begin with `where`."""
        text = str(error)
        return BadRecord(where, text.removeprefix(where).strip() if text.startswith(where) else f": {text}")

    @property
    def text(self) -> str:
        """The file, the record and the problem."""
        return f"{self.where}{'' if self.problem.startswith(':') else ' '}{self.problem}"


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut(BadRecord):
    """A record that a processor or a store leaves out. `size`: bytes that it counts for in the order of a store."""

    size: int


Record = Document | BadRecord
# Key of the text; or entries of a record, which as a whole is the document, as JSON.
Column = str | tuple[str, ...]
# Default of `Documents.max_record_bytes`.
MAX_RECORD_BYTES = 2**25


def too_long(where: str, longest: int, size: int | None = None) -> BadRecord:
    """A record of more than `longest` bytes, which was not read whole. `size`: its bytes, if they are known."""
    has = "more" if size is None else f"{size:,} bytes, more"
    return BadRecord(
        where, f"has {has} than max_record_bytes={longest:,}; raise it in Documents if the record is right"
    )


class Processor(Protocol):
    """Makes tokens of records that aren't texts: conversations, pairs of answers.

    Attributes:
      entries: entries of a record that it reads.
      gives_pairs: True if the tokens of a record are two sequences, for `PreferenceInput`.
      seq_len: tokens per row; set by the input, and a setting where there is none.
    """

    entries: ClassVar[tuple[str, ...]]
    gives_pairs: ClassVar[bool]

    @property
    def seq_len(self) -> int: ...

    def bound(self, tokenizer: Any, seq_len: int) -> Processor:
        """Returns it for a tokenizer and rows of `seq_len` tokens. Raises UserError if they can't be used."""

    def encode(self, documents: Sequence[Document]) -> list[Tokens | BadRecord]:
        """Returns the tokens of each record of JSON, with the labels that count; or why there are none."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything besides the tokenizer that decides the tokens, as JSON values."""


class Source(abc.ABC):
    """Documents in chunks (files, row groups, record batches), numbered from 0 within each chunk and across all
    chunks.

    Reads are repeatable. One thread at a time may use a source.
    """

    @property
    @abc.abstractmethod
    def num_chunks(self) -> int:
        """Number of chunks, 1 or more."""

    @property
    @abc.abstractmethod
    def random_access(self) -> bool:
        """True if any document can be read by number without reading the ones before it."""

    @property
    @abc.abstractmethod
    def num_bytes(self) -> int:
        """Total bytes of all files."""

    @property
    @abc.abstractmethod
    def size_text(self) -> str:
        """Size for messages: '3 files of 15,000 bytes'."""

    @abc.abstractmethod
    def chunk_sizes(self) -> np.ndarray | None:
        """Returns the records of each chunk, int64 [num_chunks]; None if counting them means reading them all."""

    @abc.abstractmethod
    def read_chunk(self, chunk: int, start: int) -> Iterator[Record]:
        """Yields a chunk's records from number `start` on, with bounded memory.

        Raises:
          UserError: the file can't be read further; names the file, and the record or row group.
        """

    @abc.abstractmethod
    def read(self, numbers: np.ndarray) -> list[Record]:
        """Reads records by their numbers across all chunks, int64 [n], in any order.

        Raises:
          UserError: a file (named) can't be read, or has changed since it was opened.
          NotImplementedError: the source has no `random_access`.
        """

    @abc.abstractmethod
    def fingerprint(self) -> dict[str, Any]:
        """Returns JSON values that change when a file is added, removed, reordered or resized. Reads no file."""

    @abc.abstractmethod
    def changed_text(self, before: Mapping[str, Any]) -> str:
        """Describes the changes since `fingerprint` returned `before`, with file names if they are known."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """A corpus as users name it.

    Example: `Documents("gs://bucket/web/*.parquet", column="content")`.

    Attributes:
      files: paths, globs and directories, one of them, or a function without arguments that returns them; local, gs://,
        s3:// or hf://. A directory stands for all non-hidden files below it, except empty files whose names begin with '_'.
      column: column or key of the text; 'a.b' is key b of the object in a. In tar shards, the member's extension.
      kind: 'jsonl', 'parquet', 'arrow', 'arrayrecord', 'tfrecord', 'tar', 'text' or 'tokens'; None detects it from the
        files' names and first bytes.
      shuffle: 'global': any order of all documents. 'auto': global if documents can be read by number, otherwise a
        window (JSON lines in object stores take a window too: each document would cost a request). A number: shuffled
        chunks, and windows of this many documents. None: in order. Only training shuffles, unless the input says
        otherwise.
      epochs: passes over the documents; None: endless in training, one otherwise.
      separator: text between the documents of a text file; None makes each file one document.
      processor: makes tokens of records that aren't texts, e.g. `inputs.Chat()` of conversations. `column` then says nothing.
      max_record_bytes: most bytes of a record before it is parsed: a line with its end, a tar member, a document of a text file,
        an Example. A longer one counts as a bad record and is not read whole.
      allow_binary: True reads files of any bytes as text, for the kind 'text'.
    """

    files: Any
    column: str = "text"
    kind: str | None = None
    shuffle: str | int | None = "auto"
    epochs: int | None = None
    separator: str | None = None
    processor: Processor | None = None
    max_record_bytes: int = MAX_RECORD_BYTES
    allow_binary: bool = False
