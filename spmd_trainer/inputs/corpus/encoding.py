"""Reads and tokenizes the documents of one source before they are needed."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, LeftOut, Processor, Record
from spmd_trainer.inputs.corpus.order import DocumentStream, Position, Taken, size_of
from spmd_trainer.inputs.corpus.tokens import CountedTokens, StoredTokens, Tokens, fetch, is_text

BAD_RECORDS = RAISE, SKIP = "raise", "skip"
# Maximum number of documents read and encoded at a time.
MOST_AHEAD = 64
# Bytes of memory in which an input keeps a processor's records and their tokens, see `Encoder`.
KEPT_BYTES = 2**24
# Number of skipped records per source that are logged individually.
_LOGGED = 10


_Encoded = TypeVar("_Encoded")


def encode_each(
    encode: Callable[[Sequence[Any], Sequence[str]], Sequence[_Encoded]], texts: Sequence[Any], wheres: Sequence[str]
) -> list[_Encoded | BadRecord]:
    """Returns the encoding of each text, or a BadRecord for a text that can't be encoded. `wheres`: locations, for messages.

    Encodes all texts in one call. If that call fails, encodes them one by one to find the texts that can't be encoded.
    """
    if not texts:
        return []
    try:
        return list(encode(texts, wheres))
    except UserError as error:
        if len(texts) == 1:
            return [BadRecord.of(wheres[0], error)]
    return [encode_each(encode, [text], [where])[0] for text, where in zip(texts, wheres, strict=True)]


def encode_texts(
    tokenizer: tokenizers.Tokenizer, texts: Sequence[Any], wheres: Sequence[str]
) -> list[np.ndarray | BadRecord]:
    """Returns the tokens of each UTF-8 text, or a BadRecord if it can't be encoded. `wheres`: locations, for messages."""

    def one_by_one(texts: Sequence[Any], wheres: Sequence[str]) -> list[np.ndarray]:
        return [tokenizer.encode(text, where) for text, where in zip(texts, wheres, strict=True)]

    return encode_each(getattr(tokenizer, "encode_batch", one_by_one), texts, wheres)


@dataclasses.dataclass
class Encoder:
    """Tokenizes the documents of one source.

    Attributes:
      tokenizer: the tokenizer.
      limit: token ids must be less than this: the smaller one of the tokenizer's and the model's vocabulary size.
      processor: tokenizes records that aren't plain text; None: all records are text.
      room: memory still available for caching a processor's records with their tokens, in bytes.
    """

    tokenizer: tokenizers.Tokenizer
    limit: int
    processor: Processor | None = None
    room: int = KEPT_BYTES
    _kept: dict[Any, Tokens] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def encode(self, records: Sequence[Record]) -> list[Tokens | BadRecord]:
        """Returns each record's tokens without end-of-text, with dtype `tokenizers.token_dtype`, or a BadRecord.

        Tokens in a token store are returned as references if the store's largest token is below `limit`. Otherwise they are
        fetched and checked.
        """
        dtype = np.dtype(tokenizers.token_dtype(self.tokenizer.vocab_size))
        texts = [one for one in records if isinstance(one, Document) and isinstance(one.content, bytes)]
        encoded = iter(self._encode(texts))
        found: list[Tokens | BadRecord] = []
        for record in records:
            if isinstance(record, BadRecord):
                found.append(record)
                continue
            content = record.content
            if isinstance(content, StoredTokens) and content.store.largest < self.limit:
                found.append(content)
                continue
            one = next(encoded) if isinstance(content, bytes) else _fetched(content)
            found.append(one if isinstance(one, BadRecord) else self._checked(one, record.where, dtype))
        return found

    def _encode(self, documents: Sequence[Document]) -> Sequence[Tokens | BadRecord]:
        """Tokenizes documents. If there is a processor, caches records with their tokens until `room` is used up.

        The cache is for small corpora, whose records may be read many times for one window of rows.
        """
        if self.processor is None:
            wheres = [one.where for one in documents]
            return encode_texts(self.tokenizer, [one.content for one in documents], wheres)
        new = [one for one in documents if one.content not in self._kept]
        made = dict(zip(map(id, new), self.processor.encode(new), strict=True))
        found = [made[id(one)] if id(one) in made else self._kept[one.content] for one in documents]
        for one in new:
            tokens = made[id(one)]
            if isinstance(tokens, CountedTokens):
                size = size_of(one) + tokens.tokens.nbytes + tokens.counted.nbytes
                if size <= self.room and one.content not in self._kept:
                    self._kept[one.content] = tokens
                    self.room -= size
        return found

    def _checked(self, found: Tokens, where: str, dtype: np.dtype) -> Tokens | BadRecord:
        assert not isinstance(found, StoredTokens)
        tokens = found if isinstance(found, np.ndarray) else found.tokens
        if len(tokens) and (highest := tokens.max()) >= self.limit:
            return BadRecord(where, tokenizers.unknown_token(highest, self.limit))
        tokens = tokens.astype(dtype, copy=False)
        return tokens if isinstance(found, np.ndarray) else CountedTokens(tokens, found.counted)


def _fetched(tokens: StoredTokens) -> np.ndarray | CountedTokens:
    whole = [(tokens, 0, len(tokens))]
    (values,) = fetch(whole)
    return values if is_text(tokens) else CountedTokens(values, fetch(whole, counted=True)[0])


class Encoded(NamedTuple):
    """The tokens of one document in an `EncodedStream`.

    Attributes:
      tokens: the document's tokens without end-of-text, at least one; None at the end of the stream.
      place: where the document is in its source, see `order.Taken.place`.
      after: the stream's position after the document.
      skipped: number of bad records that were left out between the previous document and this one.
    """

    tokens: Tokens | None
    place: tuple[int, int]
    after: Position
    skipped: int


class EncodedStream:
    """Stream of the tokenized documents of one source, in the order of a `DocumentStream`. Omits documents without tokens."""

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
        """Wraps a stream of records.

        Args:
          stream: the records of the source.
          encoder: tokenizes the records.
          name: the source's name, for messages; '' if the input has only one source.
          bad_records: 'raise' raises an error at a bad record; 'skip' leaves the record out, counts it and logs it.
          bytes_ahead: approximate bytes of text to read ahead.
          error: makes the exception to raise from an error message.
        """
        self._stream = stream
        self._encoder = encoder
        self._prefix = f"{name}: " if name else ""
        self._skips = bad_records == SKIP
        self._bytes_ahead = bytes_ahead
        self._error = error
        self._ahead: collections.deque[tuple[Taken, Tokens | BadRecord]] = collections.deque()
        self._count = 1  # documents per read; small at first, so that the first rows don't wait for later documents
        self._logged = 0
        self._last_good_epoch = stream.position.epoch
        self._after = stream.position

    def take(self) -> Encoded:
        """Returns the next document, or an `Encoded` with `tokens=None` at the end of the stream.

        Raises:
          UserError: the source can't be read, a whole epoch has no usable document, or a record is bad and
            `bad_records` is 'raise'.
        """
        skipped = 0
        while self._ahead or self._read():
            (record, self._after, place), tokens = self._ahead.popleft()
            if isinstance(tokens, BadRecord):
                self._refuse_or_log(tokens)
                skipped += 1
            elif len(tokens):
                self._last_good_epoch = self._after.epoch
                return Encoded(tokens, place, self._after, skipped)
            if self._after.epoch > self._last_good_epoch + 1:  # the whole epoch in between
                what = "has a document with text" if self._encoder.processor is None else "can be used"
                raise self._error(f"{self._prefix}no record {what}, the last is {record.where}; give at least one")
        return Encoded(None, (0, 0), self._after, skipped)

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
        if not self._skips and not isinstance(bad, LeftOut):
            raise self._error(f"{self._prefix}{bad.text}. Fix it, or skip bad records with bad_records='skip'")
        self._logged += 1
        if self._logged <= _LOGGED:
            logging.warning("%s%s; left out", self._prefix, bad.text)
        if self._logged == _LOGGED:
            logging.warning("%sfurther records that are left out are only counted", self._prefix)
