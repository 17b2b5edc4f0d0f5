"""The program of the worker process that renders chat templates. The module `chat_template` starts it.

A template is untrusted code. Its loops, strings and integers may grow without end, even inside C code that cannot be
interrupted from the same process. In the worker process, the kernel limits the processor time and the memory of a rendering.
A request is a pickled `Request`, and the answer is JSON. To start quickly, the program imports no module of the trainer.
"""

from __future__ import annotations

import contextlib
import datetime
import functools
import json
import pickle
import resource
import signal
import sys
import types
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    import jinja2

# Values of 'failure' in an answer: why the template could not be compiled or rendered.
SYNTAX, FORBIDDEN, FAILED, LENGTH, MEMORY, DEPTH = "syntax", "forbidden", "failed", "length", "memory", "depth"
MARKS = "marks"
# Limit of the worker's address space: a fixed part, and a part per character of the maximum length of a rendered text.
_BYTES, _BYTES_PER_CHARACTER = 2**30, 32
# Maximum number of characters of 'reason' in an answer.
_REASON = 2000


class Request(NamedTuple):
    """Request to compile a chat template, and to render it unless `variables` is None.

    Attributes:
      text: source text of the template.
      variables: variables of the template; None only compiles the template. The variable `strftime_now` is the date that the
        template's function `strftime_now` formats; if it is None, a template that calls this function fails.
      is_marked: True also returns where the `{% generation %}` blocks are in the rendered text.
      max_seconds: maximum processor time, in seconds.
      max_chars: maximum length of the rendered text, in characters.
    """

    text: str
    variables: dict[str, Any] | None
    is_marked: bool
    max_seconds: float
    max_chars: int


class _Failed(Exception):
    """The rendering failed. The message is one of the kinds of failure, such as `LENGTH` or `MARKS`."""


# State of the current rendering: number of characters written so far, and (start, content) of each `{% generation %}` block. The
# jinja2 extension `Generation` adds the blocks.
_rendering = types.SimpleNamespace(length=0, blocks=[])


def _answer(request: Request) -> dict[str, Any]:
    """Compiles a request's template, and renders it if the request has variables. Returns the answer.

    After success, the answer has 'has_marks': True if the template has `{% generation %}` blocks. If it was rendered, the answer
    also has 'text', and 'spans' with (start, end) of each block. After failure, the answer has 'failure' (its kind) and 'reason'.
    """
    import jinja2

    try:
        template, has_marks = _compiled(request.text)
        found: dict[str, Any] = {"has_marks": has_marks}
        if request.variables is not None:
            text, blocks = _rendered(template, request.variables, request.max_chars)
            found |= {"text": text, "spans": _located(text, blocks) if request.is_marked else []}
        return found
    except jinja2.TemplateSyntaxError as error:
        return _failure(SYNTAX, f"line {error.lineno}: {error.message}")
    except jinja2.exceptions.SecurityError as error:
        return _failure(FORBIDDEN, str(error))
    except MemoryError:
        return _failure(MEMORY)
    except RecursionError:
        return _failure(DEPTH)
    except _Failed as error:
        return _failure(str(error))
    except (jinja2.TemplateError, ArithmeticError, LookupError, AttributeError, TypeError, ValueError) as error:
        return _failure(FAILED, str(error))


def _failure(kind: str, reason: str = "") -> dict[str, Any]:
    return {"failure": kind, "reason": reason[:_REASON]}


def _rendered(template: jinja2.Template, given: Mapping[str, Any], longest: int) -> tuple[str, list[tuple[int, str]]]:
    """Returns the rendered text, and (start, content) of each `{% generation %}` block. `longest`: limit in characters."""
    variables = dict(given)
    if "strftime_now" in variables:
        variables["strftime_now"] = functools.partial(_formatted, variables["strftime_now"])
    _rendering.length, _rendering.blocks = 0, []
    parts = []
    for part in template.generate(variables):
        parts.append(part)
        _rendering.length += len(part)
        if _rendering.length > longest:
            raise _Failed(LENGTH)
    return "".join(parts), _rendering.blocks


def _located(text: str, blocks: list[tuple[int, str]]) -> list[tuple[int, int]]:
    end, spans = 0, []
    for start, content in blocks:
        if start < end or not text.startswith(content, start):
            raise _Failed(MARKS)
        end = start + len(content)
        spans.append((start, end))
    return spans


@functools.lru_cache(maxsize=16)
def _compiled(text: str) -> tuple[jinja2.Template, bool]:
    """Returns the compiled template, and whether it has `{% generation %}` blocks."""
    import jinja2

    environment = _environment()
    calls = environment.parse(text).find_all(jinja2.nodes.CallBlock)
    # Only `{% generation %}` blocks call an extension.
    has_marks = any(isinstance(block.call.node, jinja2.nodes.ExtensionAttribute) for block in calls)
    return environment.from_string(text), has_marks


@functools.cache
def _environment() -> jinja2.Environment:
    """Returns the sandboxed jinja2 environment for all chat templates, with the settings that transformers uses."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The block `{% generation %}...{% endgeneration %}`, which marks the assistant's text without changing it."""

        tags = {"generation"}  # noqa: RUF012  # as jinja2 declares it

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_content"), [], [], body).set_lineno(line)

        def _content(self, caller: Any) -> str:
            content = str(caller())
            _rendering.blocks.append((_rendering.length, content))
            return content

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = _to_json
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
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


def _formatted(now: datetime.datetime | None, form: str) -> str:
    if now is None:
        raise ValueError(
            "the template writes the current date, so a run that is resumed tomorrow would have other tokens; set date, "
            "e.g. '2024-07-26', or the variable that the template takes instead (template_variables)"
        )
    return now.strftime(form)


def _serve_one(content: bytes) -> bytes:
    try:
        request: Request = Request(*pickle.loads(content))
        limit = _BYTES + _BYTES_PER_CHARACTER * request.max_chars
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))
        # The timer's signal ends this process even inside C code. The timer doesn't count time without the processor.
        signal.setitimer(signal.ITIMER_PROF, request.max_seconds)
        return json.dumps(_answer(request)).encode()
    except MemoryError:
        return json.dumps(_failure(MEMORY)).encode()
    except Exception as error:  # the trainer tells the user
        return json.dumps(_failure(FAILED, f"{type(error).__name__}: {error}")).encode()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def main() -> None:
    """Answers the trainer's requests until the trainer closes the pipe.

    The program's command-line arguments are the file descriptor of the pipe, and the entries of the trainer's `sys.path`.
    """
    sys.path[:] = sys.argv[2:]
    _environment()  # imports jinja2 before the first template's time limit begins
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    with Connection(int(sys.argv[1])) as pipe, contextlib.suppress(EOFError, ConnectionError):
        while True:
            pipe.send_bytes(_serve_one(pipe.recv_bytes()))


if __name__ == "__main__":
    main()
