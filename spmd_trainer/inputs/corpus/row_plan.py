"""Which tokens stand at which place of which row: packing, worked out on the lengths of documents alone.

So a process needs the tokens of no other rows than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from spmd_trainer.inputs.corpus import row_table
from spmd_trainer.inputs.corpus.row_table import Fit, PairTable, RowTable
from spmd_trainer.inputs.corpus.tokens import Tokens, fetch, is_text

BEST_FIT, PAD, SPLIT = "best_fit", "pad", "split"
PACKINGS = (BEST_FIT, PAD, SPLIT)
# Not for texts: each document is a pair of answers, and a row of two sequences.
PAIR = "pair"


class Frame(NamedTuple):
    """What stands around a document's tokens. The first token of the whole is an id, and no label.

    Attributes:
      before: the tokens before them.
      after: the tokens after them.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Labels that a document has more than tokens."""
        return len(self.before) + len(self.after) - 1


class FramedDocument(NamedTuple):
    """A document's tokens, and what stands around them."""

    tokens: Tokens
    frame: Frame


class RowPlan(NamedTuple):
    """Rows as pieces of documents, int64 [pieces] each. Tokens are labels, of a document with its frame.

    Attributes:
      documents: the document of each piece.
      starts: its first token.
      sizes: its tokens, 1 or more.
      rows: its row.
      columns: the column of its first token.
      segments: its segment in the row, from 1.
      positions: the position of its first token in the segment.
      num_rows: number of rows.
    """

    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    num_rows: int

    @property
    def num_tokens(self) -> int:
        """Tokens in all rows."""
        return int(self.sizes.sum())


def pack(lengths: Sequence[int], seq_len: int, packing: str) -> RowPlan:
    """Plans rows in which each piece of at most `seq_len` tokens of a document is a segment.

    Args:
      lengths: labels of each document with its frame; at least one document.
      seq_len: tokens per row, T.
      packing: 'best_fit': several pieces in a row. 'pad': one.
    """
    sizes = np.asarray(lengths, np.int64)
    counts = -(-sizes // seq_len)
    documents = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    pieces = np.minimum(seq_len, sizes[documents] - starts)
    fit = row_table.best_fit_decreasing(pieces, seq_len) if packing == BEST_FIT else row_table.one_each(pieces)
    return RowPlan(documents, starts, pieces, fit.rows, fit.columns, fit.segments, np.zeros_like(pieces), fit.num_rows)


def cut(lengths: Sequence[int], seq_len: int, offset: int, used: int) -> RowPlan:
    """Plans rows that cut the documents, one after the other, every `seq_len` tokens. Each row is one segment.

    Args:
      lengths: labels of each document with its frame.
      seq_len: tokens per row, T. The last row may hold fewer.
      offset: tokens of the first document that are left out.
      used: tokens that are cut into rows, 1 or more.
    """
    begins = np.cumsum([0, *lengths]) - offset
    places = np.unique(np.concatenate([begins[:-1].clip(0), np.arange(0, used, seq_len)]))
    places = places[places < used]
    documents = np.searchsorted(begins, places, "right") - 1
    rows, columns = np.divmod(places, seq_len)
    return RowPlan(
        documents,
        starts=places - begins[documents],
        sizes=np.diff(places, append=used),
        rows=rows,
        columns=columns,
        segments=np.ones_like(rows),
        positions=columns,
        num_rows=-(-used // seq_len),
    )


def make_rows(plan: RowPlan, rows: np.ndarray, documents: Sequence[FramedDocument], seq_len: int) -> RowTable:
    """Makes some rows of a plan; fetches no other tokens than theirs.

    Args:
      plan: the plan.
      rows: numbers of rows, int64 [n], in any order.
      documents: the plan's documents.
      seq_len: tokens per row, T.

    Returns:
      The rows in this order, then an empty row.

    Raises:
      UserError: stored tokens can't be read.
    """
    place = np.full(plan.num_rows, -1)
    place[rows] = np.arange(len(rows))
    own = np.flatnonzero(place[plan.rows] >= 0)
    sizes = plan.sizes[own]
    pieces = [
        _Piece(documents[number], start, start + size + 1)
        for number, start, size in zip(
            plan.documents[own].tolist(), plan.starts[own].tolist(), sizes.tolist(), strict=True
        )
    ]
    # Each piece, and the token before it.
    tokens = _values(pieces, documents[0].tokens.dtype)
    ends = np.cumsum(sizes + 1)
    is_label, is_id = np.ones(len(tokens), bool), np.ones(len(tokens), bool)
    is_label[ends - sizes - 1], is_id[ends - 1] = False, False
    all_count = all(is_text(one.document.tokens) for one in pieces)
    return row_table.lay_out(
        tokens[is_id],
        tokens[is_label],
        sizes,
        Fit(place[plan.rows[own]], plan.columns[own], plan.segments[own], len(rows)),
        seq_len,
        positions=plan.positions[own],
        counted=None if all_count else _values(pieces, np.dtype(bool))[is_label],
    )


class _Piece(NamedTuple):
    """Tokens `start` to `stop` of a document with its frame."""

    document: FramedDocument
    start: int
    stop: int


def _values(pieces: Sequence[_Piece], dtype: np.dtype) -> np.ndarray:
    """Returns the tokens of all pieces, one after the other; of dtype bool, which of them count: those of a frame do."""
    ranges = []
    for (tokens, frame), start, stop in pieces:
        lead = len(frame.before)
        ranges.append((tokens, max(start - lead, 0), max(0, min(stop - lead, len(tokens)))))
    found = [np.zeros(0, dtype)]
    for ((tokens, frame), start, stop), content in zip(pieces, fetch(ranges, counted=dtype.kind == "b"), strict=True):
        before = frame.before[start:stop]
        after = frame.after[: max(0, stop - len(frame.before) - len(tokens))]
        found += [np.array(before, dtype), content] if before else [content]
        if after:
            found.append(np.array(after, dtype))
    return np.concatenate(found)


def make_pairs(documents: Sequence[Tokens], places: Sequence[tuple[int, int, int]], seq_len: int) -> PairTable:
    """Makes rows of pairs, fetching the tokens of no others.

    Args:
      documents: the tokens of both sequences of each pair, one after the other; those of the answers count.
      places: see `PairTable`.
      seq_len: tokens per sequence, T.
    """
    whole = [(one, 0, len(one)) for one in documents]
    tokens = np.concatenate([np.zeros(0, documents[0].dtype if documents else np.uint16), *fetch(whole)])
    counted = np.concatenate([np.zeros(0, bool), *fetch(whole, counted=True)])
    # A sequence ends with its answer, and begins with a prompt.
    ends = np.flatnonzero(counted & ~np.append(counted[1:], False)) + 1
    is_id, is_label = np.ones(len(tokens), bool), np.ones(len(tokens), bool)
    is_id[ends - 1] = False
    is_label[np.append(0, ends[:-1])[: len(ends)]] = False
    sizes = np.diff(ends, prepend=0) - 1
    sequences = row_table.lay_out(
        tokens[is_id], tokens[is_label], sizes, row_table.one_each(sizes), seq_len, counted=counted[is_label]
    )
    return PairTable(sequences, np.array([*places, (-1, -1, -1)], np.int64))
