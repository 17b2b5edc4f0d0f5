"""Conversations in files: messages with roles and contents, the tools beside them, and the template that renders them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Collection, Iterator
from typing import Any, ClassVar

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, text_base
from spmd_trainer.inputs.chat_template import (
    MAX_RENDER_SECONDS,
    MAX_RENDERED_CHARS,
    ChatTemplate,
    RenderLimitError,
    template_of,
)
from spmd_trainer.inputs.corpus import file_kinds
from spmd_trainer.sharding.messages import shortened
from spmd_trainer.storage import json_values

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Entries that an assistant's message may have instead of content.
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
_SHOWN = 80


def shown(value: object) -> str:
    """Returns the beginning of a JSON value, for errors."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _SHOWN)


def parse_tools(given: object, where: str) -> list[dict[str, Any]] | None:
    """Returns the tools of a row: a list of objects, the JSON text of one, or None.

    Parquet files hold JSON text, because all schemas in a column must have the same fields.

    Raises:
      UserError: `given` is something else.
    """
    if isinstance(given, str):
        try:
            given = json_values.parse(given)
        except ValueError as error:
            raise UserError(f"{where}: the text in `tools` is not JSON: {error}") from error
    return None if given is None else list_of_objects("tools", given, where)


def list_of_objects(name: str, given: object, where: str) -> list[dict[str, Any]]:
    """Checks that entry `name` of a row is a list of objects, and returns it.

    Raises:
      UserError: it is not.
    """
    if not (isinstance(given, list) and all(isinstance(entry, dict) for entry in given)):
        raise UserError(f"{where}: `{name}` is {shown(given)}; give a list of objects")
    return given


def readable_messages(messages: list[dict[str, Any]], template: ChatTemplate, **variables: Any) -> list[dict[str, Any]]:
    """Converts the messages' contents to a form that the template can render.

    Contents may be lists of parts: [{'type': 'text', 'text': ...}]. Templates that read lists get them, as in
    transformers. For other templates, which fail or print the Python list, the texts of the parts are joined by
    newlines. `variables` are the other arguments of `ChatTemplate.render`.
    """
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    if not lists or not all(map(_is_text, lists)):
        return messages
    try:
        text = template.render(messages, **variables)
    except RenderLimitError:
        raise
    except UserError:
        pass  # if the lists aren't the cause, the template fails again
    else:
        if not any(str(content) in text for content in lists):
            return messages
    return [{**message, "content": _text_of(message.get("content"))} for message in messages]


def text_of_content(content: object, which: str) -> str | None:
    """Returns the text of a message's content: lists of text parts are joined by newlines. `which` names the message
    in errors.

    Raises:
      UserError: the content is not a string, null or a list of text parts.
    """
    text = _text_of(content)
    if not isinstance(text, str | None):
        raise UserError(
            f"the content of {which} is {str(text)[:_SHOWN]}; give a string or a list of {{'type': 'text', 'text': '...'}}"
        )
    return text


def _text_of(content: Any) -> Any:
    """Joins lists of text parts by newlines; returns anything else unchanged."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) and _is_text(content) else content


def _is_text(content: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


PARQUET_BEGINNING = b"PAR1"
PARQUET_SUFFIX = ".parquet"


def rows(content: bytes, path: str, entries: Collection[str]) -> Iterator[tuple[Any, str]]:
    """Yields the rows of a file with their places: 'pairs.jsonl:3' or 'pairs.parquet row 3', from 1.

    Empty lines are skipped. Parquet gives every message the same entries, with nulls for missing ones; null entries
    are left out.

    Args:
      content: content of the file: Parquet, or JSON lines, which may be compressed by gzip or Zstandard.
      path: the file, for errors.
      entries: columns to read of a Parquet file, if it has them.

    Raises:
      UserError: a line is not JSON, or the file can't be read; names the file and the line.
    """
    if content.startswith(PARQUET_BEGINNING):
        return _parquet_rows(content, path, entries)
    return _json_rows(file_kinds.uncompressed(content, path), path)


def _json_rows(content: bytes, path: str) -> Iterator[tuple[Any, str]]:
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}:{number}"
        try:
            row = json_values.parse(line, finite=False)
        except ValueError as error:
            raise UserError(f"{where} is not JSON: {error}") from error
        yield row, where


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
_OWN_ENTRIES = {"messages", "tools", "documents"}


class TemplatedFiles(text_base.TokenizedFiles):
    """Base of inputs over JSON lines and Parquet files whose rows hold messages.

    Attributes:
      chat_template: None takes the tokenizer's own (for conversations with tools the one named 'tool_use', if it
        exists). Otherwise the name of one of the tokenizer's templates, the path of a .jinja file, or a template's
        text.
      template_variables: variables for the template, e.g. {'enable_thinking': False}. A row's variables take
        precedence. Values, not functions: another process renders.
      max_render_seconds: most seconds of processor time for one rendering.
      max_rendered_chars: most characters of a rendered conversation. A rendering may use 1 GiB, and 32 bytes for each of them.
    """

    _reads_json: ClassVar[bool] = True

    chat_template: str | None = None
    template_variables: Any = None
    max_render_seconds: float = MAX_RENDER_SECONDS
    max_rendered_chars: int = MAX_RENDERED_CHARS
    # Keyed by `has_tools`.
    _templates: dict[bool, ChatTemplate] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def template(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the chat template for conversations with or without tools.

        Raises:
          UserError: the template does not exist, or has a syntax error.
        """
        if has_tools not in self._templates:
            self._templates[has_tools] = template_of(
                self.tokenizer,
                self.chat_template,
                has_tools=has_tools,
                max_render_seconds=self.max_render_seconds,
                max_rendered_chars=self.max_rendered_chars,
            )
        return self._templates[has_tools]

    def variables_of(self, row: dict[str, Any], **defaults: Any) -> dict[str, Any]:
        """Merges `defaults`, `template_variables` and the row's variables; later ones win.

        Raises:
          UserError: a variable has the name of an entry of a row.
        """
        variables = {**defaults, **(self.template_variables or {}), **row}
        if own := sorted(_OWN_ENTRIES & variables.keys()):
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
        if not is_parquet and not file_kinds.is_compressed(path):
            super()._refuse_unless_text(index)


_ENTRIES = ("messages", "tools", "documents", "chat_template_kwargs", "turns")
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation of a file.

    Attributes:
      where: file and line ('chats.jsonl:3') or row ('chats.parquet row 3'), from 1.
      messages: at least one.
      tools: JSON schemas, or None.
      documents: documents for the template, or None.
      variables: further variables of the template.
      turns: value of `turns`, not validated; None if missing.
    """

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    turns: Any = None


class ConversationFiles(TemplatedFiles):
    """Base of inputs over files of conversations; the module docstring describes the files.

    Attributes:
      chat_template, template_variables: see `TemplatedFiles`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "eos":
            raise self.error(f"start={self.start!r}; leave it out: the chat template writes the beginning of a text")
        with self.naming():
            self.check_tokenizer()
            self.template(has_tools=False)

    def conversations(self) -> Iterator[Conversation]:
        """Yields the conversations of all files.

        Raises:
          UserError: a line or a row is not a conversation; names it.
        """
        for index, path in enumerate(self.paths):
            for row, where in self._rows(index, path):
                yield self._conversation(row, where)

    def variables(self, found: Conversation, **defaults: Any) -> dict[str, Any]:
        """Returns the arguments of `ChatTemplate.render` for a conversation, except its messages.

        Args:
          found: the conversation.
          **defaults: overridden by `template_variables` and the conversation.

        Raises:
          UserError: a variable has the name of an entry of the conversation.
        """
        return {"tools": found.tools, "documents": found.documents, **self.variables_of(found.variables, **defaults)}

    def _rows(self, index: int, path: str) -> Iterator[tuple[Any, str]]:
        with self.naming():
            yield from rows(self.found.read(index), path, _ENTRIES)

    def _conversation(self, row: Any, where: str) -> Conversation:
        if not isinstance(row, dict) or "messages" not in row:
            has = f"; it has {files.listed([*row])}" if isinstance(row, dict) else ""
            raise self.error(f"{where} is not a conversation; write {_EXAMPLE} in a line{has}")
        with self.naming():
            messages = list_of_objects("messages", row["messages"], where)
            tools, documents = parse_tools(row.get("tools"), where), row.get("documents")
            if documents is not None:
                documents = list_of_objects("documents", documents, where)
        if not messages:
            raise self.error(f"{where}: `messages` is []; give a list of objects")
        variables = row.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            raise self.error(f"{where}: chat_template_kwargs is {variables!r}; give an object")
        return Conversation(where, messages, tools, documents, variables, row.get("turns"))
