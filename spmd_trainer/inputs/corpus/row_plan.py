"""Packs documents into rows. The row and column (position in the row) of every token follow from the documents' lengths alone.

A process therefore fetches only the tokens of its own rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.tokens import Tokens, fetch, is_text

BEST_FIT, PAD, SPLIT = "best_fit", "pad", "split"
PACKINGS = (BEST_FIT, PAD, SPLIT)
# Only for preference pairs, not for texts: each document is a pair of answers, and becomes one row with two sequences.
PAIR = "pair"


class RowTable(NamedTuple):
    """Rows of T tokens. Each array is [rows + 1, T]. The last row is empty; it fills up batches. Positions without a token are 0.

    Attributes:
      ids: the token before each label. `ids`, `labels`, `segment_ids` and `segment_pos` are unsigned integers.
      labels: the tokens to predict.
      segment_ids: number of each position's segment in its row, from 1 (see `pack` and `cut`).
      segment_pos: position of each token in its segment, from 0.
      counted: bool, True for labels that count toward the loss. None if all labels count.
    """

    ids: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    segment_pos: np.ndarray
    counted: np.ndarray | None = None

    def batch(self, rows: np.ndarray) -> NestedMap:
        """Makes a language-model batch (see `batches.lm_input_specs`). `rows`: indices of the rows to take, integers [B]."""
        segment_ids = self.segment_ids[rows].astype(np.int32)
        inside = segment_ids > 0
        return NestedMap(
            ids=self.ids[rows].astype(np.int32),
            labels=self.labels[rows].astype(np.int32),
            paddings=1.0 - inside.astype(np.float32),
            weights=(inside if self.counted is None else self.counted[rows]).astype(np.float32),
            segment_ids=segment_ids,
            segment_pos=self.segment_pos[rows].astype(np.int32),
            eval_sample_weights=inside[:, 0].astype(np.float32),
        )


class PairTable(NamedTuple):
    """Preference pairs. Each pair has two sequences of T tokens. After the last pair comes an empty pair, which fills up batches.

    Attributes:
      sequences: two rows per pair: the prompt with the chosen answer, then the prompt with the rejected answer.
      places: where each pair was read, int64 [pairs + 1, 3]. The three numbers are the index of the source, and the pair's
        `order.Taken.place` (two numbers) in this source. They are -1 for the empty pair.
    """

    sequences: RowTable
    places: np.ndarray

    def batch(self, rows: np.ndarray) -> NestedMap:
        """Makes a batch (`chosen`, `rejected`, `eval_sample_weights`). `rows`: indices of the pairs to take, integers [B]."""
        first = 2 * (rows % len(self.places))
        sides = [self.sequences.batch(np.minimum(first + side, len(self.sequences.ids) - 1)) for side in (0, 1)]
        weights = [side.pop("eval_sample_weights") for side in sides]
        return NestedMap(chosen=sides[0], rejected=sides[1], eval_sample_weights=weights[0])


class Frame(NamedTuple):
    """Tokens put around a document, e.g. a start token and end-of-text. A framed document's first token is never a label.

    Attributes:
      before: the tokens before the document's tokens.
      after: the tokens after the document's tokens.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()

    @property
    def size(self) -> int:
        """Number of labels in the framed document minus number of tokens in the document without frame."""
        return len(self.before) + len(self.after) - 1


class FramedDocument(NamedTuple):
    """A document's tokens, and the frame around them."""

    tokens: Tokens
    frame: Frame


class RowPlan(NamedTuple):
    """Plan for putting pieces of framed documents into rows. Each array is int64 [pieces], with one number for each piece.

    `starts` and `sizes` count labels (tokens to predict), which are all tokens of a framed document except the first.

    Attributes:
      documents: index of the document that the piece belongs to.
      starts: index of the piece's first label among the labels of its document.
      sizes: number of labels in the piece, 1 or more.
      rows: index of the row that gets the piece.
      columns: position of the piece's first label in the row, from 0.
      segments: number of the piece's segment in the row, from 1.
      positions: position of the piece's first label in the segment, from 0.
    """

    documents: np.ndarray
    starts: np.ndarray
    sizes: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    segments: np.ndarray
    positions: np.ndarray

    @property
    def num_rows(self) -> int:
        """Number of rows. Every row has at least one piece."""
        return int(self.rows.max(initial=-1)) + 1

    @property
    def num_tokens(self) -> int:
        return int(self.sizes.sum())


def pack(lengths: Sequence[int] | np.ndarray, seq_len: int, packing: str, piece: int | None = None) -> RowPlan:
    """Plans rows in which each piece of a document is a segment.

    Args:
      lengths: number of labels of each framed document; at least one document.
      seq_len: tokens per row, T.
      packing: 'best_fit': several pieces per row. 'pad': one piece per row.
      piece: maximum number of labels per piece; None: `seq_len`.
    """
    piece = piece or seq_len
    sizes = np.asarray(lengths, np.int64)
    counts = -(-sizes // piece)
    documents = np.repeat(np.arange(len(sizes)), counts)
    starts = (np.arange(len(documents)) - np.repeat(np.cumsum(counts) - counts, counts)) * piece
    pieces = np.minimum(piece, sizes[documents] - starts)
    rows = best_fit_decreasing(pieces, seq_len) if packing == BEST_FIT else np.arange(len(pieces))
    return RowPlan(documents, starts, pieces, rows, *places(rows, pieces), positions=np.zeros_like(pieces))


def cut(lengths: Sequence[int], seq_len: int, offset: int, used: int) -> RowPlan:
    """Concatenates documents, and plans rows that begin every `seq_len` tokens. Each row is one segment.

    Args:
      lengths: number of labels of each framed document.
      seq_len: tokens per row, T. The last row may hold fewer.
      offset: number of labels to leave out at the beginning of the first document.
      used: number of labels to put into rows, after those left out; 1 or more. Later labels are not used.
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
    )


def make_rows(plan: RowPlan, rows: np.ndarray, documents: Sequence[FramedDocument], seq_len: int) -> RowTable:
    """Makes a table of the given rows of a plan. Fetches only the tokens of these rows.

    Args:
      plan: the plan.
      rows: indices of the rows to make, int64 [n], in any order.
      documents: all documents of the plan.
      seq_len: tokens per row, T.

    Returns:
      The rows in the order of `rows`, then an empty row.

    Raises:
      UserError: stored tokens can't be read.
    """
    place = np.full(plan.num_rows, -1)
    place[rows] = np.arange(len(rows))
    is_own = place[plan.rows] >= 0
    own = RowPlan(*(values[is_own] for values in plan))
    own = own._replace(rows=place[own.rows])
    pieces = [
        (documents[number], start, start + size + 1)
        for number, start, size in zip(own.documents.tolist(), own.starts.tolist(), own.sizes.tolist(), strict=True)
    ]
    # The tokens of each piece, after the token that precedes the piece in its document.
    tokens = _values(pieces)
    ends = np.cumsum(own.sizes + 1)
    is_label, is_id = np.ones(len(tokens), bool), np.ones(len(tokens), bool)
    is_label[ends - own.sizes - 1], is_id[ends - 1] = False, False
    all_count = all(is_text(document.tokens) for document, _, _ in pieces)
    counted = None if all_count else _values(pieces, counted=True)[is_label]
    return lay_out(tokens[is_id], tokens[is_label], own, seq_len, counted)


def _values(pieces: Sequence[tuple[FramedDocument, int, int]], *, counted: bool = False) -> np.ndarray:
    """Returns the tokens of all pieces, concatenated; with `counted`, whether each of them counts toward the loss (bool).

    A piece is (document, start, stop): the tokens `start` to `stop` of a framed document. All tokens of a frame count.
    """
    ranges = []
    for (tokens, frame), start, stop in pieces:
        lead = len(frame.before)
        ranges.append((tokens, max(start - lead, 0), max(0, min(stop - lead, len(tokens)))))
    found = [np.zeros(0, bool if counted else np.uint16)]
    for ((tokens, frame), start, stop), content in zip(pieces, fetch(ranges, counted=counted), strict=True):
        before = frame.before[start:stop]
        after = frame.after[: max(0, stop - len(frame.before) - len(tokens))]
        # The tokens of a frame always count, even a token 0.
        around = [np.ones(len(ids), bool) if counted else np.array(ids, content.dtype) for ids in (before, after)]
        found += [around[0], content, around[1]]
    return np.concatenate(found)


def make_pairs(documents: Sequence[Tokens], places: Sequence[tuple[int, int, int]], seq_len: int) -> PairTable:
    """Makes a table of preference pairs. Reads their tokens from the token store if they are stored there.

    Args:
      documents: for each pair, the tokens of the chosen sequence, followed by those of the rejected one. They must mark the
        tokens of the answers, and no others, as counting toward the loss. Each answer ends a sequence.
      places: `PairTable.places`, but without the entry for the empty pair.
      seq_len: tokens per sequence, T.
    """
    whole = [(one, 0, len(one)) for one in documents]
    tokens = np.concatenate([np.zeros(0, np.uint16), *fetch(whole)])
    counted = np.concatenate([np.zeros(0, bool), *fetch(whole, counted=True)])
    # A sequence ends with its answer, and begins with a prompt.
    ends = np.flatnonzero(counted & ~np.append(counted[1:], False)) + 1
    is_id, is_label = np.ones(len(tokens), bool), np.ones(len(tokens), bool)
    is_id[ends - 1] = False
    is_label[np.append(0, ends[:-1])[: len(ends)]] = False
    sizes = np.diff(ends, prepend=0) - 1
    sequences = lay_out(tokens[is_id], tokens[is_label], pack(sizes, seq_len, PAD), seq_len, counted[is_label])
    return PairTable(sequences, np.array([*places, (-1, -1, -1)], np.int64))


def lay_out(
    ids: np.ndarray, labels: np.ndarray, plan: RowPlan, seq_len: int, counted: np.ndarray | None = None
) -> RowTable:
    """Makes the table of all rows of a plan: puts the tokens of its pieces into the planned rows and columns.

    Args:
      ids, labels: the pieces' values for `RowTable.ids` and `RowTable.labels`, concatenated: unsigned integers [tokens].
      plan: the plan.
      seq_len: tokens per row.
      counted: bool [tokens], True for labels that count toward the loss; None: all labels do.
    """
    sizes = plan.sizes
    within = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    targets = np.repeat(plan.rows * seq_len + plan.columns, sizes) + within

    def spread(values: np.ndarray, dtype: Any) -> np.ndarray:
        table = np.zeros((plan.num_rows + 1) * seq_len, dtype)
        table[targets] = values
        return table.reshape(-1, seq_len)

    small = tokenizers.token_dtype(seq_len + 1)
    return RowTable(
        ids=spread(ids, ids.dtype),
        labels=spread(labels, labels.dtype),
        segment_ids=spread(np.repeat(plan.segments, sizes), small),
        segment_pos=spread(np.repeat(plan.positions, sizes) + within, small),
        counted=None if counted is None else spread(counted, np.bool_),
    )


def best_fit(sizes: Sequence[int], room: int) -> list[int]:
    """Puts each piece, in order, into the fullest row that has space for it, or else into a new row. Returns each piece's row.

    Args:
      sizes: tokens of each piece, 1 to `room`.
      room: tokens per row.
    """
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]
    some = 0  # bit r is set if a row has exactly r tokens free: the best fit is the lowest set bit from `size` on
    rows: list[int] = []
    count = 0
    for size in sizes:
        fitting = some >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                some &= ~(1 << left)
        else:
            left, row = room, count
            count += 1
        rows.append(row)
        if left > size:
            rows_with[left - size].append(row)
            some |= 1 << (left - size)
    return rows


def best_fit_decreasing(sizes: np.ndarray, room: int) -> np.ndarray:
    """Packs pieces by best fit, longest first, which wastes less space than packing them in order.

    Args:
      sizes: tokens of each piece, 1 to `room`.
      room: tokens per row.

    Returns:
      The row of each piece, int64 [pieces]. Rows are ordered by their first pieces.
    """
    lengths = np.asarray(sizes, np.int64)
    decreasing = np.argsort(-lengths, kind="stable")
    rows = np.empty(len(lengths), np.int64)
    rows[decreasing] = best_fit(lengths[decreasing].tolist(), room)
    _, first, rows = np.unique(rows, return_index=True, return_inverse=True)
    return np.argsort(np.argsort(first))[rows]


def places(rows: np.ndarray, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns two int64 [pieces] arrays: each piece's first column (position in the row), and its number in its row, from 1.

    Args:
      rows: row of each piece, int64 [pieces]. Each row has at least one piece. The pieces of a row are laid out in their order.
      sizes: tokens of each piece, int64 [pieces].
    """
    by_row = np.argsort(rows, kind="stable")
    counts = np.bincount(rows)
    starts = np.cumsum(sizes[by_row]) - sizes[by_row]
    firsts = np.cumsum(counts) - counts
    columns, segments = np.empty_like(rows), np.empty_like(rows)
    columns[by_row] = starts - np.repeat(starts[firsts], counts)
    segments[by_row] = np.arange(len(rows)) - np.repeat(firsts, counts) + 1
    return columns, segments
