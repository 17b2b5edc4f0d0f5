"""Finds which tokens of a conversation count in the loss: the tokens that the assistant wrote.

If the chat template has `{% generation %}...{% endgeneration %}` marks, the assistant's text is the text between the marks.
An end-of-turn token counts only if it is between the marks.

Without marks, for each assistant message `messages[i]`, the template renders `messages[:i]` with `add_generation_prompt`,
and `messages[:i + 1]` without it. The assistant's text is what the second rendering appends to the first. It includes the
end-of-turn token and any other text that the template writes after the message, such as ChatML's newline.

A token counts if at least one of its characters is in the assistant's text. With marks, the loss mask equals transformers'
`return_assistant_tokens_mask`, except in two cases, which concern the first and the last character between two marks:

- If the last character (e.g. an emoji) consists of several tokens, transformers counts only the first of them.
- If the tokenizer's offsets leave out the first character (e.g. a space), transformers counts no token from there on. If
  the offsets leave out the last character, transformers counts every token from there on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.chat_template import Rendering

Messages: TypeAlias = Sequence[dict[str, Any]]
# Renders messages, with or without a generation prompt.
Render: TypeAlias = Callable[[Messages, bool], Rendering]

ASSISTANT = "assistant"
ALL, LAST = "all", "last"
TURNS = (ALL, LAST)
# Number of characters of a text that errors show.
_SHOWN = 30
_FIX = (
    "mark the text of the assistant in the template with {% generation %} and {% endgeneration %} (chat_template=PATH)"
)


def assistant_text(messages: Messages, render: Render, *, has_marks: bool, turns: str) -> Rendering:
    """Renders a conversation and finds the text that the assistant wrote.

    Args:
      messages: the conversation, with at least one message by the assistant.
      render: renders messages, with or without a generation prompt.
      has_marks: True if the template has `{% generation %}`.
      turns: 'all' finds the text of all messages of the assistant, 'last' only that of the last one.

    Returns:
      The rendered text, and the non-empty (start, end) character spans that the assistant wrote.

    Raises:
      UserError: the template fails, or the assistant's text can't be located.
    """
    own = [index for index, message in enumerate(messages) if message.get("role") == ASSISTANT]
    whole = render(messages, False)
    if not has_marks:
        spans = _after_prompts(messages, render, whole.text, own[-1:] if turns == LAST else own)
    elif turns == ALL or len(own) == 1:
        spans = list(whole.generated)
    else:
        spans = _marks_of_last(messages, render, whole, own)
    return Rendering(whole.text, tuple((start, end) for start, end in spans if start < end))


def count_tokens(offsets: np.ndarray, spans: Iterable[tuple[int, int]]) -> np.ndarray:
    """Returns the loss mask of n tokens: bool [n], True for each token with at least one character in one of the spans.

    The mask is also True for a token without characters between two tokens of the same span.

    Args:
      offsets: (start, end) character positions of each token, int64 [n, 2], in the order of the text.
      spans: (start, end) character positions of each span.
    """
    counted = np.zeros(len(offsets), bool)
    starts, ends = offsets.T
    for start, end in spans:
        (inside,) = np.nonzero((starts < end) & (ends > start) & (starts < ends))
        if len(inside):
            # The slice includes tokens without characters that lie between two tokens of the span.
            counted[inside[0] : inside[-1] + 1] = True
    return counted


def _after_prompts(messages: Messages, render: Render, text: str, own: list[int]) -> list[tuple[int, int]]:
    """Returns the (start, end) positions in `text` of the messages with the indices `own`, all written by the assistant."""
    spans = []
    for index in own:
        try:
            before = render(messages[:index], True).text
            through = text if index == len(messages) - 1 else render(messages[: index + 1], False).text
        except UserError as error:
            raise UserError(
                f"message {index + 1} is the assistant's, and the template renders the whole conversation, but not the messages "
                f"up to this one alone ({error}); {_FIX}"
            ) from error
        which = f"message {index + 1}"
        _require_beginning(before, through, f"the generation prompt before {which} is not how {which} begins")
        _require_beginning(through, text, f"the template renders {which} differently when other messages follow it")
        spans.append((len(before), len(through)))
    return spans


def _require_beginning(part: str, text: str, otherwise: str) -> None:
    if text.startswith(part):
        return
    at = next((i for i, (a, b) in enumerate(zip(part, text, strict=False)) if a != b), min(len(part), len(text)))
    raise UserError(
        f"{otherwise}: at character {at}, {part[at : at + _SHOWN]!r} becomes {text[at : at + _SHOWN]!r}. So it is unknown which "
        f"text the assistant wrote; {_FIX}"
    )


def _marks_of_last(messages: Messages, render: Render, whole: Rendering, own: list[int]) -> list[tuple[int, int]]:
    try:
        before = render(messages[: own[-1]], False).text
    except UserError:
        before = None
    if before is not None and whole.text.startswith(before):
        return [span for span in whole.generated if span[0] >= len(before)]
    if len(whole.generated) == len(own):
        return [whole.generated[-1]]
    raise UserError(
        f"turns='last': the template marks {len(whole.generated)} texts for {len(own)} messages of the assistant, and renders "
        "the messages before the last one differently if they are alone. So it is unknown which marks are the last one's; use "
        "turns='all', or write one {% generation %} block for each message"
    )
