"""The model of a Hugging Face folder, fine-tuned on conversations. `--mode=data` shows which tokens count in the loss."""

from __future__ import annotations

from typing import Any

from praxis.pax_fiddle import Config

from spmd_trainer import experiment_registry
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import cloud, hf
from spmd_trainer.inputs import chat_text


@experiment_registry.register(tags=["needs_folder"])
class ChatFromFolder(hf.FromFolder):
    """Fine-tunes the model of a Hugging Face folder (FOLDER) on conversations (FILES): on what the assistant wrote.

    Attributes:
      FILES, EVAL_FILES: conversations to train and to evaluate on, *.jsonl or *.parquet; see `inputs.ChatInput`.
      CHAT_TEMPLATE, TEMPLATE_VARIABLES, TURNS, TOO_LONG, DATE: the fields of `ChatInput` with these names. A CHAT_TEMPLATE of
        None is the folder's.
    """

    CHAT_TEMPLATE: str | None = None
    TEMPLATE_VARIABLES: Any = None
    TURNS = "all"
    TOO_LONG = "error"
    DATE: str | None = None

    def datasets(self) -> list[Any]:
        """Returns the conversations to train on, and those to evaluate on if there are some."""
        if self.FILES is None:
            raise UserError("lm.finetune_chat.ChatFromFolder needs conversations: --fdl.FILES='chats/*.jsonl'")
        shared = {
            "tokenizer": self.TOKENIZER or self._folder(),
            "chat_template": self.CHAT_TEMPLATE,
            "template_variables": self.TEMPLATE_VARIABLES,
            "turns": self.TURNS,
            "too_long": self.TOO_LONG,
            "date": self.DATE,
            "seq_len": self.SEQ_LEN,
            "batch_size": Config(cloud.rows_per_process, global_batch_size=self.GLOBAL_BATCH_SIZE),
        }
        train = {"name": "train", "files": self.FILES, "is_training": True, "input_random_seed": 17}
        heldout = {"name": "heldout", "files": self.EVAL_FILES, "is_training": False}
        used = [train] if self.EVAL_FILES is None else [train, heldout]
        return [Config(chat_text.ChatInput, **own, **shared) for own in used]

    def decode_datasets(self) -> list[Any]:
        """Returns the prompts, if there are some. Conversations get the same template."""
        found = super().decode_datasets()
        for prompts in found:
            if hasattr(prompts.cls, "chat_template"):
                prompts.set(chat_template=self.CHAT_TEMPLATE, template_variables=self.TEMPLATE_VARIABLES)
        return found
