"""The messages that docs/errors.md quotes are those of the code."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[1]
_PAGE = _ROOT / "docs" / "errors.md"
_VARIABLE = "…"
# A quote with less fixed text than this would be found in the text of some other message.
_FEWEST_LETTERS = 12


def _template(node: ast.AST) -> str | None:
    """Returns the text of a string expression with `…` for its variable parts; None if it is no such expression."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(_template(part) or _VARIABLE for part in parts)
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            halves = _template(left), _template(right)
            return None if halves == (None, None) else "".join(half or _VARIABLE for half in halves)
    return None


def _docstrings(tree: ast.AST) -> Iterator[ast.AST]:
    """Yields the nodes of strings that stand alone, which nobody prints."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            yield node.value


def _templates_of(source: str) -> Iterator[str]:
    tree = ast.parse(source)
    passed = set(_docstrings(tree))
    for node in ast.walk(tree):  # outer nodes come before the strings that they are made of
        if node in passed:
            continue
        template = _template(node)
        if template is not None:
            passed.update(ast.walk(node))
            yield template


@functools.cache
def _all_templates() -> tuple[str, ...]:
    # Short strings are names and separators.
    return tuple(
        template
        for path in sorted((_ROOT / "spmd_trainer").rglob("*.py"))
        for template in _templates_of(path.read_text(encoding="utf-8"))
        if len(template) >= _FEWEST_LETTERS
    )


def _fragments(quote: str) -> list[str]:
    return [fragment for fragment in quote.split(_VARIABLE) if fragment.strip()]


def _is_in(quote: str, template: str) -> bool:
    """Says whether the fixed parts of a quote stand in a template in the quote's order."""
    start = 0
    for fragment in _fragments(quote):
        found = template.find(fragment, start)
        if found < 0:
            return False
        start = found + len(fragment)
    return True


def _quotes(text: str) -> list[str]:
    """Returns the messages that headings of the third level quote."""
    return re.findall(r"^### `(.+)`$", text, flags=re.MULTILINE)


_QUOTES = _quotes(_PAGE.read_text(encoding="utf-8"))


def test_every_heading_of_an_entry_quotes_a_message_once() -> None:
    headings = [line for line in _PAGE.read_text(encoding="utf-8").splitlines() if line.startswith("### ")]
    assert len(headings) == len(_QUOTES) >= 45
    assert len(set(_QUOTES)) == len(_QUOTES)


@pytest.mark.parametrize("quote", _QUOTES)
def test_quoted_message_is_in_the_code(quote: str) -> None:
    letters = sum(map(len, _fragments(quote)))
    assert letters >= _FEWEST_LETTERS, "too little fixed text to tell this message from others"
    assert any(_is_in(quote, template) for template in _all_templates()), f"no message of the code has: {quote}"


def test_every_entry_says_what_to_do() -> None:
    entries = re.split(r"^##+ .*$", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]
    titles = re.findall(r"^(##+) .*$", _PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    for title, text in zip(titles, entries, strict=True):
        if title == "###":
            assert len(text.split()) >= 4, text


@pytest.mark.parametrize(
    "quote",
    [
        "--exp=NAME is needed; --list shows the experiments",  # another word
        "--mesh=… needs …, and there …. This one suits: --mesh=…",  # another word after variable parts
        "This one fits: --mesh=…; --mesh=… needs …",  # another order
    ],
)
def test_changed_message_is_noticed(quote: str) -> None:
    assert not any(_is_in(quote, template) for template in _all_templates())


def test_parts_of_two_messages_are_not_one() -> None:
    source = 'raise ValueError(f"no step {step} in " + place)\nraise ValueError("there is none; train first")'
    templates = list(_templates_of(source))
    assert templates == ["no step … in …", "there is none; train first"]
    assert any(_is_in("no step … in", template) for template in templates)
    assert not any(_is_in("no step …; train first", template) for template in templates)


def test_docstrings_are_no_messages() -> None:
    assert list(_templates_of('def f():\n    """Raises: no such step here."""\n    return "a message"')) == [
        "a message"
    ]
