"""Conversations as prompts for decode."""

from __future__ import annotations

import functools
import zlib
from typing import Any

import numpy as np

from spmd_trainer.inputs import messages, text
from spmd_trainer.inputs.messages import readable_messages


class ChatPromptInput(messages.ConversationFiles, text.PromptRows):
    """Conversations as prompts for `LanguageModel.decode`, rendered by a chat template.

    `messages.ConversationFiles` describes the files. The template writes all special tokens; the input adds none.
    Batches are those of `text.PromptRows`; `prompt_index` counts the conversations of all files.

    Attributes:
      files, tokenizer, eos_id, allow_binary: see `text_base.TokenizedFiles`.
      start: must keep its default: the template writes the start token.
      chat_template, template_variables: see `messages.ConversationFiles`.
      add_generation_prompt: end the prompt with the beginning of the assistant's answer.
      prefix_len: most tokens in a prompt, P. A longer conversation is an error.
      num_prompts: use only the first this many conversations; None uses all.
    """

    add_generation_prompt: bool = True

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
            variables = self.variables(found, add_generation_prompt=self.add_generation_prompt)
            template = self.template(has_tools=bool(found.tools))
            messages = readable_messages(found.messages, template, **variables)
            text = template.render(messages, **variables)
            text.encode()  # refuses half of a surrogate pair
            return text

    @functools.cached_property
    def _conversations(self) -> list[messages.Conversation]:
        return list(self.conversations())

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

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for tokens in self._tokens:
            checksum = zlib.crc32(np.append(tokens, -1).astype(np.int32).tobytes(), checksum)
        return {**super()._fingerprint(), "prompts": checksum}
