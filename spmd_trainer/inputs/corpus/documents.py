"""Documents of a corpus: how the user describes them (`Documents`), and the objects that represent their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from spmd_trainer.inputs.corpus.tokens import StoredTokens, Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document of a corpus.

    Attributes:
      content: the text as UTF-8, not validated yet; or, if a `Processor` tokenizes the document, the record as JSON; or a
        reference to the document's tokens in a token store.
      where: location for messages: 'a.jsonl:3', 'x.parquet row group 2, row 17', 'a.arrayrecord record 5'. Lines, row groups
        and rows are numbered from 1, records from 0.
    """

    content: bytes | StoredTokens
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that can't be used.

    Attributes:
      where: location for messages, as in `Document`.
      problem: continues the message after `where`, e.g. 'is not JSON: ...' or 'has no column "text"'. A space separates the
        two, unless `problem` begins with a colon.
    """

    where: str
    problem: str

    @classmethod
    def of(cls, where: str, error: Exception) -> BadRecord:
        """Makes a BadRecord from an error. If the error's message begins with `where`, that beginning is removed."""
        text = str(error)
        return BadRecord(where, text.removeprefix(where).strip() if text.startswith(where) else f": {text}")

    @property
    def text(self) -> str:
        """Message with the location and the problem."""
        return f"{self.where}{'' if self.problem.startswith(':') else ' '}{self.problem}"


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut(BadRecord):
    """A record that a processor or a token store leaves out without an error, even with `bad_records='raise'`.

    `size`: the record's size in bytes, which `order.size_of` returns.
    """

    size: int


Record = Document | BadRecord
# Name of the column or key that holds the text; or a tuple of keys, if the document is a JSON object with these keys.
Column = str | tuple[str, ...]
# Default of `Documents.max_record_bytes`.
MAX_RECORD_BYTES = 2**25


def too_long(where: str, longest: int, size: int | None = None) -> BadRecord:
    """Returns the BadRecord for a record that has more than `longest` bytes. `size`: the record's size in bytes, if known."""
    has = "more" if size is None else f"{size:,} bytes, more"
    return BadRecord(
        where, f"has {has} than max_record_bytes={longest:,}; raise it in Documents if the record is right"
    )


class Processor(Protocol):
    """Interface for tokenizing records that aren't plain text, such as conversations or preference pairs.

    Attributes:
      entries: the keys of a record that the processor reads.
      gives_pairs: True if each record gives two token sequences (chosen and rejected), for `PreferenceInput`.
      seq_len: tokens per row. The input sets it. `--mode=tokenise` has no input, so the user sets it.
    """

    entries: ClassVar[tuple[str, ...]]
    gives_pairs: ClassVar[bool]

    @property
    def seq_len(self) -> int: ...

    def bound(self, tokenizer: Any, seq_len: int) -> Processor:
        """Returns a copy that uses this tokenizer and rows of `seq_len` tokens. Raises UserError if it can't use them."""

    def encode(self, documents: Sequence[Document]) -> list[Tokens | BadRecord]:
        """Tokenizes records (JSON). Each result has a mask of the tokens that count toward the loss, or is a BadRecord."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything that determines a record's tokens, except the tokenizer, as JSON values."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """A corpus of documents, as the user describes it.

    Example: `Documents("gs://bucket/web/*.parquet", column="content")`.

    Attributes:
      files: path, glob or directory; a list of these; or a function without arguments that returns them. Paths are local,
        gs://, s3:// or hf://. A directory means all non-hidden files below it, except empty files whose names begin with '_'.
      column: name of the column or key that holds the text; 'a.b' is key b of the object under key a. In tar shards: extension
        of the text member; 'text' also accepts 'txt'.
      kind: 'jsonl', 'parquet', 'arrow', 'arrayrecord', 'tfrecord', 'tar', 'text' or 'tokens'; None detects it from the
        files' names and first bytes.
      shuffle: 'global': a random order of all documents. An integer: a random order of the chunks (files, row groups or record
        batches), whose documents are shuffled within windows of this many documents. 'auto': 'global' if documents can be
        read by number (JSON lines in object stores can't), otherwise windows of at most 10,000 documents. None: in order.
        Only training data are shuffled, unless the input's `shuffle` says otherwise.
      epochs: passes over the documents; None: endless in training (but see `Mixture.stopping_strategy`), one otherwise.
      separator: text between the documents of a text file; None makes each file one document.
      processor: tokenizes records that aren't plain text, e.g. `inputs.Chat()` for conversations. `column` is then ignored.
      max_record_bytes: maximum size of a record before it is parsed, in bytes. A record is a line with its newline, a tar
        member, a document of a text file, or a tf.train.Example. A larger record is a bad record, and is not read whole.
      allow_binary: True lets the kind 'text' also read files that aren't text.
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
