"""Messages of conversations as files hold them: their roles and contents, and the tools beside them."""

from __future__ import annotations

import json
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.chat_template import ChatTemplate
from spmd_trainer.sharding.messages import shortened

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Entries that an assistant's message may have instead of content.
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
_SHOWN = 80


def shown(value: object) -> str:
    """Returns the beginning of a JSON value, for errors."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _SHOWN)


def parse_tools(given: object, where: str) -> list[dict[str, Any]] | None:
    """Returns the tools of a row. Parquet files hold them as JSON, because schemas in a column must have the same fields.

    Args:
      given: a list of objects, the JSON text of one, or None.
      where: file and line, for errors.

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
    """Returns an entry of a row.

    Args:
      name: the entry's name.
      given: the entry.
      where: file and line, for errors.

    Raises:
      UserError: the entry is not a list of objects.
    """
    if not (isinstance(given, list) and all(isinstance(entry, dict) for entry in given)):
        raise UserError(f"{where}: `{name}` is {shown(given)}; give a list of objects")
    return given


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
    return [{**message, "content": _text_of(message.get("content"))} for message in messages]


def text_of_content(content: object, which: str) -> str | None:
    """Returns the text of a message's content: lists of text parts are joined by newlines.

    Args:
      content: the content.
      which: the message, for errors.

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
    """Returns lists of text parts joined by newlines, and anything else as it is."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) and _is_text(content) else content


def _is_text(content: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )
