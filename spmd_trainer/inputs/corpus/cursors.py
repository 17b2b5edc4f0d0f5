"""Positions of a corpus input: where the current window begins in each source, and how many of its rows are taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmd_trainer.errors import did_you_mean
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.mixture import OpenSource
from spmd_trainer.inputs.corpus.order import Position

_NUMBERS = 7  # of a source


class SourceCursor(NamedTuple):
    """Where a source is.

    Attributes:
      position: in the order of its documents.
      documents: documents that it has given.
      tokens: tokens of these documents, with those that stand before and after each document.
      skipped: bad records left out.
    """

    position: Position = Position()
    documents: int = 0
    tokens: int = 0
    skipped: int = 0


class Cursor(NamedTuple):
    """Where a window begins.

    Attributes:
      window: number of the window, from 0.
      offset: tokens of the first document that belong to the window before (packing 'split').
      sources: where each source is.
    """

    window: int
    offset: int
    sources: tuple[SourceCursor, ...]


class InputPosition(NamedTuple):
    """Where an input is.

    Attributes:
      cursor: where its window begins.
      row: rows of the window that have been taken.
    """

    cursor: Cursor
    row: int


def beginning(num_sources: int) -> InputPosition:
    """Returns the position before the first batch."""
    return InputPosition(Cursor(0, 0, (SourceCursor(),) * num_sources), 0)


def to_json(position: InputPosition, names: Sequence[str]) -> str:
    """Returns a position as JSON: less than 200 characters for each source.

    Args:
      position: the position.
      names: names of the sources.
    """
    cursor = position.cursor
    sources = {
        name: [*source.position, source.documents, source.tokens, source.skipped]
        for name, source in zip(names, cursor.sources, strict=True)
    }
    return json.dumps({"window": cursor.window, "offset": cursor.offset, "row": position.row, "sources": sources})


def from_json(saved: Mapping[str, Any], names: Sequence[str]) -> InputPosition:
    """Returns a position from the value of its JSON.

    Args:
      saved: the parsed JSON.
      names: names of the sources.

    Raises:
      ValueError, KeyError, TypeError: it is not a position of these sources.
    """
    sources = []
    for name in names:
        numbers = [int(number) for number in saved["sources"][name]]
        if len(numbers) != _NUMBERS or min(numbers) < 0:
            raise ValueError(f"source {name!r} has {numbers}")
        sources.append(SourceCursor(Position(*numbers[:4]), *numbers[4:]))
    window, offset, row = (int(saved[name]) for name in ("window", "offset", "row"))
    if min(window, offset, row) < 0:
        raise ValueError(f"window {window}, offset {offset}, row {row}")
    return InputPosition(Cursor(window, offset, tuple(sources)), row)


def describe(
    settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, sources: Sequence[OpenSource]
) -> dict[str, Any]:
    """Returns what batches depend on besides the position, as JSON values.

    Args:
      settings: the input's own settings.
      tokenizer: the tokenizer.
      sources: the sources.
    """
    return {
        "settings": dict(settings),
        "tokenizer": {**tokenizer.fingerprint(), "name": _name_of(tokenizer)},
        "order": [one.name for one in sources],
        "sources": {one.name: {"settings": one.settings(), "files": one.source.fingerprint()} for one in sources},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sequence[OpenSource]) -> list[str]:
    """Returns what has changed since a position was saved, a clause for each change.

    Args:
      before: the saved result of `describe`.
      now: today's.
      sources: the sources of today.

    Raises:
      KeyError, TypeError, AttributeError: `before` is not such a result.
    """
    # The name of the setting in positions saved before it was renamed.
    renamed = {"stopping_strategy" if k == "when_one_ends" else k: value for k, value in before["settings"].items()}
    found = _differences(renamed, now["settings"])
    old, new = dict(before["tokenizer"]), dict(now["tokenizer"])
    names = old.pop("name"), new.pop("name")
    if old != new:
        found.append(f"the tokenizer was {names[0]} ({_listed(old)}) and is {names[1]} ({_listed(new)})")
    found += _changed_sources(before["sources"], now["sources"], sources)
    # The order decides between sources that are equally far behind.
    if not found and before["order"] != now["order"]:
        found.append(f"the sources were in the order {', '.join(before['order'])}")
    return found


def _changed_sources(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sequence[OpenSource]) -> list[str]:
    found = [f"the mixture no longer has {name!r}{did_you_mean(name, list(now))}" for name in before if name not in now]
    for one in sources:
        if one.name not in before:
            found.append(f"the mixture did not have {one.name!r}")
            continue
        old, new = before[one.name], now[one.name]
        of_source = "" if len(sources) == 1 else f" of {one.name!r}"
        found += [f"{text}{of_source}" for text in _differences(old["settings"], new["settings"])]
        if old["files"] != new["files"]:
            found.append(f"the files{of_source} have changed: {one.source.changed_text(old['files'])}")
    return found


def _differences(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = sorted({*before, *now})
    return [
        f"{name} was {before.get(name)} and is {now.get(name)}" for name in names if before.get(name) != now.get(name)
    ]


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def _name_of(tokenizer: tokenizers.Tokenizer) -> str:
    return str(getattr(tokenizer, "name", getattr(tokenizer, "model", type(tokenizer).__name__)))
