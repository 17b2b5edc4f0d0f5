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
from collections.abc import Iterator
from typing import Any

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, row_files
from spmd_trainer.inputs.messages import list_of_objects, parse_tools
from spmd_trainer.inputs.templated_files import TemplatedFiles

_ENTRIES = ("messages", "tools", "documents", "chat_template_kwargs", "turns")
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
          **defaults: variables that `template_variables` and the conversation may set otherwise.

        Raises:
          UserError: a variable has the name of an entry of the conversation.
        """
        return {"tools": found.tools, "documents": found.documents, **self.variables_of(found.variables, **defaults)}

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
