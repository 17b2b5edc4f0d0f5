"""Reads conversations (messages with roles and contents) from the records of files, and renders them by a chat template."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Self

from spmd_trainer.errors import UserError, require_one_of
from spmd_trainer.inputs import files
from spmd_trainer.inputs.chat_template import (
    MAX_RENDER_SECONDS,
    MAX_RENDERED_CHARS,
    ChatTemplate,
    RenderLimitError,
    clock_of,
    template_of,
)
from spmd_trainer.inputs.corpus.corpus_input import CorpusInput
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents
from spmd_trainer.inputs.corpus.text_files import value_of
from spmd_trainer.sharding.messages import short_hash, shortened
from spmd_trainer.storage import json_values

ROLES = ("system", "developer", "user", "assistant", "tool", "function", "ipython")
# Keys that an assistant's message may have instead of content.
INSTEAD_OF_CONTENT = ("tool_calls", "function_call", "reasoning_content", "thinking", "reasoning")
_SHOWN = 80


def shown(value: object) -> str:
    """Returns a JSON value as text for error messages, shortened to 80 characters."""
    return shortened(json.dumps(value, ensure_ascii=False, default=str), _SHOWN)


def parse_tools(given: object, where: str) -> list[dict[str, Any]] | None:
    """Returns a record's `tools` as a list of objects. `given` is such a list, the JSON text of such a list, or None.

    JSON text is for Parquet files, in which all objects of a column must have the same fields.

    Raises:
      UserError: `given` is none of these. The message names the record `where`.
    """
    if isinstance(given, str):
        try:
            given = json_values.parse(given)
        except ValueError as error:
            raise UserError(f"{where}: the text in `tools` is not JSON: {error}") from error
    return None if given is None else list_of_objects("tools", given, where)


def list_of_objects(name: str, given: object, where: str) -> list[dict[str, Any]]:
    """Returns `given`. If it isn't a list of objects, raises UserError, which names the record `where` and its key `name`."""
    if not (isinstance(given, list) and all(isinstance(entry, dict) for entry in given)):
        raise UserError(f"{where}: `{name}` is {shown(given)}; give a list of objects")
    return given


def readable_messages(
    messages: list[dict[str, Any]], template: ChatTemplate, /, **variables: Any
) -> list[dict[str, Any]]:
    """Returns messages whose contents have a form that the template can render.

    Contents may be lists of parts: [{'type': 'text', 'text': ...}]. As in transformers, a template gets these lists if it
    can read them. If the template fails, or prints a list in Python's form, the parts' texts are joined by newlines.
    `variables` are the other arguments of `ChatTemplate.render`.
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
    """Returns the text of a message's content; None for None. Joins the texts in a list of text parts by newlines.

    Raises:
      UserError: the content is not a string, None or a list of text parts. `which` is the message's name in the error.
    """
    text = _text_of(content)
    if not isinstance(text, str | None):
        raise UserError(
            f"the content of {which} is {str(text)[:_SHOWN]}; give a string or a list of {{'type': 'text', 'text': '...'}}"
        )
    return text


def _text_of(content: Any) -> Any:
    """Joins the texts of a list of text parts by newlines; returns anything else unchanged."""
    return "\n".join(part["text"] for part in content) if isinstance(content, list) and _is_text(content) else content


def _is_text(content: list[Any]) -> bool:
    return all(
        isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str) for part in content
    )


# Entries of a record that are arguments of `ChatTemplate.render`, so no template variable may have these names.
_OWN_ENTRIES = {"messages", "tools", "documents"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Templated:
    """Settings for rendering messages by a chat template.

    Attributes:
      chat_template: the name of one of the tokenizer's templates, the path of a .jinja file, or a template's text. None takes
        the tokenizer's default template, or for conversations with tools its template 'tool_use', if it has one.
      template_variables: variables for the template, e.g. {'enable_thinking': False}. Variables in a record override them.
        They must be values, not functions, because the template runs in a separate process.
      max_render_seconds: maximum processor time of one rendering, in seconds.
      max_rendered_chars: maximum length of a rendered conversation, in characters. A rendering may use 1 GiB of memory plus
        32 bytes per character of this maximum.
      tokenizer: the tokenizer, set by the input.
    """

    chat_template: str | None = None
    template_variables: Any = None
    max_render_seconds: float = MAX_RENDER_SECONDS
    max_rendered_chars: int = MAX_RENDERED_CHARS
    tokenizer: Any = dataclasses.field(default=None, repr=False)

    @classmethod
    def of(cls, fields: Any) -> Self:
        """Makes an instance of this class. Copies each of its fields that is also an attribute of `fields`."""
        names = [field.name for field in dataclasses.fields(cls)]
        return cls(**{name: getattr(fields, name) for name in names if hasattr(fields, name)})

    @functools.cached_property
    def _templates(self) -> dict[bool, ChatTemplate]:
        return {}

    def template(self, *, has_tools: bool) -> ChatTemplate:
        """Returns the chat template for conversations with or without tools. Raises UserError if it is missing or malformed."""
        if has_tools not in self._templates:
            self._templates[has_tools] = template_of(
                self.tokenizer,
                self.chat_template,
                has_tools=has_tools,
                max_render_seconds=self.max_render_seconds,
                max_rendered_chars=self.max_rendered_chars,
            )
        return self._templates[has_tools]

    def variables(self, found: Conversation, **defaults: Any) -> dict[str, Any]:
        """Returns the arguments of `ChatTemplate.render` for a conversation, except its messages.

        Args:
          found: the conversation.
          **defaults: default variables. `template_variables` override them, and the conversation's variables override both.

        Raises:
          UserError: a variable is named 'messages', 'tools' or 'documents', which are entries of the conversation.
        """
        variables = {**defaults, **(self.template_variables or {}), **found.variables}
        if own := sorted(_OWN_ENTRIES & variables.keys()):
            raise UserError(f"{own[0]} is an entry of the line, not a variable of the template")
        return {"tools": found.tools, "documents": found.documents, **variables}

    def render(self, messages: list[dict[str, Any]], variables: dict[str, Any]) -> str:
        """Renders messages with the result of `self.variables(...)`. Raises UserError if the template fails."""
        template = self.template(has_tools=bool(variables["tools"]))
        text = template.render(readable_messages(messages, template, **variables), **variables)
        refuse_surrogates(text)
        return text

    def check_tokenizer(self) -> None:
        """Raises UserError if the tokenizer would read the template's special tokens as plain text."""
        if getattr(self.tokenizer, "encodes_special_tokens", False):
            raise UserError(
                "the tokenizer has encode_special_tokens=True, so that the special tokens of the chat template would be read as "
                "plain text; use a tokenizer without it"
            )

    def fingerprint(self) -> dict[str, Any]:
        """Returns all settings on which a rendered text depends, as JSON values."""
        try:
            templates = [self.template(has_tools=has_tools) for has_tools in (False, True)]
        except UserError:  # pairs of plain texts need no template; rendering a message raises the same error
            templates = []
        variables = json.dumps(self.template_variables or {}, sort_keys=True, default=str)
        found = {
            "chat_template": short_hash(json.dumps([one.text for one in templates])),
            "template_variables": variables,
        }
        special = {kind: token for one in templates for kind, token in one.special_tokens.items()}
        return {**found, "special_tokens": special} if special else found


def refuse_surrogates(text: str) -> None:
    """Raises UserError if a text has a lone surrogate (half of a surrogate pair), which UTF-8 can't encode."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise UserError(f"the text has half of a surrogate pair: {error}") from error


ERROR, CUT, DROP = "error", "cut", "drop"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MessageProcessor(Templated):
    """Base class of the processors that convert records with messages to tokens.

    Attributes:
      too_long: what to do with a record of more than seq_len + 1 tokens. 'error' treats it as a bad record (see
        `CorpusInput.bad_records`). 'drop' leaves it out and counts it in the input's `skipped`. Only the first few records
        that are left out are logged.
      other_roles: roles that messages may have in addition to `ROLES`. The template must know them.
      date: the date that the template gets as the current date, e.g. '2024-07-26'. Required if the template writes the date,
        because the real date would change the tokens when a run is resumed on a later day.
      seq_len: tokens per row. The input sets it; without an input (`--mode=tokenise`), the user sets it.
    """

    gives_pairs: ClassVar[bool] = False
    _too_long: ClassVar[tuple[str, ...]] = (ERROR, DROP)

    too_long: str = ERROR
    other_roles: Sequence[str] = ()
    date: str | None = None
    seq_len: int = 0

    def bound(self, tokenizer: Any, seq_len: int) -> Self:
        """Returns a copy with this tokenizer, for rows of `seq_len` tokens. Raises UserError if a setting is invalid."""
        require_one_of("too_long", self.too_long, self._too_long)
        clock_of(self.date)
        return dataclasses.replace(self, tokenizer=tokenizer, seq_len=seq_len)

    def fingerprint(self) -> dict[str, Any]:
        own = {"too_long": self.too_long, "most_tokens": self.seq_len + 1, "date": self.date}
        return {**super().fingerprint(), **own, "other_roles": list(self.other_roles)}


class MessagesInput(CorpusInput):
    """Base class of inputs over records with messages. A subclass implements `_processor`.

    Attributes:
      files: as in `Documents`: JSON lines (also .gz and .zst), Parquet, Arrow or ArrayRecord.
      source: can be set instead of `files`: a `Documents` or a `Mixture` of several `Documents`. This input's processor is
        used for each `Documents` that has no processor.
      chat_template, template_variables, max_render_seconds, max_rendered_chars: see `Templated`.
      too_long, other_roles, date: see `MessageProcessor`.
      window_rows: see `CorpusInput`. None means 64, or fewer if 64 rows would hold too many tokens.
    """

    # Data sets of messages are small, and a larger window would delay the first batch by many renderings.
    _most_rows: ClassVar[int] = 64

    files: Any = None
    chat_template: str | None = None
    template_variables: Any = None
    max_render_seconds: float = MAX_RENDER_SECONDS
    max_rendered_chars: int = MAX_RENDERED_CHARS
    too_long: str = ERROR
    other_roles: Sequence[str] = ()
    date: str | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            self.source = Documents(self.files)
        elif self.files is not None:
            raise self.error("files and source are both set; set one of them")
        super().__post_init__()


ENTRIES = ("messages", "tools", "documents", "chat_template_kwargs", "turns")
_EXAMPLE = '{"messages": [{"role": "user", "content": "..."}]}'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A conversation, as read from a record of a file.

    Attributes:
      where: file and line of the record ('chats.jsonl:3'), or file and number of the row or record.
      messages: the messages, at least one.
      tools: JSON schemas of the functions that the model may call; None if there are none.
      documents: documents for templates that support retrieval; None if there are none.
      variables: further variables of the template.
      turns: the record's entry `turns` (see `Chat.turns`), not yet checked; None if missing.
    """

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None = None
    documents: list[dict[str, Any]] | None = None
    variables: dict[str, Any] = dataclasses.field(default_factory=dict)
    turns: Any = None


def row_of(document: Document) -> Any:
    """Returns the parsed value of a JSON record. Raises UserError if the record is not JSON."""
    assert isinstance(document.content, bytes)
    value = value_of(document.content, document.where)
    if isinstance(value, BadRecord):
        raise UserError(value.text)
    return value


def conversation_of(document: Document) -> Conversation:
    """Returns the conversation in a JSON record. Raises UserError, which names the record, if it isn't a conversation."""
    row, where = row_of(document), document.where
    if not isinstance(row, dict) or "messages" not in row:
        has = f"; it has {files.listed([*row])}" if isinstance(row, dict) else ""
        raise UserError(f"{where} is not a conversation; write {_EXAMPLE} in a line{has}")
    messages = list_of_objects("messages", row["messages"], where)
    tools, documents = parse_tools(row.get("tools"), where), row.get("documents")
    if documents is not None:
        documents = list_of_objects("documents", documents, where)
    if not messages:
        raise UserError(f"{where}: `messages` is []; give a list of objects")
    return Conversation(where, messages, tools, documents, variables_in(row, where), row.get("turns"))


def variables_in(row: dict[str, Any], where: str) -> dict[str, Any]:
    """Returns a record's template variables: its entry `chat_template_kwargs`. Raises UserError if it isn't an object."""
    variables = row.get("chat_template_kwargs") or {}
    if not isinstance(variables, dict):
        raise UserError(f"{where}: `chat_template_kwargs` is {shown(variables)}; give an object")
    return variables
