"""Documents of a corpus: how the user describes them (`Documents`), and what sources make of their records."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

if TYPE_CHECKING:
    from spmd_trainer.inputs.corpus.tokens import StoredTokens, Tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Document:
    """One document.

    Attributes:
      content: its text, UTF-8 (not validated yet); for a `Processor`, the record as JSON; from a token store, a reference to
        its tokens.
      where: file and record, for messages: 'a.jsonl:3', 'x.parquet row group 2, row 17', 'a.arrayrecord record 5'.
        Lines and rows count from 1, records from 0.
    """

    content: bytes | StoredTokens
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class BadRecord:
    """A record that can't be used.

    Attributes:
      where: file and record, as in `Document`.
      problem: continues the sentence after `where`, e.g. 'is not JSON: ...' or 'has no column "text"'; or a colon and a
        sentence.
    """

    where: str
    problem: str

    @classmethod
    def of(cls, where: str, error: Exception) -> BadRecord:
        """Makes a BadRecord of an error. If the error's message begins with `where`, that beginning is not repeated."""
        text = str(error)
        return BadRecord(where, text.removeprefix(where).strip() if text.startswith(where) else f": {text}")

    @property
    def text(self) -> str:
        """Message with the file, the record and the problem."""
        return f"{self.where}{'' if self.problem.startswith(':') else ' '}{self.problem}"


@dataclasses.dataclass(frozen=True, slots=True)
class LeftOut(BadRecord):
    """A record that a processor or a token store leaves out, also with `bad_records='raise'`.

    `size`: bytes of the record that `order.size_of` counts.
    """

    size: int


Record = Document | BadRecord
# Key of the text; or entries of a record, which as a whole is the document, as JSON.
Column = str | tuple[str, ...]
# Default of `Documents.max_record_bytes`.
MAX_RECORD_BYTES = 2**25


def too_long(where: str, longest: int, size: int | None = None) -> BadRecord:
    """Returns the BadRecord for a record of more than `longest` bytes, which was not read whole. `size`: its bytes, if known."""
    has = "more" if size is None else f"{size:,} bytes, more"
    return BadRecord(
        where, f"has {has} than max_record_bytes={longest:,}; raise it in Documents if the record is right"
    )


class Processor(Protocol):
    """Interface of processors, which tokenise records that aren't texts: conversations, pairs of answers.

    Attributes:
      entries: keys of a record that the processor reads.
      gives_pairs: True if the tokens of a record are two sequences, for `PreferenceInput`.
      seq_len: tokens per row. The input sets it; without an input (`--mode=tokenise`), the user does.
    """

    entries: ClassVar[tuple[str, ...]]
    gives_pairs: ClassVar[bool]

    @property
    def seq_len(self) -> int: ...

    def bound(self, tokenizer: Any, seq_len: int) -> Processor:
        """Returns a copy that uses a tokenizer and rows of `seq_len` tokens. Raises UserError if they can't be used."""

    def encode(self, documents: Sequence[Document]) -> list[Tokens | BadRecord]:
        """Returns the tokens of each JSON record, and which of them count in the loss; a BadRecord if a record has none."""

    def fingerprint(self) -> dict[str, Any]:
        """Returns everything on which the tokens depend, except the tokenizer, as JSON values."""


@dataclasses.dataclass(frozen=True)
class Documents:
    """A corpus of documents, as the user describes it.

    Example: `Documents("gs://bucket/web/*.parquet", column="content")`.

    Attributes:
      files: paths, globs and directories (a list or a single one), or a function without arguments that returns them; local,
        gs://, s3:// or hf://. A directory stands for all non-hidden files below it, except empty files whose names begin with
        '_'.
      column: column or key of the text; 'a.b' is key b of the object in a. In tar shards, the member's extension; 'text' also
        takes 'txt'.
      kind: 'jsonl', 'parquet', 'arrow', 'arrayrecord', 'tfrecord', 'tar', 'text' or 'tokens'; None detects it from the
        files' names and first bytes.
      shuffle: 'global': a random order of all documents. 'auto': global if documents can be read by number, otherwise a window
        (JSON lines in object stores take a window too: each document would cost a request). A number: shuffled chunks, and
        shuffled windows of this many documents in each. None: in order. Only training shuffles, unless the input says
        otherwise.
      epochs: passes over the documents; None: endless in training, one otherwise.
      separator: text between the documents of a text file; None makes each file one document.
      processor: makes tokens of records that aren't texts, e.g. `inputs.Chat()` of conversations. `column` is then ignored.
      max_record_bytes: largest size of an unparsed record, in bytes: a line with its end, a tar member, a document of a text
        file, an Example. A longer one counts as a bad record and is not read whole.
      allow_binary: for the kind 'text': True also reads files that aren't text.
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
