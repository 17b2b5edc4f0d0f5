"""Input that reads masked language-model examples from TFRecord files in the format of MLPerf's BERT. Needs TensorFlow.

Names, fields and values are those of paxml 1.4.0's `TFRecordBertInput`. The order of examples, the packing and the random
numbers differ from paxml's.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from praxis import pax_fiddle
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import indexed, record_files
from spmd_trainer.inputs.corpus import row_plan
from spmd_trainer.inputs.tensorflow_bridge import check_tensorflow_installed
from spmd_trainer.inputs.tfrecord import ExampleParser, Feature

Rows = dict[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class MaskingSettings:
    """Settings for drawing masked tokens, with lingvo's names: `p.mlm_augmenter.Set(mask_token_id=103, vocab_size=30522)`.

    Attributes:
      vocab_size: number of tokens in the vocabulary.
      mask_prob: fraction of an example's tokens that are replaced by the mask token.
      random_prob: fraction of tokens that are replaced by a random token.
      same_prob: fraction of tokens that are to be predicted but not replaced.
      mask_token_id: id of the mask token.
      random_avoid_ids: ids that are never drawn as random tokens.
    """

    vocab_size: int = 0
    mask_prob: float = 0.12
    random_prob: float = 0.015
    same_prob: float = 0.015
    mask_token_id: int = -1
    random_avoid_ids: Sequence[int] = ()


class TFRecordBertInput(indexed.CheckpointedInput):
    """Reads TFRecords with `input_ids`, `input_mask`, `masked_lm_positions`, `masked_lm_ids` and `masked_lm_weights`.

    In a batch, `labels`, `masked_ids` and `segment_pos` are int32, and `masked_pos`, `segment_ids` and `paddings` are float32;
    all are [batch_size, max_sequence_length]. The first end-of-text token of each example is left out.

    Training never ends. Each epoch yields every example once, in a random order that depends on `input_random_seed` and the
    epoch. With `enable_packing`, each window of `prepacking_batch_size` consecutive examples is packed into rows. Of H
    processes, process h takes the windows h, h + H, h + 2H, ..., so a saved position is valid only for the same number of
    processes. Evaluation yields every example once, in order, and fills up the last batch with empty rows.

    Attributes:
      input_file: path, folder or glob pattern of TFRecord files, or several of these.
      max_sequence_length: number of tokens in each example and each row.
      max_predictions_per_seq: maximum number of masked tokens per example.
      eos_token_id: id of the end-of-text token.
      eval_data_size: ignored, because the examples are counted.
      file_buffer_size: ignored, because all examples are shuffled together.
      enable_packing: in training, put several examples into a row.
      prepacking_batch_size: number of examples packed together.
      remask: in training, draw new masked tokens each epoch.
      mlm_augmenter: settings for drawing masked tokens if `remask` is True.
      num_samples: ignored, because the examples are counted.
    """

    input_file: Any = None
    max_sequence_length: int = 512
    max_predictions_per_seq: int = 76
    eos_token_id: int = 102
    eval_data_size: int = 10000
    file_buffer_size: int = 10000
    enable_packing: bool = False
    prepacking_batch_size: int = 1 << 14
    remask: bool = False
    mlm_augmenter: MaskingSettings = pax_fiddle.instance_field(MaskingSettings)
    num_samples: int = -1
    # Without packing: number of batches taken. With packing: current window, and number of rows taken from it.
    _position: int = dataclasses.field(default=0, init=False, repr=False)
    _window: int = dataclasses.field(default=0, init=False, repr=False)
    _row: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        if not self.is_training:
            self.reset_for_eval: bool = True
            self.enable_packing, self.remask = False, False
        super().__post_init__()
        check_tensorflow_installed()
        masking = self.mlm_augmenter
        if self.remask and (masking.vocab_size < 1 or masking.mask_token_id < 0):
            raise self.error(
                f"remask needs mlm_augmenter's vocab_size and mask_token_id, which are {masking.vocab_size} and "
                f"{masking.mask_token_id}; call p.mlm_augmenter.Set(mask_token_id=103, vocab_size=30522)"
            )
        if self.remask and not 0 < masking.mask_prob + masking.random_prob + masking.same_prob < 1:
            raise self.error("mlm_augmenter's probabilities must add up to a number between 0 and 1")

    @functools.cached_property
    def records(self) -> record_files.RecordFiles:
        """The records of all files. Raises UserError if there are none, or if a file is damaged or can't be read."""
        with self.naming():
            return record_files.RecordFiles(self.input_file)

    @property
    def num_batches(self) -> int | None:
        """Number of batches until `get_next` raises StopIteration; None in training."""
        return None if self.is_training else -(-len(self.records) // (self.batch_size * self.num_infeed_hosts))

    def input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of the batches that `get_next` returns, as jax.ShapeDtypeStructs. Reads no file."""
        integers = jax.ShapeDtypeStruct((self.batch_size, self.max_sequence_length), np.int32)
        floats = jax.ShapeDtypeStruct((self.batch_size, self.max_sequence_length), np.float32)
        return NestedMap(
            labels=integers,
            masked_ids=integers,
            masked_pos=floats,
            segment_ids=floats,
            paddings=floats,
            segment_pos=integers,
            eval_sample_weights=jax.ShapeDtypeStruct((self.batch_size,), np.float32),
        )

    def get_next(self) -> NestedMap:
        """Returns the next batch.

        Raises:
          StopIteration: evaluation has used all batches.
          UserError: a record is damaged or has no end-of-text token, or a feature is missing or has the wrong type or size.
        """
        if self.enable_packing:
            return self._batch(self._packed_rows())
        if self.num_batches is not None and self._position >= self.num_batches:
            raise StopIteration
        global_batch = self.batch_size * self.num_infeed_hosts
        first = self._position * global_batch + self.infeed_host_index * self.batch_size
        rows = self._rows(np.arange(first, first + self.batch_size))
        self._position += 1
        return self._batch(rows)

    def get_next_padded(self) -> NestedMap:
        batch = super().get_next_padded()
        batch.masked_pos = batch.masked_pos * batch.eval_sample_weights[:, None]
        return batch

    def reset(self) -> None:
        """Goes back to the first batch."""
        super().reset()
        self._position = self._window = self._row = 0

    @property
    def _order(self) -> indexed.ExampleOrder:
        seed = self.input_random_seed or 0
        return indexed.ExampleOrder(len(self.records), self.is_training, self.is_training, seed)

    def _batch(self, rows: Rows) -> NestedMap:
        missing = self.batch_size - len(rows["labels"])
        padded = {name: np.pad(values, ((0, missing), (0, 0))) for name, values in rows.items()}
        real = np.arange(self.batch_size) < self.batch_size - missing
        paddings = (padded["segment_ids"] == 0).astype(np.float32)
        return NestedMap(padded, paddings=paddings, eval_sample_weights=real.astype(np.float32))

    def _packed_rows(self) -> Rows:
        parts, wanted = [], self.batch_size
        while wanted:
            rows = self._packed_window(self._window)
            part = {name: values[self._row : self._row + wanted] for name, values in rows.items()}
            taken = len(part["labels"])
            parts.append(part)
            wanted -= taken
            self._row += taken
            if self._row == len(rows["labels"]):
                self._window, self._row = self._window + 1, 0
        return {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}

    def _packed_window(self, window: int) -> Rows:
        if self._packed is None or self._packed[0] != window:
            first = (window * self.num_infeed_hosts + self.infeed_host_index) * self.prepacking_batch_size
            self._packed = (
                window,
                self._pack(self._rows(np.arange(first, first + self.prepacking_batch_size)), window),
            )
        return self._packed[1]

    # Number and packed rows of the current window.
    _packed: tuple[int, Rows] | None = dataclasses.field(default=None, init=False, repr=False)

    def _pack(self, rows: Rows, window: int) -> Rows:
        """Packs a window's examples, given one per row, into fewer rows in random order. Segment ids start at 1 in each row."""
        lengths = (rows["segment_ids"] > 0).sum(axis=1)
        length = self.max_sequence_length
        kept = np.flatnonzero(lengths)
        row = np.array(row_plan.best_fit(lengths[kept].tolist(), length), np.int64)
        column, segment = row_plan.places(row, lengths[kept])
        count = int(row.max(initial=-1)) + 1
        packed = {name: np.zeros((count, length), values.dtype) for name, values in rows.items()}
        for example, r, c, s in zip(kept, row, column, segment, strict=True):
            size = lengths[example]
            for name, values in rows.items():
                packed[name][r, c : c + size] = values[example, :size]
            packed["segment_ids"][r, c : c + size] = s
        shuffled = np.random.default_rng([self.input_random_seed or 0, window, self.infeed_host_index]).permutation(
            count
        )
        return {name: values[shuffled] for name, values in packed.items()}

    def _rows(self, indices: np.ndarray) -> Rows:
        """Reads the examples at positions `indices` of the example order, one per row. Skips positions past the end."""
        numbers = self._order.examples(int(indices[0]), len(indices))
        numbers = numbers[numbers < len(self.records)]
        if not len(numbers):  # all rows of the last batch belong to other processes
            shape = (0, self.max_sequence_length)
            whole, real = np.zeros(shape, np.int32), np.zeros(shape, np.float32)
            return {"labels": whole, "masked_ids": whole, "masked_pos": real, "segment_ids": real, "segment_pos": whole}
        parser = ExampleParser(
            {
                "input_ids": Feature((self.max_sequence_length,), "int32"),
                "input_mask": Feature((self.max_sequence_length,), "int32"),
                "masked_lm_positions": Feature((self.max_predictions_per_seq,), "int32"),
                "masked_lm_ids": Feature((self.max_predictions_per_seq,), "int32"),
                "masked_lm_weights": Feature((self.max_predictions_per_seq,), "float32"),
            },
            lambda row: self.records.describe(int(numbers[row])),
        )
        with self.naming():
            parsed = parser.parse(self.records.data(numbers))
        examples = [
            self._example({name: values[row] for name, values in parsed.items()}, int(numbers[row]), int(indices[row]))
            for row in range(len(numbers))
        ]
        return {name: np.stack([example[name] for example in examples]) for name in examples[0]}

    def _example(self, parsed: Rows, number: int, index: int) -> Rows:
        count = int(parsed["masked_lm_weights"].sum())
        positions, tokens = parsed["masked_lm_positions"][:count], parsed["masked_lm_ids"][:count]
        labels, masked = parsed["input_ids"].copy(), np.zeros(self.max_sequence_length, np.float32)
        labels[positions], masked[positions] = tokens, 1
        ends = np.flatnonzero(labels == self.eos_token_id)
        if not len(ends):
            raise self.error(f"{self.records.describe(number)} has no end-of-text token ({self.eos_token_id})")

        def without_end(values: np.ndarray) -> np.ndarray:
            return np.append(np.delete(values, ends[0]), np.zeros(1, values.dtype))

        example = {
            "labels": without_end(labels),
            "masked_ids": without_end(parsed["input_ids"]),
            "masked_pos": without_end(masked),
            "segment_ids": without_end(parsed["input_mask"].astype(np.float32)),
        }
        example["segment_pos"] = (example["segment_ids"] * np.arange(self.max_sequence_length)).astype(np.int32)
        return self._masked_anew(example, index) if self.remask else example

    def _masked_anew(self, example: Rows, index: int) -> Rows:
        """Returns an example with newly drawn masked tokens. `index`, its position in the example order, seeds the draw."""
        p, labels = self.mlm_augmenter, example["labels"]
        rng = np.random.default_rng([self.input_random_seed or 0, index])
        draw = rng.random(len(labels)) + 2 * (example["segment_ids"] == 0)  # never a padding token
        to_mask, to_random = p.mask_prob, p.mask_prob + p.random_prob
        allowed = np.setdiff1d(np.arange(p.vocab_size), np.asarray(p.random_avoid_ids, np.int64))
        random_tokens = rng.choice(allowed, len(labels)).astype(labels.dtype)
        ids = np.where(draw < to_mask, p.mask_token_id, np.where(draw < to_random, random_tokens, labels))
        masked = (draw < to_random + p.same_prob).astype(np.float32)
        return {**example, "masked_ids": ids.astype(labels.dtype), "masked_pos": masked}

    def _fingerprint(self) -> dict[str, Any]:
        found = {
            "files": self.records.checksum,
            "seed": self.input_random_seed or 0,
            "packing": self.prepacking_batch_size if self.enable_packing else 0,
            "remask": repr(self.mlm_augmenter) if self.remask else "",
        }
        if self.enable_packing:
            return {**found, "processes": self.num_infeed_hosts}
        return {**found, "rows": self.batch_size * self.num_infeed_hosts}

    def _get_state_internal(self) -> bytes:
        return self._encode_position(self._position, self._window, self._row)

    def _set_state_internal(self, state: bytes) -> None:
        position = self._decode_position(state, 3)
        self.reset()
        self._position, self._window, self._row = position
