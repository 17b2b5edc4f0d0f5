"""Selects lines of a resolved config, e.g. those that describe the model, and compares the configs of two starts or runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# A job's devices don't change its results.
_DEVICES = re.compile(r"\.(ici_mesh_shape|dcn_mesh_shape|mesh_axis_names|contiguous_submeshes|infeed_host_index): ")
_MAX_VALUE_CHARS = 120


def without_addresses(text: str) -> str:
    """Removes memory addresses from the text of a setting."""
    return _ADDRESS.sub("", text)


def lines_of(lines: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """Returns the lines that begin with one of `beginnings`, without those about devices, and without memory addresses.

    Args:
      lines: lines of a config, 'task.model.name: value'.
      beginnings: e.g. ('task.model', 'task.lora').
    """
    return [without_addresses(line) for line in lines if line.startswith(beginnings) and not _DEVICES.search(line)]


@dataclasses.dataclass(frozen=True)
class Change:
    """One changed setting.

    Attributes:
      path: the setting, e.g. 'task.train.num_train_steps'.
      before: its value as text in the last run, or None if the setting did not exist.
      now: its value as text, or None if the setting no longer exists.
    """

    path: str
    before: str | None
    now: str | None

    def shortened(self) -> tuple[str | None, str | None]:
        """Returns `before` and `now`. Long values are cut to the part around their first difference."""
        return around_difference(self.before, self.now), around_difference(self.now, self.before)

    def __str__(self) -> str:
        before, now = self.shortened()
        if before is None:
            return f"{self.path} is new: {now}"
        if now is None:
            return f"{self.path} was removed; it was {before}"
        return f"{self.path} was {before or 'empty'}, is now {now or 'empty'}"


def changes(before: Sequence[str], now: Sequence[str]) -> list[Change]:
    """Returns the changes between two lists of 'path: value' lines, sorted by path; memory addresses are ignored."""
    return compare(settings(before), settings(now))


def is_flag_of_some(path: str, all_settings: Sequence[Mapping[str, str]]) -> bool:
    """Returns True if `path` is a flag ('--flag') that at least one of `all_settings` lacks."""
    return path.startswith("--") and any(path not in settings for settings in all_settings)


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Returns the changes between two results of `settings`, sorted by path.

    A flag ('--flag') that only one of them has doesn't count as a change, because versions of the trainer differ in their flags.
    """
    paths = sorted(path for path in {**old, **new} if not is_flag_of_some(path, (old, new)))
    return [Change(path, old.get(path), new.get(path)) for path in paths if old.get(path) != new.get(path)]


def settings(lines: Iterable[str]) -> dict[str, str]:
    """Parses 'path: value' lines to {path: value}, without memory addresses. A line without ': ' continues a value."""
    found: dict[str, str] = {}
    path = ""
    for line in lines:
        start, separator, value = without_addresses(line).partition(": ")
        if separator:
            path = start
            found[path] = value
        elif path:
            found[path] += f" {start.strip()}"
    return found


def around_difference(value: str | None, other: str | None) -> str | None:
    """Returns the value. A long value is cut to the part around the first difference from `other`."""
    if value is None or len(value) <= _MAX_VALUE_CHARS:
        return value
    pairs = enumerate(zip(value, other or "", strict=False))
    same = next((i for i, (a, b) in pairs if a != b), 0)
    start = max(0, min(same - _MAX_VALUE_CHARS // 4, len(value) - _MAX_VALUE_CHARS))
    end = start + _MAX_VALUE_CHARS
    return ("..." if start else "") + value[start:end] + ("..." if end < len(value) else "")
