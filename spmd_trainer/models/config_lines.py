"""Selects lines of a resolved config, e.g. the lines about the model, and compares two configs, e.g. of two runs."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence

_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
# Settings that depend on a job's devices, which don't change its results.
_DEVICES = re.compile(r"\.(ici_mesh_shape|dcn_mesh_shape|mesh_axis_names|contiguous_submeshes|infeed_host_index): ")
_MAX_VALUE_CHARS = 120


def without_addresses(text: str) -> str:
    """Removes memory addresses (' at 0x7f...') from the text of a setting."""
    return _ADDRESS.sub("", text)


def lines_of(lines: Iterable[str], beginnings: tuple[str, ...]) -> list[str]:
    """Returns the lines of a config that begin with one of `beginnings`, without memory addresses.

    Leaves out lines about devices and the mesh, which don't change a run's results.

    Args:
      lines: lines of a config, such as 'task.model.name: value'.
      beginnings: e.g. ('task.model', 'task.lora').
    """
    return [without_addresses(line) for line in lines if line.startswith(beginnings) and not _DEVICES.search(line)]


@dataclasses.dataclass(frozen=True)
class Change:
    """A setting that differs between two configs, an earlier and a later one.

    Attributes:
      path: the setting, e.g. 'task.train.num_train_steps'.
      before: the setting's value as text in the earlier config, or None if it did not exist.
      now: the setting's value as text in the later config, or None if it no longer exists.
    """

    path: str
    before: str | None
    now: str | None

    def shortened(self) -> tuple[str | None, str | None]:
        """Returns (before, now). Values of more than 120 characters are cut to the part around their first difference."""
        return around_difference(self.before, self.now), around_difference(self.now, self.before)

    def __str__(self) -> str:
        before, now = self.shortened()
        if before is None:
            return f"{self.path} is new: {now}"
        if now is None:
            return f"{self.path} was removed; it was {before}"
        return f"{self.path} was {before or 'empty'}, is now {now or 'empty'}"


def changes(before: Sequence[str], now: Sequence[str]) -> list[Change]:
    """Returns the changes between two configs, given as 'path: value' lines, sorted by path. Ignores memory addresses."""
    return compare(settings(before), settings(now))


def is_flag_of_some(path: str, all_settings: Sequence[Mapping[str, str]]) -> bool:
    """Returns True if `path` is a flag ('--flag') that is missing in at least one of `all_settings`."""
    return path.startswith("--") and any(path not in settings for settings in all_settings)


def compare(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """Returns the changes between two configs, sorted by path. `old` and `new` are results of `settings`.

    A flag ('--flag') that only one config has doesn't count as a change, because versions of the trainer have different flags.
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
    """Returns `value`. If it is longer than 120 characters, returns the part around its first difference from `other`."""
    if value is None or len(value) <= _MAX_VALUE_CHARS:
        return value
    pairs = enumerate(zip(value, other or "", strict=False))
    same = next((i for i, (a, b) in pairs if a != b), 0)
    start = max(0, min(same - _MAX_VALUE_CHARS // 4, len(value) - _MAX_VALUE_CHARS))
    end = start + _MAX_VALUE_CHARS
    return ("..." if start else "") + value[start:end] + ("..." if end < len(value) else "")
