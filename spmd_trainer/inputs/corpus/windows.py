"""Windows: consecutive documents of all sources, packed into rows together.

A window depends only on where it begins, and so does the beginning of the next. A restored input therefore makes the
same windows again, for any batch size and number of processes.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
import weakref
import zlib
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import encoding, order, rows
from spmd_trainer.inputs.corpus.cursors import Cursor, SourceCursor
from spmd_trainer.inputs.corpus.mixture import STOP, TOKENS, OpenSource, Schedule
from spmd_trainer.inputs.packed_text import RowTable

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
        table, end = self._split(pending, ended) if self._settings.packing == rows.SPLIT else self._pack(pending)
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
        return -(-size // seq_len) * seq_len if self._settings.packing == rows.PAD else size

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
        starts = settings.packing == rows.SPLIT and settings.start_id not in (None, settings.eos_id)
        return np.concatenate(
            [np.array(ids, tokens.dtype) for ids in ([settings.start_id] if starts else [], tokens, [settings.eos_id])]
        )

    def _pack(self, pending: list[_PendingDocument]) -> tuple[RowTable, Cursor]:
        settings = self._settings
        first = settings.eos_id if settings.start_id is None else settings.start_id
        table = rows.pack_documents([one.tokens for one in pending], settings.seq_len, first, settings.packing)
        return table, Cursor(self._begin.window + 1, 0, tuple(self._cursors))

    def _split(self, pending: list[_PendingDocument], ended: bool) -> tuple[RowTable, Cursor]:
        """Cuts the documents into rows, and carries the tokens after the last full row to the next window."""
        offset, number, seq_len = self._begin.offset, self._begin.window + 1, self._settings.seq_len
        stream = np.concatenate([one.tokens for one in pending])
        before = int(stream[offset - 1]) if offset else self._settings.eos_id
        stream = stream[offset:]
        used = len(stream) if ended else len(stream) // seq_len * seq_len
        table = rows.cut_stream(stream[:used], seq_len, before)
        if used == len(stream):
            return table, Cursor(number, 0, tuple(self._cursors))
        starts = np.cumsum([0, *(len(one.tokens) for one in pending[:-1])]) - offset
        cut = int(np.searchsorted(starts, used, "right")) - 1
        self._carried = pending[cut:]
        return table, Cursor(number, used - int(starts[cut]), pending[cut].before)


class WindowThread:
    """A thread that makes the next window while the current one is used. Ends when this object is closed or collected."""

    def __init__(self, maker: WindowMaker, name: str, *, after: WindowThread | None = None):
        """Starts the thread, which owns `maker` from now on.

        Args:
          maker: makes the windows.
          name: the input's name.
          after: a closed WindowThread on the same sources; the new thread waits for it to end.
        """
        before = None if after is None else after._thread
        self._results: queue.SimpleQueue[Window | Ended | BaseException] = queue.SimpleQueue()
        self._room = threading.Semaphore(1)
        # The thread must not hold this object, or neither could be collected.
        self._thread: threading.Thread = threading.Thread(
            target=_run, args=(maker, before, self._room, self._results), name=f"windows-{name}", daemon=True
        )
        self._cancel = weakref.finalize(self, _cancel, maker, self._room)
        self._thread.start()

    def next_window(self) -> Window | Ended:
        """Returns the next window or `Ended`, or raises the maker's error. Either ends the thread."""
        result = self._results.get()
        if isinstance(result, BaseException):
            raise result
        self._room.release()
        return result

    def close(self) -> None:
        """Tells the thread to end. Does not wait for it, because it may be waiting for a disk."""
        self._cancel()


def _run(
    maker: WindowMaker,
    before: threading.Thread | None,
    room: threading.Semaphore,
    results: queue.SimpleQueue[Window | Ended | BaseException],
) -> None:
    try:
        if before is not None:
            before.join()
        while True:
            room.acquire()
            window = maker.next_window()
            results.put(window)
            if isinstance(window, Ended):
                return
    except Cancelled:
        return
    except BaseException as error:  # else the consumer would wait forever
        results.put(error)


def _cancel(maker: WindowMaker, room: threading.Semaphore) -> None:
    maker.cancel()
    room.release()
