"""What transformers makes of the conversations in data/chat; tools/make_chat_goldens.py wrote it."""

from __future__ import annotations

import json
import pathlib
from typing import Any

from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import ChatInput
from spmd_trainer.inputs.corpus.documents import BadRecord

DATA = pathlib.Path(__file__).parent / "data" / "chat"
TEMPLATES = tuple(sorted(path.stem for path in (DATA / "templates").glob("*.jinja")))


def conversations(directory: pathlib.Path = DATA) -> list[dict[str, Any]]:
    """The conversations, in the order of the file."""
    return [json.loads(line) for line in (directory / "conversations.jsonl").read_bytes().splitlines()]


def expected(directory: pathlib.Path = DATA) -> dict[str, list[dict[str, list[int]] | None]]:
    """Tokens and masks of each template, by conversation; None where transformers refuses it."""
    return json.loads((directory / "expected.json").read_text())


def tokenizer_of(template: str, directory: pathlib.Path = DATA) -> str:
    """The tokenizer that the templates of a family are used with."""
    return str(directory / ("byte_fallback" if template.startswith("gemma") else "byte_level"))


def make(path: pathlib.Path | str, **fields: Any) -> ChatInput:
    """A ChatInput over a file, by default with the marked ChatML template."""
    settings = {
        "tokenizer": tokenizer_of("chatml"),
        "chat_template": str(DATA / "templates" / "chatml_marked.jinja"),
        "seq_len": 64,
        "batch_size": 2,
        **fields,
    }
    return base_hyperparams.instantiate(pax_fiddle.Config(ChatInput, name="chats", files=str(path), **settings))


def encoded_of(source: ChatInput) -> list[Any]:
    """Tokens of all conversations of an input, and which of them count."""
    (one,) = source.sources
    records = [record for chunk in range(one.source.num_chunks) for record in one.source.read_chunk(chunk, 0)]
    found = one.documents.processor.encode(records)
    for bad in found:
        if isinstance(bad, BadRecord):
            raise UserError(bad.text)
    return found


def encoded(template: str, conversation: dict[str, Any], scratch: pathlib.Path, directory: pathlib.Path = DATA):
    """Tokens and mask of one conversation, as an input over a file with it has them."""
    path = scratch / "one.jsonl"
    path.write_text(json.dumps(conversation) + "\n")
    source = make(
        path,
        tokenizer=tokenizer_of(template, directory),
        chat_template=str(directory / "templates" / f"{template}.jinja"),
        seq_len=4096,
    )
    (found,) = encoded_of(source)
    return found.tokens.tolist(), found.counted.astype(int).tolist()
