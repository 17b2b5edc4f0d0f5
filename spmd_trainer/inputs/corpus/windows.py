"""Windows: groups of consecutive documents of the mixture, packed into rows together.

A window, and the position at its end, depend only on the position at its beginning. A restored input therefore makes the
same windows again, for any batch size and number of processes. Each process makes its own rows of a window.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
import zlib
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus import encoding, order, row_plan
from spmd_trainer.inputs.corpus.cursors import Cursor, SourceCursor
from spmd_trainer.inputs.corpus.mixture import STOP, TOKENS, ChangingShare, OpenSource, Schedule, holding, steps_of
from spmd_trainer.inputs.corpus.row_plan import PAD, PAIR, SPLIT, Frame, FramedDocument, PairTable, RowPlan, RowTable
from spmd_trainer.sharding.messages import count_text

# Bytes of text that all sources together keep in memory, each an equal share: for shuffling documents (with 'auto'), and for
# tokenizing documents ahead.
_AUTO_WINDOW_BYTES, _BYTES_AHEAD = order.AUTO_WINDOW_BYTES, 2**25


@dataclasses.dataclass(frozen=True, kw_only=True)
class WindowSettings:
    """Settings for making windows. Most come from `corpus_input.CorpusInput`, its mixture or `encoding.Encoder`.

    Attributes (the others):
      batch_rows: rows per global batch.
      segment_lens: {row number, counted over all windows: maximum number of tokens per segment from this row on}.
    """

    tokenizer: tokenizers.Tokenizer
    limit: int
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
    batch_rows: int
    segment_lens: Mapping[int, int]


class Share(NamedTuple):
    """This process's share of the rows of a window, in the order in which the input gives them.

    Attributes:
      first: number of the process's first row in each global batch.
      rows: number of the process's rows in each global batch.
      batch_size: rows per global batch.
      filled: row n of the window has the number (n + filled) % batch_size in its global batch.
      skipped: number of rows at the window's beginning that are left out, because they were given before a restart.
    """

    first: int
    rows: int
    batch_size: int
    filled: int
    skipped: int

    def of(self, num_rows: int) -> np.ndarray:
        """Returns the numbers of the process's rows in a window of `num_rows` rows, ascending, int64."""
        numbers = np.arange(self.skipped, num_rows)
        places = (numbers + self.filled) % self.batch_size
        return numbers[(places >= self.first) & (places < self.first + self.rows)]


class Window(NamedTuple):
    """The rows of one window.

    Attributes:
      begin: position in the input where the window begins.
      end: position in the input where the next window begins.
      table: this process's rows of the window. An empty row (or pair) follows, which fills up the input's last batch.
      places: index in `table` of each row of the window, in the input's order, int64 [num_rows]; -1 for other processes' rows.
      num_tokens: tokens in the rows of all processes.
    """

    begin: Cursor
    end: Cursor
    table: RowTable | PairTable
    places: np.ndarray
    num_tokens: int

    @property
    def num_rows(self) -> int:
        """Number of rows of all processes."""
        return len(self.places)


# Future of the next window; or of the position where the input ends, after any bad records that follow the last document.
Ahead: TypeAlias = "concurrent.futures.Future[Window | Cursor]"


class Cancelled(Exception):
    """Raised while making a window if the window is no longer needed."""


class _PendingDocument(NamedTuple):
    """A document of the window that is being made.

    Attributes:
      framed: the document's tokens, and the tokens put around them.
      size: number of labels.
      place: number of the document's source, and the two numbers of its `order.Taken.place` in this source.
      before: positions of all sources before the document was read.
    """

    framed: FramedDocument
    place: tuple[int, int, int]
    size: int
    before: tuple[SourceCursor, ...]


class WindowMaker:
    """Makes the windows of an input in order."""

    def __init__(
        self, sources: Sequence[OpenSource], settings: WindowSettings, begin: Cursor, error: Callable[[str], UserError]
    ):
        """Opens every source at `begin`, the position of the first window. `error` makes an exception from a message."""
        self._settings = settings
        self._begin = begin
        self._error = error
        self._cursors = list(begin.sources)
        self._carried: list[_PendingDocument] = []
        self._cancelled = threading.Event()
        self._frames = [_frame(one, settings) for one in sources]
        self._are_texts = all(one.documents.processor is None for one in sources)
        by_tokens = settings.weigh_by == TOKENS
        self._weighed = (lambda cursor: cursor.tokens) if by_tokens else (lambda cursor: cursor.documents)
        self._shares = [one.share for one in sources]
        # Numbers of rows (over all windows) after which the weights of each step apply; and those at which weights or segment
        # lengths change. A window ends at such a row, or with the document that crosses it.
        self._weights_from = [step * settings.batch_rows for step in steps_of(self._shares[0])]
        self._changes = {*self._weights_from, *settings.segment_lens}
        self._schedule = self._schedule_by(begin.begins)
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
            encoding.Encoder(
                settings.tokenizer, settings.limit, one.documents.processor, room=encoding.KEPT_BYTES // num_sources
            ),
            one.name if num_sources > 1 else "",
            bad_records=settings.bad_records,
            bytes_ahead=_BYTES_AHEAD // num_sources,
            error=self._error,
        )

    def cancel(self) -> None:
        """Makes `next_window`, called in another thread, raise `Cancelled` soon."""
        self._cancelled.set()

    def next_window(self, share: Share) -> Window | Cursor:
        """Returns the next window with this process's rows (`share`). After the last window, returns the input's end position.

        Raises:
          UserError: a source can't be read or has a bad record, or all sources are empty.
          Cancelled: `cancel` was called.
        """
        pending, ended = self._next_documents()
        if not pending:
            if self._begin.window == 0:
                left_out = sum(one.skipped for one in self._cursors)
                those = f"; left out: {count_text(left_out, 'record')}, see the log" if left_out else ""
                what = "document with text" if self._are_texts else "record that can be used"
                raise self._error(f"the sources have no {what}{those}; give at least one")
            return self._begin._replace(sources=tuple(self._cursors))
        settings = self._settings
        plan, end = self._split(pending, ended) if settings.packing == SPLIT else self._pack(pending)
        in_order = np.arange(plan.num_rows)
        if settings.shuffle and settings.packing != PAIR:  # pairs keep the order of the shuffled documents
            in_order = order.permutation(plan.num_rows, settings.seed, self._begin.window)(in_order)
        own = share.of(plan.num_rows)
        table: RowTable | PairTable
        if settings.packing == PAIR:
            pairs = [pending[row] for row in own.tolist()]
            tokens, places_of = [one.framed.tokens for one in pairs], [one.place for one in pairs]
            table = row_plan.make_pairs(tokens, places_of, settings.seq_len)
        else:
            table = row_plan.make_rows(plan, in_order[own], [one.framed for one in pending], settings.seq_len)
        places = np.full(plan.num_rows, -1)
        places[own] = np.arange(len(own))
        # Each of a pair's two sequences has one label fewer than tokens, and `size` subtracts only 1. The plan counts pairs.
        num_tokens = sum(one.size - 1 for one in pending) if settings.packing == PAIR else plan.num_tokens
        window = Window(self._begin, end, table, places, num_tokens)
        if end.begins != self._begin.begins:
            self._schedule = self._schedule_by(end.begins)
        self._begin = end
        return window

    def _schedule_by(self, begins: Sequence[int]) -> Schedule:
        """Makes a schedule with the shares that apply now. `begins`: see `ChangingShare.so_far`."""
        shares = [share.so_far(begins) if isinstance(share, ChangingShare) else share for share in self._shares]
        return Schedule(shares, [self._weighed(one) for one in self._cursors])

    def _next_documents(self) -> tuple[list[_PendingDocument], bool]:
        """Returns the documents of the next window, and whether they are the last documents of the input."""
        rows = [self._settings.window_rows, *(row - self._begin.rows for row in self._changes)]
        wanted = min(count for count in rows if count > 0) * self._settings.seq_len
        pending, self._carried = self._carried, []
        filled = sum(map(self._size, pending)) - self._begin.offset
        while filled < wanted:
            if self._cancelled.is_set():
                raise Cancelled
            one = self._next_document()
            if one is None:
                return pending, True
            if not pending and self._begin.offset >= one.size:
                raise self._error(
                    "the saved position lies in a document that has become shorter: the files have changed"
                )
            pending.append(one)
            filled += self._size(one)
        return pending, False

    def _size(self, one: _PendingDocument) -> int:
        """Returns the number of row positions that a document takes up."""
        seq_len, packing = self._settings.seq_len, self._settings.packing
        if packing == PAIR:
            return seq_len
        return -(-one.size // seq_len) * seq_len if packing == PAD else one.size

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
            framed = FramedDocument(encoded.tokens, self._frames[index])
            size = len(framed.tokens) + framed.frame.size
            self._cursors[index] = SourceCursor(
                encoded.after, cursor.documents + 1, cursor.tokens + size, cursor.skipped + encoded.skipped
            )
            self._schedule.advance(self._weighed(self._cursors[index]))
            return _PendingDocument(framed, (index, *encoded.place), size, before)
        return None

    def _pack(self, pending: list[_PendingDocument]) -> tuple[RowPlan, Cursor]:
        settings = self._settings
        if settings.packing == PAIR:
            plan = row_plan.pack([1] * len(pending), 1, PAD)
        else:
            most = holding(settings.segment_lens, self._begin.rows)
            plan = row_plan.pack([one.size for one in pending], settings.seq_len, settings.packing, most)
        return plan, self._after(plan, 0, tuple(self._cursors))

    def _after(self, plan: RowPlan, offset: int, sources: tuple[SourceCursor, ...]) -> Cursor:
        """Returns the position where the next window begins."""
        window, rows, begins = self._begin.window + 1, self._begin.rows + plan.num_rows, self._begin.begins
        come = sum(begin <= rows for begin in self._weights_from)
        if come > 1 + len(begins):  # the weights of the steps reached so far apply from here on
            due = self._schedule.total
            begins += (max(begins, default=0) if due is None else due,) * (come - 1 - len(begins))
        return Cursor(window, offset, sources, rows, begins)

    def _split(self, pending: list[_PendingDocument], ended: bool) -> tuple[RowPlan, Cursor]:
        """Cuts the documents into rows, and carries the tokens after the last full row over to the next window."""
        offset, seq_len = self._begin.offset, self._settings.seq_len
        sizes = [one.size for one in pending]
        total = sum(sizes) - offset
        used = total if ended else total // seq_len * seq_len
        plan = row_plan.cut(sizes, seq_len, offset, used)
        if used == total:
            return plan, self._after(plan, 0, tuple(self._cursors))
        starts = np.cumsum([0, *sizes[:-1]]) - offset
        last = int(np.searchsorted(starts, used, "right")) - 1
        self._carried = pending[last:]
        return plan, self._after(plan, used - int(starts[last]), pending[last].before)


def _frame(source: OpenSource, settings: WindowSettings) -> Frame:
    """Returns the tokens to put around a source's documents: the start token and end-of-text; none if it has a processor."""
    if source.documents.processor is not None:
        return Frame()
    end, start = settings.eos_id, settings.start_id
    if settings.packing == SPLIT:
        return Frame((end,) if start in (None, end) else (end, start), (end,))
    return Frame((end if start is None else start,), (end,))


def make_ahead(maker: WindowMaker, share: Share, name: str, reading: threading.Lock) -> Ahead:
    """Makes the next window in a new thread, and returns its future.

    Args:
      maker: makes the window.
      share: this process's rows of the window.
      name: the input's name.
      reading: lock held while the window is made, because several makers may share the input's sources.
    """
    found: Ahead = concurrent.futures.Future()
    # Not an executor's thread: Python waits for such threads when it exits, and this one may be waiting for a disk.
    threading.Thread(target=_make, args=(maker, share, found, reading), name=f"windows-{name}", daemon=True).start()
    return found


def _make(maker: WindowMaker, share: Share, found: Ahead, reading: threading.Lock) -> None:
    try:
        with reading:
            window = maker.next_window(share)
        found.set_result(window)
    except Cancelled:  # nobody waits
        pass
    except BaseException as error:  # else the consumer would wait forever
        found.set_exception(error)
    finally:
        del maker, found  # an error's traceback holds this frame
