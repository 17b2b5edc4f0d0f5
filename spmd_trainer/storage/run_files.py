"""Names of the files in a run's directory that several packages read, and the record of the run's status."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from absl import logging
from etils import epath

from spmd_trainer.storage import json_values, reading

# The record of the run: experiment, status, settings, and the versions and devices of its newest start; see `read_record`.
RUN = "run.json"
# Full logs of the processes that worked in a job_log_dir.
LOGS = "logs"
# Settings of the newest start, and of earlier starts with different ones.
CONFIG_FILE = "config.txt"
EARLIER_CONFIG = re.compile(r"config\.(\d{4,})\.txt")
# The sharding report as data.
SHARDING_REPORT = "sharding_report.json"
# The page that shows the run.
PAGE = "run.html"
# The page that compares the run with other runs.
COMPARISON = "compare.html"
# Files of runs of an older version of the trainer, in which `run.json` had no status.
OLD_MARKER, _OLD_END, _OLD_FAILURE = "experiment.json", "end_of_training.json", "failure.json"
_FAILURE_OF_PROCESS = re.compile(r"failure_(\d+)\.json")
# Fields that hold numbers of steps.
_STEPS = {"step", "last_step"}


def read_record(directory: epath.Path) -> dict[str, Any]:
    """Returns a run's record, from `run.json` and the failure files of processes other than 0; {} if there is none.

    The record's keys:

    - 'experiment': full name of the experiment.
    - 'status': 'running', 'stopped', 'finished' or 'failed'.
    - 'last_step': only once training has ended.
    - 'failure': only after a failure: the step, process and reason of the failure.
    - 'parameters', 'devices' and 'versions': those of the newest launch.
    - 'overrides', 'settings' (the flags that are not the defaults) and 'working_directory': those of the newest launch that has
      begun to train; missing before the first such launch.

    If a file other than `run.json` can't be read, it is left out, with a warning. `run.json` itself is left out only if the
    directory also has files of an older version of the trainer, which are then used instead.

    Raises:
      ValueError: `run.json` can't be read, and the directory has no files of an older version.
    """
    names = names_in(directory)
    record = (_readable if OLD_MARKER in names else _object)(directory / RUN)
    if "status" not in record and OLD_MARKER in names:
        record |= _readable(directory / OLD_MARKER)
        if end := _readable(directory / _OLD_END):
            record |= {"status": "finished", "last_step": end.get("step")}
        if failure := _readable(directory / _OLD_FAILURE):
            record |= {"status": "failed", "failure": failure}
    for name in failures_among(names).values():
        if "failure" not in record and (failure := _readable(directory / name)):
            record |= {"status": "failed", "failure": failure}
    return record


def failure_file(process: int) -> str:
    """Returns the name of the file in which a process other than 0 writes why it failed. Only process 0 writes `run.json`."""
    return f"failure_{process}.json"


def failures_among(names: Iterable[str]) -> dict[int, str]:
    """Returns {process: file name} for those of `names` that are `failure_file`s, sorted by process."""
    return dict(sorted((int(found[1]), name) for name in names if (found := _FAILURE_OF_PROCESS.fullmatch(name))))


def names_in(directory: epath.Path) -> set[str]:
    """Returns the names of a directory's entries; an empty set if the directory is missing."""
    try:
        return {path.name for path in directory.iterdir()}
    except FileNotFoundError:
        return set()


def has_run(directory: epath.Path) -> bool:
    """Returns True if a training run has begun in a directory."""
    return any((directory / name).exists() for name in (RUN, OLD_MARKER))


def _readable(path: epath.Path) -> dict[str, Any]:
    """Returns the JSON object in a file. If it can't be read, logs a warning and returns {}."""
    try:
        return _object(path)
    except ValueError as error:
        logging.warning("in %s, %s; it is left out", path.parent, error)
        return {}


def _object(path: epath.Path) -> dict[str, Any]:
    try:
        found = json_values.parse_object(json_values.content_of(path))
        for field in _STEPS & found.keys():
            if found[field] is not None:  # a failure before the first step has none
                json_values.integer(found[field], field)
        return found
    except FileNotFoundError:
        return {}
    except (ValueError, reading.NotRegularError) as error:
        raise ValueError(f"{path.name} can't be read: {type(error).__name__}: {error}") from error
