"""Pretraining on your own text: JSON lines, Parquet, Arrow, ArrayRecord, TFRecord, tar shards, text, or a prepared
corpus.
"""

from __future__ import annotations

from typing import Any

from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry
from spmd_trainer.experiments.lm import stdlib
from spmd_trainer.inputs import CorpusInput, Documents, stdlib_text, tokenizer_field
from spmd_trainer.inputs.corpus.documents import MAX_RECORD_BYTES


class OnDocuments:
    """Base of experiments on documents. List it before the base class of the experiment.

    Attributes:
      FILES: documents to train on: paths, globs or directories of JSON lines (also compressed), Parquet, Arrow,
        ArrayRecord, TFRecord, tar shards or text, or an output folder of --mode=tokenise. None: the sources of
        Python's standard library.
      EVAL_FILES: documents to evaluate on, all of them. None: the held-out files of the standard library if FILES is
        None, otherwise no evaluation.
      COLUMN: column or key with the text, see `Documents.column`.
      SEPARATOR: text between the documents of a text file; None: a file is one document.
      TOKENIZER: path of a tokenizer, see `text_base.TokenizedInput`.
      PACKING: see `CorpusInput.packing`.
      BAD_RECORDS: 'raise' or 'skip'.
      MAX_RECORD_BYTES: see `Documents.max_record_bytes`.
    """

    FILES: Any = None
    EVAL_FILES: Any = None
    COLUMN = "text"
    SEPARATOR: str | None = None
    TOKENIZER: str | None = None
    PACKING = "best_fit"
    BAD_RECORDS = "raise"
    MAX_RECORD_BYTES = MAX_RECORD_BYTES

    def corpus_fields(self) -> dict[str, Any]:
        """Returns the fields of `CorpusInput` that the experiment decides: tokenizer, seq_len, batch_size, ..."""
        raise NotImplementedError

    def datasets(self) -> list[Any]:
        files, evaluated = self.FILES, self.EVAL_FILES
        if files is None:
            files = stdlib_text.stdlib_train_files
            evaluated = stdlib_text.stdlib_heldout_files if evaluated is None else evaluated
        found = [self._corpus("train", files, is_training=True, input_random_seed=17)]
        return found if evaluated is None else [*found, self._corpus("heldout", evaluated)]

    def _corpus(self, name: str, files: Any, **settings: Any) -> Any:
        source = Documents(files, column=self.COLUMN, separator=self.SEPARATOR, max_record_bytes=self.MAX_RECORD_BYTES)
        return Config(
            CorpusInput,
            name=name,
            source=source,
            packing=self.PACKING,
            bad_records=self.BAD_RECORDS,
            **self.corpus_fields(),
            **settings,
        )


@experiment_registry.register
class OwnText(OnDocuments, stdlib.StdlibBytes):
    """StdlibBytes on your own text, with any tokenizer: `--fdl.FILES='web/*.parquet' --fdl.TOKENIZER=tokenizer.json`.

    Attributes:
      FILES, EVAL_FILES, COLUMN, SEPARATOR, TOKENIZER, PACKING, BAD_RECORDS, MAX_RECORD_BYTES: see
        `OnDocuments`. A TOKENIZER of None reads bytes.
    """

    MAX_SEQ_LEN = 512

    def corpus_fields(self) -> dict[str, Any]:
        return {"tokenizer": self.TOKENIZER, "seq_len": self.MAX_SEQ_LEN, "batch_size": self.GLOBAL_BATCH_SIZE}

    def vocab_size(self) -> int:
        return tokenizer_field.make_tokenizer(self.TOKENIZER, None).vocab_size

    def decode_datasets(self) -> list[Any]:
        """Returns prompts if the model reads bytes: the beginnings of the standard library's held-out files."""
        return [] if self.TOKENIZER else super().decode_datasets()
