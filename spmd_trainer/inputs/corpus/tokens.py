"""Tokens of documents: arrays in memory, or references to a token store."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

if TYPE_CHECKING:
    from spmd_trainer.inputs.corpus.token_store import TokenStore


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTokens:
    """Reference to the tokens of a document in a token store.

    Attributes:
      store: the store.
      batch: number of the record batch in the store.
      start: number of the document's first token in the batch.
      size: number of tokens.
      nbytes: size of the document's text in bytes; if it is unknown, the size of the tokens in bytes.
    """

    store: TokenStore
    batch: int
    start: int
    size: int
    nbytes: int

    def __len__(self) -> int:
        return self.size


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class CountedTokens:
    """A document's tokens in memory, with a mask of the tokens that count toward the loss.

    Attributes:
      tokens: unsigned integers [n].
      counted: bool [n], True for tokens that count toward the loss.
    """

    tokens: np.ndarray
    counted: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)


# A document's tokens: an unsigned array [n] if all count toward the loss, or an array with a mask, or a reference to a store.
Tokens: TypeAlias = np.ndarray | CountedTokens | StoredTokens


def is_text(tokens: Tokens) -> bool:
    """Returns True if a document is plain text, so that all its tokens count toward the loss."""
    if isinstance(tokens, StoredTokens):
        return tokens.store.description.processor is None
    return isinstance(tokens, np.ndarray)


def fetch(ranges: Sequence[tuple[Tokens, int, int]], *, counted: bool = False) -> list[np.ndarray]:
    """Returns the tokens `start` to `stop` of each document.

    Args:
      ranges: (tokens of the document, start, stop) for each document.
      counted: True returns a mask of those that count toward the loss, bool [n], instead of the tokens.

    Raises:
      UserError: a file of a token store can't be read or has changed; the message names the file.
    """
    found: dict[int, np.ndarray] = {}
    stored: dict[TokenStore, list[tuple[int, tuple[int, int, int]]]] = collections.defaultdict(list)
    for place, (document, start, stop) in enumerate(ranges):
        if isinstance(document, StoredTokens):
            asked = (document.batch, document.start + start, document.start + stop)
            stored[document.store].append((place, asked))
        elif isinstance(document, CountedTokens):
            found[place] = (document.counted if counted else document.tokens)[start:stop]
        else:
            found[place] = np.ones(stop - start, bool) if counted else document[start:stop]
    for store, wanted in stored.items():
        tokens = (store.fetch_counted if counted else store.fetch)([asked for _, asked in wanted])
        found |= {place: one for (place, _), one in zip(wanted, tokens, strict=True)}
    return [found[place] for place in range(len(ranges))]
