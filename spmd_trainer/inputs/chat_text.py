"""Inputs over conversations: for training, where only the assistant's text counts in the loss, and as prompts for decoding.

The chat template renders a conversation with all special tokens, and the tokenizer encodes the whole text at once, so
the tokens are the same as from transformers' `apply_chat_template`. A conversation of n tokens is one segment of n - 1
positions: each token but the last is an id, and each token but the first a label. `weights` is 1 for the labels that
the assistant wrote (see `assistant_masks`) and 0 for all others. Conversations are packed into rows and never split.

Example: rows have T = 8 tokens, the text '<user>hi<assistant>yes<end>' has five tokens (<user>, hi, <assistant>, yes, <end>),
and the template marks the assistant's text as '{% generation %}yes<end>{% endgeneration %}':
    ids         <user> hi <assistant> yes 0 0 0 0
    labels      hi <assistant> yes <end>  0 0 0 0
    weights     0  0           1   1      0 0 0 0
    segment_ids 1  1           1   1      0 0 0 0
"""

from __future__ import annotations

import dataclasses
import functools
import zlib
from collections.abc import Sequence
from typing import Any, ClassVar, Self

import numpy as np
from absl import logging

from spmd_trainer.errors import UserError, did_you_mean, require_one_of
from spmd_trainer.inputs import assistant_masks, messages, text
from spmd_trainer.inputs.assistant_masks import ASSISTANT, TURNS
from spmd_trainer.inputs.chat_template import MAX_RENDER_SECONDS, MAX_RENDERED_CHARS, Rendering, clock_of
from spmd_trainer.inputs.corpus.documents import BadRecord, Document, Documents, LeftOut
from spmd_trainer.inputs.corpus.encoding import encode_each
from spmd_trainer.inputs.corpus.open_source import open_documents
from spmd_trainer.inputs.corpus.tokens import CountedTokens, Tokens
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.messages import (
    CUT,
    DROP,
    ERROR,
    INSTEAD_OF_CONTENT,
    ROLES,
    Conversation,
    readable_messages,
    text_of_content,
)

# Roles of tool results. Their messages may be empty.
_RETURNED = ("tool", "function", "ipython")
# Maximum number of cut conversations that a process logs.
_LOGGED = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class Chat(messages.MessageProcessor):
    """Processor that renders and tokenizes conversations, for `Documents.processor` and `ChatInput`.

    A record is {"messages": [{"role": ..., "content": ...}, ...]}, and may also have the entries `tools`, `documents`,
    `chat_template_kwargs` and `turns`. A conversation is a bad record (see `CorpusInput.bad_records`) if it has an unknown
    role, an empty message or no message of the assistant, if none of its labels counts in the loss, or if the template fails. A
    tool's message may be empty, and an assistant's message may have reasoning or tool calls instead of content.

    Attributes:
      chat_template, template_variables, max_render_seconds, max_rendered_chars: see `messages.Templated`.
      turns: which messages of the assistant count in the loss: 'all', or only the 'last' one. The entry `turns` of a
        conversation overrides this setting.
      too_long: 'error' and 'drop': see `messages.MessageProcessor`. 'cut' keeps the first seq_len + 1 tokens, and logs the
        first 10 conversations that are cut. If the tokens that are kept have no text of the assistant, the conversation is a
        bad record.
      other_roles, date: see `messages.MessageProcessor`.
    """

    entries: ClassVar[tuple[str, ...]] = messages.ENTRIES
    _too_long: ClassVar[tuple[str, ...]] = (ERROR, CUT, DROP)

    turns: str = assistant_masks.ALL

    def bound(self, tokenizer: Any, seq_len: int) -> Self:
        require_one_of("turns", self.turns, TURNS)
        if not isinstance(tokenizer, HuggingFaceTokenizer):
            raise UserError(
                f"a {type(tokenizer).__name__} does not map tokens to characters, which the loss on the "
                "assistant's text needs; give a Hugging Face tokenizer"
            )
        if "add_generation_prompt" in (self.template_variables or {}):
            raise UserError("template_variables has add_generation_prompt, which is for prompts, not for training")
        found = super().bound(tokenizer, seq_len)
        found.check_tokenizer()
        found.template(has_tools=False)
        return found

    def encode(self, documents: Sequence[Document]) -> list[Tokens | BadRecord]:
        rendered = [self._render(document) for document in documents]
        good = [
            (document, one) for document, one in zip(documents, rendered, strict=True) if isinstance(one, Rendering)
        ]
        wheres = [document.where for document, _ in good]
        encoded = encode_each(self.tokenizer.encode_with_offsets, [one.text for _, one in good], wheres)
        made = (
            found if isinstance(found, BadRecord) else self._counted(document.where, found, one)
            for (document, one), found in zip(good, encoded, strict=True)
        )
        return [one if isinstance(one, BadRecord) else next(made) for one in rendered]

    def fingerprint(self) -> dict[str, Any]:
        return {**super().fingerprint(), "turns": self.turns}

    def _render(self, document: Document) -> Rendering | BadRecord:
        try:
            return self._rendering(messages.conversation_of(document))
        except UserError as error:
            return BadRecord.of(document.where, error)

    def _rendering(self, found: Conversation) -> Rendering:
        self._check(found)
        turns = self.turns if found.turns is None else found.turns
        template = self.template(has_tools=bool(found.tools))
        variables = self.variables(found, strftime_now=clock_of(self.date))
        if "add_generation_prompt" in variables:
            raise UserError("chat_template_kwargs has add_generation_prompt, which is for prompts, not for training")
        readable = readable_messages(found.messages, template, add_generation_prompt=False, **variables)

        def render(some: assistant_masks.Messages, prompt: bool) -> Rendering:
            return template.render_marked(some, add_generation_prompt=prompt, **variables)

        text = assistant_masks.assistant_text(readable, render, has_marks=template.has_marks, turns=turns)
        messages.refuse_surrogates(text.text)
        if not text.generated:
            raise UserError(
                f"no label would count: {template.name} writes nothing"
                + (" between {% generation %} and {% endgeneration %}" if template.has_marks else " for the assistant")
            )
        return text

    def _check(self, found: Conversation) -> None:
        if found.turns is not None:
            require_one_of("turns", found.turns, TURNS)
        known = (*ROLES, *self.other_roles)
        for number, message in enumerate(found.messages, 1):
            role = message.get("role")
            if role not in known:
                raise UserError(
                    f"message {number} has the unknown role {role!r} (other_roles=[...] adds roles that the template knows)"
                    f"{did_you_mean(role, known)}"
                )
            self._check_content(message, f"message {number} ({role})")
        if not any(message["role"] == ASSISTANT for message in found.messages):
            raise UserError(
                "no message is the assistant's, so that there is nothing to learn; add one, or leave it out"
            )

    def _check_content(self, message: dict[str, Any], which: str) -> None:
        content = text_of_content(message.get("content"), which)
        has_other = message["role"] == ASSISTANT and any(message.get(name) for name in INSTEAD_OF_CONTENT)
        may_be_empty = has_other or (content is not None and message["role"] in _RETURNED)
        if not may_be_empty and not (content and content.strip()):
            raise UserError(f"{which} has no content; give it some, or leave the message out")

    def _counted(
        self, where: str, encoded: tuple[np.ndarray, np.ndarray], text: Rendering
    ) -> CountedTokens | BadRecord:
        """Returns the tokens of a rendered conversation with their loss mask, or a BadRecord if they can't be used.

        `encoded` has the n tokens, int32 [n], and the (start, end) character positions of each token, int64 [n, 2].
        """
        tokens, offsets = encoded
        size, room = len(tokens), self.seq_len + 1
        counted = assistant_masks.count_tokens(offsets, text.generated)
        if size and counted[0]:
            return BadRecord(
                where,
                ": the text begins with the assistant's, and a first token can't be predicted; use a template that begins with a "
                "beginning-of-text token or with a role",
            )
        if not counted.any():
            return BadRecord(where, ": no label counts: no token covers the assistant's text")
        if size <= room:
            return CountedTokens(tokens, counted)
        what = f": the conversation has {size} tokens, more than seq_len + 1 = {room}"
        if self.too_long == ERROR:
            return BadRecord(where, f"{what}; raise seq_len, shorten it, or set too_long to 'drop' or 'cut'")
        if self.too_long == DROP:
            return LeftOut(where, what, 0)
        if not counted[:room].any():
            return BadRecord(
                where,
                f"{what}, and in the first {room}, which too_long='cut' keeps, the assistant has not written anything yet; raise "
                "seq_len, shorten it, or leave it out",
            )
        logging.log_first_n(logging.WARNING, "%s%s; cut", _LOGGED, where, what)
        return CountedTokens(tokens[:room], counted[:room])


class ChatInput(messages.MessagesInput):
    """Language-model input over conversations, packed into rows. Only labels that the assistant wrote count in the loss.

    The docstring of this module shows an example. `CorpusInput` describes the batches.

    Attributes:
      files, source, chat_template, ...: see `messages.MessagesInput` and `Chat`.
      tokenizer, eos_id: see `text_base.TokenizedInput`. The tokenizer must be a Hugging Face tokenizer.
      start: must keep its default, because the template writes the start token.
      turns, too_long: see `Chat`.
      seq_len, packing, shuffle, window_rows, bad_records: see `CorpusInput`.
    """

    turns: str = assistant_masks.ALL

    def __post_init__(self) -> None:
        if self.start != "eos":
            raise self.error(f"start={self.start!r}; leave it out: the chat template writes the beginning of a text")
        super().__post_init__()

    @property
    def _processor(self) -> Chat:
        return Chat.of(self)


class ChatPromptInput(text.PromptRows):
    """Conversations as prompts for `LanguageModel.decode`, rendered by a chat template.

    `Chat` describes the records in the files. The template writes all special tokens; the input adds none. `text.PromptRows`
    describes the batches. In them, `prompt_index` is the number of a conversation, counted from 0 over all files.

    Attributes:
      files: see `ChatInput`.
      tokenizer, eos_id: see `text_base.TokenizedInput`.
      start: must keep its default, because the template writes the start token.
      chat_template, template_variables, max_render_seconds, max_rendered_chars: see `messages.Templated`.
      add_generation_prompt: True ends each prompt with the text that opens the assistant's turn (see `ChatTemplate.render`).
      prefix_len: maximum number of tokens in a prompt, P. A longer conversation is an error.
      num_prompts: use only the first `num_prompts` conversations; None uses all.
    """

    chat_template: str | None = None
    template_variables: Any = None
    max_render_seconds: float = MAX_RENDER_SECONDS
    max_rendered_chars: int = MAX_RENDERED_CHARS
    add_generation_prompt: bool = True
    _templated: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self.allow_binary = True  # conversations are in files of several kinds, and checked when they are read
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
        """Returns the tokens of conversation `index`. The first call renders and tokenizes all conversations.

        Raises:
          UserError: as in `text_of_prompt`; or a conversation is empty or longer than `prefix_len`, or has a token outside
            the model's vocabulary.
        """
        return self._tokens[index]

    def text_of_prompt(self, index: int) -> str:
        """Returns the text of conversation `index`, rendered by the chat template.

        Raises:
          UserError: a record is not a conversation, or the template fails. The message names the file and the record.
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

    def _fingerprint(self) -> dict[str, Any]:
        checksum = 0
        for tokens in self._tokens:
            checksum = zlib.crc32(np.append(tokens, -1).astype(np.int32).tobytes(), checksum)
        return {**super()._fingerprint(), "prompts": checksum}
