"""Converts a run's config from text lines to nested dicts."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import TypeAlias

Value: TypeAlias = bool | int | float | str | None
Settings: TypeAlias = dict[str, "Settings | Value"]

# Key under which the dict of a config's fields has the config's class, e.g. 'Learner' in 'task.train.learner'.
CLASS = "class"


def nested(lines: Iterable[str]) -> Settings:
    """Returns {'task': {'train': {'num_train_steps': 200}}} for the line 'task.train.num_train_steps: 200'.

    Numbers, strings, booleans and None become Python values; other values stay text. If a setting has both a value and
    fields of its own, its value is stored under the key 'class'. A line without ': ' continues the previous line's value.
    """
    values: dict[str, str] = {}
    path = ""
    for line in lines:
        start, separator, text = line.partition(": ")
        if separator:
            path = start
            values[path] = text
        elif path:
            values[path] += f"\n{line}"
    root: Settings = {}
    for path, text in values.items():
        *parents, name = path.split(".")
        at = root
        for parent in parents:
            inner = at.get(parent)
            if not isinstance(inner, dict):
                inner = at[parent] = {CLASS: inner} if parent in at else {}
            at = inner
        found = at.get(name)
        if isinstance(found, dict):
            found[CLASS] = _value(text)
        else:
            at[name] = _value(text)
    return root


def flat(settings: Settings, prefix: str = "") -> dict[str, Value]:
    """Returns {'task.train.num_train_steps': 200} for {'task': {'train': {'num_train_steps': 200}}}; see `nested`."""
    found: dict[str, Value] = {}
    for name, value in settings.items():
        if isinstance(value, dict):
            found |= flat(value, f"{prefix}{name}.")
        else:
            found[f"{prefix}{name}"] = value
    return found


def _value(text: str) -> Value:
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        return text
    return value if value is None or isinstance(value, bool | int | float | str) else text
