"""Reads and writes a run's record in its directory: the experiment, the last training settings, and how training ended."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
from absl import logging
from etils import epath

from spmd_trainer import pax, sharding
from spmd_trainer.errors import UserError
from spmd_trainer.models.config_lines import Change, changes, settings
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import access, reading
from spmd_trainer.storage.files import UNFINISHED_SUFFIX, write_atomically, write_if_changed
from spmd_trainer.storage.run_files import (
    CONFIG_FILE,
    EARLIER_CONFIG,
    LOGS,
    OLD_MARKER,
    RUN,
    failure_file,
    failures_among,
    has_run,
    names_in,
    read_record,
)

# Files that modes which don't train (inspect, plan, data, coord_check) may have written before the run began.
_OF_LOOKING = re.compile(r"sharding_report\.\w+|plan(_\w+)?\.(json|html)|(data|coord_check)\.html")
# The file that holds the training process's lock.
LOCK = "lock"
# Entries of the record that say how the run was launched. They come from the newest launch that has begun to train.
_OF_BEGUN = ("overrides", "settings", "working_directory")
# Maximum number of changed settings that are logged.
_MAX_TOLD = 10


def check_directory(directory: epath.Path, experiment: str, *, trains: bool) -> None:
    """Makes sure that this experiment may use a `job_log_dir`.

    Raises:
      UserError: the directory can't be read, or has a Pax run, a different experiment's run or, if `trains`, unrelated files.
    """
    with access.explained("--job_log_dir", directory):
        names = names_in(directory)
        record = record_of(directory) if {RUN, OLD_MARKER} & names else {}
    owner = record.get("experiment")
    # Shipped experiments were once registered without the package that they are in.
    if owner not in (None, experiment, experiment.removeprefix("spmd_trainer.")):
        raise UserError(
            f"--job_log_dir={directory} holds a run of {owner}, not of {experiment}; "
            "give each experiment a directory of its own"
        )
    if owner is not None or not names:
        return
    if (pax_run := pax.find(directory)) is not None:  # nothing is ever written to a Pax run
        step = "" if pax_run.step is None else f" --restore_checkpoint_step={pax_run.step}"
        raise UserError(
            f"--job_log_dir={directory} holds checkpoints of a Pax run, which this trainer only reads; give a new --job_log_dir, "
            f"and --restore_checkpoint_dir={pax_run.path}{step} to start from them"
        )
    if {RUN, OLD_MARKER} & names:
        may_be_ours = not record or "status" in record  # a record that can't be read counts as ours
    else:  # files that a killed launch or a mode that doesn't train leaves
        may_be_ours = all(
            name in (LOGS, LOCK) or name.endswith(UNFINISHED_SUFFIX) or _OF_LOOKING.fullmatch(name) for name in names
        )
    if trains and not may_be_ours:
        raise UserError(
            f"--job_log_dir={directory} is not empty and no run of this trainer; give a new or an empty directory"
        )


def record_of(directory: epath.Path) -> dict[str, Any]:
    """Returns the record of the run in a directory; {} if there is no record or, with a warning, if it can't be read."""
    try:
        return read_record(directory)
    except ValueError as error:
        # The disk was full, or someone has edited the file. The other files in the directory are complete.
        logging.warning(
            "%s: %s; so it is not known whose run this is, and it is taken as if it had neither ended nor failed. Training "
            "writes the file again",
            directory,
            error,
        )
        return {}


def _write(path: epath.Path, record: Mapping[str, object]) -> None:
    write_if_changed(path, json.dumps(record, indent=1).splitlines())


def describe(directory: epath.Path, about: Mapping[str, object], settings: Sequence[str]) -> None:
    """Writes a training run's record and settings into its directory when the run starts, and clears earlier failures.

    Process 0 writes; each process removes its share of the files about failures. If the run is restarted, the entries that
    `mark_begin_of_training` wrote at the previous launch stay, because this launch may fail before its first step.

    Logs the settings that have changed since the last training in the directory.

    Args:
      directory: the `job_log_dir`.
      about: {name: JSON value}, facts about this launch. 'experiment' is the experiment's full name.
      settings: lines 'path: value'; see `write_config`.
    """
    for process, name in failures_among(names_in(directory)).items():
        # A process may just have written its own file, which no other process may delete. This launch may have fewer processes.
        if process % jax.process_count() == jax.process_index():
            (directory / name).unlink(missing_ok=True)
    if jax.process_index():
        return
    directory.mkdir(parents=True, exist_ok=True)
    before = record_of(directory)
    ended = {"status": "finished", "last_step": before["last_step"]} if "last_step" in before else {"status": "running"}
    kept = {name: before[name] for name in _OF_BEGUN if name in before}
    _write(directory / RUN, {**about, **kept, **ended})
    write_config(directory, settings)


def write_report(report: sharding.ShardingReport, directory: epath.Path) -> list[epath.Path]:
    """Writes a sharding report as text, JSON and HTML; returns the paths of the files."""
    forms = {"txt": report.text, "json": report.json, "html": report.html}
    paths = {suffix: directory / f"sharding_report.{suffix}" for suffix in forms}
    for suffix, path in paths.items():
        write_if_changed(path, forms[suffix]().splitlines())
    return list(paths.values())


def report_directory(job_log_dir: epath.Path) -> epath.Path:
    """Creates and returns the directory for reports: `job_log_dir/inspect` if `job_log_dir` has a run, else `job_log_dir`."""
    directory = job_log_dir / "inspect" if has_run(job_log_dir) else job_log_dir
    directory.mkdir(parents=True, exist_ok=True)
    return directory


@contextlib.contextmanager
def _logging_errors(directory: epath.Path) -> Iterator[None]:
    """Context manager that logs errors of writing a run's status, so that they don't replace the run's own error or result."""
    try:
        yield
    except Exception:
        logging.exception("the status of the run could not be written to %s", directory)


def mark_begin_of_training(
    directory: epath.Path, overrides: Sequence[str], settings: Mapping[str, object], *, trains: bool = True
) -> None:
    """Records a run's overrides and flags when it begins to train; clears the recorded end of a previous launch. Process 0 only.

    Args:
      directory: the `job_log_dir`.
      overrides: overrides of the experiment, each as 'path=value'.
      settings: {field: JSON value} of the flags that differ from their defaults; see `Settings.given`.
      trains: False if training was already complete when the run was launched. Then recorded overrides and flags stay.
    """
    if jax.process_index():
        return
    record = record_of(directory)
    if record.pop("last_step", None) is not None:
        record.pop("failure", None)
        record["status"] = "running"
    asked = dict(zip(_OF_BEGUN, (list(overrides), dict(settings), os.getcwd()), strict=True))
    _write(directory / RUN, {**record, **asked} if trains else {**asked, **record})


def mark_end_of_training(directory: epath.Path, step: int, *, complete: bool) -> None:
    """Records in a run's directory that training is complete, or was stopped by a signal. Process 0 only.

    Keeps failures that other processes have recorded since the launch. If a stop can't be recorded, the error is only logged. If
    the completion can't be recorded, the error is raised, because a restart would continue training.

    Args:
      directory: the run's `job_log_dir`.
      step: the number of training steps that the run has taken.
      complete: True if training is complete; False if a signal has stopped it.
    """
    if jax.process_index():
        return
    with contextlib.nullcontext() if complete else _logging_errors(directory):
        record = record_of(directory)
        if complete:
            record.pop("failure", None)
            record |= {"status": "finished", "last_step": step}
        elif "failure" not in record:
            record["status"] = "stopped"
        _write(directory / RUN, record)


def end_of_training(directory: epath.Path) -> int | None:
    """Returns the step at which a run's training was completed, or None if it is not complete.

    The step may be less than num_train_steps.
    """
    step = record_of(directory).get("last_step")
    return step if isinstance(step, int) else None


@dataclasses.dataclass(frozen=True)
class Failure:
    """Why a training process failed.

    Attributes:
      step: the number of training steps that the process had taken.
      process: the index of the process.
      reason: the error's type and message.
    """

    step: int
    process: int
    reason: str


def mark_failure(directory: epath.Path, step: int, error: BaseException) -> None:
    """Records in a run's directory why training failed, so that evaluation and decode jobs stop waiting for the run."""
    reason = str(error) if isinstance(error, UserError) else f"{type(error).__name__}: {error}"
    failure = dataclasses.asdict(Failure(step, jax.process_index(), reason))
    with _logging_errors(directory):
        if not has_run(directory):
            return
        if process := jax.process_index():
            _write(directory / failure_file(process), failure)
        else:
            _write(directory / RUN, {**record_of(directory), "status": "failed", "failure": failure})


def failure(directory: epath.Path) -> Failure | None:
    """Returns the recorded failure of a run's training; None if training has not failed, or was restarted since."""
    failure = record_of(directory).get("failure")
    try:
        return None if failure is None else Failure(**failure)
    except TypeError:  # another version wrote the record, or someone has edited it
        return None


def write_config(directory: epath.Path, lines: Sequence[str]) -> list[Change]:
    """Writes a training run's settings, each as 'path: value', to `config.txt`, and logs the changes since the last launch.

    If settings have changed, first copies the old file to `config.0001.txt`, `config.0002.txt`, ... Called by one process, and
    only for training, because evaluation and decode jobs with the same directory may have different settings.

    Returns:
      The changed settings; an empty list for a new directory.
    """
    path = directory / CONFIG_FILE
    # The repr of an array may have several lines.
    now = [re.sub(r"\s*\n\s*", " ", line) for line in lines]
    last = _read(path)
    if last is None:
        write_atomically(path, now)
        return []
    changed = changes(last, now)
    if changed:
        kept = _keep(directory, last)
        more = f"\n  and {len(changed) - _MAX_TOLD} more" if len(changed) > _MAX_TOLD else ""
        logging.warning(
            "%s changed since the last run in this directory:\n%s%s\nto see all changes: diff %s %s",
            *(
                count_text(len(changed), "setting has", "settings have"),
                "\n".join(f"  {change}" for change in changed[:_MAX_TOLD]),
                more,
                kept,
                path,
            ),
        )
    if settings(last) != settings(now):
        write_atomically(path, now)
    return changed


def _read(path: epath.Path) -> list[str] | None:
    """Returns the lines of a settings file; None if it is missing or, with a warning, if it has no readable settings."""
    try:
        lines = reading.read(str(path)).decode().splitlines()
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
    """Writes old settings to the next free `config.N.txt` and returns its path.

    If the newest such file already has them, because a process was killed just after writing it, only returns its path.
    """
    numbers = [int(match[1]) for entry in directory.iterdir() if (match := EARLIER_CONFIG.fullmatch(entry.name))]
    newest = max(numbers, default=0)
    path = directory / f"config.{newest:04}.txt"
    if newest and _read(path) == lines:
        return path
    path = directory / f"config.{newest + 1:04}.txt"
    write_atomically(path, lines)
    return path
