"""Short documents packed into rows, each document a segment.

A document's tokens and one end-of-text are cut into pieces of at most T tokens. Each piece is one segment of one row:
attention stays within the segment, and positions in it count from 0. A segment's first id is the token before its
first label: end-of-text at a document's beginning (beginning-of-text with `start='bos'`). Every token is therefore
predicted exactly once.

Example, T = 8, documents b"hello", b"a":
    ids         EOS h e l l o EOS a
    labels        h e l l o EOS a EOS
    segment_ids   1 1 1 1 1 1 2 2
    segment_pos   0 1 2 3 4 5 0 1
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import batches, indexed, text_base, tokenizers


class PackedRows(text_base.TokenizedFiles):
    """Base of language-model inputs over packed rows.

    Training is endless: each epoch gives every row once, in an order drawn from (input_random_seed, epoch). Evaluation
    gives every row once, then StopIteration until `reset()`. All files are read before the first batch. A batch has
    the same arrays as one of `TextInput`; segments are numbered from 1 in each row, and padding after the last segment
    has segment id 0.

    A subclass implements `_table`.

    Attributes:
      seq_len: tokens per row, T.
      shuffle: False keeps the rows of a training input in packing order.
    """

    seq_len: int = 0
    shuffle: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("seq_len")

    @property
    def num_rows(self) -> int:
        """Rows of one epoch."""
        return len(self._table.labels) - 1

    @property
    def num_tokens(self) -> int:
        """Labels of one epoch, without padding."""
        return int(np.count_nonzero(self._table.segment_ids))

    @property
    def num_counted(self) -> int:
        """Labels of one epoch that count in the loss."""
        return self.num_tokens if self._table.counted is None else int(np.count_nonzero(self._table.counted))

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(self.num_rows, self.is_training, self.shuffle and self.is_training, self.seed)

    def input_specs(self) -> NestedMap:
        return batches.lm_input_specs(self.batch_size, self.seq_len)

    def batch_at(self, position: int) -> NestedMap:
        return self._table.batch(self.examples_at(position))

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_len": self.seq_len}

    @property
    def _table(self) -> RowTable:
        """All rows. Subclasses cache them."""
        raise NotImplementedError


class PackedTextInput(PackedRows):
    """Language-model input over the documents in text files, packed into rows (see the module docstring).

    The packing depends only on the documents and `seq_len`. For batches and epochs see `PackedRows`.

    Attributes:
      files, tokenizer, eos_id, start, allow_binary: see `text_base.TokenizedFiles`.
      seq_len, shuffle: see `PackedRows`.
      separator: text between the documents of a file, e.g. a newline, not part of them; None makes each file one
        document. Empty documents are left out.
    """

    separator: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.separator == "":
            raise self.error("separator=''; set it to the text between documents, or to None for one document per file")

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "separator": self.separator}

    def _documents(self) -> Iterator[np.ndarray]:
        separator = None if self.separator is None else self.separator.encode()
        end = np.array(self.tokenizer.eos_id, self.token_dtype)
        for i, path in enumerate(self.paths):
            content = self.found.read(i)
            for tokens in tokenizers.encode_documents(content, path, self.tokenizer, separator):
                self.refuse_unknown_ids(tokens, path)
                yield np.append(tokens.astype(self.token_dtype), end)

    @functools.cached_property
    def _table(self) -> RowTable:
        documents = list(self._documents())
        if not documents:
            raise self.error(f"the files hold no document, the first is {self.paths[0]}; give one with text in it")
        first = self.tokenizer.eos_id if self.start_id is None else self.start_id
        return pack(np.concatenate(documents), [len(x) for x in documents], self.seq_len, first)


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


def pack(
    stream: np.ndarray,
    lengths: list[int],
    seq_len: int,
    first: int | np.ndarray,
    counted: np.ndarray | None = None,
) -> RowTable:
    """Packs documents into rows by best fit.

    Args:
      stream: labels of all documents, unsigned [sum of lengths].
      lengths: labels of each document.
      seq_len: tokens per row.
      first: id before the first label of each document, one for all or [documents].
      counted: True for labels that count in the loss, bool [sum of lengths]; None: all do.
    """
    sizes = np.array([min(seq_len, n - start) for n in lengths for start in range(0, n, seq_len)])
    before = np.roll(stream, 1)
    before[np.cumsum([0, *lengths[:-1]])] = first
    return lay_out(before, stream, sizes, best_fit(sizes.tolist(), seq_len), seq_len, counted=counted)


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
      counted: as in `pack`.
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
