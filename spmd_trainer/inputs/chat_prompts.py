"""Conversations as prompts for decode."""

from __future__ import annotations

import dataclasses
import functools
import zlib
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import messages, text
from spmd_trainer.inputs.chat_template import MAX_RENDER_SECONDS, MAX_RENDERED_CHARS
from spmd_trainer.inputs.chat_text import Chat
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
from spmd_trainer.inputs.corpus.open_source import open_documents


class ChatPromptInput(text.PromptRows):
    """Conversations as prompts for `LanguageModel.decode`, rendered by a chat template.

    `chat_text.Chat` describes the records. The template writes all special tokens; the input adds none. Batches are those
    of `text.PromptRows`; `prompt_index` counts the conversations of all files.

    Attributes:
      files: as of `chat_text.ChatInput`.
      tokenizer, eos_id: see `text_base.TokenizedInput`.
      start: must keep its default: the template writes the start token.
      chat_template, template_variables, max_render_seconds, max_rendered_chars: see `messages.Templated`.
      add_generation_prompt: end the prompt with the beginning of the assistant's answer.
      prefix_len: most tokens in a prompt, P. A longer conversation is an error.
      num_prompts: use only the first this many conversations; None uses all.
    """

    chat_template: str | None = None
    template_variables: Any = None
    max_render_seconds: float = MAX_RENDER_SECONDS
    max_rendered_chars: int = MAX_RENDERED_CHARS
    add_generation_prompt: bool = True
    _templated: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.start != "eos":
            raise self.error(f"start={self.start!r}; leave it out: the chat template writes the beginning of a text")
        with self.naming():
            self._templated = messages.Templated.of(self)
            self._templated.check_tokenizer()
            self._templated.template(has_tools=False)

    @property
    def num_available(self) -> int:
        return len(self._conversations)

    def tokens_of_prompt(self, index: int) -> np.ndarray:
        """Returns the tokens of a conversation. The first call renders all conversations.

        Raises:
          UserError: as `text_of_prompt`; or a conversation is longer than `prefix_len`, or has a token outside the
            model's vocabulary.
        """
        return self._tokens[index]

    def text_of_prompt(self, index: int) -> str:
        """Renders a conversation.

        Raises:
          UserError: a line is not a conversation, or the template fails; names the file and the line.
        """
        found = self._conversations[index]
        with self.naming(f"{found.where}: "):
            variables = self._templated.variables(found, add_generation_prompt=self.add_generation_prompt)
            text: str = self._templated.render(found.messages, variables)
            return text

    @functools.cached_property
    def _conversations(self) -> list[messages.Conversation]:
        found = []
        with self.naming():
            source = open_documents(Documents(self.found.paths, processor=Chat()))
            for record in (one for chunk in range(source.num_chunks) for one in source.read_chunk(chunk, 0)):
                if isinstance(record, BadRecord):
                    raise UserError(record.text)
                found.append(messages.conversation_of(record))
        return found

    @functools.cached_property
    def _tokens(self) -> list[np.ndarray]:
        return [self._encode(index) for index in range(self.order.num_examples or 0)]

    def _encode(self, index: int) -> np.ndarray:
        where = self._conversations[index].where
        text = self.text_of_prompt(index).encode()
        tokens = self.tokenizer.encode(text, where)
        self.refuse_unknown_ids(tokens, where)
        if not 1 <= len(tokens) <= self.prefix_len:
            raise self.error(
                f"{where}: the conversation has {len(tokens)} tokens, and prompts have 1 to prefix_len={self.prefix_len}; raise "
                "prefix_len or shorten it"
            )
        return tokens

    def _refuse_unless_text(self) -> None:
        """Leaves it to the reading of conversations, which are in files of several kinds."""

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for tokens in self._tokens:
            checksum = zlib.crc32(np.append(tokens, -1).astype(np.int32).tobytes(), checksum)
        return {**super()._fingerprint(), "prompts": checksum}
