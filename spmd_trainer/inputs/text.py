"""Text files as tokens: windows for training and evaluation, beginnings of files for decode.

A token is a byte (0 to 255) or `eos_id`, end-of-text; with a tokenizer, what that makes of a file. The files in their
order, each followed by one end-of-text, make one stream s[0], s[1], ..., s[N-1]; s[-1] is end-of-text too. Window w has
the labels s[wT : (w+1)T] and the ids s[wT-1 : (w+1)T-1]: each position sees the token before the one it predicts, and
every token is predicted exactly once. The last window may be shorter than T; its rest has weight 0.

Example, T = 4, one file holding b"hello", so that the stream is h e l l o EOS:
    window 0: ids EOS h e l, labels h e l l, weights 1 1 1 1
    window 1: ids l o 0 0, labels o EOS 0 0, weights 1 1 0 0
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import batches, indexed, text_base
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow
from spmd_trainer.inputs.tokenizers import ByteTokenizer

# Batches that the pipeline keeps ready; the Prefetcher keeps its own on the devices.
_READY_BATCHES = 2
# Batches of one tf.data pipeline; building one takes as long as some 200 batches.
_STRETCH = 2048
# Batches that numpy makes first: more than the Prefetcher asks for before the first step has run.
_BEFORE_TENSORFLOW = 4
# Bytes that are read at first for each token of a prompt: most texts have fewer.
_BYTES_PER_TOKEN = 8


class TextInput(text_base.TokenizedFiles):
    """Language-model input over text files (see the module's text for what a window is).

    Training (`is_training=True`): endless; each epoch gives every window once, in an order drawn from
    (input_random_seed, epoch). Otherwise: every window once, in the order of the files, then StopIteration until
    `reset()`. By byte, text of any encoding will do; SentencePiece and Hugging Face tokenizers want UTF-8, and read all
    the files before the first batch.

    A batch is a NestedMap of numpy arrays, which may be read-only: `ids`, `labels`, `segment_ids`, `segment_pos` int32
    [B, T]; `paddings`, `weights` float32 [B, T]; `eval_sample_weights` float32 [B]. One segment (1) a row; where
    `weights` is 0, `paddings` is 1 and the rest 0.

    Attributes:
      files: paths and glob patterns, one of them, or a function without arguments that returns them; see
        `text_base.TokenizedFiles`, as for the next three. The caller chooses the split.
      tokenizer: a path or an object; None reads by byte.
      eos_id: end-of-text; None: 256 by byte, and a tokenizer's own.
      allow_binary: read files that are not text, too.
      seq_len: tokens per row, T.
      shuffle: False gives the windows of a training input in the order of the files.
      max_windows: use so many windows, spread evenly over the files; None uses all.
    """

    seq_len: int = 0
    shuffle: bool = True
    max_windows: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("seq_len")
        if self.max_windows is not None:
            self.require_positive("max_windows")

    @property
    def num_tokens(self) -> int:
        """Tokens of one epoch: every token and one end-of-text a file; with `max_windows`, those of its windows."""
        if self.num_windows < self._windows_of_stream:
            return self.num_windows * self.seq_len  # the last window, which may be short, is not among them
        return self._stream_len

    @property
    def num_windows(self) -> int:
        """Windows of one epoch."""
        return min(self._windows_of_stream, self.max_windows or self._windows_of_stream)

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(
            num_examples=self.num_windows,
            endless=self.is_training,
            shuffle=self.shuffle and self.is_training,
            seed=self.seed,
        )

    def input_specs(self) -> NestedMap:
        return batches.lm_input_specs(self.batch_size, self.seq_len)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_len": self.seq_len}

    @functools.cached_property
    def _stream_len(self) -> int:
        if isinstance(self.tokenizer, ByteTokenizer):  # known without reading
            return self.found.total_bytes + len(self.found.sizes)
        return sum(map(len, self._tokens_of_files))

    @functools.cached_property
    def _tokens_of_files(self) -> list[np.ndarray]:
        return [self.tokens_of_file(i) for i in range(len(self.paths))]

    @property
    def _windows_of_stream(self) -> int:
        return -(-self._stream_len // self.seq_len)

    def _load_stream(self) -> np.ndarray:
        """[windows + 1, T]: the stream; 0 in the rest of its last window, and in a row that is no window."""
        stream = np.zeros((self._windows_of_stream + 1) * self.seq_len, self.token_dtype)
        start = 0
        for tokens in self._tokens_of_files:
            stream[start : start + len(tokens)] = tokens
            start += len(tokens)
        del self._tokens_of_files  # the table holds them from here on
        return stream.reshape(-1, self.seq_len)

    @functools.cached_property
    def _table(self) -> WindowTable:
        labels = self._load_stream()
        before = np.append(np.array(self.tokenizer.eos_id, labels.dtype), labels[:-1, -1])
        chosen = np.arange(self.num_windows, dtype=np.int64) * self._windows_of_stream // self.num_windows
        rows = np.append(chosen, self._windows_of_stream)
        lengths = np.clip(self._stream_len - rows * self.seq_len, 0, self.seq_len)
        return WindowTable(labels[rows], before[rows], lengths)

    def batch_at(self, position: int) -> NestedMap:
        windows = self.examples_at(position)
        lengths = self._table.lengths[windows]
        columns = np.arange(self.seq_len)
        mask = (columns < lengths[:, None]).astype(np.int32)
        labels = self._table.labels[windows].astype(np.int32)
        first = self._table.before[windows].astype(np.int32)
        weights = mask.astype(np.float32)
        return NestedMap(
            ids=np.concatenate([first[:, None], labels[:, :-1]], axis=1) * mask,
            labels=labels,
            paddings=1.0 - weights,
            weights=weights,
            segment_ids=mask,
            segment_pos=columns.astype(np.int32) * mask,
            eval_sample_weights=(lengths > 0).astype(np.float32),
        )

    def _iterate(self, start: int) -> Iterator[NestedMap]:
        """The first batches from numpy, so that step 1 needn't wait for TensorFlow's import; the others from tf.data.

        A tf.data pipeline runs for a stretch of batches, whose windows are looked up beforehand. Looked up inside it,
        its threads would call back into Python, and a process that ends at that moment hangs.
        """
        end = np.iinfo(np.int64).max if self.num_batches is None else self.num_batches
        stop = min(start + _BEFORE_TENSORFLOW, end)
        yield from map(self.batch_at, range(start, stop))
        tf = import_tensorflow()
        table = WindowTable(*map(tf.constant, self._table))
        while stop < end:
            start, stop = stop, min(stop + _STRETCH, end)
            windows = tf.constant(np.stack([self.examples_at(position) for position in range(start, stop)]))
            batch = functools.partial(_batch_as_graph, tf, table, windows)
            stretch = tf.data.Dataset.range(stop - start).map(batch).prefetch(_READY_BATCHES)
            yield from map(NestedMap, stretch.as_numpy_iterator())


class ByteTextInput(TextInput):
    """`TextInput` by its older name."""


class WindowTable(NamedTuple):
    """All windows of an input; the last row stands for no window.

    Attributes:
      labels: uint16 or uint32 [windows + 1, T].
      before: the same [windows + 1]: the token before each window.
      lengths: int64 [windows + 1]: tokens in each window.
    """

    labels: Any
    before: Any
    lengths: Any


def _batch_as_graph(tf: Any, table: WindowTable, windows_of: Any, index: Any) -> dict[str, Any]:
    """`TextInput.batch_at` in TensorFlow: three gathers make a whole batch."""
    windows = windows_of[index]
    lengths = tf.gather(table.lengths, windows)
    columns = tf.range(table.labels.shape[1], dtype=tf.int64)
    mask = tf.cast(columns < lengths[:, None], tf.int32)
    labels = tf.cast(tf.gather(table.labels, windows), tf.int32)
    first = tf.cast(tf.gather(table.before, windows), tf.int32)
    weights = tf.cast(mask, tf.float32)
    return {
        "ids": tf.concat([first[:, None], labels[:, :-1]], axis=1) * mask,
        "labels": labels,
        "paddings": 1.0 - weights,
        "weights": weights,
        "segment_ids": mask,
        "segment_pos": tf.cast(columns, tf.int32) * mask,
        "eval_sample_weights": tf.cast(lengths > 0, tf.float32),
    }


class PromptInput(text_base.TokenizedFiles):
    """Prompts for `LanguageModel.decode`: the beginning of each file, one prompt a file, then StopIteration.

    Row b holds end-of-text (the start token the model was trained with) and the file's first `prefix_len - 1` tokens,
    left aligned. A batch is a NestedMap of numpy arrays: `ids` int32 [B, P]; `paddings`, `weights` float32 [B, P], 1
    and 0 after the end of the prompt; `prefix_lengths` int32 [B], start token included; `prompt_index` int32 [B], which
    indexes `paths` and says which prompt a decoded row continues; `eval_sample_weights` float32 [B]. Rows that fill up
    the last batch have a prompt of the start token alone, weight 0 and prompt_index -1.

    Attributes:
      files: as for `TextInput`.
      tokenizer: as for `TextInput`.
      eos_id: as for `TextInput`.
      allow_binary: as for `TextInput`.
      prefix_len: longest prompt in tokens, the start token included, P.
      num_prompts: take the first so many files; None takes all.
    """

    prefix_len: int = 0
    num_prompts: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("prefix_len")
        if self.num_prompts is not None:
            self.require_positive("num_prompts")
        if self.is_training:
            raise self.error("is_training: prompts are for decode; use TextInput for training")

    @property
    def paths(self) -> tuple[str, ...]:
        """The files that prompts are taken from, in the order of `prompt_index`."""
        return self.found.paths[: self.num_prompts]

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(num_examples=len(self.paths), endless=False)

    def input_specs(self) -> NestedMap:
        def spec(dtype: Any, *shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((self.batch_size, *shape), dtype)

        return NestedMap(
            ids=spec(np.int32, self.prefix_len),
            paddings=spec(np.float32, self.prefix_len),
            weights=spec(np.float32, self.prefix_len),
            prefix_lengths=spec(np.int32),
            prompt_index=spec(np.int32),
            eval_sample_weights=spec(np.float32),
        )

    def batch_at(self, position: int) -> NestedMap:
        prompts = self.examples_at(position)
        real = prompts < len(self.paths)
        ids = np.zeros((self.batch_size, self.prefix_len), np.int32)
        ids[:, 0] = self.tokenizer.eos_id
        lengths = np.ones(self.batch_size, np.int32)
        for row in np.flatnonzero(real):
            tokens = self._prompt(int(prompts[row]))
            self.refuse_unknown_ids(tokens, self.paths[int(prompts[row])])
            ids[row, 1 : 1 + len(tokens)] = tokens
            lengths[row] += len(tokens)
        inside = np.arange(self.prefix_len) < lengths[:, None]
        return NestedMap(
            ids=ids,
            paddings=1.0 - inside.astype(np.float32),
            weights=(inside & real[:, None]).astype(np.float32),
            prefix_lengths=lengths,
            prompt_index=np.where(real, prompts, -1).astype(np.int32),
            eval_sample_weights=real.astype(np.float32),
        )

    def _prompt(self, index: int) -> np.ndarray:
        count = self.prefix_len - 1
        limit = count * min(self.tokenizer.bytes_per_token, _BYTES_PER_TOKEN)
        before = None
        while True:
            text = self.found.read(index, limit=limit)
            tokens = self.tokenizer.encode(text, self.paths[index], cut=len(text) == limit)[:count]
            if len(text) < limit or self.tokenizer.bytes_per_token == 1:
                return tokens
            # The end of the text that was read may have cut a word in two, whose tokens are then others.
            if before is not None and len(tokens) == count and np.array_equal(tokens, before):
                return tokens
            before, limit = tokens, 2 * limit

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prefix_len": self.prefix_len}
