"""Parses a run's config lines to nested dicts."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | None
Settings: TypeAlias = dict[str, "Settings | Value"]

# Key of a config's class among its fields: 'task.train.learner: Learner' has fields below it.
CLASS = "class"


def nested(lines: Iterable[str]) -> Settings:
    """Returns {'task': {'train': {'num_train_steps': 200}}} for the line 'task.train.num_train_steps: 200'.

    Numbers, strings, booleans and None become Python values; other values stay text. The own value of a setting with
    fields goes under 'class'. A line without ': ' continues the value before it.
    """
    root: Settings = {}
    for path, text in _pairs(lines):
        *parents, name = path.split(".")
        at = root
        for parent in parents:
            at = _below(at, parent)
        found = at.get(name)
        if isinstance(found, dict):
            found[CLASS] = _value(text)
        else:
            at[name] = _value(text)
    return root


def flat(settings: Settings, prefix: str = "") -> dict[str, Value]:
    """Returns {'task.train.num_train_steps': 200} of nested settings."""
    found: dict[str, Value] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _pairs(lines: Iterable[str]) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    for line in lines:
        path, separator, text = line.partition(": ")
        if separator:
            pairs.append((path, text))
        elif pairs:
            pairs[-1] = (pairs[-1][0], f"{pairs[-1][1]}\n{line}")
    return pairs


def _below(settings: Settings, name: str) -> Settings:
    """Returns the dict under a name; an existing value becomes its class."""
    found = settings.get(name)
    if isinstance(found, dict):
        return found
    inner: Settings = {} if name not in settings else {CLASS: found}
    settings[name] = inner
    return inner


def _value(text: str) -> Value:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text
