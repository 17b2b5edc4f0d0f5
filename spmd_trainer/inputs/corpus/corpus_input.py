"""Language-model input over text files (JSON lines, Parquet, Arrow, ArrayRecord, TFRecord, tar, plain text) and their mixtures.

The rows form one sequence, the same in every process: documents are mixed by weight, tokenized, and packed window by window
(see `windows`). A global batch takes the next batch_size * num_infeed_hosts rows, of which process h keeps the rows
[h * batch_size, (h + 1) * batch_size). A saved position has each source's position at the beginning of the current window, and
the number of rows taken from this window. It is valid for any number of processes, and for any batch size unless weights or
`segment_len` change at training steps.

Without a token store, every process reads and tokenizes all documents. `--mode=tokenise` writes a store before training,
`tokenise_ahead` during it. With a store, a process reads the lengths of all documents, but only its own rows' tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import threading
import weakref
from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import numpy as np
from praxis import base_input
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, first_paragraph, require_one_of
from spmd_trainer.inputs import batches, text_base
from spmd_trainer.inputs.corpus import cursors, encoding, mixture, prepared_source, row_plan, windows
from spmd_trainer.inputs.corpus.documents import Documents, Processor
from spmd_trainer.inputs.corpus.file_kinds import TOKENS
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.prepare import Preparation
from spmd_trainer.inputs.corpus.prepared_source import Helpers, PreparedSource, store_name
from spmd_trainer.inputs.corpus.row_plan import PairTable, RowTable

# Default of `window_rows`: `_most_rows`, or fewer if they would hold more than _MOST_TOKENS, but at least _LEAST_ROWS.
_MOST_TOKENS, _LEAST_ROWS = 2**22, 32
# A saved position is valid only for the same values of these settings.
_SAVED_SETTINGS = (
    "start_id", "seq_len", "packing", "window_rows", "shuffle", "seed", "bad_records", "weigh_by", "stopping_strategy"
)  # fmt: skip


class CorpusInput(text_base.TokenizedInput):
    """Language-model input over documents from files of many kinds, packed into rows (see the module docstring).

    A training input never ends, unless its sources have `epochs`. An evaluation input gives every document once, then raises
    StopIteration until `reset()`. The last batch is filled up with rows of weight 0, so all processes have the same number of
    batches. Batches have the same arrays as in `TextInput`. Documents without text are left out. A window is a group of
    consecutive documents that are packed into rows together. A thread makes the next window in advance.

    Attributes:
      source: `Documents`, or a `Mixture` of them.
      tokenizer, eos_id, start: see `text_base.TokenizedInput`.
      seq_len: tokens per row, T.
      packing: 'best_fit' cuts documents into pieces of at most T tokens, and puts several pieces into a row, each as a segment.
        'pad': one piece per row. 'split' cuts the concatenated documents every T tokens: no padding; attention crosses documents.
      segment_len: maximum tokens per piece (only for 'best_fit'), at most T; None: T. {0: 512, 10_000: 2048} is a curriculum:
        at most 512 tokens per piece from training step 0 on, and 2,048 for documents that begin at step 10,000 or later. This
        is dataset decomposition (Pouransari et al. 2024, arXiv:2405.13226), except that all rows have T tokens. With a mapping,
        a saved position is valid only for the same number of rows per global batch.
      shuffle: True shuffles each source's documents (see `Documents`) and each window's rows. None shuffles only training data.
      window_rows: rows per window; more rows pack better and take more memory. None: 256, or fewer (at least 32) if 256 rows
        would have more than 4,194,304 tokens.
      bad_records: 'raise' stops at a record that can't be read or encoded, with an error that names its file and its number.
        'skip' leaves such a record out, counts it in `skipped` and logs it.
    """

    _packings: ClassVar[tuple[str, ...]] = row_plan.PACKINGS
    _most_rows: ClassVar[int] = 256

    source: Any = None
    seq_len: int = 0
    packing: str = row_plan.BEST_FIT
    segment_len: int | Mapping[int, int] | None = None
    shuffle: bool | None = None
    window_rows: int | None = None
    bad_records: str = encoding.RAISE
    sources: Any = dataclasses.field(default=None, init=False, repr=False)
    _at: Any = dataclasses.field(default=None, init=False, repr=False)
    _window: Any = dataclasses.field(default=None, init=False, repr=False)
    _maker: Any = dataclasses.field(default=None, init=False, repr=False)
    # Future of the next window, which `_maker` makes.
    _ahead: Any = dataclasses.field(default=None, init=False, repr=False)
    # Held by the one thread that reads the sources.
    _reading: Any = dataclasses.field(default_factory=threading.Lock, init=False, repr=False)
    # Cancels `_maker`. Also called when this input is garbage-collected.
    _cancel: Any = dataclasses.field(default=None, init=False, repr=False)
    _ended_at: Any = dataclasses.field(default=None, init=False, repr=False)
    _rows_read: int = dataclasses.field(default=0, init=False, repr=False)
    _tokens_read: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("seq_len")
        if self.window_rows is not None:
            self.require_positive("window_rows")
        if self.shuffle is not None and not isinstance(self.shuffle, bool):
            raise self.error(
                f"shuffle={self.shuffle!r}; set it to True, False or None. Windows are set in Documents(shuffle=...)"
            )
        with self.naming():
            require_one_of("packing", self.packing, self._packings)
            require_one_of("bad_records", self.bad_records, encoding.BAD_RECORDS)
            self._segment_lens: dict[int, int] = self._read_segment_len()
        try:
            self.make_tokenizer()
            self._mixture = mixture.as_mixture(self.source, is_training=self.is_training)
            self.sources: list[mixture.OpenSource] = mixture.open_mixture(
                self._mixture, is_training=self.is_training, shuffle=self._shuffles, bound=self._bound
            )
            for one in self.sources:
                if hasattr(one.source, "check_made_by"):  # a prepared corpus
                    one.source.check_made_by(self.tokenizer.fingerprint(), one.documents.processor)
        except ValueError as error:
            raise self.error(first_paragraph(error)) from error
        if self._changes_by_steps and self.packing == row_plan.SPLIT:
            raise self.error(
                "change_by='steps' needs whole documents, which packing='split' cuts; use 'best_fit' or 'pad'"
            )
        self._at: cursors.InputPosition = cursors.beginning(len(self.sources))
        if self.endless or not self.is_training:
            self.settle_reset_for_eval()

    @property
    def endless(self) -> bool:
        return any(one.epochs is None for one in self.sources)

    @property
    def takes_any_batch_size(self) -> bool:
        return len(self._segment_lens) == 1 and not self._changes_by_steps

    @property
    def paths(self) -> tuple[str, ...]:
        """The files of all sources."""
        return tuple(path for one in self.sources for path in one.source.paths)

    @property
    def _opened(self) -> list[FileSource]:
        return [one.source.text if isinstance(one.source, PreparedSource) else one.source for one in self.sources]

    @property
    def num_batches(self) -> int | None:
        """Always None: the length of a finite input is unknown until its end."""
        return None

    @property
    def fill(self) -> float | None:
        """Fraction of the token positions in all windows read so far that are not padding; None before the first window."""
        positions = self._rows_read * self.seq_len * (2 if self.packing == row_plan.PAIR else 1)
        return self._tokens_read / positions if positions else None

    @property
    def skipped(self) -> dict[str, int]:
        """Number of bad records left out so far, by source name."""
        return {name: cursor.skipped for name, cursor in self._read_so_far.items()}

    @property
    def documents_of(self) -> dict[str, int]:
        """Number of documents read so far, by source name."""
        return {name: cursor.documents for name, cursor in self._read_so_far.items()}

    @property
    def tokens_of(self) -> dict[str, int]:
        """Number of tokens read so far, including start and end tokens, by source name."""
        return {name: cursor.tokens for name, cursor in self._read_so_far.items()}

    def input_specs(self) -> NestedMap:
        return batches.lm_input_specs(self.batch_size, self.seq_len)

    def store_names(self) -> dict[str, str]:
        """Returns {source name: name of its token store in the cache} for all sources that aren't token stores already."""
        found = {}
        for one in self.sources:
            if one.source.kind != TOKENS:
                found[one.name] = store_name(one.documents, one.source, self.tokenizer, self.bad_records)
        return found

    def tokenise_ahead(
        self, stores: Mapping[str, str], helpers: Helpers, after: threading.Thread | None = None
    ) -> threading.Thread:
        """Starts a thread that tokenizes sources into token stores, and returns the thread. Call this before the first batch.

        Each source is read as text until its store is finished, and from its store afterwards.

        Args:
          stores: {source name: local, gs:// or s3:// folder of its store}, the same on all processes of the job.
          helpers: the processes that tokenize.
          after: thread that this method returned for a different input. The new thread waits until that thread ends.
        """
        found = []
        for number, one in enumerate(self.sources):
            if one.name in stores:
                preparation = Preparation(one.documents, self.tokenizer, stores[one.name], self.bad_records)
                found.append(PreparedSource(one.source, preparation, helpers))
                self.sources[number] = dataclasses.replace(one, source=found[-1])
        # An evaluation may be over before a thread finds the finished stores, so it looks for them first. Training never waits.
        return prepared_source.tokenise(found, after, look_first=not self.is_training)

    def stop_tokenising(self) -> None:
        """Stops the work that `tokenise_ahead` has started. Finished parts of the stores are kept."""
        for one in self.sources:
            if isinstance(one.source, PreparedSource):
                one.source.stop()

    def get_next(self) -> NestedMap:
        """Returns the next batch and advances the position.

        Raises:
          StopIteration: a finite input has ended; `reset()` starts over.
          UserError: a source can't be read or has a bad record; the message names the file and the record.
        """
        at, window, parts, given = self._at, self._window, [], 0
        first = self.infeed_host_index * self.batch_size
        while given < self.global_batch_size:
            if window is None and (window := self._next_window(at, given)) is None:
                break
            count = min(self.global_batch_size - given, window.num_rows - at.row)
            # This process' rows among the next `count` rows of the window.
            own = np.arange(max(first, given), min(first + self.batch_size, given + count)) - given + at.row
            parts.append(self._batch(window.table, window.places[own]))
            filler = self._batch(window.table, np.array([-1]))
            given += count
            at = at._replace(row=at.row + count)
            if at.row == window.num_rows:
                at, window = cursors.InputPosition(window.end, 0), None
        if not given:
            raise StopIteration
        self._at, self._window = at, window
        missing = self.batch_size - sum(len(part.eval_sample_weights) for part in parts)
        return jax.tree.map(lambda *leaves: np.concatenate(leaves), *parts, *[filler] * missing)

    def reset(self) -> None:
        """Goes back to the first batch."""
        base_input.BaseInput.reset(self)
        self._go_to(cursors.beginning(len(self.sources)))

    def _batch(self, table: RowTable | PairTable, rows: np.ndarray) -> NestedMap:
        """Makes a batch from rows of a window's table. `rows`: the row numbers in the table, integers [B]; -1: an empty row."""
        return table.batch(rows)

    @property
    def _processor(self) -> Processor | None:
        """The processor for sources that don't have their own; None if such sources are tokenized as plain text."""
        return None

    def _bound(self, documents: Documents) -> Documents:
        """Returns `documents` with its processor set up for this input. Raises UserError if the processor is unsuitable."""
        processor = documents.processor or self._processor
        if processor is None:
            return documents
        if processor.gives_pairs != (self.packing == row_plan.PAIR):
            given, wanted, fix = "documents", "pairs of answers", "leave `processor` out"
            if processor.gives_pairs:
                given, wanted, fix = wanted, given, "give them to a PreferenceInput"
            raise UserError(
                f"the processor is a {type(processor).__name__}, which makes {given}, and a {type(self).__name__} takes "
                f"{wanted}; {fix}"
            )
        if self.packing == row_plan.SPLIT or self.segment_len is not None:
            raise UserError(
                "packing='split' and segment_len cut texts, and conversations are not cut; use 'best_fit' or 'pad' alone"
            )
        return dataclasses.replace(documents, processor=processor.bound(self.tokenizer, self.seq_len))

    @property
    def _shuffles(self) -> bool:
        return self.is_training if self.shuffle is None else self.shuffle

    @property
    def _changes_by_steps(self) -> bool:
        return any(mixture.steps_of(one.share) for one in self.sources)

    def _read_segment_len(self) -> dict[int, int]:
        """Returns `segment_len` as {training step: maximum number of tokens per segment from this step on}."""
        given = self.segment_len
        if given is None:
            return {0: self.seq_len}
        found = dict(given) if isinstance(given, Mapping) else {0: given}
        are_whole = all(isinstance(one, int) and not isinstance(one, bool) for one in (*found, *found.values()))
        if (
            not are_whole
            or 0 not in found
            or min(found) < 0
            or not all(0 < one <= self.seq_len for one in found.values())
        ):
            raise UserError(
                f"segment_len={given!r}; give tokens, 1 to seq_len={self.seq_len}, or {{0: tokens, step: tokens, ...}}"
            )
        if self.packing != row_plan.BEST_FIT:
            raise UserError(f"segment_len={given!r} is for packing='best_fit', and packing is {self.packing!r}")
        return found

    @property
    def _settings(self) -> windows.WindowSettings:
        limits = (self.vocab_size, self._model_vocab_size or self.vocab_size)
        return windows.WindowSettings(
            tokenizer=self.tokenizer,
            limit=min(limits),
            eos_id=self.tokenizer.eos_id,
            start_id=self.start_id,
            seq_len=self.seq_len,
            packing=self.packing,
            window_rows=self.window_rows or max(_LEAST_ROWS, min(self._most_rows, _MOST_TOKENS // self.seq_len)),
            shuffle=self._shuffles,
            seed=self.seed,
            bad_records=self.bad_records,
            weigh_by=self._mixture.weigh_by,
            stopping_strategy=self._mixture.stopping_strategy,
            batch_rows=self.global_batch_size,
            segment_lens={step * self.global_batch_size: most for step, most in self._segment_lens.items()},
        )

    @property
    def _read_so_far(self) -> dict[str, cursors.SourceCursor]:
        window = self._window
        cursor = self._ended_at or (self._at.cursor if window is None else window.end)
        return {one.name: source for one, source in zip(self.sources, cursor.sources, strict=True)}

    def _share(self, filled: int, skipped: int = 0) -> windows.Share:
        first = self.infeed_host_index * self.batch_size
        return windows.Share(first, self.batch_size, self.global_batch_size, filled - skipped, skipped)

    def _next_window(self, at: cursors.InputPosition, given: int) -> windows.Window | None:
        """Returns the window at position `at`; None after the last window. `given`: rows already put into the global batch."""
        if self._maker is None:
            # The maker has no reference to this input, so the input can be garbage-collected while a window is made.
            prefix = str(self.error(""))
            self._maker = windows.WindowMaker(
                self.sources, self._settings, at.cursor, lambda text: UserError(prefix + text)
            )
            self._cancel = weakref.finalize(self, self._maker.cancel)
        try:
            if self._ahead is None:
                share = self._share(given, at.row)
                self._ahead = windows.make_ahead(self._maker, share, self.name, self._reading)
            window = self._ahead.result()
            if isinstance(window, windows.Window):
                share = self._share((given + window.num_rows - at.row) % self.global_batch_size)
                self._ahead = windows.make_ahead(self._maker, share, self.name, self._reading)
        except BaseException:
            self._stop()  # the next call tries again
            raise
        if not isinstance(window, windows.Window):
            self._stop()
            self._ended_at = window
            return None
        if window.begin != at.cursor:  # an interrupted call took this window and lost it
            self._stop()
            return self._next_window(at, given)
        if at.row >= window.num_rows:
            raise self.error(f"the saved position is after row {at.row} of a window that has {window.num_rows} rows")
        self._rows_read += window.num_rows
        self._tokens_read += window.num_tokens
        return window

    def _get_state_internal(self) -> bytes:
        position = cursors.to_json(self._at, [one.name for one in self.sources])
        return f'{{"data": {self._data_json}, "position": {position}}}'.encode()

    def _set_state_internal(self, state: bytes) -> None:
        try:
            saved = json.loads(state)
            data, position = dict(saved["data"]), dict(saved["position"])
            changes = cursors.changes(data, self._data, self.sources)
            at = None if changes else cursors.from_json(position, [one.name for one in self.sources])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise self._not_a_position(state) from error
        if at is None:
            raise self._other_batches(changes)
        self._go_to(at)

    @functools.cached_property
    def _data(self) -> dict[str, Any]:
        """Everything that determines the batches, except the position, as JSON values."""
        settings = self._settings
        data: dict[str, Any] = {name: getattr(settings, name) for name in _SAVED_SETTINGS}
        if self.segment_len is not None:
            data["segment_len"] = sorted(map(list, self._segment_lens.items()))
        if not self.takes_any_batch_size:
            data["batch_rows"] = settings.batch_rows
        return cursors.describe(data, self.tokenizer, self.sources)

    @functools.cached_property
    def _data_json(self) -> str:
        # Cached: a mixture may name many files, and every batch saves a position.
        return json.dumps(self._data, sort_keys=True)

    def _stop(self) -> None:
        if self._cancel is not None:
            self._cancel()
        self._maker = self._ahead = self._cancel = None

    def _go_to(self, at: cursors.InputPosition) -> None:
        self._stop()
        self._ended_at = None
        self._window, self._at = None, at
        self._rows_read = self._tokens_read = 0
