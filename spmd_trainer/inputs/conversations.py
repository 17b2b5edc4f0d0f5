"""Files of conversations, and their chat template: what training and decode have in common.

A conversation is a JSON object with `messages`: [{"role": "user", "content": "Hello"}, ...]. It may also have `tools` (a list, or
the JSON text of one), `documents` and `chat_template_kwargs` (further variables of the template), as in transformers, and `turns`
(see `chat_text.ChatInput`). Its other entries are not read.

Files are JSON lines, one conversation a line, where empty lines are skipped; or Parquet, one conversation a row, with these
entries as columns. A Parquet file gives every message the same entries, with nulls where a message lacks one: entries that are
null are left out.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, row_files, text_base
from spmd_trainer.inputs.chat_template import ChatTemplate
from spmd_trainer.inputs.chat_template_field import template_of

# The lists of a conversation; the template gets them by these names.
_LISTS = ("messages", "tools", "documents")
_ENTRIES = (*_LISTS, "chat_template_kwargs", "turns")
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation of a file.

    Attributes:
      where: the file and the line ('chats.jsonl:3') or the row ('chats.parquet row 3'), from 1.
      messages: at least one.
      tools: JSON schemas, or None.
      documents: documents for the template, or None.
      variables: further variables of the template.
      turns: the value of `turns`, not checked; None if there is none.
    """

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]
    turns: Any = None


class ConversationFiles(text_base.TokenizedFiles):
    """Base of inputs over files of conversations; the module docstring describes the files.

    Attributes:
      chat_template: None takes the tokenizer's ('tool_use' for conversations with tools if it has one of this name). Otherwise
        the name of one of the tokenizer's templates, the path of a .jinja file, or a template's text.
      template_variables: variables for the template, e.g. {'enable_thinking': False}. Those of a conversation take precedence.
    """

    chat_template: str | None = None
    template_variables: Any = None
    # By `has_tools`.
    _templates: dict[bool, ChatTemplate] = dataclasses.field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "eos":
            raise self.error(f"start={self.start!r}; leave it out: the chat template writes the beginning of a text")
        if getattr(self.tokenizer, "encodes_special_tokens", False):
            raise self.error(
                "the tokenizer has encode_special_tokens=True, so that the special tokens of the chat template would be read as "
                "plain text; use a tokenizer without it"
            )
        try:
            self.template(has_tools=False)
        except UserError as error:
            raise self.error(str(error)) from error

    def conversations(self) -> Iterator[Conversation]:
        """Yields the conversations of all files.

        Raises:
          UserError: a line or a row is not a conversation; names it.
        """
        for index, path in enumerate(self.paths):
            for row, where in self._rows(index, path):
                yield self._conversation(row, where)

    def template(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the chat template for conversations with or without tools.

        Raises:
          UserError: there is no such template, or it has a syntax error.
        """
        if has_tools not in self._templates:
            self._templates[has_tools] = template_of(self.tokenizer, self.chat_template, has_tools=has_tools)
        return self._templates[has_tools]

    def variables(self, found: Conversation, **defaults: Any) -> dict[str, Any]:
        """Returns the arguments of `ChatTemplate.render` for a conversation, except its messages.

        Args:
          found: the conversation.
          **defaults: variables that `template_variables` and the conversation may set otherwise.

        Raises:
          UserError: a variable has the name of an entry of the conversation.
        """
        variables = {**defaults, **(self.template_variables or {}), **found.variables}
        if own := sorted(set(_LISTS) & variables.keys()):
            raise self.error(f"{found.where}: {own[0]} is an entry of the line, not a variable of the template")
        return {"tools": found.tools, "documents": found.documents, **variables}

    def _refuse_unless_text(self, index: int) -> None:
        path = self.paths[index]
        is_parquet = self.found.read(index, limit=len(row_files.PARQUET_BEGINNING)) == row_files.PARQUET_BEGINNING
        if path.endswith(row_files.PARQUET_SUFFIX) and not is_parquet:
            raise UserError(f"{path} is not a Parquet file; write it again, or rename it if it holds JSON lines")
        if not is_parquet:
            super()._refuse_unless_text(index)

    def _rows(self, index: int, path: str) -> Iterator[tuple[Any, str]]:
        """Yields the conversations of a file, and where each one is."""
        try:
            yield from row_files.rows(self.found.read(index), path, _ENTRIES)
        except UserError as error:
            raise self.error(str(error)) from error

    def _conversation(self, row: Any, where: str) -> Conversation:
        if not isinstance(row, dict) or "messages" not in row:
            has = f"; it has {files.listed([*row])}" if isinstance(row, dict) else ""
            raise self.error(f"{where} is not a conversation; write {_EXAMPLE} in a line{has}")
        found: dict[str, Any] = {name: row.get(name) for name in _ENTRIES}
        if isinstance(found["tools"], str):
            try:
                found["tools"] = json.loads(found["tools"])
            except ValueError as error:
                raise self.error(f"{where}: the text in `tools` is not JSON: {error}") from error
        for name in _LISTS:
            if name == "messages" or found[name] is not None:
                self._check_objects(name, found[name], where)
        variables = found["chat_template_kwargs"] or {}
        if not isinstance(variables, dict):
            raise self.error(f"{where}: chat_template_kwargs is {variables!r}; give an object")
        return Conversation(where, found["messages"], found["tools"], found["documents"], variables, found["turns"])

    def _check_objects(self, name: str, given: object, where: str) -> None:
        is_list = isinstance(given, list) and all(isinstance(entry, dict) for entry in given)
        if not is_list or (name == "messages" and not given):
            raise self.error(f"{where}: `{name}` is {json.dumps(given, default=str)[:80]}; give a list of objects")


def readable_messages(messages: list[dict[str, Any]], template: ChatTemplate, **variables: Any) -> list[dict[str, Any]]:
    """Returns messages whose content the template can write.

    Contents may be lists of parts: [{'type': 'text', 'text': ...}]. A template that reads lists gets them, as in transformers.
    Other templates fail on a list or write it as Python would print it. They get the texts of the parts, joined by newlines.

    Args:
      messages: the messages.
      template: the template.
      **variables: the other arguments of `ChatTemplate.render`.
    """
    lists = [message["content"] for message in messages if isinstance(message.get("content"), list)]
    if not lists or not all(map(_is_text, lists)):
        return messages
    try:
        text = template.render(messages, **variables)
    except UserError:
        pass  # if it isn't because of the lists, the template fails again
    else:
        if not any(str(content) in text for content in lists):
            return messages
    return [{**message, "content": text_of_content(message.get("content"))} for message in messages]


def text_of_content(content: Any) -> Any:
    """Returns the text of a message's content: lists of text parts are joined by newlines, anything else stays as it is."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) and _is_text(content) else content


def _is_text(content: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
