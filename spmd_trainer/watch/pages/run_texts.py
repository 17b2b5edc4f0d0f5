"""The texts that a run's page shows: decoded examples, and the warnings and errors in the run's logs, each kind once."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from typing import Any, TypeAlias

from etils import epath

from spmd_trainer.sharding.messages import shortened
from spmd_trainer.storage import is_remote, json_values, reading
from spmd_trainer.storage.append import read_joined
from spmd_trainer.watch.pages.run_scalars import entries

# (time, level, 'file.py:12', message) of one record in a log. A message may have several lines.
Logged: TypeAlias = tuple[str, str, str, str]
# A line of a full log, as `cli.log_lines` writes it.
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) ([^ ]+:\d+)\] (.*)")
_SHOWN = ("WARNING", "ERROR", "CRITICAL", "FATAL")
# Warnings that differ only in numbers and addresses count as one kind.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
# Maximum number of bytes that are read: of each log, from its end; of each file of examples, from its beginning.
_LOG_BYTES = 32 * 2**20
_EXAMPLES_BYTES = 4 * 2**20
MOST_KINDS = 200
_STEP = re.compile(r"step_(\d+)\.jsonl")
FOLDERS = ("decode_out", "eval_out")
MOST_STEPS = 24
MOST_EXAMPLES = 16
_MOST_OF_WARNING, _MOST_OF_EXAMPLE = 2000, 3000


def read_warnings(path: epath.Path) -> tuple[list[Logged], bool]:
    """Returns the warnings and errors of a log, and True if the log is so long that its beginning was left out."""
    if is_remote(path):
        text = read_joined(path)
        text, is_cut = text[-_LOG_BYTES:], len(text) > _LOG_BYTES
    else:
        with open(path, "rb", opener=reading.opened) as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - _LOG_BYTES))
            text, is_cut = file.read().decode(errors="replace"), size > _LOG_BYTES
    records: list[list[str]] = []
    is_shown = False
    for line in text.splitlines():
        if (match := _LINE.fullmatch(line)) is not None:
            is_shown = match[2] in _SHOWN
            if is_shown:
                records.append([*match.groups()])
        elif is_shown:
            records[-1][3] += "\n" + line
    return [(time, level, where, message) for time, level, where, message in records], is_cut


def add(found: Iterable[Logged], kinds: dict[tuple[str, ...], dict[str, Any]]) -> None:
    """Adds warnings to `kinds`. Warnings of one kind differ only in numbers.

    Args:
      found: the warnings; see `read_warnings`.
      kinds: {key: record of a kind of warning, with its first text, its count, and the first and last time}. Changed in place.
    """
    for time, level, where, text in found:
        key = (level, where.partition(":")[0], _NUMBERS.sub("#", text))
        if key in kinds:
            kind = kinds[key]
            kind["count"] += 1
            kind["first"], kind["last"] = min(kind["first"], time), max(kind["last"], time)
        else:
            text = _beginning(text, _MOST_OF_WARNING, "log")
            kinds[key] = {"level": level, "where": where, "text": text, "count": 1, "first": time, "last": time}


def sample_files(job_log_dir: epath.Path) -> dict[str, dict[int, epath.Path]]:
    """Returns {'decode_out/DATASET': {step: file}, 'eval_out/DATASET': {step: file}, ...}, with ascending steps."""
    found = {}
    for folder in FOLDERS:
        for dataset in entries(job_log_dir / folder):
            steps = {
                int(match[1]): path for path in entries(dataset) if (match := _STEP.fullmatch(path.name)) is not None
            }
            if steps:
                found[f"{folder}/{dataset.name}"] = dict(sorted(steps.items()))
    return found


def chosen_steps(steps: list[int]) -> list[int]:
    """Returns at most `MOST_STEPS` of the steps, evenly spread, including the first and the last step."""
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[round(n * (len(steps) - 1) / (MOST_STEPS - 1))] for n in range(MOST_STEPS)]


def read_examples(path: epath.Path) -> list[dict[str, Any]]:
    """Returns the first examples of a file: index in the dataset, prompt ('' if it has none) and output.

    Raises:
      OSError: the file can't be read.
      ValueError: the file has a line that is not valid JSON.
    """
    if is_remote(path):
        lines = json_values.lines(path.read_text(encoding="utf-8"))
    else:
        with open(path, encoding="utf-8", opener=reading.opened) as file:
            lines = json_values.lines(file.read(_EXAMPLES_BYTES))
        if len(lines) < MOST_EXAMPLES and path.stat().length > _EXAMPLES_BYTES:
            lines = lines[:-1]  # the last one was cut
    return [
        _example(json_values.parse_object(line, finite=False), number)
        for number, line in enumerate(lines[:MOST_EXAMPLES])
    ]


def _example(record: dict[str, object], number: int) -> dict[str, Any]:
    index = record.get("index", number)
    rest = {name: value for name, value in record.items() if name != "index"}
    output = str(record["output"]) if "output" in record else json.dumps(rest, ensure_ascii=False)
    return {
        "index": index if isinstance(index, int) else number,
        "prompt": _beginning(str(record.get("prompt", "")), _MOST_OF_EXAMPLE, "file"),
        "output": _beginning(output, _MOST_OF_EXAMPLE, "file"),
    }


def _beginning(text: str, most: int, where: str) -> str:
    return shortened(text, most, f" … ({len(text) - most:,} more characters in the {where})")
