"""Fine-tuning of the model in a Hugging Face folder: with adapters (LoRA, DoRA), on conversations, on preferences (DPO).

    spmd-trainer --exp=lm.finetune.LoraFromFolder --job_log_dir=runs/lora --fdl.FOLDER=models/llama --fdl.FILES='my/*.txt'
    spmd-trainer --exp=lm.finetune.ChatFromFolder --job_log_dir=runs/chat --fdl.FOLDER=models/llama --fdl.FILES=chats.jsonl
    spmd-trainer --exp=lm.finetune.DpoFromFolder --job_log_dir=runs/dpo --fdl.FOLDER=models/llama --fdl.FILES=pairs.jsonl

`--fdl.LORA_TARGETS=all-linear` adds adapters to the last two; without it, all variables learn. With the same flags,
`--mode=export --export_dir=DIR` writes a folder that transformers opens, with the adapters merged; `--export_adapter`
writes only the adapters, for PEFT. `--mode=data` shows which tokens count in the loss.
"""

from __future__ import annotations

from typing import Any

from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry, tasks_lib
from spmd_trainer.decoder.preferences.loss import PreferenceLoss
from spmd_trainer.decoder.preferences.model import PreferenceModel
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm.adapters import WithAdapters
from spmd_trainer.experiments.lm.cloud import rows_per_process
from spmd_trainer.experiments.lm.hf import FromFolder
from spmd_trainer.inputs import chat_text, preferences
from spmd_trainer.inputs.chat_template import MAX_RENDER_SECONDS, MAX_RENDERED_CHARS


class TunedFromFolder(WithAdapters, FromFolder):
    """Base of fine-tuning the model of a Hugging Face folder (FOLDER); frozen, with adapters, if LORA_TARGETS is set.

    Attributes:
      CHAT_TEMPLATE, TEMPLATE_VARIABLES: the fields `chat_template` and `template_variables` of all conversation inputs, for
        training and decoding. CHAT_TEMPLATE None: the folder's template.
    """

    CHAT_TEMPLATE: str | None = None
    TEMPLATE_VARIABLES: Any = None

    def decode_datasets(self) -> list[Any]:
        found = super().decode_datasets()
        for prompts in found:
            if hasattr(prompts.cls, "chat_template"):
                prompts.set(chat_template=self.CHAT_TEMPLATE, template_variables=self.TEMPLATE_VARIABLES)
        return found


@experiment_registry.register(tags=["needs_folder"])
class LoraFromFolder(TunedFromFolder):
    """Trains adapters on text files (FILES) beside the frozen model of a Hugging Face folder (FOLDER)."""

    LORA_TARGETS = "all-linear"
    VARIABLE_DTYPE = "stored"
    LEARNING_RATE = 2e-4
    WARMUP_STEPS = 10


@experiment_registry.register(tags=["needs_folder"])
class ChatFromFolder(TunedFromFolder):
    """Fine-tunes the model of a Hugging Face folder (FOLDER) on the assistant's text in conversations (FILES).

    Attributes:
      FILES, EVAL_FILES: conversations to train and to evaluate on, *.jsonl (also .gz, .zst) or *.parquet; see
        `inputs.ChatInput`.
      CHAT_TEMPLATE, TEMPLATE_VARIABLES, TURNS, TOO_LONG, DATE, MAX_RENDER_SECONDS, MAX_RENDERED_CHARS: the fields of
        `ChatInput` with these names.
      LORA_TARGETS, LORA_RANK, ...: see `adapters.WithAdapters`.
    """

    TURNS = "all"
    TOO_LONG = "error"
    DATE: str | None = None
    MAX_RENDER_SECONDS = MAX_RENDER_SECONDS
    MAX_RENDERED_CHARS = MAX_RENDERED_CHARS

    def datasets(self) -> list[Any]:
        if self.FILES is None:
            raise UserError("lm.finetune.ChatFromFolder needs conversations: --fdl.FILES='chats/*.jsonl'")
        shared = {
            "tokenizer": self.TOKENIZER or self._folder(),
            "chat_template": self.CHAT_TEMPLATE,
            "template_variables": self.TEMPLATE_VARIABLES,
            "turns": self.TURNS,
            "too_long": self.TOO_LONG,
            "date": self.DATE,
            "max_render_seconds": self.MAX_RENDER_SECONDS,
            "max_rendered_chars": self.MAX_RENDERED_CHARS,
            "seq_len": self.SEQ_LEN,
            "batch_size": Config(rows_per_process, global_batch_size=self.GLOBAL_BATCH_SIZE),
        }
        train = {"name": "train", "files": self.FILES, "is_training": True, "input_random_seed": 17}
        heldout = {"name": "heldout", "files": self.EVAL_FILES, "is_training": False}
        used = [train] if self.EVAL_FILES is None else [train, heldout]
        return [Config(chat_text.ChatInput, **own, **shared) for own in used]


@experiment_registry.register(tags=["needs_folder"])
class DpoFromFolder(TunedFromFolder):
    """Trains the model of a Hugging Face folder (FOLDER) on pairs of answers (FILES), by DPO or a related loss.

    A batch has GLOBAL_BATCH_SIZE pairs.

    Attributes:
      FILES, EVAL_FILES: pairs, *.jsonl (also .gz, .zst) or *.parquet; see `inputs.PreferenceInput`. Without
        EVAL_FILES, evaluation is off.
      REFERENCE: 'file' computes the reference model's log-probabilities when the run begins, and stores them in the run's
        job_log_dir; 'live' computes them in each step with the frozen base of the adapters.
      LOSS, BETA, LABEL_SMOOTHING, TARGET_MARGIN: see `decoder.preferences.loss.PreferenceLoss`.
      CHAT_TEMPLATE, TEMPLATE_VARIABLES, TOO_LONG, DATE: the fields of `PreferenceInput` with these names.
      LORA_TARGETS, LORA_RANK, ...: see `adapters.WithAdapters`.
    """

    REFERENCE = "file"
    LOSS, BETA, LABEL_SMOOTHING, TARGET_MARGIN = "sigmoid", 0.1, 0.0, 0.0
    TOO_LONG = "error"
    DATE: str | None = None
    LEARNING_RATE = 1e-6

    def datasets(self) -> list[Any]:
        if self.FILES is None:
            raise UserError("lm.finetune.DpoFromFolder needs pairs: --fdl.FILES='pairs/*.jsonl'")
        train = Config(
            preferences.PreferenceInput, name="train", files=self.FILES, is_training=True, input_random_seed=17
        )
        train.set(chat_template=self.CHAT_TEMPLATE, template_variables=self.TEMPLATE_VARIABLES, date=self.DATE)
        train.set(too_long=self.TOO_LONG, start=self.START, seq_len=self.SEQ_LEN)
        train.tokenizer, train.reference = self.TOKENIZER or self._folder(), self._reference()
        train.batch_size = Config(rows_per_process, global_batch_size=self.GLOBAL_BATCH_SIZE)
        if self.EVAL_FILES is None:
            return [train]
        return [
            train,
            train.clone().set(name="heldout", files=self.EVAL_FILES, is_training=False, input_random_seed=None),
        ]

    def task(self) -> Config[tasks_lib.SingleTask]:
        task_p = super().task()
        if task_p.lora is not None:
            task_p.lora.reference = self.REFERENCE == "live" and self.LOSS != "simpo"
        return task_p

    def model(self) -> Config[PreferenceModel]:
        plain = super().model()
        model_p = Config(PreferenceModel, **{name: getattr(plain, name) for name in plain.__arguments__})
        fields = {"loss": self.LOSS, "beta": self.BETA, "label_smoothing": self.LABEL_SMOOTHING}
        return model_p.set(preference=Config(PreferenceLoss, target_margin=self.TARGET_MARGIN, **fields))

    def _reference(self) -> str | None:
        if self.REFERENCE not in ("file", "live"):
            raise UserError(f"REFERENCE={self.REFERENCE!r}; give 'file' or 'live'")
        if self.REFERENCE == "live" and self.LORA_TARGETS is None and self.LOSS != "simpo":
            raise UserError(
                "REFERENCE='live' needs adapters, whose frozen base is the reference: --fdl.LORA_TARGETS=all-linear. Without "
                "them, use REFERENCE='file'"
            )
        return "file" if self.REFERENCE == "file" and self.LOSS != "simpo" else None
