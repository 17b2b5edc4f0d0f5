"""`config.txt`: the settings that a directory was last trained with, and a report of what has changed since."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from absl import logging
from etils import epath

from spmd_trainer.models.config_lines import Change, changes, settings
from spmd_trainer.sharding.messages import count_text, mesh_text
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.storage.run_files import CONFIG_FILE, EARLIER_CONFIG

_MAX_TOLD = 10


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

    If settings have changed, the earlier file is kept as `config.0001.txt`, `config.0002.txt`, ... Called by one process and only
    for training: evaluation and decode jobs on the same directory may have other settings.

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
    if settings(last) != settings(now):
        write_atomically(path, now)
    return changed


def _message(changed: Sequence[Change], kept: epath.Path, path: epath.Path) -> str:
    told = "\n".join(f"  {change}" for change in changed[:_MAX_TOLD])
    more = f"\n  and {len(changed) - _MAX_TOLD} more" if len(changed) > _MAX_TOLD else ""
    return (
        f"{count_text(len(changed), 'setting has', 'settings have')} changed since the last run in this directory:\n"
        f"{told}{more}\nto see all changes: diff {kept} {path}"
    )


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
    numbers = [int(match[1]) for entry in directory.iterdir() if (match := EARLIER_CONFIG.fullmatch(entry.name))]
    newest = max(numbers, default=0)
    path = directory / f"config.{newest:04}.txt"
    if newest and _read(path) == lines:
        return path
    path = directory / f"config.{newest + 1:04}.txt"
    write_atomically(path, lines)
    return path


def _on_one_line(line: str) -> str:
    """Joins the lines of a multi-line value, such as an array's text."""
    return re.sub(r"\s*\n\s*", " ", line)
