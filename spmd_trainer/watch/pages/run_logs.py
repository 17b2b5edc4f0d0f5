"""Warnings and errors of a run's logs, each kind once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import TypedDict

from etils import epath

from spmd_trainer.sharding.messages import shortened
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.append import read_joined

# A line of a full log, as `cli.log_lines` writes it.
_LINE = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d),\d{3} ([A-Z]+) ([^ ]+:\d+)\] (.*)")
_SHOWN = ("WARNING", "ERROR", "CRITICAL", "FATAL")
# Warnings that differ in numbers and addresses alone count as one.
_NUMBERS = re.compile(r"0x[0-9a-f]+|\d+(?:[.,]\d+)*(?:e[+-]?\d+)?")
# Bytes of each log, from its end.
_READ = 32 * 2**20
MOST_KINDS = 200
_MOST_CHARACTERS = 2000


class Warned(TypedDict):
    """A kind of warning: the text of its first record, how often it was logged, and when first and last."""

    level: str
    where: str
    text: str
    count: int
    first: str
    last: str


def read_text(path: epath.Path) -> tuple[str, bool]:
    """Returns the text of a log, and whether its beginning was left out because it is too long."""
    if is_remote(path):
        text = read_joined(path)
        return text[-_READ:], len(text) > _READ
    with open(path, "rb") as file:
        size = file.seek(0, 2)
        file.seek(max(0, size - _READ))
        return file.read().decode(errors="replace"), size > _READ


def warnings_of(text: str) -> Iterator[tuple[str, str, str, str]]:
    """Yields (time, level, 'file.py:12', message) of each warning and error; a message may have several lines."""
    record: list[str] | None = None
    for line in text.splitlines():
        match = _LINE.fullmatch(line)
        if match is None:
            if record is not None:
                record[3] += "\n" + line
            continue
        if record is not None:
            yield record[0], record[1], record[2], record[3]
        record = list(match.groups()) if match[2] in _SHOWN else None
    if record is not None:
        yield record[0], record[1], record[2], record[3]


def add(found: Iterable[tuple[str, str, str, str]], kinds: dict[tuple[str, ...], Warned]) -> None:
    """Adds warnings to their kinds.

    Args:
      found: see `warnings_of`.
      kinds: {key: kind}; added to.
    """
    for time, level, where, text in found:
        key = (level, where.partition(":")[0], _NUMBERS.sub("#", text))
        if key in kinds:
            kind = kinds[key]
            kind["count"] += 1
            kind["first"], kind["last"] = min(kind["first"], time), max(kind["last"], time)
        else:
            text = shortened(
                text, _MOST_CHARACTERS, f" … ({len(text) - _MOST_CHARACTERS:,} more characters in the log)"
            )
            kinds[key] = Warned(level=level, where=where, text=text, count=1, first=time, last=time)
