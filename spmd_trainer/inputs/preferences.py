"""Input over preference pairs (a chosen and a rejected answer to one prompt). Makes batches for `decoder.preferences`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
from collections.abc import Sequence
from typing import Any, ClassVar

import jax
import numpy as np
from absl import logging
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import preference_pairs
from spmd_trainer.inputs.chat_template import clock_of
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, LeftOut
from spmd_trainer.inputs.corpus.encoding import encode_texts
from spmd_trainer.inputs.corpus.file_kinds import open_bytes
from spmd_trainer.inputs.corpus.row_plan import PAIR, PairTable, RowTable
from spmd_trainer.inputs.corpus.tokens import CountedTokens, Tokens
from spmd_trainer.inputs.files import readable
from spmd_trainer.inputs.messages import (
    DROP,
    Conversation,
    MessageProcessor,
    MessagesInput,
    refuse_surrogates,
    row_of,
)
from spmd_trainer.inputs.preference_pairs import Messages, Pair, common_length

_SIDES = ("chosen", "rejected")
_REFERENCE = "reference_logps"
_FILE = "file"
# Maximum number of warnings that a process logs about prompts whose last tokens change when an answer follows.
_LOGGED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Pairs(MessageProcessor):
    """Processor that tokenizes preference pairs.

    A pair's tokens are the prompt with the chosen answer, followed by the prompt with the rejected answer. Only the answers'
    tokens count in the loss, so the loss mask shows where each answer is.

    Attributes:
      start_id: token to put before each of the two sequences if the pair consists of plain texts; None for no token.
    """

    entries: ClassVar[tuple[str, ...]] = preference_pairs.ENTRIES
    gives_pairs: ClassVar[bool] = True

    start_id: int | None = None

    def encode(self, documents: Sequence[Document]) -> list[Tokens | BadRecord]:
        parsed = [self._parse(document) for document in documents]
        good = [one for one in parsed if not isinstance(one, BadRecord)]
        texts = [text.encode() for _, texts in good for text in texts]
        encoded = iter(encode_texts(self.tokenizer, texts, [pair.where for pair, texts in good for _ in texts]))
        made = iter([self._pair(pair, [next(encoded) for _ in texts]) for pair, texts in good])
        return [one if isinstance(one, BadRecord) else next(made) for one in parsed]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "start_id": self.start_id}

    def _parse(self, document: Document) -> tuple[Pair, list[str]] | BadRecord:
        try:
            pair = preference_pairs.parse(row_of(document), document.where, self.other_roles)
            return pair, self._texts(pair)
        except UserError as error:
            return BadRecord.of(document.where, error)

    def _pair(self, pair: Pair, encoded: Sequence[np.ndarray | BadRecord]) -> CountedTokens | BadRecord:
        """Returns the tokens of a pair, with a loss mask that is True for the answers' tokens.

        Returns a BadRecord if the pair can't be used. `encoded` has the tokens of each text that `_texts` returns.
        """
        bad = [one for one in encoded if isinstance(one, BadRecord)]
        if bad:
            return bad[0]
        alone, *sides = [one.tolist() for one in encoded if isinstance(one, np.ndarray)]
        before = [self.start_id] if pair.is_text and self.start_id is not None else []
        after = [self.tokenizer.eos_id] if pair.is_text else []
        common = min(common_length(alone, side) for side in sides)
        start = common + len(before)
        if start == 0:
            return BadRecord(
                pair.where, ": the prompt has no token, so that nothing comes before the answer's first one"
            )
        for side, tokens in zip(_SIDES, sides, strict=True):
            if len(tokens) <= common:
                return BadRecord(pair.where, f": the {side} answer has no token")
        whole = [[*before, *tokens, *(after if tokens[-1] not in after else [])] for tokens in sides]
        if whole[0] == whole[1]:
            return BadRecord(pair.where, ": the chosen and the rejected answer have the same tokens; take the pair out")
        longest = max(map(len, whole))
        if longest > self.seq_len + 1:
            what = (
                f": prompt and answer have {longest} tokens, and rows of seq_len={self.seq_len} hold {self.seq_len + 1}"
            )
            if self.too_long == DROP:
                return LeftOut(pair.where, what, 0)
            return BadRecord(pair.where, f"{what}; raise seq_len, shorten it, or leave it out with too_long={DROP!r}")
        if common < len(alone):
            logging.log_first_n(
                logging.WARNING,
                "%s: the prompt has other tokens at its end when an answer follows. The answer begins at the first of these, so "
                "that the model learns to continue another text than it will see when it generates",
                _LOGGED,
                pair.where,
            )
        counted = [np.arange(len(side)) >= start for side in whole]
        return CountedTokens(np.concatenate(whole).astype(np.int32), np.concatenate(counted))

    def _texts(self, pair: Pair) -> list[str]:
        """Returns three texts: the prompt, the prompt with the chosen answer, and the prompt with the rejected answer."""
        if isinstance(pair.prompt, str):
            refuse_surrogates(f"{pair.prompt}{pair.chosen}{pair.rejected}")
            return [pair.prompt, f"{pair.prompt}{pair.chosen}", f"{pair.prompt}{pair.rejected}"]
        self.check_tokenizer()
        prompt = self._render(pair, pair.prompt, add_generation_prompt=True)
        answered = [
            self._render(pair, [*pair.prompt, *answer], add_generation_prompt=False)
            for answer in (pair.chosen, pair.rejected)
        ]
        if not all(text.startswith(prompt) for text in answered):
            # Some templates end a prompt with text that they omit before an answer, e.g. an empty thought.
            plain = self._render(pair, pair.prompt, add_generation_prompt=False)
            if not all(text.startswith(plain) for text in answered):
                raise UserError(
                    "the chat template writes the prompt in another way when an answer follows, so that nobody can tell "
                    "where the answer begins; use another chat_template"
                )
        return [prompt, *answered]

    def _render(self, pair: Pair, messages: Messages, *, add_generation_prompt: bool) -> str:
        found = Conversation(pair.where, messages, pair.tools, variables=pair.variables)
        variables = self.variables(found, strftime_now=clock_of(self.date))
        return self.render(messages, {**variables, "add_generation_prompt": add_generation_prompt})


class PreferenceInput(MessagesInput):
    """Input over preference pairs: each pair is one row of a batch. `preference_pairs` describes the records in the files.

    A chat template renders messages with all special tokens. For plain texts, the input puts the start token (if `start` gives
    one) before the prompt, and end-of-text after the answer unless the answer already ends with it. As in TRL, prompt and
    answer are encoded together, and the answer begins at the first token that differs from the encoded prompt.

    A batch of B pairs has `chosen` and `rejected`. Each of them is a NestedMap of arrays, in which row b is the prompt and one
    answer of pair b: `ids`, `labels`, `segment_ids`, `segment_pos` int32 [B, T]; `paddings`, `weights` float32 [B, T].
    `weights` is 1 for the labels of the answer. The batch also has `eval_sample_weights` float32 [B] and `pair_index` int32
    [B], the number of each pair in the files, from 0 to `num_pairs` - 1, or -1 in rows that fill up the last batch. With
    `reference='file'`, `chosen` and `rejected` also have `reference_logps` int32 [B]. These are the bits of float32
    log-probabilities, stored as integers because a step in bfloat16 would round floats.

    Training is endless: each epoch gives each pair once, in an order drawn from (input_random_seed, epoch); files that can only
    be read in order are shuffled in windows (`Documents.shuffle`). Evaluation gives each pair once.

    Attributes:
      files, source, chat_template, ...: see `messages.MessagesInput`.
      tokenizer, eos_id, start: see `text_base.TokenizedInput`. `start` is for pairs of plain texts only.
      seq_len: tokens per row, T.
      too_long: what to do with pairs whose prompt and answer have more than T + 1 tokens, see `messages.MessageProcessor`.
        Answers are never cut, because the preference is for the whole answer.
      shuffle, window_rows, bad_records: see `CorpusInput`.
      reference: 'file' adds the reference model's log-probabilities, which the trainer computes once and keeps in the
        job_log_dir. None is for models that need no reference or compute it themselves.
    """

    _packings: ClassVar[tuple[str, ...]] = (PAIR,)

    packing: str = PAIR
    takes_reference: ClassVar[bool] = True

    reference: str | None = None
    _logps: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.reference not in (None, _FILE):
            raise self.error(f"reference={self.reference!r}; set it to {_FILE!r} or None")
        if self.reference and len(self._opened) > 1:
            raise self.error("reference='file' needs the pairs of one source, and `source` is a mixture")

    @property
    def num_pairs(self) -> int:
        """Number of records in one epoch, including those left out. Counting reads JSON lines that are compressed or remote."""
        return self._first_of(len(self._opened), 0)

    def _first_of(self, source: int, chunk: int) -> int:
        """Returns the number of pairs before chunk `chunk` of source `source`, in this and all earlier sources."""
        before = sum(self._in_source(number, self._opened[number].num_chunks) for number in range(source))
        return before + (self._in_source(source, chunk) if chunk else 0)

    def _in_source(self, source: int, chunk: int) -> int:
        """Returns the number of pairs in source `source` before its chunk `chunk`."""
        ends, opened, sizes = self._ends[source], self._opened[source], self._sizes[source]
        while len(ends) <= chunk:
            number = len(ends) - 1
            if sizes is None:
                with self._reading:
                    size = sum(1 for _ in opened.read_chunk(number, 0))
            else:
                size = int(sizes[number])
            ends.append(ends[-1] + size)
        return ends[chunk]

    @functools.cached_property
    def _ends(self) -> list[list[int]]:
        """For each source, a list whose item i is the number of pairs before chunk i. `_in_source` extends the lists."""
        return [[0] for _ in self._opened]

    @functools.cached_property
    def _sizes(self) -> list[np.ndarray | None]:
        return [source.chunk_sizes() for source in self._opened]

    @functools.cached_property
    def pairs_checksum(self) -> str:
        """Checksum of everything on which the pairs' tokens depend: files, tokenizer and processors. Reads the files."""
        made = [self.tokenizer.fingerprint(), [one.made_by for one in self.sources]]
        found = hashlib.sha256(json.dumps(made, sort_keys=True, default=str).encode())
        for path in self.paths:
            with readable(path), open_bytes(path) as file:
                while content := file.read(2**20):
                    found.update(content)
        return found.hexdigest()[:32]

    @property
    def lacks_reference(self) -> bool:
        """True if this input needs reference log-probabilities and `use_reference` has not been called yet."""
        return self.reference is not None and self._logps is None

    def use_reference(self, logps: np.ndarray) -> None:
        """Sets the reference model's log-probabilities of (chosen, rejected) for all pairs in file order.

        `logps`: float32 [num_pairs, 2]. Raises ValueError for another shape.
        """
        if logps.shape != (self.num_pairs, 2):
            raise ValueError(
                f"reference log-probabilities have shape {logps.shape}, and there are {self.num_pairs} pairs"
            )
        self._logps = np.asarray(logps, np.float32)

    def input_specs(self) -> NestedMap:
        row = super().input_specs()
        weights, numbers = row.pop("eval_sample_weights"), jax.ShapeDtypeStruct((self.batch_size,), np.int32)
        if self.reference:
            row[_REFERENCE] = numbers
        return NestedMap(chosen=row, rejected=NestedMap(row), pair_index=numbers, eval_sample_weights=weights)

    def get_next(self) -> NestedMap:
        if self.lacks_reference:
            raise self.error(
                "there are no reference log-probabilities of these pairs. Training computes them when a run begins, and keeps "
                "them in its job_log_dir: give that of a training run. If it is one, the pairs, the tokenizer or the chat "
                "template have changed since it began: put them back, or begin a new run"
            )
        return super().get_next()

    @property
    def _processor(self) -> Pairs:
        return Pairs.of(self)

    def _batch(self, table: RowTable | PairTable, rows: np.ndarray) -> NestedMap:
        assert isinstance(table, PairTable)
        batch = super()._batch(table, rows)
        places = table.places[rows]
        numbers = [
            self._first_of(source, chunk) + number if source >= 0 else -1 for source, chunk, number in places.tolist()
        ]
        batch.pair_index = np.array(numbers, np.int32)
        if self.reference:
            logps = self._logps_of(batch.pair_index).view(np.int32)
            for column, side in enumerate(_SIDES):
                batch[side][_REFERENCE] = np.ascontiguousarray(logps[:, column])
        return batch

    def _logps_of(self, pairs: np.ndarray) -> np.ndarray:
        """Returns reference log-probabilities, float32 [B, 2], of the pairs with these numbers; 0 for -1, a padding row."""
        found: np.ndarray = np.where(pairs[:, np.newaxis] >= 0, self._logps[pairs], np.float32(0))
        lacking = pairs[np.isnan(found).any(axis=1)]
        if len(lacking):
            raise self.error(
                f"pair {lacking[0]} of the files (from 0) has no reference log-probabilities: it was left out when the run "
                "computed them, or the reference gives NaN. If the run has no checkpoint yet, remove the folder "
                "reference_logps of its job_log_dir, and they are computed again; otherwise begin a new run"
            )
        return found
