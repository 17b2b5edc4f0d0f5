"""`config.txt`: the settings that a directory was last trained with, and a report of what has changed since."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence

from absl import logging
from etils import epath

from spmd_trainer.models import config_lines
from spmd_trainer.sharding.messages import mesh_text
from spmd_trainer.storage.files import write_atomically

CONFIG_FILE = "config.txt"
_EARLIER = re.compile(r"config\.(\d{4,})\.txt")
_MAX_TOLD = 10
_MAX_VALUE_CHARS = 120


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

    def __str__(self) -> str:
        if self.before is None:
            return f"{self.path} is new: {_shortened(self.now or '', '')}"
        if self.now is None:
            return f"{self.path} was removed; it was {_shortened(self.before, '')}"
        return f"{self.path} was {_shortened(self.before, self.now)}, is now {_shortened(self.now, self.before)}"


def run_lines(mesh_shape: Mapping[str, int], processes: int, batch_rows: int, num_minibatches: int) -> list[str]:
    """Returns a run's settings outside of the config, as 'name: value' lines for `write_config`.

    Args:
      mesh_shape: mesh axis sizes by name.
      processes: number of processes.
      batch_rows: rows of the global training batch.
      num_minibatches: parts that training divides the batch into.
    """
    return [
        f"mesh: ({mesh_text(mesh_shape)})",
        f"processes: {processes}",
        f"global batch rows: {batch_rows}",
        f"minibatches: {num_minibatches}",
    ]


def write_config(directory: epath.Path, lines: Sequence[str]) -> list[Change]:
    """Writes the settings of a starting run to `config.txt`, and logs what has changed since the last run.

    If settings have changed, the earlier file is kept as `config.0001.txt`, `config.0002.txt`, ... If none have, nothing is
    written. Called by one process and only for training: evaluation and decode jobs on the same directory may have other
    settings.

    Args:
      directory: the run's `job_log_dir`.
      lines: the settings, each as 'path: value'.

    Returns:
      The changed settings; empty for a new directory.
    """
    path = directory / CONFIG_FILE
    now = [_on_one_line(line) for line in lines]
    last = _read(path)
    if last is None:
        write_atomically(path, now)
        return []
    changed = changes(last, now)
    if changed:
        kept = _keep(directory, last)
        logging.warning("%s", _message(changed, kept, path))
        write_atomically(path, now)
    return changed


def changes(before: Sequence[str], now: Sequence[str]) -> list[Change]:
    """Returns the changes between two lists of 'path: value' lines, sorted by path; memory addresses are ignored."""
    old, new = _settings(before), _settings(now)
    return [Change(path, old.get(path), new.get(path)) for path in sorted(old | new) if old.get(path) != new.get(path)]


def _message(changed: Sequence[Change], kept: epath.Path, path: epath.Path) -> str:
    told = "\n".join(f"  {change}" for change in changed[:_MAX_TOLD])
    more = f"\n  and {len(changed) - _MAX_TOLD} more" if len(changed) > _MAX_TOLD else ""
    what = "1 setting has" if len(changed) == 1 else f"{len(changed)} settings have"
    return f"{what} changed since the last run in this directory:\n{told}{more}\nto see all changes: diff {kept} {path}"


def _read(path: epath.Path) -> list[str] | None:
    """Returns the lines of a settings file; None if it is missing or, with a warning, if it has no readable settings."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        logging.warning("%s can't be read, so changed settings can't be reported: %s", path, error)
        return None
    if not any(": " in line for line in lines):
        logging.warning("%s has no settings in it, so changed settings can't be reported", path)
        return None
    return lines


def _keep(directory: epath.Path, lines: list[str]) -> epath.Path:
    """Writes the earlier settings to the next free `config.N.txt`, unless the newest one already has them; returns its path.

    The newest one has them if an earlier start was killed just after writing it.
    """
    numbers = [int(match[1]) for entry in directory.iterdir() if (match := _EARLIER.fullmatch(entry.name))]
    newest = max(numbers, default=0)
    path = directory / f"config.{newest:04}.txt"
    if newest and _read(path) == lines:
        return path
    path = directory / f"config.{newest + 1:04}.txt"
    write_atomically(path, lines)
    return path


def _settings(lines: Sequence[str]) -> dict[str, str]:
    """Returns {path: value} without memory addresses. A line without ': ' continues the value before it."""
    settings: dict[str, str] = {}
    path = ""
    for line in lines:
        start, separator, value = config_lines.without_addresses(line).partition(": ")
        if separator:
            path = start
            settings[path] = value
        elif path:
            settings[path] += f" {start.strip()}"
    return settings


def _on_one_line(line: str) -> str:
    """Joins the lines of a multi-line value, such as an array's text."""
    return re.sub(r"\s*\n\s*", " ", line)


def _shortened(value: str, other: str) -> str:
    """Returns the value; of a long one, only the part around the first difference from `other`."""
    if len(value) <= _MAX_VALUE_CHARS:
        return value
    same = next((i for i, (a, b) in enumerate(zip(value, other, strict=False)) if a != b), 0)
    start = max(0, min(same - _MAX_VALUE_CHARS // 4, len(value) - _MAX_VALUE_CHARS))
    end = start + _MAX_VALUE_CHARS
    return ("..." if start else "") + value[start:end] + ("..." if end < len(value) else "")
