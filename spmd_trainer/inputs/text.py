"""Inputs over text files: windows and packed documents for training and evaluation, prompts for decoding.

Without a tokenizer, a token is a byte (0 to 255) or `eos_id`, end-of-text. The tokens of the files, in order and with
one end-of-text after each file, form one stream s[0], s[1], ..., s[N-1]; let s[-1] be end-of-text too. Window w of T
tokens has the labels s[wT : (w+1)T] and the ids s[wT-1 : (w+1)T-1]: each position sees the token before the one it
predicts, and every token is predicted exactly once. If N is not a multiple of T, the end of the last window has weight
0. With `start='bos'`, the tokens of each file begin with beginning-of-text, which is an ordinary token of the stream.

Example for T = 4 and a single file that contains b"hello", so that the stream is h e l l o EOS:
    window 0: ids EOS h e l, labels h e l l, weights 1 1 1 1
    window 1: ids l o 0 0, labels o EOS 0 0, weights 1 1 0 0
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import batches, files, indexed, text_base
from spmd_trainer.inputs.corpus import encoding, open_source
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
from spmd_trainer.inputs.corpus.file_source import FileSource
from spmd_trainer.inputs.corpus.tokens import fetch
from spmd_trainer.inputs.tokenizers import ByteTokenizer

# Bytes to read at first for each token of a prompt. Most texts have fewer bytes per token.
_BYTES_PER_TOKEN = 8


class PromptRows(text_base.TokenizedFiles):
    """Base class of inputs for `LanguageModel.decode`. Gives each prompt once, in order, then raises StopIteration.

    A batch of B rows is a NestedMap of numpy arrays: `ids` int32 [B, P], left-aligned prompts; `paddings` float32 [B, P], 1
    after the end of the prompt; `weights` float32 [B, P], 1 for the prompt's tokens and 0 after them; `prefix_lengths` int32
    [B], number of tokens in the prompt; `prompt_index` int32 [B], the prompt's number; `eval_sample_weights` float32 [B], 1 for
    a prompt. Rows that fill up the last batch hold one token, with `weights` and `eval_sample_weights` 0 and `prompt_index` -1.

    A subclass implements `num_available` and `tokens_of_prompt`.

    Attributes:
      prefix_len: maximum number of tokens in a prompt, P.
      num_prompts: use only the first `num_prompts` prompts; None uses all.
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
    def num_available(self) -> int:
        """Number of prompts in the files."""
        raise NotImplementedError

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the tokens of prompt `index`: integers [n], where 1 <= n <= prefix_len."""
        raise NotImplementedError

    @property
    def order(self) -> indexed.ExampleOrder:
        available = self.num_available
        count = available if self.num_prompts is None else min(self.num_prompts, available)
        return indexed.ExampleOrder(num_examples=count, endless=False)

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
        real = prompts < self.order.num_examples
        ids = np.zeros((self.batch_size, self.prefix_len), np.int32)
        ids[:, 0] = self.tokenizer.eos_id if self.start_id is None else self.start_id
        lengths = np.ones(self.batch_size, np.int32)
        for row in np.flatnonzero(real):
            tokens = self.tokens_of_prompt(int(prompts[row]))
            ids[row, : len(tokens)] = tokens
            lengths[row] = len(tokens)
        inside = np.arange(self.prefix_len) < lengths[:, None]
        return NestedMap(
            ids=ids,
            paddings=1.0 - inside.astype(np.float32),
            weights=(inside & real[:, None]).astype(np.float32),
            prefix_lengths=lengths,
            prompt_index=np.where(real, prompts, -1).astype(np.int32),
            eval_sample_weights=real.astype(np.float32),
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prefix_len": self.prefix_len}


class TextInput(text_base.TokenizedFiles):
    """Language-model input over text files. Their tokens form one stream, which is cut into windows of T tokens.

    Training (`is_training=True`) is endless: each epoch gives every window once, in an order drawn from (input_random_seed,
    epoch). Evaluation gives every window once, in the order of the files, then raises StopIteration until `reset()`. Without a
    tokenizer, each byte is a token, so text may have any encoding. SentencePiece and Hugging Face tokenizers need UTF-8. All
    files are read before the first batch.

    A batch of B rows is a NestedMap of numpy arrays: `ids`, `labels`, `segment_ids`, `segment_pos` int32 [B, T]; `paddings`,
    `weights` float32 [B, T]; `eval_sample_weights` float32 [B]. Each row is a single segment, with the id 1. At positions
    whose `weights` are 0, `paddings` are 1 and the other arrays 0.

    Attributes:
      files, tokenizer, eos_id, start, allow_binary: see `text_base.TokenizedFiles`. The caller splits the files into
        training and evaluation.
      seq_len: tokens per row, T.
      shuffle: False gives the windows of a training input in the order of the files.
      max_windows: number of windows to use, spread evenly over the files; None uses all.
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
        """Number of tokens in all windows of one epoch, including one end-of-text per file."""
        if self.num_windows < self._windows_of_stream:
            return self.num_windows * self.seq_len  # the stream's last window, which may be short, is not used
        return self._stream_len

    @property
    def num_windows(self) -> int:
        """Number of windows in one epoch."""
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
        if isinstance(self.tokenizer, ByteTokenizer):  # known from the file sizes
            return self.found.total_bytes + len(self.found.sizes)
        return sum(map(len, self._tokens_of_files))

    @functools.cached_property
    def _tokens_of_files(self) -> list[np.ndarray]:
        return [self.tokens_of_file(i) for i in range(len(self.paths))]

    @property
    def _windows_of_stream(self) -> int:
        return -(-self._stream_len // self.seq_len)

    def _numbers(self, windows: np.ndarray) -> np.ndarray:
        """Converts indices among the windows that are used (see `max_windows`) to indices among all windows of the stream.

        Both are int64 [n]. The index after the last used window becomes the index after the stream's last window.
        """
        return windows * self._windows_of_stream // self.num_windows

    @functools.cached_property
    def _windows(self) -> np.ndarray:
        """The tokens of the windows that are used (see `max_windows`), `token_dtype` [num_windows + 1, T + 1].

        Each row has the token before a window, then the window's T tokens. The last row is an empty window.
        """
        stream = np.zeros((self._windows_of_stream + 1) * self.seq_len + 1, self.token_dtype)
        stream[0] = self.tokenizer.eos_id
        np.concatenate(self._tokens_of_files, out=stream[1 : self._stream_len + 1])
        del self._tokens_of_files  # the stream has a copy
        windows = np.lib.stride_tricks.sliding_window_view(stream, self.seq_len + 1)[:: self.seq_len]
        # If all windows are used, no copy is needed: they are a view of the stream.
        all_used = self.num_windows == self._windows_of_stream
        return windows if all_used else windows[self._numbers(np.arange(self.num_windows + 1))]

    def batch_at(self, position: int) -> NestedMap:
        windows = self.examples_at(position)
        lengths = np.clip(self._stream_len - self._numbers(windows) * self.seq_len, 0, self.seq_len)
        columns = np.arange(self.seq_len)
        mask = (columns < lengths[:, None]).astype(np.int32)
        tokens = self._windows[windows].astype(np.int32)
        weights = mask.astype(np.float32)
        return NestedMap(
            ids=tokens[:, :-1] * mask,
            labels=tokens[:, 1:] * mask,
            paddings=1.0 - weights,
            weights=weights,
            segment_ids=mask,
            segment_pos=columns.astype(np.int32) * mask,
            eval_sample_weights=(lengths > 0).astype(np.float32),
        )


class PromptInput(PromptRows):
    """Prompts for `LanguageModel.decode`: the beginning of each file, one prompt per file.

    A row holds the start token (end-of-text, as in training, unless `start` says otherwise) and the first tokens of
    the file, together at most `prefix_len` tokens. `PromptRows` describes the batches, in which `prefix_lengths` includes
    the start token, and `prompt_index` is the index of the file in `paths`.

    Attributes:
      files, tokenizer, eos_id, start, allow_binary: see `text_base.TokenizedFiles`.
      prefix_len: maximum number of tokens in a prompt, including the start token.
      num_prompts: use only the first `num_prompts` files; None uses all.
    """

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files whose beginnings are the prompts, in the order of `prompt_index`."""
        return self.found.paths[: self.num_prompts]

    @property
    def num_available(self) -> int:
        return len(self.found.paths)

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the start token, if `start` gives one, and the first tokens of file `index`.

        Raises:
          UserError: the file can't be read, or it is empty and `start` gives no token. The message names the file.
        """
        first = [] if self.start_id is None else [self.start_id]
        tokens = self._beginning(index, self.prefix_len - len(first))
        self.refuse_unknown_ids(tokens, self.paths[index])
        if not first and not len(tokens):
            raise self.error(
                f"{self.paths[index]} has no text, and start={self.start!r} puts no token before it; leave the file out of "
                "`files`"
            )
        return np.concatenate([np.array(first, np.int32), tokens.astype(np.int32)])

    def _beginning(self, index: int, count: int) -> np.ndarray:
        limit = count * min(self.tokenizer.bytes_per_token, _BYTES_PER_TOKEN)
        before = None
        while True:
            text = self.found.read(index, limit=limit)
            tokens = self.tokenizer.encode(text, self.paths[index], cut=len(text) == limit)[:count]
            if len(text) < limit or self.tokenizer.bytes_per_token == 1:
                return tokens
            # The byte limit may cut a word in two and so change its tokens: read more until the tokens stay the same.
            if before is not None and len(tokens) == count and np.array_equal(tokens, before):
                return tokens
            before, limit = tokens, 2 * limit


class DocumentPrompts(PromptRows):
    """Prompts for `LanguageModel.decode`: the beginnings of the first documents of a corpus.

    A row holds the start token and the first tokens of a document, together at most `prefix_len` tokens. At most half of a
    document's tokens are used, so that the model has something to continue. Documents without text and records that can't be
    read are left out. `PromptRows` describes the batches.

    Attributes:
      source: the corpus, with files of any kind that `Documents` supports; the field `files` is ignored.
      tokenizer, eos_id, start: see `text_base.TokenizedInput`.
      prefix_len: maximum number of tokens in a prompt, including the start token.
      num_prompts: use only the first `num_prompts` documents.
    """

    source: Documents | None = None
    num_prompts: int = 8
    _opened: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        with self.naming():
            self._opened: FileSource = open_source.open_documents(self.source or Documents(None))
        self.files, self.allow_binary = self._opened.paths, True
        super().__post_init__()

    @property
    def num_available(self) -> int:
        return len(self._prompts)

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the start token, if `start` gives one, and the first tokens of document `index`."""
        return self._prompts[index]

    @functools.cached_property
    def _prompts(self) -> list[np.ndarray]:
        first = np.array([] if self.start_id is None else [self.start_id], np.int32)
        encoder = encoding.Encoder(self.tokenizer, self._model_vocab_size or self.vocab_size)
        found: list[np.ndarray] = []
        for record in (one for chunk in range(self._opened.num_chunks) for one in self._opened.read_chunk(chunk, 0)):
            (tokens,) = encoder.encode([record])
            if not isinstance(tokens, BadRecord) and len(tokens):
                most = min(self.prefix_len - len(first), max(1, len(tokens) // 2))
                (beginning,) = fetch([(tokens, 0, most)])
                found.append(np.concatenate([first, beginning.astype(np.int32)]))
            if len(found) == self.num_prompts:
                break
        return found

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "prompts": zlib.crc32(b"".join(one.tobytes() for one in self._prompts))}


class PackedTextInput(CorpusInput):
    """Language-model input over short documents in text files. Several documents share a row, each as a separate segment.

    A document's tokens, followed by one end-of-text, are cut into pieces of at most T tokens. Each piece is one segment of a
    row: attention stays within the segment, and positions count from 0 in each segment. A segment's first id is the token
    before its first label: end-of-text at a document's beginning (beginning-of-text with `start='bos'`). Every token is
    therefore predicted exactly once. `CorpusInput` describes order and batches.

    Example for T = 8 and the documents b"hello" and b"a":
        ids         EOS h e l l o EOS a
        labels        h e l l o EOS a EOS
        segment_ids   1 1 1 1 1 1 2 2
        segment_pos   0 1 2 3 4 5 0 1

    Attributes:
      files, allow_binary: see `text_base.TokenizedFiles`.
      tokenizer, eos_id, start: see `text_base.TokenizedInput`.
      seq_len, packing, shuffle, window_rows, bad_records: see `CorpusInput`.
      separator: text that separates the documents of a file, e.g. a newline; it belongs to no document. None makes each file
        one document. Empty documents are left out.
    """

    files: Any = None
    separator: str | None = None
    allow_binary: bool = False

    def __post_init__(self) -> None:
        # Whether a file is text depends on the tokenizer, see `_bound`.
        self.source = Documents(self.files, kind="text", separator=self.separator, allow_binary=True)
        super().__post_init__()

    def _bound(self, documents: Documents) -> Documents:
        found = files.find_files(documents.files)
        if not self.allow_binary:
            text_base.refuse_unless_text(found, self.tokenizer)
        return super()._bound(documents)
