"""Base of the inputs that render conversations by a chat template."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import text_base
from spmd_trainer.inputs.chat_template import ChatTemplate, template_of

PARQUET_BEGINNING = b"PAR1"
PARQUET_SUFFIX = ".parquet"


def rows(content: bytes, path: str, entries: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Yields the rows of a file with their places: 'pairs.jsonl:3' or 'pairs.parquet row 3', from 1.

    Empty lines are skipped. Parquet gives every message the same entries, with nulls for missing ones; null entries
    are left out.

    Args:
      content: content of the file: Parquet or JSON lines.
      path: the file, for errors.
      entries: columns to read of a Parquet file, if it has them.

    Raises:
      UserError: a line is not JSON, or the file can't be read; names the file and the line.
    """
    return _parquet_rows(content, path, entries) if content.startswith(PARQUET_BEGINNING) else _json_rows(content, path)


def _json_rows(content: bytes, path: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            yield json.loads(line), where
        except (ValueError, RecursionError) as error:
            raise UserError(f"{where} is not JSON: {error}") from error


def _parquet_rows(content: bytes, path: str, entries: Collection[str]) -> Iterator[tuple[Any, str]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise UserError(f"{path}: Parquet files need pyarrow: pip install 'spmd-trainer[parquet]'") from error
    number = 0
    try:
        table = pyarrow.parquet.ParquetFile(pyarrow.BufferReader(content))
        names = table.schema_arrow.names
        columns = [name for name in names if name in entries] or names
        for batch in table.iter_batches(columns=columns):
            for row in batch.to_pylist():
                number += 1
                yield _without_nulls(row), f"{path} row {number}"
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(f"{path} can't be read as Parquet after row {number}: {error}") from error


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value


# Entries of a row that are passed to the template by name.
_ENTRIES = {"messages", "tools", "documents"}


class TemplatedFiles(text_base.TokenizedFiles):
    """Base of inputs over JSON lines and Parquet files whose rows hold messages.

    Attributes:
      chat_template: None takes the tokenizer's own (for conversations with tools the one named 'tool_use', if it
        exists). Otherwise the name of one of the tokenizer's templates, the path of a .jinja file, or a template's
        text.
      template_variables: variables for the template, e.g. {'enable_thinking': False}. A row's variables take
        precedence.
    """

    chat_template: str | None = None
    template_variables: Any = None
    # Keyed by `has_tools`.
    _templates: dict[bool, ChatTemplate] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def template(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the chat template for conversations with or without tools.

        Raises:
          UserError: the template does not exist, or has a syntax error.
        """
        if has_tools not in self._templates:
            self._templates[has_tools] = template_of(self.tokenizer, self.chat_template, has_tools=has_tools)
        return self._templates[has_tools]

    def variables_of(self, row: dict[str, Any], **defaults: Any) -> dict[str, Any]:
        """Merges `defaults`, `template_variables` and the row's variables; later ones win.

        Raises:
          UserError: a variable has the name of an entry of a row.
        """
        variables = {**defaults, **(self.template_variables or {}), **row}
        if own := sorted(_ENTRIES & variables.keys()):
            raise UserError(f"{own[0]} is an entry of the line, not a variable of the template")
        return variables

    def check_tokenizer(self) -> None:
        """Refuses a tokenizer that reads special tokens as plain text, by UserError."""
        if getattr(self.tokenizer, "encodes_special_tokens", False):
            raise UserError(
                "the tokenizer has encode_special_tokens=True, so that the special tokens of the chat template would be read as "
                "plain text; use a tokenizer without it"
            )

    def _refuse_unless_text(self, index: int) -> None:
        path = self.paths[index]
        is_parquet = self.found.read(index, limit=len(PARQUET_BEGINNING)) == PARQUET_BEGINNING
        if path.endswith(PARQUET_SUFFIX) and not is_parquet:
            raise UserError(f"{path} is not a Parquet file; write it again, or rename it if it holds JSON lines")
        if not is_parquet:
            super()._refuse_unless_text(index)
