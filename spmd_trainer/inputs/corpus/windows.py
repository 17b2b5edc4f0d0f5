"""Windows: consecutive documents of all sources, packed into rows together.

A window depends only on where it begins, and so does the beginning of the next. A restored input therefore makes the
same windows again, for any batch size and number of processes.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import packed_text, tokenizers
from spmd_trainer.inputs.corpus import encoding, order
from spmd_trainer.inputs.corpus.cursors import Cursor, SourceCursor
from spmd_trainer.inputs.corpus.mixture import STOP, TOKENS, OpenSource, Schedule
from spmd_trainer.inputs.packed_text import Fit, RowTable

BEST_FIT, PAD, SPLIT = "best_fit", "pad", "split"
PACKINGS = (BEST_FIT, PAD, SPLIT)
# Bytes of text that all sources together keep in memory, each an equal part: to shuffle documents ('auto'), and to encode
# them ahead.
_AUTO_WINDOW_BYTES, _BYTES_AHEAD = order.AUTO_WINDOW_BYTES, 2**25


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """How windows are made.

    Attributes:
      encoder: encodes documents.
      eos_id: end-of-text, after each document.
      start_id: token before each document; None: no start token, and the id before a document's first label is
        `eos_id`.
      seq_len: tokens per row, T.
      packing: 'best_fit', 'pad' or 'split'.
      window_rows: a window ends with the document that fills this many rows.
      shuffle: True shuffles the rows of a window.
      seed: seed of all shuffles.
      bad_records: 'raise' or 'skip'.
      weigh_by, stopping_strategy: see `mixture.Mixture`.
    """

    encoder: encoding.Encoder
    eos_id: int
    start_id: int | None
    seq_len: int
    packing: str
    window_rows: int
    shuffle: bool
    seed: int
    bad_records: str
    weigh_by: str
    stopping_strategy: str


class Window(NamedTuple):
    """The rows of one window.

    Attributes:
      begin: where it begins.
      end: where the next window begins.
      table: its rows; the last one is empty.
      order: order in which the input gives the rows, int64 [num_rows + 1]; the empty row comes last.
      num_tokens: tokens in its rows.
    """

    begin: Cursor
    end: Cursor
    table: RowTable
    order: np.ndarray
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Rows without the empty one."""
        return len(self.order) - 1


class Ended(NamedTuple):
    """The end of the input.

    Attributes:
      end: final position, after any bad records behind the last document.
    """

    end: Cursor


# The next window, or the end.
Ahead: TypeAlias = "concurrent.futures.Future[Window | Ended]"


class Cancelled(Exception):
    """The window being made is no longer needed."""


class _PendingDocument(NamedTuple):
    """A document of the current window.

    Attributes:
      tokens: its tokens with end-of-text and, if `packing` is 'split', the start token.
      before: positions of the sources before it was read.
    """

    tokens: np.ndarray
    before: tuple[SourceCursor, ...]


class WindowMaker:
    """Makes the windows of an input in order."""

    def __init__(
        self, sources: Sequence[OpenSource], settings: WindowSettings, begin: Cursor, error: Callable[[str], UserError]
    ):
        """Opens every source at the position where the first window begins. `error` makes an error of a message."""
        self._settings = settings
        self._begin = begin
        self._error = error
        self._cursors = list(begin.sources)
        self._carried: list[_PendingDocument] = []
        self._cancelled = threading.Event()
        by_tokens = settings.weigh_by == TOKENS
        self._weighed = (lambda cursor: cursor.tokens) if by_tokens else (lambda cursor: cursor.documents)
        self._schedule = Schedule([one.share for one in sources], [self._weighed(one) for one in self._cursors])
        self._streams = [
            self._open(one, cursor.position, len(sources)) for one, cursor in zip(sources, begin.sources, strict=True)
        ]

    def _open(self, one: OpenSource, position: order.Position, num_sources: int) -> encoding.EncodedStream:
        settings = self._settings
        stream = order.DocumentStream(
            one.source,
            shuffle=one.shuffle,
            seed=settings.seed * 2**32 + zlib.crc32(one.name.encode()),
            epochs=one.epochs,
            auto_window_bytes=_AUTO_WINDOW_BYTES // num_sources,
            position=position,
        )
        return encoding.EncodedStream(
            stream,
            settings.encoder,
            one.name if num_sources > 1 else "",
            bad_records=settings.bad_records,
            bytes_ahead=_BYTES_AHEAD // num_sources,
            error=self._error,
        )

    def cancel(self) -> None:
        """Makes `next_window`, called in another thread, raise `Cancelled` soon."""
        self._cancelled.set()

    def next_window(self) -> Window | Ended:
        """Returns the next window, or `Ended` after the last.

        Raises:
          UserError: a source can't be read or has a bad record, or all sources are empty.
          Cancelled: `cancel` was called.
        """
        pending, ended = self._next_documents()
        if not pending:
            if self._begin.window == 0:
                raise self._error("the sources have no document with text; give at least one")
            return Ended(self._begin._replace(sources=tuple(self._cursors)))
        table, end = self._split(pending, ended) if self._settings.packing == SPLIT else self._pack(pending)
        num_rows = len(table.labels) - 1
        in_order = np.arange(num_rows + 1)
        if self._settings.shuffle:
            in_order[:-1] = order.permutation(num_rows, self._settings.seed, self._begin.window)(in_order[:-1])
        window = Window(self._begin, end, table, in_order, int(np.count_nonzero(table.segment_ids)))
        self._begin = end
        return window

    def _next_documents(self) -> tuple[list[_PendingDocument], bool]:
        """Returns the documents of the next window, and True if they are the last."""
        pending, self._carried = self._carried, []
        filled = sum(map(self._size, pending)) - self._begin.offset
        while filled < self._settings.window_rows * self._settings.seq_len:
            if self._cancelled.is_set():
                raise Cancelled
            one = self._next_document()
            if one is None:
                return pending, True
            if not pending and self._begin.offset >= len(one.tokens):
                raise self._error(
                    "the saved position lies in a document that has become shorter: the files have changed"
                )
            pending.append(one)
            filled += self._size(one)
        return pending, False

    def _size(self, one: _PendingDocument) -> int:
        """Returns the positions of rows that a document fills."""
        seq_len, size = self._settings.seq_len, len(one.tokens)
        return -(-size // seq_len) * seq_len if self._settings.packing == PAD else size

    def _next_document(self) -> _PendingDocument | None:
        while (index := self._schedule.source) is not None:
            before, cursor = tuple(self._cursors), self._cursors[index]
            encoded = self._streams[index].take()
            if encoded.tokens is None:
                self._cursors[index] = cursor._replace(position=encoded.after, skipped=cursor.skipped + encoded.skipped)
                if self._settings.stopping_strategy == STOP:
                    return None
                self._schedule.drop()
                continue
            tokens = self._surround(encoded.tokens)
            self._cursors[index] = SourceCursor(
                encoded.after, cursor.documents + 1, cursor.tokens + len(tokens), cursor.skipped + encoded.skipped
            )
            self._schedule.advance(self._weighed(self._cursors[index]))
            return _PendingDocument(tokens, before)
        return None

    def _surround(self, tokens: np.ndarray) -> np.ndarray:
        settings = self._settings
        starts = settings.packing == SPLIT and settings.start_id not in (None, settings.eos_id)
        return np.concatenate(
            [np.array(ids, tokens.dtype) for ids in ([settings.start_id] if starts else [], tokens, [settings.eos_id])]
        )

    def _pack(self, pending: list[_PendingDocument]) -> tuple[RowTable, Cursor]:
        settings = self._settings
        first = settings.eos_id if settings.start_id is None else settings.start_id
        table = pack_documents([one.tokens for one in pending], settings.seq_len, first, settings.packing)
        return table, Cursor(self._begin.window + 1, 0, tuple(self._cursors))

    def _split(self, pending: list[_PendingDocument], ended: bool) -> tuple[RowTable, Cursor]:
        """Cuts the documents into rows, and carries the tokens after the last full row to the next window."""
        offset, number, seq_len = self._begin.offset, self._begin.window + 1, self._settings.seq_len
        stream = np.concatenate([one.tokens for one in pending])
        before = int(stream[offset - 1]) if offset else self._settings.eos_id
        stream = stream[offset:]
        used = len(stream) if ended else len(stream) // seq_len * seq_len
        table = cut_stream(stream[:used], seq_len, before)
        if used == len(stream):
            return table, Cursor(number, 0, tuple(self._cursors))
        starts = np.cumsum([0, *(len(one.tokens) for one in pending[:-1])]) - offset
        cut = int(np.searchsorted(starts, used, "right")) - 1
        self._carried = pending[cut:]
        return table, Cursor(number, used - int(starts[cut]), pending[cut].before)


def make_ahead(maker: WindowMaker, name: str, reading: threading.Lock) -> Ahead:
    """Makes the next window in a thread, which ends with it.

    Args:
      maker: makes the window.
      name: the input's name.
      reading: a lock, held while the window is made: makers of one input share their sources.
    """
    found: Ahead = concurrent.futures.Future()
    # Not an executor's: Python waits for those at its end, and this one may be waiting for a disk.
    threading.Thread(target=_make, args=(maker, found, reading), name=f"windows-{name}", daemon=True).start()
    return found


def _make(maker: WindowMaker, found: Ahead, reading: threading.Lock) -> None:
    try:
        with reading:
            window = maker.next_window()
        found.set_result(window)
    except Cancelled:  # nobody waits
        pass
    except BaseException as error:  # else the consumer would wait forever
        found.set_exception(error)
    finally:
        del maker, found  # an error's traceback holds this frame


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
