"""Rows of tokens: pieces of documents put into rows of equal length, and the batches of these rows."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import tokenizers


class RowTable(NamedTuple):
    """All rows of an input, arrays [rows + 1, T], 0 in empty positions. The last row is empty.

    Attributes:
      ids: the token before each label, unsigned integers, like the next three.
      labels: the tokens.
      segment_ids: from 1 in each row.
      segment_pos: from 0 in each segment.
      counted: True for labels that count in the loss, bool; None: all do.
    """

    ids: np.ndarray
    labels: np.ndarray
    segment_ids: np.ndarray
    segment_pos: np.ndarray
    counted: np.ndarray | None = None

    def batch(self, rows: np.ndarray) -> NestedMap:
        """Makes a language-model batch (see `batches.lm_input_specs`) of the given rows, integers [B]."""
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
    """Pairs of answers, each a row of two sequences; the last one is empty.

    Attributes:
      sequences: the chosen and the rejected answer of each pair, after its prompt.
      places: source of each pair, and its place in the source (see `order.Taken`), int64 [pairs + 1, 3]; -1 for the last.
    """

    sequences: RowTable
    places: np.ndarray

    def batch(self, rows: np.ndarray) -> NestedMap:
        """Makes a batch of the given pairs, integers [B]: `chosen`, `rejected` and `eval_sample_weights`."""
        first = 2 * (rows % len(self.places))
        sides = [self.sequences.batch(np.minimum(first + side, len(self.sequences.ids) - 1)) for side in (0, 1)]
        weights = [side.pop("eval_sample_weights") for side in sides]
        return NestedMap(chosen=sides[0], rejected=sides[1], eval_sample_weights=weights[0])


class Fit(NamedTuple):
    """Row of each piece of a document.

    Attributes:
      rows: row of each piece, int64 [pieces].
      columns: its first column, int64 [pieces].
      segments: its number in the row, from 1, int64 [pieces].
      num_rows: number of rows.
    """

    rows: np.ndarray
    columns: np.ndarray
    segments: np.ndarray
    num_rows: int


def lay_out(
    ids: np.ndarray,
    labels: np.ndarray,
    sizes: np.ndarray,
    fit: Fit,
    seq_len: int,
    *,
    positions: int | np.ndarray = 0,
    counted: np.ndarray | None = None,
) -> RowTable:
    """Puts pieces into their rows.

    Args:
      ids, labels: tokens of all pieces, one after the other, unsigned [sum of sizes].
      sizes: size of each piece, int64 [pieces].
      fit: where each piece stands.
      seq_len: tokens per row.
      positions: position of each piece's first token in its segment, one for all or int64 [pieces].
      counted: True for labels that count in the loss, bool [sum of sizes]; None: all do.
    """
    within = np.arange(len(labels)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    targets = np.repeat(fit.rows * seq_len + fit.columns, sizes) + within

    def spread(values: np.ndarray, dtype: Any) -> np.ndarray:
        table = np.zeros((fit.num_rows + 1) * seq_len, dtype)
        table[targets] = values
        return table.reshape(-1, seq_len)

    small = tokenizers.token_dtype(seq_len + 1)
    return RowTable(
        ids=spread(ids, ids.dtype),
        labels=spread(labels, labels.dtype),
        segment_ids=spread(np.repeat(fit.segments, sizes), small),
        segment_pos=spread(np.repeat(np.broadcast_to(positions, len(sizes)), sizes) + within, small),
        counted=None if counted is None else spread(counted, np.bool_),
    )


def best_fit(sizes: list[int], room: int) -> Fit:
    """Packs pieces in order, each into the fullest row with room, or else into a new row.

    Args:
      sizes: size of each piece, 1 to `room`.
      room: size of a row.
    """
    rows_with: list[list[int]] = [[] for _ in range(room + 1)]
    some = 0  # bit r is set if a row has exactly r tokens free: the best fit is the lowest set bit from `size` on
    in_row: list[int] = []
    placed = np.empty((3, len(sizes)), np.int64)
    for i, size in enumerate(sizes):
        fitting = some >> size
        if fitting:
            left = size + (fitting & -fitting).bit_length() - 1
            row = rows_with[left].pop()
            if not rows_with[left]:
                some &= ~(1 << left)
        else:
            left, row = room, len(in_row)
            in_row.append(0)
        in_row[row] += 1
        placed[:, i] = row, room - left, in_row[row]
        if left > size:
            rows_with[left - size].append(row)
            some |= 1 << (left - size)
    return Fit(placed[0], placed[1], placed[2], len(in_row))


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
    rows[decreasing] = best_fit(lengths[decreasing].tolist(), room).rows
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
