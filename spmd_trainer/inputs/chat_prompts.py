"""Conversations as prompts for decode."""

from __future__ import annotations

import dataclasses
import functools
import json
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import files, prompts
from spmd_trainer.inputs.chat_template import ChatTemplate, choose
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.storage import reading
from spmd_trainer.storage.paths import file_or_pattern


@dataclasses.dataclass(frozen=True)
class _Conversation:
    """A line of a file: where it stands, and what is in it."""

    where: str
    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    documents: list[dict[str, Any]] | None
    variables: dict[str, Any]


class ChatPromptInput(prompts.PromptRows):
    """Conversations as prompts for `LanguageModel.decode`, written as text by a chat template.

    Each line of a file is a JSON object with `messages`: [{"role": "user", "content": "Hello"}, ...]. It may also have `tools`,
    `documents` and `chat_template_kwargs` (further variables of the template), as in transformers. Other entries of a line are
    not read, and neither are empty lines. The template writes all special tokens, so that no others are added. Batches are those
    of `prompts.PromptRows`; `prompt_index` counts the conversations of all files.

    Attributes:
      files, tokenizer, eos_id, allow_binary: see `text_base.TokenizedFiles`.
      start: must stay at its default: the template writes the beginning of a text.
      chat_template: None takes the tokenizer's ('tool_use' for conversations with tools if it has one of this name). Otherwise
        the name of one of the tokenizer's templates, the path of a .jinja file, or a template's text.
      template_variables: variables for the template, e.g. {'enable_thinking': False}. Those of a line take precedence.
      add_generation_prompt: end the prompt with the beginning of the assistant's answer.
      prefix_len: maximum number of tokens in a prompt, P. A longer conversation is an error.
      num_prompts: number of conversations to use, from the first; None uses all.
    """

    chat_template: str | None = None
    template_variables: Any = None
    add_generation_prompt: bool = True

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
            self._template(has_tools=False)
        except UserError as error:
            raise self.error(str(error)) from error

    @property
    def num_available(self) -> int:
        return len(self._conversations)

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the tokens of a conversation. The first call renders all conversations.

        Raises:
          UserError: see `text_of_prompt`; or a conversation is longer than `prefix_len`, or has a token that the model lacks.
        """
        return self._tokens[index]

    def text_of_prompt(self, index: int) -> str:
        """Returns a conversation as the template writes it.

        Raises:
          UserError: a line is not a conversation, or the template can't render it; names the file and the line.
        """
        found = self._conversations[index]
        template = self._template(has_tools=bool(found.tools))
        chosen = {"add_generation_prompt": self.add_generation_prompt}
        variables = {**chosen, **(self.template_variables or {}), **found.variables}
        if own := sorted({"messages", "tools", "documents"} & variables.keys()):
            raise self.error(f"{found.where}: {own[0]} is an entry of the line, not a variable of the template")
        try:
            return template.render(found.messages, tools=found.tools, documents=found.documents, **variables)
        except UserError as error:
            raise self.error(f"{found.where}: {error}") from error

    @functools.cached_property
    def _conversations(self) -> list[_Conversation]:
        found = []
        for index, path in enumerate(self.paths):
            lines = self.found.read(index).splitlines()
            found += [self._parse(line, f"{path}:{number}") for number, line in enumerate(lines, 1) if line.strip()]
        return found

    @functools.cached_property
    def _tokens(self) -> list[np.ndarray]:
        return [self._encode(index) for index in range(self.order.num_examples or 0)]

    def _encode(self, index: int) -> np.ndarray:
        where = self._conversations[index].where
        try:
            text = self.text_of_prompt(index).encode()
        except UnicodeEncodeError as error:
            raise self.error(f"{where}: the text has half of a surrogate pair: {error}") from error
        tokens = self.tokenizer.encode(text, where)
        self.refuse_unknown_ids(tokens, where)
        if not 1 <= len(tokens) <= self.prefix_len:
            raise self.error(
                f"{where}: the conversation has {len(tokens)} tokens, and prompts have 1 to prefix_len={self.prefix_len}; raise "
                "prefix_len or shorten it"
            )
        return tokens

    def _parse(self, line: bytes, where: str) -> _Conversation:
        try:
            parsed = json.loads(line)
        except ValueError as error:
            raise self.error(f"{where} is not JSON: {error}") from error
        if not isinstance(parsed, dict) or "messages" not in parsed:
            has = f"; it has {files.listed([*parsed])}" if isinstance(parsed, dict) else ""
            raise self.error(
                f'{where} is not a conversation; write {{"messages": [{{"role": "user", "content": "..."}}]}} in a line{has}'
            )
        messages, variables = parsed["messages"], parsed.get("chat_template_kwargs") or {}
        for name, given in (
            ("messages", messages),
            ("tools", parsed.get("tools")),
            ("documents", parsed.get("documents")),
        ):
            if name == "messages" or given is not None:
                self._check_objects(name, given, where)
        if not isinstance(variables, dict):
            raise self.error(f"{where}: chat_template_kwargs is {variables!r}; give an object")
        return _Conversation(where, messages, parsed.get("tools"), parsed.get("documents"), variables)

    def _check_objects(self, name: str, given: object, where: str) -> None:
        is_list = isinstance(given, list) and all(isinstance(entry, dict) for entry in given)
        if not is_list or (name == "messages" and not given):
            raise self.error(f"{where}: `{name}` is {json.dumps(given)[:80]}; give a list of objects")

    def _template(self, *, has_tools: bool) -> ChatTemplate:
        owner = getattr(self.tokenizer, "name", type(self.tokenizer).__name__)
        known: Mapping[str, str] = getattr(self.tokenizer, "chat_templates", {})
        given = self.chat_template
        if given is None or given in known:
            name, text = choose(known, given, has_tools=has_tools, owner=owner)
            name = f"the chat template {name!r} of {owner}"
        elif "{" in given:
            name, text = "chat_template", given
        else:
            name, text = f"the chat template {given}", _read(given)
        tokens = self.tokenizer.special_tokens if isinstance(self.tokenizer, HuggingFaceTokenizer) else {}
        return ChatTemplate(text, name=name, special_tokens=tokens)

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for tokens in self._tokens:
            checksum = zlib.crc32(np.append(tokens, -1).astype(np.int32).tobytes(), checksum)
        return {**super()._fingerprint(), "prompts": checksum}


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
