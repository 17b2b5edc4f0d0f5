"""What the inputs over text files share: the files, a tokenizer, and text from ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files as text_files
from spmd_trainer.inputs import indexed, tokenizers


class TokenizedFiles(indexed.IndexedInput):
    """Base of inputs over text files.

    Attributes:
      files: paths, one path, or a function without arguments that returns paths.
      tokenizer: a `tokenizers.Tokenizer` or the config of one; None reads by byte. After construction, the tokenizer.
      eos_id: end-of-text, where there is no tokenizer; 256 makes a vocabulary of 257.
    """

    files: Any = None
    tokenizer: Any = None
    eos_id: int = tokenizers.BYTE_VALUES
    found: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            if self.tokenizer is None:
                self.tokenizer = tokenizers.ByteTokenizer(self.eos_id)
            elif self.eos_id != tokenizers.BYTE_VALUES:
                raise UserError(f"eos_id={self.eos_id}, but the tokenizer has an end-of-text of its own; unset eos_id")
            self.found: text_files.TextFiles = text_files.find_files(self.files)
        except UserError as error:
            raise self.error(str(error)) from error
        self.settle_reset_for_eval()

    @property
    def paths(self) -> tuple[str, ...]:
        """The files, in their order."""
        return self.found.paths

    @property
    def vocab_size(self) -> int:
        """Tokens that may occur."""
        return self.tokenizer.vocab_size

    @property
    def token_dtype(self) -> Any:
        """Unsigned dtype in which tables of tokens are kept."""
        return tokenizers.token_dtype(self.vocab_size)

    @property
    def endless(self) -> bool:
        return self.is_training

    def tokens_of_file(self, index: int) -> np.ndarray:
        """Tokens of a file and one end-of-text, `token_dtype` [n].

        Raises:
          UserError: it can't be read, or the tokenizer can't read what is in it; names the file.
        """
        tokens = self.tokenizer.encode(self.found.read(index), self.found.paths[index])
        return np.append(tokens.astype(self.token_dtype), np.array(self.tokenizer.eos_id, self.token_dtype))

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        """Text of ids [B, T], of each row's first lengths[b]; tokens without text, end-of-text among them, give none."""
        del key
        return self.tokenizer.decode(ids, lengths)

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), **self.tokenizer.fingerprint(), "files": self.found.checksum}
