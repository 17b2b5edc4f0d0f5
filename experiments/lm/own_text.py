"""Pretraining on your own text: JSON lines, Parquet, Arrow, ArrayRecord, TFRecord, tar shards, text, or tokenised files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry, sharding, tasks_lib
from spmd_trainer.decoder import experiment
from spmd_trainer.decoder.generation.settings import GenerationSettings
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.experiments.lm import stdlib
from spmd_trainer.inputs import CorpusInput, Documents, stdlib_text, text, tokenizer_field
from spmd_trainer.inputs.corpus.documents import MAX_RECORD_BYTES
from spmd_trainer.models.decoder_spec import DecoderSpec


class OnDocuments:
    """Base of experiments on documents. List this class before the base class of the experiment.

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
      BAD_RECORDS: what to do with a damaged record: 'raise' an error or 'skip' it.
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
        """Returns the fields of `CorpusInput` that the subclass sets: tokenizer, seq_len, batch_size, ..."""
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
class OwnText(OnDocuments, experiment.DecoderExperiment):
    """A 4-layer decoder on your own text, with any tokenizer: `--fdl.FILES='web/*.parquet' --fdl.TOKENIZER=tokenizer.json`.

    Attributes:
      FILES, EVAL_FILES, COLUMN, SEPARATOR, TOKENIZER, PACKING, BAD_RECORDS, MAX_RECORD_BYTES: see
        `OnDocuments`. A TOKENIZER of None reads bytes.
      MAX_SEQ_LEN: tokens per row.
      GLOBAL_BATCH_SIZE: rows per step.
      NUM_PROMPTS, PROMPT_LEN: `--mode=decode_once` continues the first PROMPT_LEN tokens of each of the first NUM_PROMPTS
        documents of EVAL_FILES, or else of FILES.
      DECODE_STEPS: most tokens to generate after a prompt.
    """

    ICI_MESH_SHAPE = (1, 4, 2)
    FPROP_DTYPE = jnp.float32
    NUM_LAYERS = 4
    MODEL_DIMS = 256
    HIDDEN_DIMS = 768
    NUM_HEADS = 4
    MAX_SEQ_LEN = 512
    GLOBAL_BATCH_SIZE = 8
    LEARNING_RATE = 2e-3
    WARMUP_STEPS = 100
    NUM_TRAIN_STEPS = 600
    EVAL_INTERVAL_STEPS = 300
    CHECKPOINT_EVERY_N_STEPS = 200
    NUM_PROMPTS = 5
    PROMPT_LEN = 64
    DECODE_STEPS = 64

    def corpus_fields(self) -> dict[str, Any]:
        return {"tokenizer": self.TOKENIZER, "seq_len": self.MAX_SEQ_LEN, "batch_size": self.GLOBAL_BATCH_SIZE}

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def spec(self) -> Config[DecoderSpec]:
        vocabulary = tokenizer_field.make_tokenizer(self.TOKENIZER, None).vocab_size
        heads = {"num_kv_heads": self.NUM_HEADS, "head_dims": self.MODEL_DIMS // self.NUM_HEADS}
        room = max(self.MAX_SEQ_LEN, self.PROMPT_LEN + self.DECODE_STEPS)
        return super().spec().set(vocab_size=vocabulary, max_positions=room, **heads)

    def model(self) -> Config[DecoderLanguageModel]:
        return super().model().set(generation=Config(GenerationSettings, max_tokens=self.DECODE_STEPS))

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        if self.TOKENIZER is None:
            task_p.metrics = Config(stdlib.BitsPerByte)
        task_p.train.set(eval_skip_train=True, summary_interval_steps=20, save_max_to_keep=2)
        return task_p

    def decode_datasets(self) -> list[Any]:
        """Returns prompts: the beginnings of the first documents that the model is evaluated or trained on."""
        source = self.datasets()[-1].source
        return [
            Config(
                text.DocumentPrompts,
                name="prompts",
                source=source,
                tokenizer=self.TOKENIZER,
                prefix_len=self.PROMPT_LEN,
                num_prompts=self.NUM_PROMPTS,
                batch_size=self.NUM_PROMPTS,
            )
        ]
