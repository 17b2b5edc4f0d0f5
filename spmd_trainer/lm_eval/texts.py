"""Converts text to tokens and back. Start tokens and chat templates are used as in lm-eval's `hf` backend."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from absl import logging

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.chat_template import ChatTemplate, choose, template_of
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.tokenizers import Tokenizer
from spmd_trainer.lm_eval.settings import ModelArgs

Message = Mapping[str, Any]


class Texts:
    """Converts text to tokens and back: a tokenizer with a start token and a chat template.

    Attributes:
      tokenizer: the tokenizer.
      prefix_id: token id put before a text without a context.
      template: the chat template; None if none is used.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        start_id: int | None,
        *,
        arguments: ModelArgs | None = None,
        vocab_size: int | None = None,
        chat_template: bool | str = False,
    ):
        """Reads the chat template, if requested.

        Args:
          tokenizer: the tokenizer.
          start_id: the token before each text in training; None if there is none.
          arguments: `add_bos_token` and `prefix_token_id`; None: the defaults.
          vocab_size: size of the model's vocabulary; None if unknown.
          chat_template: True, or the name of one of the tokenizer's templates; False for no template.

        Raises:
          UserError: the template does not exist, or beginning-of-text is requested and missing.
        """
        self.tokenizer, arguments = tokenizer, arguments or ModelArgs()
        bos_id: int | None = getattr(tokenizer, "bos_id", None)
        self._start_id = start_id
        if arguments.add_bos_token is not None:
            if arguments.add_bos_token and bos_id is None:
                raise UserError("--model_args: add_bos_token=True, but the tokenizer has no beginning-of-text")
            self._start_id = bos_id if arguments.add_bos_token else None
        usual = next(token for token in (self._start_id, bos_id, tokenizer.eos_id) if token is not None)
        self.prefix_id = usual if arguments.prefix_token_id is None else arguments.prefix_token_id
        self._bos_id = bos_id
        self._vocab_size = vocab_size
        self.template = _template(tokenizer, chat_template) if chat_template else None

    def encode(self, text: str, *, special: bool | None = None) -> list[int]:
        """Returns the tokens of a text.

        Args:
          text: the text.
          special: True puts the start token before the text; False does not; None does, unless the text already begins
            with the text of the token `prefix_id`.

        Raises:
          UserError: the tokenizer can't encode the text, or a token is outside the model's vocabulary.
        """
        return self._encode(text, self.prefix_id if special is None else None, special is not False)

    def encode_prompt(self, text: str) -> list[int]:
        """Returns the tokens of a text that the model is to continue, or `[prefix_id]` if the text gives no tokens."""
        return self._encode(text, self._bos_id, True) or [self.prefix_id]

    def _encode(self, text: str, spelled: int | None, special: bool) -> list[int]:
        tokens = self.tokenizer.encode(
            text.encode(errors="surrogatepass"), f"a text of the tasks ({text[:60]!r})"
        ).tolist()
        begins = self.spelling(spelled)
        if special and self._start_id is not None and not (begins and text.startswith(begins)):
            tokens = [self._start_id, *tokens]
        if self._vocab_size is not None and tokens and max(tokens) >= self._vocab_size:
            raise UserError(
                f"a text of the tasks ({text[:60]!r}) gives token {max(tokens)}, and the model's vocabulary is 0 to "
                f"{self._vocab_size - 1}; give the tokenizer that the model was trained with: --model_args=tokenizer=PATH"
            )
        return tokens

    def encode_pair(self, context: str, continuation: str) -> tuple[list[int], list[int]]:
        """Returns the tokens of a context and of its continuation.

        Spaces at the end of the context count as part of the continuation. Context and continuation are encoded together,
        and split after as many tokens as the context alone has.

        Raises:
          UserError: see `encode`; or the continuation has no tokens.
        """
        if not context:
            tokens = self.encode(continuation, special=False)
            pair = (tokens[:1], tokens[1:]) if tokens[:1] == [self.prefix_id] else ([self.prefix_id], tokens)
        else:
            kept = context.rstrip()
            whole, before = self.encode(context + continuation), self.encode(kept)
            pair = (before or [self.prefix_id], whole[len(before) :])
        if not pair[1]:
            raise UserError(
                f"the continuation {continuation!r} of a context that ends with {context[-40:]!r} has no token "
                "besides the context's, so its likelihood is undefined; change the task's texts"
            )
        return pair

    def decode(self, tokens: Sequence[int]) -> str:
        """Returns the text of generated tokens, without special tokens."""
        return self.tokenizer.decode(np.asarray(tokens, np.int32)[None], [len(tokens)])[0]

    def spelling(self, token: int | None) -> str:
        """Returns the text that the vocabulary has for a token; '' for None, or if the text is unknown."""
        if token is None or not isinstance(self.tokenizer, HuggingFaceTokenizer):
            return ""
        return self._spellings.get(token, "")

    @functools.cached_property
    def _spellings(self) -> dict[int, str]:
        assert isinstance(self.tokenizer, HuggingFaceTokenizer)
        return {token: text for text, token in self.tokenizer.vocabulary.items()}

    def chat(self, messages: Sequence[Message], *, add_generation_prompt: bool) -> str:
        """Renders a conversation by the chat template.

        If the template can't render it, system messages are left out with a warning, as in lm-eval.

        Args:
          messages: the conversation.
          add_generation_prompt: True ends with the beginning of an answer; False with the text of the last message,
            which the model continues.

        Raises:
          UserError: the template can't render the conversation.
        """
        assert self.template is not None
        try:
            text = self.template.render(messages, add_generation_prompt=add_generation_prompt)
        except UserError as error:
            rest = [message for message in messages if message["role"] != "system"]
            if len(rest) == len(messages):
                raise
            logging.log_first_n(logging.WARNING, "%s; written without the system message", 1, error)
            messages, text = rest, self.template.render(rest, add_generation_prompt=add_generation_prompt)
        return text if add_generation_prompt else _up_to_last_message(text, str(messages[-1]["content"]))


def _up_to_last_message(text: str, last: str) -> str:
    """Returns `text` up to the end of the last message, `last`. Templates may strip the spaces around a message."""
    found = text.rfind(last.strip())
    if found < 0:
        raise UserError(
            "the chat template changes the text of the last message, so that the model can't continue it; evaluate without "
            "--apply_chat_template"
        )
    kept = last.lstrip() if text.startswith(last.lstrip(), found) else last.strip()
    return text[: found + len(kept)]


def _template(tokenizer: Tokenizer, chosen: bool | str) -> ChatTemplate:
    """Returns the tokenizer's default chat template if `chosen` is True, or the template with the name `chosen`."""
    if isinstance(chosen, str):
        owner = str(getattr(tokenizer, "name", type(tokenizer).__name__))
        choose(getattr(tokenizer, "chat_templates", {}), chosen, has_tools=False, owner=owner)
    return template_of(tokenizer, chosen if isinstance(chosen, str) else None, has_tools=False)
