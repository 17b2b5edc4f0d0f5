"""Which tokens stand at which place of which row: packing, worked out on the lengths of documents alone.

So a process needs the tokens of no other rows than its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from spmd_trainer.inputs import packed_text
from spmd_trainer.inputs.corpus.token_store import StoredTokens, fetch
from spmd_trainer.inputs.packed_text import Fit, RowTable

BEST_FIT, PAD, SPLIT = "best_fit", "pad", "split"
PACKINGS = (BEST_FIT, PAD, SPLIT)
# A document's tokens, unsigned [n], or where they are stored.
Tokens: TypeAlias = np.ndarray | StoredTokens


class Frame(NamedTuple):
    """What stands around each document.

    Attributes:
      start: the token before it; None: none.
      end: the token after it.
      first: the id before the first token of a segment that begins with a document.
    """

    start: int | None
    end: int
    first: int

    @property
    def size(self) -> int:
        """Tokens that it adds to a document."""
        return 1 if self.start is None else 2


class RowPlan(NamedTuple):
    """Rows as pieces of documents, int64 [pieces] each. Tokens of a document are counted with its frame.

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
      lengths: tokens of each document with its frame; at least one document.
      seq_len: tokens per row, T.
      packing: 'best_fit': several pieces in a row. 'pad': one.
    """
    sizes = np.asarray(lengths, np.int64)
    counts = -(-sizes // seq_len)
    documents = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * seq_len
    pieces = np.minimum(seq_len, sizes[documents] - starts)
    fit = best_fit_decreasing(pieces, seq_len) if packing == BEST_FIT else one_each(pieces)
    return RowPlan(documents, starts, pieces, fit.rows, fit.columns, fit.segments, np.zeros_like(pieces), fit.num_rows)


def cut(lengths: Sequence[int], seq_len: int, offset: int, used: int) -> RowPlan:
    """Plans rows that cut the documents, one after the other, every `seq_len` tokens. Each row is one segment.

    Args:
      lengths: tokens of each document with its frame.
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


def make_rows(plan: RowPlan, rows: np.ndarray, documents: Sequence[Tokens], frame: Frame, seq_len: int) -> RowTable:
    """Makes some rows of a plan; fetches no other tokens than theirs.

    Args:
      plan: the plan.
      rows: numbers of rows, int64 [n], in any order.
      documents: the plan's documents, without their frames.
      frame: what stands around each.
      seq_len: tokens per row, T.

    Returns:
      The rows in this order, then an empty row.

    Raises:
      UserError: stored tokens can't be read.
    """
    place = np.full(plan.num_rows, -1)
    place[rows] = np.arange(len(rows))
    own = np.flatnonzero(place[plan.rows] >= 0)
    dtype = documents[0].dtype
    labels, before = _tokens(plan, own, documents, frame, dtype)
    sizes = plan.sizes[own]
    ids = np.roll(labels, 1)
    ids[np.cumsum(sizes) - sizes] = before
    fit = Fit(place[plan.rows[own]], plan.columns[own], plan.segments[own], len(rows))
    return packed_text.lay_out(ids, labels, sizes, fit, seq_len, positions=plan.positions[own])


def _tokens(
    plan: RowPlan, own: np.ndarray, documents: Sequence[Tokens], frame: Frame, dtype: np.dtype
) -> tuple[np.ndarray, list[int]]:
    """Returns the tokens of some pieces, [sum of sizes], and the token before each piece."""
    lead = frame.size - 1  # tokens before a document
    pieces = list(zip(plan.documents[own].tolist(), plan.starts[own].tolist(), plan.sizes[own].tolist(), strict=True))
    # From the token before the piece on, if it has one, counted without the frame.
    ranges = [
        (documents[document], max(start - 1 - lead, 0), min(start + size - lead, len(documents[document])))
        for document, start, size in pieces
    ]
    ends = np.array([frame.end], dtype)
    starts = np.array([] if frame.start is None else [frame.start], dtype)
    found, before = [], []
    for content, (document, start, size) in zip(fetch(ranges), pieces, strict=True):
        parts = [starts] if start <= lead else []
        parts.append(content)
        if start + size == len(documents[document]) + frame.size:
            parts.append(ends)
        whole = np.concatenate(parts) if len(parts) > 1 else content
        found.append(whole[len(whole) - size :])
        before.append(int(whole[-size - 1]) if start else frame.first)
    return np.concatenate(found) if found else np.zeros(0, dtype), before


def best_fit_decreasing(sizes: np.ndarray, room: int) -> Fit:
    """Packs pieces by best fit, largest first, which wastes less room than packing them in order.

    Rows are ordered by their first pieces; pieces keep their order within a row.

    Args:
      sizes: size of each piece, 1 to `room`.
      room: size of a row.
    """
    lengths = np.asarray(sizes, np.int64)
    decreasing = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(sizes), np.int64)
    rows[decreasing] = packed_text.best_fit(lengths[decreasing].tolist(), room).rows
    _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
    rows = np.argsort(np.argsort(first))[rows]
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    starts = np.cumsum(lengths[by_row]) - lengths[by_row]
    firsts = np.cumsum(counts) - counts
    columns, segments = np.empty_like(rows), np.empty_like(rows)
    columns[by_row] = starts - np.repeat(starts[firsts], counts)
    segments[by_row] = np.arange(len(rows)) - np.repeat(firsts, counts) + 1
    return Fit(rows, columns, segments, len(counts))


def one_each(sizes: np.ndarray) -> Fit:
    """Gives every piece a row."""
    count = len(sizes)
    return Fit(np.arange(count), np.zeros(count, np.int64), np.ones(count, np.int64), count)
