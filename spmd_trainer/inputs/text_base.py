"""Base classes of the inputs over text: inputs with a tokenizer, and inputs with a tokenizer and text files."""

from __future__ import annotations

import dataclasses
from typing import Any

import fiddle as fdl
import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import file_formats, indexed, tokenizer_field, tokenizers
from spmd_trainer.inputs import files as text_files
from spmd_trainer.inputs.corpus import file_kinds
from spmd_trainer.inputs.corpus import text_files as corpus_texts

HEAD_BYTES = file_formats.HEAD_BYTES


def reads_texts(input_p: Any) -> bool:
    """Returns True if `input_p` is the config of a `TokenizedInput` or of a subclass."""
    kind = fdl.get_callable(input_p) if isinstance(input_p, fdl.Buildable) else None
    return isinstance(kind, type) and issubclass(kind, TokenizedInput)


class TokenizedInput(indexed.IndexedInput):
    """Base class of inputs whose rows hold the tokens of texts.

    Attributes:
      tokenizer: None makes each byte a token. Otherwise the path of a SentencePiece .model file, of a Hugging Face
        tokenizer.json or of a folder that holds one; a `tokenizers.Tokenizer` or a fast tokenizer of transformers; or
        an object with the methods of `spmd_trainer.inputs.tokenizers.Tokenizer`, or its config. After construction, this
        attribute is the tokenizer object.
      eos_id: id of end-of-text. It can be set only for byte tokens and Hugging Face tokenizers. None means 256 for byte tokens
        (a vocabulary of 257 tokens), and otherwise the tokenizer's own id.
      start: the token before the first token of each text. 'eos': end-of-text, as in Pax. 'bos': the tokenizer's
        beginning-of-text. 'none': no token. A prompt then begins with its own first token, and in training a text follows
        the previous text's end-of-text. 'tokenizer': as in transformers, 'bos' if a Hugging Face tokenizer's post-processor
        adds beginning-of-text, and otherwise 'none'.
    """

    tokenizer: Any = None
    eos_id: int | None = None
    start: str = "eos"
    start_id: int | None = dataclasses.field(default=None, init=False, repr=False)
    _model_vocab_size: int | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary."""
        return self.tokenizer.vocab_size

    @property
    def encoded_vocab_size(self) -> int:
        """Vocabulary size that a model needs for ordinary texts, in which no special token is written out."""
        of_text = getattr(self.tokenizer, "encoded_vocab_size", self.vocab_size)
        return of_text if self.start_id is None else max(of_text, self.start_id + 1)

    def limit_vocabulary(self, model_vocab_size: int) -> None:
        """Sets the model's vocabulary size. Tokens outside the vocabulary are then errors. Called before the first batch."""
        self._model_vocab_size = model_vocab_size

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        """Decodes the first lengths[b] ids of each row b of `ids` [B, T]. Drops end-of-text and tokens without text."""
        del key
        return self.tokenizer.decode(ids, lengths)

    def make_tokenizer(self) -> None:
        """Sets `tokenizer` to the tokenizer object and `start_id` to the start token's id. Subclasses call it at construction.

        Raises UserError if the setting `tokenizer`, `eos_id` or `start` is invalid.
        """
        self.tokenizer = tokenizer_field.make_tokenizer(self.tokenizer, self.eos_id)
        self.start_id = tokenizer_field.start_token(self.tokenizer, self.start)


class TokenizedFiles(TokenizedInput):
    """Base class of inputs over text files.

    Attributes:
      files: a path, folder or glob pattern ('corpus/*.txt' or 'corpus/**/*.txt', whose matches are sorted); a list of these;
        or a function without arguments that returns one of them or a list.
      tokenizer, eos_id, start: see `TokenizedInput`.
      allow_binary: True reads any file. False makes a file an error if its first bytes show a format that isn't text (Parquet,
        gzip, TFRecord, ...), or if its name or first bytes show that it is JSON. With a tokenizer that needs UTF-8, NUL bytes
        or invalid UTF-8 among the first bytes are an error, too.
    """

    files: Any = None
    allow_binary: bool = False
    found: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        with self.naming():
            self.make_tokenizer()
            self.found: text_files.TextFiles = text_files.find_files(self.files)
            if not self.allow_binary:
                refuse_unless_text(self.found, self.tokenizer)
        self.settle_reset_for_eval()

    @property
    def paths(self) -> tuple[str, ...]:
        """Paths of the files, in the order in which they are read."""
        return self.found.paths

    def refuse_unknown_ids(self, tokens: np.ndarray, path: str) -> None:
        """Raises UserError, which names the file `path`, if one of its tokens [n] is outside the model's vocabulary."""
        limit = self._model_vocab_size
        if limit is not None and len(tokens) and tokens.max() >= limit:
            raise self.error(f"{path} {tokenizers.unknown_token(tokens.max(), limit)}")

    @property
    def token_dtype(self) -> Any:
        """Dtype in which tokens are stored: uint16 if all token ids fit in it, otherwise uint32."""
        return tokenizers.token_dtype(self.vocab_size)

    @property
    def endless(self) -> bool:
        return self.is_training

    def tokens_of_file(self, index: int) -> np.ndarray:
        """Returns the tokens of file `index` followed by end-of-text, `token_dtype` [n].

        If `start` gives a start token other than end-of-text, that token comes first.

        Raises:
          UserError: the file can't be read, the tokenizer can't encode it, or a token is outside the model's
            vocabulary. The message names the file.
        """
        tokens = self.tokenizer.encode(self.found.read(index), self.found.paths[index])
        self.refuse_unknown_ids(tokens, self.found.paths[index])
        first = [] if self.start_id in (None, self.tokenizer.eos_id) else [self.start_id]
        around = [np.array(ids, self.token_dtype) for ids in (first, [self.tokenizer.eos_id])]
        return np.concatenate([around[0], tokens.astype(self.token_dtype), around[1]])

    def _fingerprint(self) -> dict[str, Any]:
        # Positions saved before `start` existed stay valid.
        start = {} if self.start_id == self.tokenizer.eos_id else {"start_id": self.start_id}
        return {**super()._fingerprint(), **self.tokenizer.fingerprint(), **start, "files": self.found.checksum}

    def _sizes_behind_checksums(self) -> dict[str, str]:
        return {**super()._sizes_behind_checksums(), "files": self.found.size_text}


def refuse_unless_text(found: text_files.TextFiles, tokenizer: tokenizers.Tokenizer) -> None:
    """Raises UserError, which names the file, if the name or first `HEAD_BYTES` bytes of a file show that it isn't text."""
    is_utf8 = isinstance(tokenizer, tokenizer_field.UTF8_TOKENIZERS)
    for index, path in enumerate(found.paths):
        head = found.read(index, limit=HEAD_BYTES)
        corpus_texts.refuse_unless_text(head, path, is_utf8=is_utf8)
        if file_kinds.kind_of_name(path) == "jsonl" or file_formats.begins_as_json(head):
            raise UserError(
                f"{path} is JSON, not text. {file_formats.JSON.instead}. allow_binary=True reads its bytes as they are"
            )
        if is_utf8:
            tokenizers.decode_utf8(head, path, cut=len(head) == HEAD_BYTES)
