"""Fine-tuning on text files, evaluation and generation with the model of a Hugging Face folder.

    spmd-trainer --exp=lm.hf.FromFolder --job_log_dir=runs/tuned --fdl.FOLDER=models/llama --fdl.FILES='corpus/*.txt'

`--mode=export --export_dir=DIR` with the same flags writes a folder that transformers opens.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry, sharding, storage, tasks_lib
from spmd_trainer.checkpointing import LOAD_ALL, CheckpointLoadingRules
from spmd_trainer.decoder import experiment
from spmd_trainer.decoder.generation import settings
from spmd_trainer.decoder.lm import DecoderLanguageModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.cloud import rows_per_process
from spmd_trainer.experiments.lm.own_text import OnDocuments
from spmd_trainer.hf import folder as hf_folder
from spmd_trainer.hf.families.family import MTP_LAYERS
from spmd_trainer.inputs import chat_text, text
from spmd_trainer.inputs.corpus import file_kinds
from spmd_trainer.models.decoder_spec import DecoderSpec

_STORED = "stored"


@experiment_registry.register(tags=["needs_folder"])
class FromFolder(OnDocuments, experiment.DecoderExperiment):
    """Fine-tunes the model of a Hugging Face folder (FOLDER) on documents (FILES), and generates with it.

    Attributes:
      FOLDER: the folder: config.json, safetensors files, tokenizer.json.
      FILES, EVAL_FILES, COLUMN, SEPARATOR, PACKING, BAD_RECORDS, MAX_RECORD_BYTES: see `own_text.OnDocuments`.
      TOKENIZER: path of a tokenizer; None: the one in FOLDER.
      START: the token before each text; see `inputs.text_base.TokenizedInput`.
      SEQ_LEN: tokens per row.
      GLOBAL_BATCH_SIZE: rows per step.
      VARIABLE_DTYPE: 'float32', 'bfloat16', or 'stored' for the dtype of the folder's tensors.
      PROMPTS: prompts for `--mode=decode_once`: text files, whose beginnings are the prompts; or files of conversations
        (*.jsonl, *.parquet), see `inputs.ChatPromptInput`. None disables decoding.
      PROMPT_LEN: most tokens of a prompt.
      NUM_PROMPTS: prompts per decode step.
      MTP_LAYERS: layers of the folder that predict further tokens to train too (DeepSeek V3, GLM 4.5).
    """

    FOLDER: str = ""
    START = "tokenizer"
    SEQ_LEN = 1024
    GLOBAL_BATCH_SIZE = 8
    VARIABLE_DTYPE = "float32"
    PROMPTS: Any = None
    PROMPT_LEN = 256
    NUM_PROMPTS = 8
    MTP_LAYERS = 0

    ICI_MESH_SHAPE = (1, -1, 1)
    FPROP_DTYPE = jnp.float32
    LEARNING_RATE = 1e-5
    WEIGHT_DECAY = 0.0
    WARMUP_STEPS = 2
    NUM_TRAIN_STEPS = 200
    EVAL_INTERVAL_STEPS = 100
    CHECKPOINT_EVERY_N_STEPS = 100

    def adapt_mesh(self, mesh_shape: Mapping[str, int], num_devices: int) -> dict[str, int]:
        return sharding.fit_mesh_shape(mesh_shape, num_devices, grow="data")

    def corpus_fields(self) -> dict[str, Any]:
        return {
            "tokenizer": self.TOKENIZER or self._folder(),
            "start": self.START,
            "seq_len": self.SEQ_LEN,
            "batch_size": Config(rows_per_process, global_batch_size=self.GLOBAL_BATCH_SIZE),
        }

    def decode_datasets(self) -> list[Any]:
        if self.PROMPTS is None:
            return []
        shared = {
            "name": "prompts",
            "files": self.PROMPTS,
            "tokenizer": self.TOKENIZER or self._folder(),
            "prefix_len": self.PROMPT_LEN,
            "batch_size": Config(rows_per_process, global_batch_size=self.NUM_PROMPTS),
        }
        paths = [self.PROMPTS] if isinstance(self.PROMPTS, str | os.PathLike) else list(self.PROMPTS)
        chats = [file_kinds.kind_of_name(os.fspath(path)) in ("jsonl", "parquet") for path in paths]
        if any(chats) and not all(chats):
            raise UserError(
                f"PROMPTS={self.PROMPTS!r} has conversations (*.jsonl, *.parquet) and other files; give one kind"
            )
        if any(chats):
            return [Config(chat_text.ChatPromptInput, **shared)]
        return [Config(text.PromptInput, start=self.START, **shared)]

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        task_p.train.init_from_checkpoint_rules = {self._folder(): CheckpointLoadingRules(load_rules=[LOAD_ALL])}
        # A short fine-tuning has a curve, too.
        task_p.train.set(eval_skip_train=True, summary_interval_steps=max(1, min(100, self.NUM_TRAIN_STEPS // 20)))
        return task_p

    def model(self) -> Config[DecoderLanguageModel]:
        model_p = super().model()
        if self.VARIABLE_DTYPE not in ("float32", "bfloat16", _STORED):
            raise UserError(f"VARIABLE_DTYPE={self.VARIABLE_DTYPE!r}; give 'float32', 'bfloat16' or {_STORED!r}")
        stored = self.VARIABLE_DTYPE == _STORED
        # The ids in the folder's generation_config.json belong to its own tokenizer.
        changes = {} if self.TOKENIZER is None else {"eos_ids": None, "pad_id": 0}
        generation = settings.from_folder(self._folder(), **changes)
        model_p.generation = Config(settings.GenerationSettings, **vars(generation))
        model_p.dtype = jnp.dtype(hf_folder.open_folder(self._folder()).dtype() if stored else self.VARIABLE_DTYPE).type
        return model_p

    def spec(self) -> Config[DecoderSpec]:
        config, _, spec = hf_folder.read_model(self._folder())
        if (has := config.get(MTP_LAYERS) or 0) < self.MTP_LAYERS:
            raise UserError(
                f"MTP_LAYERS={self.MTP_LAYERS}, and {self.FOLDER} has {has} layers that predict further tokens"
            )
        return experiment.config_of_spec({**vars(spec), "mtp_layers": self.MTP_LAYERS})

    def _folder(self) -> str:
        if not self.FOLDER:
            raise UserError("lm.hf.FromFolder needs a folder: --fdl.FOLDER=models/llama")
        return str(storage.directory("FOLDER", self.FOLDER))
