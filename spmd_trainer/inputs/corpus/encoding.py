"""Reads and encodes the documents of one source a few documents ahead."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Record
from spmd_trainer.inputs.corpus.order import DocumentStream, Position, Taken, size_of
from spmd_trainer.inputs.corpus.row_plan import Tokens
from spmd_trainer.inputs.corpus.token_store import StoredTokens, fetch

RAISE, SKIP = "raise", "skip"
# Most documents read and encoded at a time.
MOST_AHEAD = 64
# Skipped records per source that are logged individually.
_LOGGED = 10


@dataclasses.dataclass(frozen=True)
class Encoder:
    """Encodes documents.

    Attributes:
      tokenizer: the tokenizer.
      limit: every token must be below this: the vocabulary size of the tokenizer, or of the model if smaller.
    """

    tokenizer: tokenizers.Tokenizer
    limit: int

    def encode(self, records: Sequence[Record]) -> list[Tokens | BadRecord]:
        """Returns each record's tokens without end-of-text, `tokenizers.token_dtype` [n], or a BadRecord.

        Stored tokens are returned as they are, or fetched if one of their store may be above the limit.
        """
        dtype = np.dtype(tokenizers.token_dtype(self.tokenizer.vocab_size))
        texts = [one for one in records if isinstance(one, Document) and isinstance(one.content, bytes)]
        encoded = iter(self._encode_texts(texts))
        found: list[Tokens | BadRecord] = []
        for record in records:
            if isinstance(record, BadRecord):
                found.append(record)
                continue
            content = record.content
            if isinstance(content, StoredTokens) and content.store.largest < self.limit:
                found.append(content)
                continue
            one = next(encoded) if isinstance(content, bytes) else fetch([(content, 0, len(content))])[0]
            found.append(one if isinstance(one, BadRecord) else self._checked(one, record.where, dtype))
        return found

    def _encode_texts(self, documents: Sequence[Document]) -> Sequence[np.ndarray | BadRecord]:
        encode_batch = getattr(self.tokenizer, "encode_batch", None)
        if encode_batch is None or not documents:
            return [self._encode_text(document) for document in documents]
        try:
            tokens: list[np.ndarray] = encode_batch(
                [one.content for one in documents], [one.where for one in documents]
            )
        except UserError:  # one by one, to find out which of them are bad
            return [self._encode_text(document) for document in documents]
        return tokens

    def _encode_text(self, document: Document) -> np.ndarray | BadRecord:
        assert isinstance(document.content, bytes)
        try:
            return self.tokenizer.encode(document.content, document.where)
        except UserError as error:
            return BadRecord(document.where, str(error).removeprefix(document.where).lstrip(": "))

    def _checked(self, tokens: np.ndarray, where: str, dtype: np.dtype) -> np.ndarray | BadRecord:
        if len(tokens) and (highest := tokens.max()) >= self.limit:
            return BadRecord(where, f"gives token {highest}, and the vocabulary is 0 to {self.limit - 1}")
        return tokens.astype(dtype, copy=False)


class Encoded(NamedTuple):
    """A document of a stream as tokens.

    Attributes:
      tokens: without end-of-text, at least one; None at the end of the stream.
      where: the file and the record.
      after: the stream's position after it.
      skipped: bad records that the stream has left out since the document before it.
    """

    tokens: Tokens | None
    where: str
    after: Position
    skipped: int


class EncodedStream:
    """The encoded documents of one source, in order. Leaves out documents without tokens."""

    def __init__(
        self,
        stream: DocumentStream,
        encoder: Encoder,
        name: str,
        *,
        bad_records: str,
        bytes_ahead: int,
        error: Callable[[str], UserError] = UserError,
    ):
        """Wraps a stream.

        Args:
          stream: records of the source.
          encoder: encodes them.
          name: the source's name, for messages; empty if it is the only one.
          bad_records: 'raise' raises an error at a bad record; 'skip' leaves it out, counts and logs it.
          bytes_ahead: approximate bytes of text to read ahead.
          error: makes an error of a message.
        """
        self._stream = stream
        self._encoder = encoder
        self._prefix = f"{name}: " if name else ""
        self._skips = bad_records == SKIP
        self._bytes_ahead = bytes_ahead
        self._error = error
        self._ahead: collections.deque[tuple[Taken, Tokens | BadRecord]] = collections.deque()
        self._count = 1  # grows, so that the first rows don't wait for later documents
        self._logged = 0
        self._last_good_epoch = stream.position.epoch
        self._after = stream.position

    def take(self) -> Encoded:
        """Returns the next document.

        Raises:
          UserError: the source can't be read, a whole epoch has no usable document, or a record is bad and
            `bad_records` is 'raise'.
        """
        skipped = 0
        while self._ahead or self._read():
            (record, self._after), tokens = self._ahead.popleft()
            if isinstance(tokens, BadRecord):
                self._refuse_or_log(tokens)
                skipped += 1
            elif len(tokens):
                self._last_good_epoch = self._after.epoch
                return Encoded(tokens, record.where, self._after, skipped)
            if self._after.epoch > self._last_good_epoch + 1:  # the whole epoch in between
                raise self._error(
                    f"{self._prefix}no record has a document with text, the last is {record.where}; give at least one"
                )
        return Encoded(None, "", self._after, skipped)

    def _read(self) -> bool:
        taken = self._stream.take(self._count)
        if not taken:
            return False
        records = [one.record for one in taken]
        self._ahead.extend(zip(taken, self._encoder.encode(records), strict=True))
        mean = sum(map(size_of, records)) / len(records)
        self._count = min(2 * self._count, MOST_AHEAD, max(1, int(self._bytes_ahead / max(mean, 1.0))))
        return True

    def _refuse_or_log(self, bad: BadRecord) -> None:
        if not self._skips:
            raise self._error(
                f"{self._prefix}{bad.where} {bad.problem}. Fix it, or skip bad records with bad_records='skip'"
            )
        self._logged += 1
        if self._logged <= _LOGGED:
            logging.warning("%s%s %s; left out", self._prefix, bad.where, bad.problem)
        if self._logged == _LOGGED:
            logging.warning("%sfurther records that are left out are only counted", self._prefix)
