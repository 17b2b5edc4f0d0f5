"""Pairs of answers, one preferred over the other, as batches for `decoder.preferences`."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from absl import logging
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import indexed, preference_pairs
from spmd_trainer.inputs.chat_template import clock_of
from spmd_trainer.inputs.messages import TemplatedFiles, readable_messages
from spmd_trainer.inputs.preference_pairs import Messages, Pair, common_length

_SIDES = ("chosen", "rejected")
_REFERENCE = "reference_logps"
_FILE = "file"
_ERROR, _DROP = "error", "drop"


class PreferenceInput(TemplatedFiles):
    """Pairs of answers to a prompt, from JSON lines or Parquet files (`preference_pairs` has the forms of a row).

    A chat template renders messages with all special tokens. A text gets the token of `start` before it, if set, and
    end-of-text after it, unless it ends with it. As in TRL, prompt and answer are encoded together, and the answer
    begins at the first token that differs from the encoded prompt.

    A batch has `chosen` and `rejected`, each with `ids`, `labels`, `segment_ids`, `segment_pos` int32 [B, T], and
    `paddings`, `weights` float32 [B, T]: one row for prompt and answer, with weight 1 on the labels of the answer;
    `pair_index` int32 [B], the number of the pair among `num_pairs`, -1 in rows that fill up the last batch; and
    `eval_sample_weights` float32 [B]. With `reference='file'`, both sides also have `reference_logps`:
    log-probabilities as the bits of float32 in int32 [B], because a step in bfloat16 would round floats.

    Training is endless, each epoch in an order drawn from (input_random_seed, epoch). Evaluation gives each pair once.
    The first batch reads and encodes all files.

    Attributes:
      files, tokenizer, eos_id, start: see `text_base.TokenizedFiles`. `start` is for texts only.
      seq_len: tokens per row, T.
      chat_template, template_variables: see `messages.TemplatedFiles`.
      other_roles: roles that the template knows besides `messages.ROLES`.
      date: the template's current date, e.g. '2024-07-26'. Required if the template writes the date: today's date
        would change the tokens of a run resumed tomorrow.
      too_long: for pairs whose prompt and answer have more than T + 1 tokens. 'error': refuse. 'drop': leave out, and
        log the number. Answers are never cut: a cut answer is not the one that was compared.
      shuffle: False gives the pairs of a training input in the order of the files.
      reference: 'file' adds log-probabilities that the trainer has computed once and keeps in the job_log_dir. None:
        the model needs no reference or computes it itself.
    """

    seq_len: int = 0
    other_roles: Sequence[str] = ()
    date: str | None = None
    too_long: str = _ERROR
    shuffle: bool = True
    reference: str | None = None
    _logps: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("seq_len")
        if self.too_long not in (_ERROR, _DROP):
            raise self.error(f"too_long={self.too_long!r}; set it to {_ERROR!r} or {_DROP!r}")
        if self.reference not in (None, _FILE):
            raise self.error(f"reference={self.reference!r}; set it to {_FILE!r} or None")
        with self.naming():
            self._clock = clock_of(self.date)

    @property
    def num_pairs(self) -> int:
        """Pairs of one epoch."""
        return len(self._table.starts)

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(self.num_pairs, self.is_training, self.shuffle and self.is_training, self.seed)

    @functools.cached_property
    def pairs_checksum(self) -> str:
        """Checksum of all pairs' tokens and answer starts, which decide the log-probabilities of a model."""
        found = hashlib.sha256()
        for array in self._table:
            found.update(np.ascontiguousarray(array).tobytes())
        return found.hexdigest()[:32]

    @property
    def lacks_reference(self) -> bool:
        """True if `use_reference` must still be called."""
        return self.reference is not None and self._logps is None

    def use_reference(self, logps: np.ndarray) -> None:
        """Sets the reference's log-probabilities, float32 [num_pairs, 2]: chosen and rejected, in file order."""
        if logps.shape != (self.num_pairs, 2):
            raise ValueError(
                f"reference log-probabilities have shape {logps.shape}, and there are {self.num_pairs} pairs"
            )
        self._logps = np.asarray(logps, np.float32)

    def input_specs(self) -> NestedMap:
        def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)

        def row() -> NestedMap:
            tokens, floats = spec(np.int32, self.seq_len), spec(np.float32, self.seq_len)
            found = NestedMap(
                ids=tokens, labels=tokens, paddings=floats, weights=floats, segment_ids=tokens, segment_pos=tokens
            )
            if self.reference:
                found[_REFERENCE] = spec(np.int32)
            return found

        return NestedMap(chosen=row(), rejected=row(), pair_index=spec(np.int32), eval_sample_weights=spec(np.float32))

    def batch_at(self, position: int) -> NestedMap:
        if self.lacks_reference:
            raise self.error(
                "there are no reference log-probabilities of these pairs. Training computes them when a run begins, and keeps "
                "them in its job_log_dir: give that of a training run. If it is one, the pairs, the tokenizer or the chat "
                "template have changed since it began: put them back, or begin a new run"
            )
        pairs = self.examples_at(position)
        batch = NestedMap({side: self._rows(pairs, column) for column, side in enumerate(_SIDES)})
        real = pairs < self.num_pairs
        batch.pair_index = np.where(real, pairs, -1).astype(np.int32)
        batch.eval_sample_weights = real.astype(np.float32)
        return batch

    def _rows(self, pairs: np.ndarray, column: int) -> NestedMap:
        """Returns the rows of one side of these pairs; a row after the last pair is padding."""
        table, shape = self._table, (len(pairs), self.seq_len)
        ids, labels, weights = np.zeros(shape, np.int32), np.zeros(shape, np.int32), np.zeros(shape, np.float32)
        lengths = np.zeros(len(pairs), np.int64)
        for row in np.flatnonzero(pairs < self.num_pairs):
            pair = int(pairs[row])
            begin, end = table.offsets[2 * pair + column : 2 * pair + column + 2]
            tokens = table.tokens[begin:end]
            length = lengths[row] = len(tokens) - 1
            ids[row, :length], labels[row, :length] = tokens[:-1], tokens[1:]
            weights[row, table.starts[pair] - 1 : length] = 1
        inside = np.arange(self.seq_len) < lengths[:, None]
        rows = NestedMap(
            ids=ids,
            labels=labels,
            paddings=1.0 - inside.astype(np.float32),
            weights=weights,
            segment_ids=inside.astype(np.int32),
            segment_pos=(np.arange(self.seq_len) * inside).astype(np.int32),
        )
        if self.reference:
            logps = self._logps[np.minimum(pairs, self.num_pairs - 1), column]
            rows[_REFERENCE] = np.ascontiguousarray(logps).view(np.int32)
        return rows

    @functools.cached_property
    def _table(self) -> PairTable:
        tokens: list[np.ndarray] = []
        starts: list[int] = []
        left_out, diverging, where = 0, 0, ""
        for index, path in enumerate(self.paths):
            for pair in self._pairs(index, path):
                where = pair.where
                found = self._encode(pair)
                if (longest := max(map(len, found.sides)) - 1) > self.seq_len:
                    if self.too_long == _ERROR:
                        raise self.error(
                            f"{pair.where}: prompt and answer have {longest + 1} tokens, and rows of seq_len={self.seq_len} "
                            f"hold {self.seq_len + 1}; raise seq_len, shorten the pair, or leave such pairs out with "
                            f"too_long={_DROP!r}"
                        )
                    left_out += 1
                    continue
                diverging += found.diverges
                tokens += [np.array(side, self.token_dtype) for side in found.sides]
                starts.append(found.start)
        if left_out:
            logging.warning(
                "%s %r leaves out %d of %d pairs, which are too long for seq_len=%d",
                type(self).__name__,
                self.name,
                left_out,
                left_out + len(starts),
                self.seq_len,
            )
        if not starts:
            raise self.error(f"the files hold no pair{' that fits' if where else ''}; the first is {self.paths[0]}")
        if diverging:
            logging.warning(
                "%s %r: in %d of %d pairs, the prompt has other tokens at its end when an answer follows. The answer begins at "
                "the first of these, so that the model learns to continue another text than it will see when it generates",
                type(self).__name__,
                self.name,
                diverging,
                len(starts),
            )
        return PairTable(
            np.concatenate(tokens),
            np.concatenate([[0], np.cumsum([len(side) for side in tokens])]),
            np.array(starts, np.int64),
        )

    def _pairs(self, index: int, path: str) -> Iterator[Pair]:
        with self.naming():
            yield from preference_pairs.read(self.found.read(index), path, self.other_roles)

    def _encode(self, pair: Pair) -> _Encoded:
        """Encodes both conversations, with the token before the first label."""
        prompt, *answered = self._texts(pair)
        before = [self.start_id] if pair.is_text and self.start_id is not None else []
        after = [self.tokenizer.eos_id] if pair.is_text else []
        alone = self._tokens(prompt, pair.where)
        sides = [self._tokens(text, pair.where) for text in answered]
        start = min(common_length(alone, side) for side in sides)
        if start + len(before) == 0:
            raise self.error(
                f"{pair.where}: the prompt has no token, so that nothing comes before the answer's first token"
            )
        for side, tokens in zip(_SIDES, sides, strict=True):
            if len(tokens) <= start:
                raise self.error(f"{pair.where}: the {side} answer has no token")
        whole = [[*before, *tokens, *(after if tokens[-1] not in after else [])] for tokens in sides]
        if whole[0] == whole[1]:
            raise self.error(
                f"{pair.where}: the chosen and the rejected answer have the same tokens; take the pair out"
            )
        return _Encoded(whole, start + len(before), start < len(alone))

    def _texts(self, pair: Pair) -> tuple[str, str, str]:
        """Returns the prompt, and the prompt followed by each answer."""
        if isinstance(pair.prompt, str):
            return pair.prompt, f"{pair.prompt}{pair.chosen}", f"{pair.prompt}{pair.rejected}"
        prompt = self._render(pair, pair.prompt, add_generation_prompt=True)
        answered = [
            self._render(pair, [*pair.prompt, *answer], add_generation_prompt=False)
            for answer in (pair.chosen, pair.rejected)
        ]
        if not all(text.startswith(prompt) for text in answered):
            # Some templates end a prompt with text that they omit before an answer, e.g. an empty thought.
            plain = self._render(pair, pair.prompt, add_generation_prompt=False)
            if not all(text.startswith(plain) for text in answered):
                raise self.error(
                    f"{pair.where}: the chat template writes the prompt in another way when an answer follows, so that nobody "
                    "can tell where the answer begins; use another chat_template"
                )
        return prompt, answered[0], answered[1]

    def _render(self, pair: Pair, messages: Messages, *, add_generation_prompt: bool) -> str:
        with self.naming(f"{pair.where}: "):
            self.check_tokenizer()
            variables = self.variables_of(pair.variables, strftime_now=self._clock)
            variables |= {"tools": pair.tools, "add_generation_prompt": add_generation_prompt}
            template = self.template(has_tools=bool(pair.tools))
            return template.render(readable_messages(messages, template, **variables), **variables)

    def _tokens(self, text: str, where: str) -> list[int]:
        with self.naming(f"{where}: "):
            content = text.encode()
        tokens = self.tokenizer.encode(content, where)
        self.refuse_unknown_ids(tokens, where)
        found: list[int] = tokens.tolist()
        return found

    def _fingerprint(self) -> dict[str, Any]:
        # The checksum says more than the sizes of the files.
        return {**super()._fingerprint(), "seq_len": self.seq_len, "pairs": self.pairs_checksum}


class PairTable(NamedTuple):
    """Tokens of all pairs.

    Attributes:
      tokens: unsigned [sum of lengths]: chosen of pair 0, rejected of pair 0, chosen of pair 1, ..., each with its
        prompt.
      offsets: first token of each, int64 [2 * pairs + 1].
      starts: index of the answer's first token on both sides, int64 [pairs].
    """

    tokens: np.ndarray
    offsets: np.ndarray
    starts: np.ndarray


class _Encoded(NamedTuple):
    """An encoded pair: both sides, the start of the answers, and True if the prompt alone ends with other tokens."""

    sides: list[list[int]]
    start: int
    diverges: bool
