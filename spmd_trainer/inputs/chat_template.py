"""Chat templates, which render conversations as the text that a model was trained on. Needs jinja2 (pip extra `hf`).

Templates come with tokenizers and may be malicious. They therefore run in a separate process, in jinja2's sandbox without
access to files, modules or the interpreter, and with limits on time and memory. Templates have the same variables and
functions as in transformers, and give the same text.
"""

from __future__ import annotations

import atexit
import datetime
import json
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.errors.installation import imported
from spmd_trainer.inputs import files, template_worker
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.inputs.template_worker import Request
from spmd_trainer.inputs.worker_process import EndedError, WorkerProcess
from spmd_trainer.storage.paths import file_or_pattern

# Keys under which a message may hold the model's reasoning; newer templates read the first key.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEFAULT, _FOR_TOOLS = "default", "tool_use"
# Default variables of `render_marked`.
_USUAL: Mapping[str, Any] = {"add_generation_prompt": True, "tools": None, "documents": None}
# Default limits of a rendering, and the highest limit that can be set.
MAX_RENDER_SECONDS, MAX_RENDERED_CHARS = 1.0, 2**24
_MOST = 2**31


def _make_renderer() -> WorkerProcess:
    # -I -S: ignore Python's environment variables, and skip the start-up code of site-packages.
    command = [sys.executable, "-I", "-S", template_worker.__file__]
    return WorkerProcess(command, sys.path, stderr=subprocess.DEVNULL)


def _forget() -> None:
    """Replaces the renderer after a fork, so that the forked process starts its own worker process."""
    global _renderer
    _renderer = _make_renderer()


_renderer = _make_renderer()
os.register_at_fork(after_in_child=_forget)
atexit.register(lambda: _renderer.stop())


class RenderLimitError(UserError):
    """A rendering exceeded its limit of time, memory or text length."""


class Rendering(NamedTuple):
    """A rendered conversation.

    Attributes:
      text: the rendered text.
      generated: (start, end) character positions of each `{% generation %}` block in `text`, in order.
    """

    text: str
    generated: tuple[tuple[int, int], ...]


class ChatTemplate:
    """A compiled chat template.

    Attributes:
      name: where the template comes from, for error messages.
      text: source text of the template.
      special_tokens: the tokenizer's special tokens that the template mentions: {'bos_token': '<s>', ...}.
      has_marks: True if the template marks the assistant's text by `{% generation %}...{% endgeneration %}`.
    """

    def __init__(
        self,
        text: str,
        *,
        name: str = "chat_template",
        special_tokens: Mapping[str, str] | None = None,
        max_render_seconds: float = MAX_RENDER_SECONDS,
        max_rendered_chars: int = MAX_RENDERED_CHARS,
    ):
        """Compiles the template.

        Args:
          text: source text of the template.
          name: where the template comes from, for error messages.
          special_tokens: tokens that the template can use as variables: {'bos_token': '<s>', ...}.
          max_render_seconds: maximum processor time of one rendering, in seconds.
          max_rendered_chars: maximum length of a rendered conversation, in characters. A higher value also raises the
            memory limit of a rendering.

        Raises:
          UserError: jinja2 is missing, the template has a syntax error, or a limit is outside the range (0, 2**31].
        """
        for field, value in (("max_render_seconds", max_render_seconds), ("max_rendered_chars", max_rendered_chars)):
            if not 0 < value <= _MOST:
                raise UserError(f"{field}={value!r}; give a number above 0, and at most {_MOST:,}")
        imported("jinja2", f"{name} needs jinja2: pip install 'spmd-trainer[hf]'")  # used by the process that renders
        self.name = name
        self.text = text
        self.special_tokens = {kind: token for kind, token in (special_tokens or {}).items() if kind in text}
        self._limits = max_render_seconds, max_rendered_chars
        self.has_marks = bool(self._ask(None)["has_marks"])

    def render(
        self,
        /,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders a conversation.

        Args:
          messages: [{'role': 'user', 'content': ...}, ...], JSON values. As in transformers, the template doesn't see
            entries of a message whose value is None.
          add_generation_prompt: True appends the text that opens the assistant's turn, such as ChatML's
            '<|im_start|>assistant', if the template supports it.
          tools: JSON schemas of the functions that the model may call.
          documents: documents that the answer may use, for templates that support retrieval.
          **variables: further variables of the template; they override the special tokens. They must be values, not
            functions, because the template runs in a separate process. The value `strftime_now` is the date that the
            template's function `strftime_now` formats (see `clock_of`); the default is the current date.

        Raises:
          RenderLimitError: the rendering exceeds a limit of time, memory or length.
          UserError: the template rejects the conversation, fails, or violates the sandbox.
        """
        given = {"add_generation_prompt": add_generation_prompt, "tools": tools, "documents": documents}
        return self._rendering(messages, {**given, **variables}, is_marked=False).text

    def render_marked(self, /, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendering:
        """Renders a conversation and locates each `{% generation %}` block. Takes the same arguments as `render`.

        Raises:
          UserError: as in `render`; or a block can't be located in the rendered text.
        """
        return self._rendering(messages, {**_USUAL, **variables}, is_marked=True)

    def _rendering(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any], *, is_marked: bool
    ) -> Rendering:
        given = {
            **self.special_tokens,
            **variables,
            "messages": [_as_templates_expect(message) for message in messages],
        }
        answer = self._ask(given, is_marked=is_marked)
        return Rendering(answer["text"], tuple((start, end) for start, end in answer["spans"]))

    def _ask(self, variables: dict[str, Any] | None, *, is_marked: bool = False) -> dict[str, Any]:
        """Sends the template to a worker process, which compiles it and renders it with `variables`, unless they are None.

        Returns the worker's answer.
        """
        seconds, chars = self._limits
        try:
            content = pickle.dumps(tuple(Request(self.text, variables, is_marked, seconds, chars)))
        except (pickle.PicklingError, TypeError, AttributeError) as error:
            raise UserError(
                f"{self.name} can't be given its variables, which must be values that another process can read: {error}"
            ) from error
        try:
            answer: dict[str, Any] = json.loads(_renderer.ask(content))
        except EndedError as error:
            problem = f"ended the process that rendered it, which {error}; correct it"
            if error.status == -signal.SIGPROF:
                problem = f"did not end within {seconds} s of processor time; correct it, or raise max_render_seconds"
            raise RenderLimitError(f"{self.name} {problem}") from error
        if "failure" in answer:
            raise self._error(answer["failure"], answer["reason"])
        return answer

    def _error(self, failure: str, reason: str) -> UserError:
        _, chars = self._limits
        longer = f"if the template is right, raise max_rendered_chars={chars:,}"
        match failure:
            case template_worker.SYNTAX:
                return UserError(f"{self.name} is not a chat template: {reason}")
            case template_worker.FORBIDDEN:
                return UserError(f"{self.name} does something that chat templates may not do: {reason}")
            case template_worker.MARKS:
                return UserError(
                    f"{self.name} has {{% generation %}} inside a macro, a filter or a {{% set %}} block, where its position "
                    "in the text is unknown; move it to where the text is written"
                )
            case template_worker.LENGTH:
                return RenderLimitError(f"{self.name} writes more than {chars:,} characters; {longer}")
            case template_worker.MEMORY:
                return RenderLimitError(f"{self.name} needs more memory than a rendering may use; {longer}")
            case template_worker.DEPTH:
                return RenderLimitError(f"{self.name} calls itself too often, or nests too deeply; correct it")
        return UserError(f"{self.name} can't render this conversation: {reason}")


def choose(templates: Mapping[str, str], chosen: str | None, *, has_tools: bool, owner: str) -> tuple[str, str]:
    """Chooses one of a tokenizer's chat templates as transformers does, and returns the template's name and text.

    Args:
      templates: {name: text} of the tokenizer's templates.
      chosen: name of the template to take. None takes the template 'tool_use' if `has_tools` is True and that template
        exists, and otherwise the template 'default'.
      has_tools: True if the conversation has tools.
      owner: name of the tokenizer, for error messages.

    Raises:
      UserError: the template does not exist.
    """
    usual = _FOR_TOOLS if has_tools and _FOR_TOOLS in templates else _DEFAULT
    name = usual if chosen is None else chosen
    if name in templates:
        return name, templates[name]
    if not templates:
        raise UserError(
            f"{owner} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json); set chat_template "
            "to the path of a .jinja file"
        )
    raise UserError(
        f"{owner} has no chat template {name!r}; it has {', '.join(sorted(templates))}{did_you_mean(name, templates)}"
    )


def _as_templates_expect(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Drops entries that are None, and copies the model's reasoning to the keys 'thinking' and 'reasoning_content'."""
    message = {name: value for name, value in message.items() if value is not None}
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


def template_of(tokenizer: Any, given: str | None, *, has_tools: bool, **limits: Any) -> ChatTemplate:
    """Returns the template for a conversation.

    Args:
      tokenizer: the input's tokenizer.
      given: None for the tokenizer's own template; the name of one of the tokenizer's templates; the path of a .jinja file;
        or the text of a template.
      has_tools: True if the conversation has tools.
      **limits: `max_render_seconds` and `max_rendered_chars` of `ChatTemplate`.

    Raises:
      UserError: the template does not exist, can't be read, or has a syntax error.
    """
    owner = getattr(tokenizer, "name", type(tokenizer).__name__)
    known: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
    if given is None or given in known:
        name, text = choose(known, given, has_tools=has_tools, owner=owner)
        name = f"the chat template {name!r} of {owner}"
    elif "{" in given:
        name, text = "chat_template", given
    else:
        path = file_or_pattern("chat_template", given)
        name, text = f"the chat template {given}", files.read_text(path, f"chat_template={path!r}")
    tokens = tokenizer.special_tokens if isinstance(tokenizer, HuggingFaceTokenizer) else {}
    return ChatTemplate(text, name=name, special_tokens=tokens, **limits)


def clock_of(date: str | None) -> datetime.datetime | None:
    """Returns the fixed date that a training input's chat template sees as the current date; None if `date` is None.

    Today's date would change the tokens when a run is resumed on another day. A template that writes the current date
    therefore fails if `date` is None.

    Raises:
      UserError: `date` is not a date such as '2024-07-26'.
    """
    try:
        return None if date is None else datetime.datetime.fromisoformat(date)
    except (ValueError, TypeError) as error:
        raise UserError(f"date={date!r}; write it as year-month-day, e.g. '2024-07-26'") from error
