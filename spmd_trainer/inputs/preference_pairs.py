"""Reads preference pairs (a chosen and a rejected answer to one prompt) from records in the forms that TRL reads.

A record has `prompt`, `chosen` and `rejected`. Either all three are texts, or all three are lists of messages:

    {"prompt": "The sky is", "chosen": " blue.", "rejected": " green."}
    {"prompt": [{"role": "user", "content": "Which color is the sky?"}],
     "chosen": [{"role": "assistant", "content": "Blue."}], "rejected": [{"role": "assistant", "content": "Green."}]}

If `prompt` is missing, the common prefix of `chosen` and `rejected` is the prompt. A record with messages may also have
`tools` and `chat_template_kwargs` (further variables of the template). Other entries and empty lines are ignored.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, TypeAlias

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs import files
from spmd_trainer.inputs.messages import INSTEAD_OF_CONTENT, ROLES, parse_tools, shown, text_of_content, variables_in

Messages: TypeAlias = list[dict[str, Any]]

_SIDES = ("chosen", "rejected")
ENTRIES = ("prompt", *_SIDES, "tools", "chat_template_kwargs")


@dataclasses.dataclass(frozen=True)
class Pair:
    """A preference pair: a prompt, a chosen and a rejected answer. Either all are texts, or all are lists of messages.

    Attributes:
      where: file and line of the pair, for error messages.
      prompt: the prompt of both answers.
      chosen: the preferred answer.
      rejected: the other answer.
      tools: JSON schemas of the functions that the model may call, for the chat template.
      variables: further variables of the chat template.
    """

    where: str
    prompt: str | Messages
    chosen: str | Messages
    rejected: str | Messages
    tools: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def is_text(self) -> bool:
        """True if prompt and answers are texts, False if they are lists of messages."""
        return isinstance(self.prompt, str)


def parse(row: object, where: str, other_roles: Sequence[str] = ()) -> Pair:
    """Makes a `Pair` from a record.

    Args:
      row: the record's parsed JSON value.
      where: names the record in error messages.
      other_roles: roles that messages may have in addition to `messages.ROLES`.

    Raises:
      UserError: the record is not a pair with a prompt and two different answers.
    """
    if not isinstance(row, dict):
        raise UserError(f"{where} is not a pair: {shown(row)}; give an object with `prompt`, `chosen` and `rejected`")
    for side in _SIDES:
        if side not in row:
            names = [str(name) for name in row]
            near = did_you_mean(side, names)
            has = near if near.startswith("; did you mean") else f"; it has {files.listed(names)}"
            raise UserError(f"{where}: the pair has no {side} answer: there is no `{side}`{has}")
        if row[side] in (None, "", []):
            raise UserError(f"{where}: the pair has no {side} answer: `{side}` is {shown(row[side])}")
    prompt, chosen, rejected = _one_kind(row, where, (*ROLES, *other_roles))
    if chosen == rejected:
        raise UserError(f"{where}: the chosen and the rejected answer are equal: {shown(chosen)}; take the pair out")
    if prompt is None:
        prompt, chosen, rejected = _without_common_beginning(chosen, rejected, where)
    if not prompt:
        raise UserError(f"{where}: the prompt is empty; give one, or take the pair out")
    if not isinstance(prompt, str):
        _check_turns(prompt, {"chosen": chosen, "rejected": rejected}, where)
    tools = parse_tools(row.get("tools"), where) or None
    return Pair(where, prompt, chosen, rejected, tools, variables_in(row, where))


def _one_kind(row: dict[str, Any], where: str, roles: Sequence[str]) -> tuple[Any, Any, Any]:
    """Returns a record's prompt (None if missing), chosen answer and rejected answer.

    Raises UserError unless either all of them are texts, or all are lists of messages with roles in `roles`.
    """
    given = {name: row[name] for name in ("prompt", *_SIDES) if row.get(name) is not None}
    for name, value in given.items():
        if not isinstance(value, str | list):
            raise UserError(f"{where}: `{name}` is {shown(value)}; give a text or a list of messages")
        if isinstance(value, list):
            _check_messages(name, value, where, roles)
    texts = [name for name, value in given.items() if isinstance(value, str)]
    if texts and len(texts) < len(given):
        messages = [name for name in given if name not in texts]
        raise UserError(
            f"{where}: `{texts[0]}` is a text and `{messages[0]}` is a list of messages; give all of them in one form. Where "
            "`chosen` and `rejected` are whole conversations, leave `prompt` out"
        )
    return given.get("prompt"), given["chosen"], given["rejected"]


def _check_messages(name: str, messages: list[Any], where: str, roles: Sequence[str]) -> None:
    for number, message in enumerate(messages, 1):
        if not isinstance(message, dict):
            raise UserError(f"{where}: message {number} of `{name}` is {shown(message)}; give an object with a `role`")
        role = message.get("role")
        if role not in roles:
            raise UserError(
                f"{where}: message {number} of `{name}` has the role {role!r}; give one of {', '.join(roles)} "
                f"(other_roles=[...] adds roles that the template knows){did_you_mean(str(role), roles)}"
            )
        try:
            text_of_content(message.get("content"), f"message {number} of `{name}`")
        except UserError as error:
            raise UserError(f"{where}: {error}") from error


def _check_turns(prompt: Messages, answers: dict[str, Any], where: str) -> None:
    """Raises UserError if the prompt or an answer is empty, the prompt's last message is the assistant's, or an answer has
    a message that isn't the assistant's. (The loss includes every message of an answer.)
    """
    if not any(text_of_content(message.get("content"), "the prompt") for message in prompt):
        raise UserError(f"{where}: the prompt is empty; give one, or take the pair out")
    if prompt[-1]["role"] == "assistant":
        raise UserError(
            f"{where}: the prompt ends with a message of the assistant; end it with the message that is answered"
        )
    for side, messages in answers.items():
        for message in messages:
            if message["role"] != "assistant":
                raise UserError(
                    f"{where}: the {side} answer has a message of the role {message['role']!r}, and the loss counts all of an "
                    "answer; answers may only have messages of the assistant"
                )
        if not any(_is_written(message) for message in messages):
            raise UserError(f"{where}: the pair has no {side} answer: its messages are empty")


def _is_written(message: dict[str, Any]) -> bool:
    """Returns True if a message of an answer has content, reasoning or a tool call."""
    text = text_of_content(message.get("content"), "the answer")
    return bool(text) or any(message.get(entry) for entry in INSTEAD_OF_CONTENT)


def _without_common_beginning(chosen: Any, rejected: Any, where: str) -> tuple[Any, Any, Any]:
    """Splits two answers into (common prefix, rest of `chosen`, rest of `rejected`).

    If the answers are texts and their common prefix ends with a space, the space is moved to the start of each rest.
    """
    size = common_length(chosen, rejected)
    if isinstance(chosen, str) and size < min(len(chosen), len(rejected)) and chosen[size - 1 : size] == " ":
        size -= 1
    if size == 0:
        raise UserError(
            f"{where}: there is no `prompt`, and `chosen` and `rejected` have no common beginning; give a prompt"
        )
    for side, answer in (("chosen", chosen), ("rejected", rejected)):
        if len(answer) == size:
            raise UserError(
                f"{where}: the pair has no {side} answer: there is no `prompt`, and the other answer begins with all of "
                f"`{side}`; give a prompt"
            )
    return chosen[:size], chosen[size:], rejected[size:]


def common_length(one: Sequence[Any], other: Sequence[Any]) -> int:
    """Returns the length of the common prefix of two sequences."""
    same = itertools.takewhile(lambda both: both[0] == both[1], zip(one, other, strict=False))
    return sum(1 for _ in same)
