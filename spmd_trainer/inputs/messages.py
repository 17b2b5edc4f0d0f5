"""Conversations in files: messages with roles and contents, and the tools beside them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, templated_files
from spmd_trainer.inputs.chat_template import ChatTemplate
from spmd_trainer.inputs.templated_files import TemplatedFiles
from spmd_trainer.sharding.messages import shortened

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
            given = json.loads(given)
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
      chat_template, template_variables: see `templated_files.TemplatedFiles`.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "eos":
            raise self.error(f"start={self.start!r}; leave it out: the chat template writes the beginning of a text")
        try:
            self.check_tokenizer()
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
        try:
            yield from templated_files.rows(self.found.read(index), path, _ENTRIES)
        except UserError as error:
            raise self.error(str(error)) from error

    def _conversation(self, row: Any, where: str) -> Conversation:
        if not isinstance(row, dict) or "messages" not in row:
            has = f"; it has {files.listed([*row])}" if isinstance(row, dict) else ""
            raise self.error(f"{where} is not a conversation; write {_EXAMPLE} in a line{has}")
        try:
            messages = list_of_objects("messages", row["messages"], where)
            tools, documents = parse_tools(row.get("tools"), where), row.get("documents")
            if documents is not None:
                documents = list_of_objects("documents", documents, where)
        except UserError as error:
            raise self.error(str(error)) from error
        if not messages:
            raise self.error(f"{where}: `messages` is []; give a list of objects")
        variables = row.get("chat_template_kwargs") or {}
        if not isinstance(variables, dict):
            raise self.error(f"{where}: chat_template_kwargs is {variables!r}; give an object")
        return Conversation(where, messages, tools, documents, variables, row.get("turns"))
