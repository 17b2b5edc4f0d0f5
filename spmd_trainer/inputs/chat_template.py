"""Chat templates: conversations as the text that a model was trained on. Need the package jinja2: extra `hf`.

A template comes with a tokenizer, from people whom nobody has checked, so it runs in jinja2's sandbox, which gives it no way to
files, modules or the interpreter's internals. It sees the same names as in transformers, so the text is the same.
"""

from __future__ import annotations

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from spmd_trainer.errors import UserError, did_you_mean

if TYPE_CHECKING:
    import jinja2

# Names under which a message may carry a model's reasoning. The first is the one that newer templates read.
_REASONING = ("reasoning_content", "thinking", "reasoning")
_DEFAULT, _FOR_TOOLS = "default", "tool_use"


class ChatTemplate:
    """A compiled chat template."""

    def __init__(self, text: str, *, name: str = "chat_template", special_tokens: Mapping[str, str] | None = None):
        """Compiles the template.

        Args:
          text: the template.
          name: where it is from, for errors.
          special_tokens: tokens that the template can name: {'bos_token': '<s>', ...}.

        Raises:
          UserError: jinja2 is missing, or the template has a syntax error.
        """
        self.name = name
        self.text = text
        self._special_tokens = dict(special_tokens or {})
        self._template = _compile(text, name)

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        **variables: Any,
    ) -> str:
        """Returns a conversation as text.

        Args:
          messages: [{'role': 'user', 'content': ...}, ...], JSON values.
          add_generation_prompt: end with the beginning of the assistant's answer, if the template can.
          tools: JSON schemas of the functions that the model may call.
          documents: documents for templates that take some.
          **variables: further variables of the template. They take precedence over the special tokens.

        Raises:
          UserError: the template refuses the conversation, fails, or does something that the sandbox forbids.
        """
        import jinja2

        given = {**self._special_tokens, **variables}
        try:
            return self._template.render(
                messages=[_with_reasoning(message) for message in messages],
                tools=tools,
                documents=documents,
                add_generation_prompt=add_generation_prompt,
                **given,
            )
        except jinja2.exceptions.SecurityError as error:
            raise UserError(f"{self.name} does something that chat templates may not do: {error}") from error
        except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
            raise UserError(f"{self.name} can't render this conversation: {error}") from error


def choose(templates: Mapping[str, str], chosen: str | None, *, has_tools: bool, owner: str) -> tuple[str, str]:
    """Returns the name and the text of one of a tokenizer's templates, as transformers chooses it.

    Args:
      templates: {name: text} of a tokenizer.
      chosen: a name, or None for 'default' ('tool_use' if there are tools and there is such a template).
      has_tools: the conversation has tools.
      owner: the tokenizer, for errors.

    Raises:
      UserError: there is no such template.
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


def _with_reasoning(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Gives a message with reasoning the names under which templates look for it."""
    found = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if found is None else {"thinking": found, **message, "reasoning_content": found}


# Compiling takes milliseconds, and a job builds its inputs several times.
@functools.lru_cache(maxsize=16)
def _compile(text: str, name: str) -> jinja2.Template:
    try:
        import jinja2
    except ImportError as error:
        raise UserError(f"{name} needs jinja2: pip install 'spmd-trainer[hf]'") from error
    try:
        return _environment().from_string(text)
    except jinja2.TemplateSyntaxError as error:
        raise UserError(f"{name} is not a chat template: line {error.lineno}: {error.message}") from error


@functools.cache
def _environment() -> jinja2.Environment:
    """Returns the environment in which all templates run. It differs from jinja2's own where transformers' does."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}...{% endgeneration %}`: marks what the model wrote. The text inside stays as it is."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            return caller()

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
