"""Makes a chat template, and the date that it sees, from the fields of an input."""

from __future__ import annotations

import datetime
import functools
from collections.abc import Callable, Mapping
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files
from spmd_trainer.inputs.chat_template import ChatTemplate, choose
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.storage import reading
from spmd_trainer.storage.paths import file_or_pattern


def template_of(tokenizer: Any, given: str | None, *, has_tools: bool) -> ChatTemplate:
    """Returns the template for a conversation.

    Args:
      tokenizer: the input's tokenizer.
      given: None for the tokenizer's own template; the name of one of its templates; the path of a .jinja file; or a text.
      has_tools: the conversation has tools.

    Raises:
      UserError: there is no such template, it can't be read, or it has a syntax error.
    """
    owner = getattr(tokenizer, "name", type(tokenizer).__name__)
    known: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if given is None or given in known:
        name, text = choose(known, given, has_tools=has_tools, owner=owner)
        name = f"the chat template {name!r} of {owner}"
    elif "{" in given:
        name, text = "chat_template", given
    else:
        name, text = f"the chat template {given}", _read(given)
    tokens = tokenizer.special_tokens if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    return ChatTemplate(text, name=name, special_tokens=tokens)


def clock_of(date: str | None) -> Callable[[str], str]:
    """Returns `strftime_now` for the templates of a training input: a function that formats a fixed date.

    With today's date, a run that is resumed tomorrow would have other tokens. So the function raises UserError if `date` is None.

    Args:
      date: the `date` field, e.g. '2024-07-26'.

    Raises:
      UserError: `date` is not a date.
    """
    try:
        return functools.partial(_formatted, None if date is None else datetime.datetime.fromisoformat(date))
    except (ValueError, TypeError) as error:
        raise UserError(f"date={date!r}; write it as year-month-day, e.g. '2024-07-26'") from error


def _formatted(now: datetime.datetime | None, form: str) -> str:
    if now is None:
        raise UserError(
            "the template writes the current date, so a run that is resumed tomorrow would have other tokens; set date, "
            "e.g. '2024-07-26', or the variable that the template takes instead (template_variables)"
        )
    return now.strftime(form)


def _read(path: str) -> str:
    path = file_or_pattern("chat_template", path)
    try:
        return reading.read(path).decode("utf-8-sig")
    except OSError as error:
        raise UserError(
            f"chat_template={path!r} can't be read: {reading.problem(path, error)}{files.beside(path)}"
        ) from error
    except UnicodeDecodeError as error:
        raise UserError(f"chat_template={path!r} is not UTF-8: {error}") from error
