"""Reads fiddle's errors about a field that a config doesn't have: which field, of what, and which fields there are.

Standard library only, like the rest of this package.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

# Raised where a field is set, given to the config's constructor, and read.
_SET = re.compile(r"No parameter named '(\w+)' exists for (.+?); valid parameter names: ([\w, ]+)")
_GIVEN = re.compile(r"Cannot bind arguments to (.+?): got an unexpected keyword argument '(\w+)'")
_READ = re.compile(r"No parameter '(\w+)' has been set on <")
# How fiddle writes a class and a function.
_CALLABLE = re.compile(r"<(?:class '([^']+)'|function (\S+) at 0x\w+)>")


class UnknownField(NamedTuple):
    """A field that a config doesn't have.

    Attributes:
      name: the field.
      owner: the class or function that the config is of, e.g. 'praxis.layers.linears.Linear'.
      known: the fields that it has; empty if they can't be found out.
    """

    name: str
    owner: str
    known: Sequence[str]


def of(error: BaseException, text: str) -> UnknownField | None:
    """Returns what an error says of an unknown field; None if it says nothing of one.

    Args:
      error: the error. Python notes on an AttributeError which config it is about.
      text: the error's message.
    """
    if match := _SET.match(text):
        return UnknownField(match[1], _name(match[2]), match[3].split(", "))
    if match := _GIVEN.match(text):
        owner = _name(match[1])
        return UnknownField(match[2], owner, _parameters(_imported(owner)))
    if match := _READ.match(text):
        called = getattr(getattr(error, "obj", None), "__fn_or_cls__", None)
        known = _parameters(called)
        if called is not None and match[1] not in known:
            return UnknownField(match[1], f"{called.__module__}.{called.__qualname__}", known)
    return None


def _name(described: str) -> str:
    match = _CALLABLE.fullmatch(described)
    return (match[1] or match[2]) if match else described


def _imported(name: str) -> Callable[..., Any] | None:
    """Returns the class with a full name such as 'praxis.layers.linears.Linear', if its module is imported."""
    parts = name.split(".")
    for end in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:end]))
        if found is not None:
            for part in parts[end:]:
                found = getattr(found, part, None)
            return found if callable(found) else None
    return None


def _parameters(called: Callable[..., Any] | None) -> list[str]:
    if called is None:
        return []
    try:
        parameters = inspect.signature(called).parameters.values()
    except (TypeError, ValueError):  # some classes written in C have no signature
        return []
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
