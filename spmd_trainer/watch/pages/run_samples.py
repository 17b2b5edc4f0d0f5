"""What a run has decoded: the first examples of each dataset, at some of its steps."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import TypedDict

from etils import epath

from spmd_trainer.sharding.messages import shortened
from spmd_trainer.storage import is_remote

_STEP = re.compile(r"step_(\d+)\.jsonl")
FOLDERS = ("decode_out", "eval_out")
MOST_STEPS = 24
MOST_EXAMPLES = 16
_MOST_CHARACTERS = 3000
# Of each file only the beginning is read.
_READ_BYTES = 4 * 2**20


class Example(TypedDict):
    """One example: its number in the dataset, its prompt ('' if it has none) and what came of it."""

    index: int
    prompt: str
    output: str


class StepSamples(TypedDict):
    """The examples at one step."""

    step: int
    examples: list[Example]


def groups_below(job_log_dir: epath.Path) -> dict[str, dict[int, epath.Path]]:
    """Returns {'decode_out/DATASET': {step: file}}, with all steps in their order."""
    found = {}
    for folder in FOLDERS:
        for dataset in _entries(job_log_dir / folder):
            steps = {
                int(match[1]): path for path in _entries(dataset) if (match := _STEP.fullmatch(path.name)) is not None
            }
            if steps:
                found[f"{folder}/{dataset.name}"] = dict(sorted(steps.items()))
    return found


def chosen_steps(steps: list[int]) -> list[int]:
    """Returns at most `MOST_STEPS` of the steps, evenly spread, the first and the last among them."""
    if len(steps) <= MOST_STEPS:
        return steps
    return [steps[round(n * (len(steps) - 1) / (MOST_STEPS - 1))] for n in range(MOST_STEPS)]


def read_examples(path: epath.Path) -> list[Example]:
    """Returns the first examples of a file.

    Raises:
      OSError: it can't be read.
      ValueError: it has a line that can't be read.
    """
    return [_example(json.loads(line), number) for number, line in enumerate(_first_lines(path))]


def _first_lines(path: epath.Path) -> Iterator[str]:
    if is_remote(path):
        lines = path.read_text(encoding="utf-8").splitlines()
    else:
        with open(path, encoding="utf-8") as file:
            lines = file.read(_READ_BYTES).splitlines()
        if len(lines) < MOST_EXAMPLES and path.stat().length > _READ_BYTES:
            lines = lines[:-1]  # the last one was cut
    yield from lines[:MOST_EXAMPLES]


def _example(record: dict[str, object], number: int) -> Example:
    index = record.get("index", number)
    if "output" in record:
        output = str(record["output"])
    else:
        output = json.dumps({name: value for name, value in record.items() if name != "index"}, ensure_ascii=False)
    return Example(
        index=index if isinstance(index, int) else number,
        prompt=_beginning(str(record.get("prompt", ""))),
        output=_beginning(output),
    )


def _beginning(text: str) -> str:
    return shortened(text, _MOST_CHARACTERS, f" … ({len(text) - _MOST_CHARACTERS:,} more characters in the file)")


def _entries(directory: epath.Path) -> list[epath.Path]:
    try:
        return sorted(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
