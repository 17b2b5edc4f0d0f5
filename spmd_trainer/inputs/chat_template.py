"""Chat templates render conversations as the text a model was trained on. Needs the package jinja2: extra `hf`.

Templates come with tokenizers and may be malicious, so they run in jinja2's sandbox without access to files, modules
or the interpreter. They see the same names as in transformers and give the same text.
"""

from __future__ import annotations

import contextvars
import datetime
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.inputs import files
from spmd_trainer.inputs.huggingface_tokenizer import HuggingFaceTokenizer
from spmd_trainer.storage.paths import file_or_pattern

if TYPE_CHECKING:
    import jinja2

# Keys of a model's reasoning in a message; newer templates read the first.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEFAULT, _FOR_TOOLS = "default", "tool_use"


class Rendering(NamedTuple):
    """A rendered conversation.

    Attributes:
      text: the text.
      generated: (start, end) characters of each `{% generation %}` block, in order.
    """

    text: str
    generated: tuple[tuple[int, int], ...]


class _Recorder:
    """Collects the `{% generation %}` blocks of a rendering.

    Attributes:
      length: characters written so far.
      blocks: (start, content) of each block.
    """

    def __init__(self) -> None:
        self.length = 0
        self.blocks: list[tuple[int, str]] = []


# Recorder of the current rendering: all templates share one environment and its `Generation` extension.
_recorder: contextvars.ContextVar[_Recorder | None] = contextvars.ContextVar("recorder", default=None)


class ChatTemplate:
    """A compiled chat template.

    Attributes:
      name: its origin, for errors.
      text: the template.
      has_marks: True if it marks the assistant's text by `{% generation %}...{% endgeneration %}`.
    """

    def __init__(self, text: str, *, name: str = "chat_template", special_tokens: Mapping[str, str] | None = None):
        """Compiles the template.

        Args:
          text: the template.
          name: its origin, for errors.
          special_tokens: tokens that the template can name: {'bos_token': '<s>', ...}.

        Raises:
          UserError: jinja2 is missing, or the template has a syntax error.
        """
        self.name = name
        self.text = text
        self._special_tokens = dict(special_tokens or {})
        self._template, self.has_marks = _compile(text, name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Renders a conversation.

        Args:
          messages: [{'role': 'user', 'content': ...}, ...], JSON values. As in transformers, null entries are hidden
            from the template.
          add_generation_prompt: end with the beginning of the assistant's answer, if the template supports it.
          tools: JSON schemas of the functions that the model may call.
          documents: documents for retrieval templates.
          **variables: further variables; they override the special tokens.

        Raises:
          UserError: the template rejects the conversation, fails, or violates the sandbox.
        """
        import jinja2

        given = {**self._special_tokens, **variables}
        recorder = _recorder.get()
        parts = []
        try:
            for part in self._template.generate(
                messages=[_as_templates_expect(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **given,
            ):
                parts.append(part)
                if recorder is not None:
                    recorder.length += len(part)
        except jinja2.exceptions.SecurityError as error:
            raise UserError(f"{self.name} does something that chat templates may not do: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.name} can't render this conversation: {error}") from error
        return "".join(parts)

    def render_marked(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> Rendering:
        """Renders a conversation and locates each `{% generation %}` block. Arguments are those of `render`.

        Raises:
          UserError: as `render`; or a block can't be located in the text.
        """
        recorder = _Recorder()
        token = _recorder.set(recorder)
        try:
            text = self.render(messages, **variables)
        finally:
            _recorder.reset(token)
        end, spans = 0, []
        for start, content in recorder.blocks:
            if start < end or not text.startswith(content, start):
                raise UserError(
                    f"{self.name} has {{% generation %}} inside a macro, a filter or a {{% set %}} block, where its position "
                    "in the text is unknown; move it to where the text is written"
                )
            end = start + len(content)
            spans.append((start, end))
        return Rendering(text, tuple(spans))


def choose(templates: Mapping[str, str], chosen: str | None, *, has_tools: bool, owner: str) -> tuple[str, str]:
    """Chooses one of a tokenizer's templates as transformers does; returns its name and text.

    Args:
      templates: {name: text} of a tokenizer.
      chosen: a name; None for 'default' ('tool_use' if there are tools and such a template).
      has_tools: True if the conversation has tools.
      owner: the tokenizer, for errors.

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
    """Drops null entries, and repeats reasoning under the names that templates look for."""
    message = {name: value for name, value in message.items() if value is not None}
    found = next((message[name] for name in _REASONING if name in message), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


# Cached: compiling takes milliseconds, and a job builds its inputs several times.
@functools.lru_cache(maxsize=16)
def _compile(text: str, name: str) -> tuple[jinja2.Template, bool]:
    """Returns the compiled template, and True if it has `{% generation %}`."""
    try:
        import jinja2
    except ImportError as error:
        raise UserError(f"{name} needs jinja2: pip install 'spmd-trainer[hf]'") from error
    environment = _environment()
    try:
        calls = environment.parse(text).find_all(jinja2.nodes.CallBlock)
        # No other block of these templates calls an extension.
        has_marks = any(isinstance(block.call.node, jinja2.nodes.ExtensionAttribute) for block in calls)
        return environment.from_string(text), has_marks
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{name} is not a chat template: line {error.lineno}: {error.message}") from error


@functools.cache
def _environment() -> jinja2.Environment:
    """Environment of all templates; differs from jinja2's defaults as transformers' does."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}`: marks the assistant's text without changing it."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            content = caller()
            recorder = _recorder.get()
            if recorder is not None:
                recorder.blocks.append((recorder.length, content))
            return content

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _time_now
    return environment


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # jinja2's own filter escapes HTML.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    import jinja2

    raise jinja2.TemplateError(message)


def _time_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def template_of(tokenizer: Any, given: str | None, *, has_tools: bool) -> ChatTemplate:
    """Returns the template for a conversation.

    Args:
      tokenizer: the input's tokenizer.
      given: None for the tokenizer's own template; the name of one of its templates; the path of a .jinja file; or a
        text.
      has_tools: True if the conversation has tools.

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
    return ChatTemplate(text, name=name, special_tokens=tokens)


def clock_of(date: str | None) -> Callable[[str], str]:
    """Returns `strftime_now` for the templates of a training input: a function that formats a fixed date.

    Today's date would change the tokens of a run resumed tomorrow, so with `date=None` the
    returned function raises UserError when a template calls it.

    Raises:
      UserError: `date` is not a date such as '2024-07-26'.
    """
    try:
        return functools.partial(_formatted, None if date is None else datetime.datetime.fromisoformat(date))
    except (ValueError, TypeError) as error:
        raise UserError(f"date={date!r}; write it as year-month-day, e.g. '2024-07-26'") from error


def _formatted(now: datetime.datetime | None, form: str) -> str:
    if now is None:
        raise UserError(
            "the template writes the current date, so a run that is resumed tomorrow would have other tokens; set date, "
            "e.g. '2024-07-26', or the variable that the template takes instead (template_variables)"
        )
    return now.strftime(form)
