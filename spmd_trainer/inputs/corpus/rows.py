"""Packs the documents of one window into rows of a language-model batch."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from spmd_trainer.inputs import packed_text, tokenizers
from spmd_trainer.inputs.packed_text import Fit, RowTable

BEST_FIT, PAD, SPLIT = "best_fit", "pad", "split"
PACKINGS = (BEST_FIT, PAD, SPLIT)


def best_fit_decreasing(sizes: list[int], room: int) -> Fit:
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


def one_each(sizes: list[int], room: int) -> Fit:
    """Gives every piece its own row; same signature as `best_fit_decreasing`."""
    del room
    count = len(sizes)
    return Fit(np.arange(count), np.zeros(count, np.int64), np.ones(count, np.int64), count)


def pack_documents(documents: Sequence[np.ndarray], seq_len: int, first: int, packing: str) -> RowTable:
    """Packs documents into rows.

    Args:
      documents: tokens of each document with its end-of-text, unsigned [n]; at least one document.
      seq_len: tokens per row, T.
      first: the id before the first token of each document.
      packing: 'best_fit' or 'pad'.
    """
    fit = best_fit_decreasing if packing == BEST_FIT else one_each
    return packed_text.pack(np.concatenate(documents), [len(one) for one in documents], seq_len, first, fit=fit)


def cut_stream(stream: np.ndarray, seq_len: int, before: int) -> RowTable:
    """Cuts a stream of tokens into rows of one segment each.

    Args:
      stream: tokens, unsigned [n], n >= 1.
      seq_len: tokens per row, T.
      before: the token before the first.

    Returns:
      The rows, then an empty row; the last row before it may hold fewer than T tokens.
    """
    num_rows = -(-len(stream) // seq_len)
    small = tokenizers.token_dtype(seq_len + 1)
    inside = np.arange((num_rows + 1) * seq_len) < len(stream)
    labels = np.zeros(len(inside), stream.dtype)
    labels[: len(stream)] = stream
    ids = np.roll(labels, 1) * inside
    ids[0] = before
    positions = np.tile(np.arange(seq_len, dtype=small), num_rows + 1) * inside
    tables = (ids, labels, inside.astype(small), positions)
    return RowTable(*(table.reshape(-1, seq_len) for table in tables))
