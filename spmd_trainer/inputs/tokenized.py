"""Base of the inputs with a tokenizer."""

from __future__ import annotations

import dataclasses
from typing import Any

from spmd_trainer.inputs import indexed, tokenizer_field


class TokenizedInput(indexed.IndexedInput):
    """Base of inputs whose rows hold the tokens of texts.

    Attributes:
      tokenizer: None reads by byte. Otherwise the path of a SentencePiece .model file, of a Hugging Face tokenizer.json or
        of a folder that holds one; a `tokenizers.Tokenizer` or a fast tokenizer of transformers; or an object with the
        methods of `spmd_trainer.inputs.tokenizers.Tokenizer`, or its config. After construction, the tokenizer.
      eos_id: end-of-text. None is 256 when reading by byte (a vocabulary of 257), or the tokenizer's own. Can be set for
        bytes and for Hugging Face tokenizers only.
      start: the token before the first token of each text. 'eos': end-of-text, as in Pax. 'bos': the tokenizer's
        beginning-of-text. 'none': no token, so that a prompt begins with its own first token; in training, the first token of a
        text follows the end-of-text of the text before. 'tokenizer': 'bos' or 'none', whichever a Hugging Face tokenizer does
        itself (by its post-processor), as in transformers.
    """

    tokenizer: Any = None
    eos_id: int | None = None
    start: str = "eos"
    start_id: int | None = dataclasses.field(default=None, init=False, repr=False)
    _model_vocab_size: int | None = dataclasses.field(default=None, init=False, repr=False)

    @property
    def vocab_size(self) -> int:
        """Size of the tokenizer's vocabulary: tokens are below it."""
        return self.tokenizer.vocab_size

    @property
    def encoded_vocab_size(self) -> int:
        """Vocabulary size that a model needs: `vocab_size` without special tokens that occur only if a text spells them."""
        of_text = getattr(self.tokenizer, "encoded_vocab_size", self.vocab_size)
        return of_text if self.start_id is None else max(of_text, self.start_id + 1)

    def limit_vocabulary(self, model_vocab_size: int) -> None:
        """Makes a token that the model has no embedding for an error, or its document a bad record.

        Call it before the first batch.

        Args:
          model_vocab_size: the model's vocabulary size; its tokens are 0 to `model_vocab_size` - 1.
        """
        self._model_vocab_size = model_vocab_size

    def ids_to_strings(self, ids: Any, lengths: Any, key: str | None = None) -> list[str]:
        """Returns the text of the first lengths[b] of each row of ids [B, T]. End-of-text and tokens without text are dropped."""
        del key
        return self.tokenizer.decode(ids, lengths)

    def make_tokenizer(self) -> None:
        """Makes the tokenizer from its setting, and finds `start_id`. A subclass calls it at construction.

        Raises:
          UserError: a setting doesn't fit.
        """
        self.tokenizer = tokenizer_field.make_tokenizer(self.tokenizer, self.eos_id)
        self.start_id = tokenizer_field.start_token(self.tokenizer, self.start)
