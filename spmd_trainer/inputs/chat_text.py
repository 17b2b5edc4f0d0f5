"""Conversations for training: only the assistant's text counts in the loss.

The chat template renders a conversation with all special tokens, and the tokenizer encodes the whole text at once, so
the tokens are those of transformers' `apply_chat_template`. A conversation of n tokens is one segment of n - 1
positions: each token but the last is an id, and each token but the first a label. `weights` is 1 on the assistant's
labels (see `assistant_masks`) and 0 on all others. Conversations are packed into rows and never split.

Example, T = 8, '<user>hi<assistant>yes<end>' with one token for each of the five, and the assistant's text marked as
'{% generation %}yes<end>{% endgeneration %}':
    ids         <user> hi <assistant> yes 0 0 0 0
    labels      hi <assistant> yes <end>  0 0 0 0
    weights     0  0           1   1      0 0 0 0
    segment_ids 1  1           1   1      0 0 0 0
"""

from __future__ import annotations

import functools
import itertools
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from absl import logging

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs import assistant_masks, files, messages, packed_text
from spmd_trainer.inputs.assistant_masks import ASSISTANT, TURNS
from spmd_trainer.inputs.chat_template import Rendering, clock_of
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.messages import INSTEAD_OF_CONTENT, ROLES, Conversation, readable_messages, text_of_content

# Roles whose messages may be empty: tool results.
_RETURNED = ("tool", "function", "ipython")
_ERROR, _CUT, _DROP = "error", "cut", "drop"
_TOO_LONG = (_ERROR, _CUT, _DROP)
# Conversations encoded at a time, on all cores.
_TOGETHER = 1024


class Encoded(NamedTuple):
    """An encoded conversation.

    Attributes:
      where: file and line or row.
      tokens: all its tokens, unsigned [n].
      counted: True for tokens that the assistant wrote, bool [n].
    """

    where: str
    tokens: np.ndarray
    counted: np.ndarray


class ChatInput(messages.ConversationFiles, packed_text.PackedRows):
    """Language-model input over conversations, packed into rows (see the module docstring).

    `messages.ConversationFiles` describes the files, and `packed_text.PackedRows` batches and epochs. An unusable
    conversation is an error with its file and line: it has no message of the assistant, an unknown role, an empty
    message, no label that counts, or the template fails. A tool's message may be empty, and an assistant's may have
    reasoning or tool calls instead of content.

    Attributes:
      files, tokenizer, eos_id, allow_binary: see `text_base.TokenizedFiles`. The tokenizer must be a Hugging Face
        tokenizer.
      start: must keep its default: the template writes the start token.
      chat_template, template_variables: see `messages.ConversationFiles`.
      seq_len, shuffle: see `packed_text.PackedRows`.
      turns: 'all' counts all messages of the assistant, 'last' only the last one. An entry `turns` of a conversation
        takes precedence.
      too_long: for conversations of more than seq_len + 1 tokens. 'error': refuse. 'drop': leave out. 'cut': keep the
        first seq_len + 1 tokens, and refuse if the assistant's text is cut off. 'drop' and 'cut' log the number.
      other_roles: roles that the template knows besides `messages.ROLES`.
      date: the template's current date, e.g. '2024-07-26'. Required if the template writes the date: today's date
        would change the tokens of a run resumed tomorrow.
    """

    turns: str = assistant_masks.ALL
    too_long: str = _ERROR
    other_roles: Sequence[str] = ()
    date: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, values in (("turns", TURNS), ("too_long", _TOO_LONG)):
            if getattr(self, field) not in values:
                raise self.error(_choices(field, getattr(self, field), values))
        if not isinstance(self.tokenizer, HuggingFaceTokenizer):
            raise self.error(
                f"a {type(self.tokenizer).__name__} does not map tokens to characters, which the loss on the "
                "assistant's text needs; give a Hugging Face tokenizer"
            )
        if "add_generation_prompt" in (self.template_variables or {}):
            raise self.error("template_variables has add_generation_prompt, which is for prompts, not for training")
        with self.naming():
            self._clock = clock_of(self.date)

    def encoded(self) -> Iterator[Encoded]:
        """Yields every conversation of the files as tokens, of any length.

        Raises:
          UserError: a conversation is unusable; names its file and line.
        """
        everything = self.conversations()
        while some := list(itertools.islice(everything, _TOGETHER)):
            found = [self._render(conversation) for conversation in some]
            wheres = [conversation.where for conversation in some]
            tokens = self.tokenizer.encode_with_offsets([one.text for one in found], wheres)
            for where, (ids, offsets), one in zip(wheres, tokens, found, strict=True):
                self.refuse_unknown_ids(ids, where)
                counted = assistant_masks.count_tokens(offsets, one.generated)
                self._check_counted(counted, where)
                yield Encoded(where, ids.astype(self.token_dtype), counted)

    @property
    def _table(self) -> packed_text.RowTable:
        return self._packed[0]

    @functools.cached_property
    def _packed(self) -> tuple[packed_text.RowTable, int]:
        """Returns the rows, and a checksum of their conversations."""
        kept = list(self._fitting(self.encoded()))
        if not kept:
            raise self.error(f"no conversation is left, the first file is {self.paths[0]}; give one, or raise seq_len")
        checksum = 0
        for one in kept:
            checksum = zlib.crc32(np.append(one.tokens.astype(np.int64) * 2 + one.counted, -1).tobytes(), checksum)
        table = packed_text.pack(
            np.concatenate([one.tokens[1:] for one in kept]),
            [len(one.tokens) - 1 for one in kept],
            self.seq_len,
            np.array([one.tokens[0] for one in kept]),
            np.concatenate([one.counted[1:] for one in kept]),
        )
        return table, checksum

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "conversations": self._packed[1]}

    def _render(self, found: Conversation) -> Rendering:
        """Checks a conversation and renders it."""
        with self.naming(f"{found.where}: "):
            self._check(found)
            turns = self.turns if found.turns is None else found.turns
            template = self.template(has_tools=bool(found.tools))
            variables = self.variables(found, strftime_now=self._clock)
            if "add_generation_prompt" in variables:
                raise UserError(
                    "chat_template_kwargs has add_generation_prompt, which is for prompts, not for training"
                )
            messages = readable_messages(found.messages, template, add_generation_prompt=False, **variables)

            def render(some: assistant_masks.Messages, prompt: bool) -> Rendering:
                return template.render_marked(some, add_generation_prompt=prompt, **variables)

            text = assistant_masks.assistant_text(messages, render, has_marks=template.has_marks, turns=turns)
            text.text.encode()
        if not text.generated:
            raise self.error(
                f"{found.where}: no label would count: {template.name} writes nothing"
                + (" between {% generation %} and {% endgeneration %}" if template.has_marks else " for the assistant")
            )
        return text

    def _check(self, found: Conversation) -> None:
        if found.turns is not None and found.turns not in TURNS:
            raise UserError(_choices("turns", found.turns, TURNS))
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

    def _check_counted(self, counted: np.ndarray, where: str) -> None:
        if len(counted) and counted[0]:
            raise self.error(
                f"{where}: the text begins with the assistant's, and a first token can't be predicted; use a template that "
                "begins with a beginning-of-text token or with a role"
            )
        if not counted.any():
            raise self.error(f"{where}: no label counts: no token covers the assistant's text")

    def _fitting(self, encoded: Iterator[Encoded]) -> Iterator[Encoded]:
        """Yields the conversations that fit in a row, and treats the others as `too_long` says."""
        room, total, longer = self.seq_len + 1, 0, []
        for one in encoded:
            total += 1
            size = len(one.tokens)
            if size <= room:
                yield one
                continue
            longer.append((one.where, size))
            if self.too_long == _ERROR:
                raise self.error(
                    f"{one.where}: the conversation has {size} tokens, more than seq_len + 1 = {room}; raise seq_len, "
                    "shorten it, or set too_long to 'drop' or 'cut'"
                )
            if self.too_long == _CUT:
                if not one.counted[:room].any():
                    raise self.error(
                        f"{one.where}: the conversation has {size} tokens, and too_long='cut' keeps the first seq_len + 1 = "
                        f"{room}, where the assistant has not written anything yet; raise seq_len, shorten it, or leave it out"
                    )
                yield Encoded(one.where, one.tokens[:room], one.counted[:room])
        if longer:
            did = "cut" if self.too_long == _CUT else "dropped"
            logging.warning(
                "%s %r: %s %d of %d conversations, which have more than seq_len + 1 = %d tokens (up to %d): %s",
                *(type(self).__name__, self.name, did, len(longer), total, room),
                *(max(size for _, size in longer), files.listed([where for where, _ in longer])),
            )


def _choices(field: str, value: object, values: Sequence[str]) -> str:
    near = did_you_mean(value, values, otherwise="")
    return f"{field}={value!r}; set it to {', '.join(map(repr, values[:-1]))} or {values[-1]!r}{near}"
