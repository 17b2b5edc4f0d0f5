"""Pretraining on your own text: JSON lines, Parquet, Arrow, ArrayRecord, TFRecord, tar shards, text, or a prepared
corpus.
"""

from __future__ import annotations

from typing import Any

from praxis import pax_fiddle

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm import stdlib
from spmd_trainer.inputs import CorpusInput, Documents, stdlib_text, tokenizer_field
from spmd_trainer.inputs.corpus.documents import MAX_RECORD_BYTES


@experiment_registry.register
class OwnText(stdlib.StdlibBytes):
    """StdlibBytes on your own text, with any tokenizer: `--fdl.FILES='web/*.parquet' --fdl.TOKENIZER=tokenizer.json`.

    Without FILES, the text is the sources of the standard library.

    Attributes:
      FILES, EVAL_FILES: paths, globs or directories of the documents for training and for evaluation, or an output
        folder of tools/prepare_text.py. Without EVAL_FILES, evaluation is off.
      COLUMN: column or key with the text, see `Documents.column`.
      TOKENIZER: path of a tokenizer, see `text_base.TokenizedInput`; None reads bytes.
      PACKING: see `CorpusInput.packing`.
      BAD_RECORDS: 'raise' or 'skip'.
      MAX_RECORD_BYTES: see `Documents.max_record_bytes`.
    """

    FILES: Any = None
    EVAL_FILES: Any = None
    COLUMN = "text"
    TOKENIZER: str | None = None
    PACKING = "best_fit"
    BAD_RECORDS = "raise"
    MAX_RECORD_BYTES = MAX_RECORD_BYTES
    MAX_SEQ_LEN = 512

    def datasets(self) -> list[Any]:
        train = self._corpus(
            "train", self.FILES or stdlib_text.stdlib_train_files, is_training=True, input_random_seed=17
        )
        evaluated = self.EVAL_FILES or (None if self.FILES else stdlib_text.stdlib_heldout_files)
        return [train, *([self._corpus("heldout", evaluated)] if evaluated else [])]

    def vocab_size(self) -> int:
        return tokenizer_field.make_tokenizer(self.TOKENIZER, None).vocab_size

    def decode_datasets(self) -> list[Any]:
        """Returns prompts if the model reads bytes: the beginnings of the standard library's held-out files."""
        return [] if self.TOKENIZER else super().decode_datasets()

    def _corpus(self, name: str, files: Any, **settings: Any) -> Any:
        return pax_fiddle.Config(
            CorpusInput,
            name=name,
            source=Documents(files, column=self.COLUMN, max_record_bytes=self.MAX_RECORD_BYTES),
            tokenizer=self.TOKENIZER,
            seq_len=self.MAX_SEQ_LEN,
            batch_size=self.GLOBAL_BATCH_SIZE,
            packing=self.PACKING,
            bad_records=self.BAD_RECORDS,
            **settings,
        )
