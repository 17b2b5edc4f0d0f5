"""Command-line settings of the modes that read text and need no experiment: `--mode=tokenise` and `--mode=tokenizer`."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from spmd_trainer.errors import UserError
from spmd_trainer.settings import Settings, names, setting

if TYPE_CHECKING:
    from spmd_trainer.inputs.corpus.documents import Documents

_text = functools.partial(setting, group="Text (--mode=tokenise and --mode=tokenizer)")
_conversations = functools.partial(setting, group="Conversations (--mode=tokenise and --mode=tokenizer)")
# Suffix of an output path that selects a SentencePiece model.
MODEL_SUFFIX = ".model"
_TEMPLATE_HELP = (
    "Name, path or text of the chat template. Default: the tokenizer's own. With --mode=tokenizer: path or text of the one to "
    "write beside the tokenizer."
)


@dataclasses.dataclass(frozen=True)
class _TextConfig(Settings):
    """Settings that both modes share: the text to read, and where to write the result.

    Attributes:
      files: the command's positional arguments: local or remote (gs://, s3://, hf://) paths, globs or directories.
    """

    files: Sequence[str]
    output: str = _text(
        None,
        "The folder to write. With --mode=tokenizer also NAME.model, the file of a SentencePiece model.",
        value="PATH",
        required="--output=PATH is needed: the folder to write",
    )
    column: str = _text(
        "text",
        "Column or key with the text; 'a.b' reaches into objects.",
        value="NAME",
        instead="an experiment may have --fdl.COLUMN",
    )
    kind: str | None = _text(
        None, "Kind of the files, if their names don't say it: jsonl, parquet, arrow, ...", value="KIND"
    )
    separator: str | None = _text(
        None, "Text between the documents of a text file. Default: a file is one document.", value="TEXT"
    )
    bad_records: str = _text(
        "raise",
        "raise stops at a record that can't be used; skip leaves it out and counts it.",
        value="raise|skip",
        instead="an experiment may have --fdl.BAD_RECORDS",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.files:
            raise UserError(f"give the files to read, e.g. spmd-trainer ... --output={self.output} 'web/*.parquet'")

    def documents(self) -> Documents:
        """Returns the corpus that the settings describe."""
        from spmd_trainer.inputs.corpus.documents import Documents  # imports NumPy, which --help doesn't need

        return Documents(tuple(self.files), column=self.column, kind=self.kind, separator=self.separator)


@dataclasses.dataclass(frozen=True)
class TokeniseConfig(_TextConfig):
    """Settings of `--mode=tokenise`, which writes the tokens of a corpus to a folder."""

    tokenizer: str | None = _text(
        None,
        "With --mode=tokenise: a tokenizer.json, its folder, or a SentencePiece .model. Default: bytes.",
        value="PATH",
        instead="an experiment may have --fdl.TOKENIZER",
    )
    workers: int | None = _text(
        None, "With --mode=tokenise: number of processes. Default: one for each core.", value="N", at_least=1
    )
    conversations: bool = _conversations(False, "The records are conversations.")
    seq_len: int | None = _conversations(None, "Tokens per row of the input.", value="N", at_least=1)
    chat_template: str | None = _conversations(None, _TEMPLATE_HELP, value="TEMPLATE")
    turns: str | None = _conversations(
        None, "Which of the assistant's messages count: all, the default, or last.", value="all|last"
    )
    too_long: str | None = _conversations(
        None,
        "What becomes of a conversation that is longer than a row: error, the default, drop or cut.",
        value="error|drop|cut",
    )

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.conversations and (given := list(self.of_conversations())):
            raise UserError(f"--{given[0]} goes with --conversations")
        if self.conversations and self.seq_len is None:
            raise UserError(
                "--conversations needs --seq_len=N: conversations that are too long are refused, dropped or cut"
            )

    def of_conversations(self) -> dict[str, Any]:
        """Returns {name: value} of the settings for conversations (`seq_len`, `chat_template`, ...) that aren't None."""
        found = {name: getattr(self, name) for name in ("seq_len", "chat_template", "turns", "too_long")}
        return {name: value for name, value in found.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class TokenizerConfig(_TextConfig):
    """Settings of `--mode=tokenizer`, which trains a tokenizer."""

    vocab_size: int = _text(
        4096,
        "With --mode=tokenizer: number of tokens, special ones included.",
        value="N",
        at_least=1,
        at_most=2**24,
    )
    algorithm: str = _text(
        "bpe",
        "With --mode=tokenizer: bpe (Sennrich et al., 2016) or unigram (Kudo, 2018).",
        value="bpe|unigram",
        choices=("bpe", "unigram"),
    )
    eos: str | None = _text(
        None,
        "With --mode=tokenizer: end-of-text. Default: <|endoftext|>, of a SentencePiece model </s>.",
        value="TOKEN",
    )
    special_tokens: tuple[str, ...] = _text(
        (),
        "With --mode=tokenizer: more special tokens, e.g. '<|im_start|>,<|im_end|>,<pad>'. May be repeated.",
        value="TOKEN,...",
        read=names,
    )
    chat_template: str | None = _conversations(None, _TEMPLATE_HELP, value="TEMPLATE")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.output.endswith(".json"):
            raise UserError(f"--output={self.output}: give the folder to write, which gets a tokenizer.json")
        if self.chat_template and self.output.endswith(MODEL_SUFFIX):
            raise UserError(f"--chat_template: {self.output} is one file, of SentencePiece; give --output a folder")
