"""Saves and restores positions of a `CorpusInput`, and lists changes of settings or files that make a position invalid."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from spmd_trainer.errors import did_you_mean
from spmd_trainer.inputs import tokenizers
from spmd_trainer.inputs.corpus.mixture import OpenSource
from spmd_trainer.inputs.corpus.order import Position

_NUMBERS = 7  # numbers saved per source: four of `Position` and three of `SourceCursor`


class SourceCursor(NamedTuple):
    """How much of one source of documents has been read.

    Attributes:
      position: position in the source's order of documents.
      documents: number of documents read.
      tokens: number of tokens of these documents, including start and end tokens.
      skipped: number of bad records left out.
    """

    position: Position = Position()
    documents: int = 0
    tokens: int = 0
    skipped: int = 0


class Cursor(NamedTuple):
    """Position where a window begins. A window is a group of documents that are packed together (see `windows`).

    Attributes:
      window: number of the window, from 0.
      offset: with packing 'split', number of tokens of the window's first document that are in the previous window; else 0.
      sources: progress in each source.
      rows: total number of rows in all previous windows.
      begins: if mixture weights change at training steps (see `Mixture.change_by`): how many tokens or documents the mixture
        had given at each change so far, not counting step 0.
    """

    window: int
    offset: int
    sources: tuple[SourceCursor, ...]
    rows: int = 0
    begins: tuple[int, ...] = ()


class InputPosition(NamedTuple):
    """Position of a `CorpusInput`.

    Attributes:
      cursor: where the current window begins.
      row: number of rows already taken from the current window.
    """

    cursor: Cursor
    row: int


def beginning(num_sources: int) -> InputPosition:
    """Returns the position before the first batch."""
    return InputPosition(Cursor(0, 0, (SourceCursor(),) * num_sources), 0)


def to_json(position: InputPosition, names: Sequence[str]) -> str:
    """Returns a position as JSON text of fewer than 200 characters per source. `names`: names of the sources, in order."""
    cursor = position.cursor
    sources = {
        name: [*source.position, source.documents, source.tokens, source.skipped]
        for name, source in zip(names, cursor.sources, strict=True)
    }
    steps = {"rows": cursor.rows, "begins": cursor.begins} if cursor.rows else {}
    return json.dumps(
        {"window": cursor.window, "offset": cursor.offset, "row": position.row, "sources": sources, **steps}
    )


def from_json(saved: Mapping[str, Any], names: Sequence[str]) -> InputPosition:
    """Reads a position from parsed JSON.

    Raises:
      ValueError, KeyError, TypeError: `saved` is not a position of the sources in `names`.
    """
    sources = []
    for name in names:
        numbers = [int(number) for number in saved["sources"][name]]
        if len(numbers) != _NUMBERS or min(numbers) < 0:
            raise ValueError(f"source {name!r} has {numbers}")
        sources.append(SourceCursor(Position(*numbers[:4]), *numbers[4:]))
    window, offset, row = (int(saved[name]) for name in ("window", "offset", "row"))
    # Positions that were saved before weights could change by steps don't have these entries.
    rows, begins = int(saved.get("rows", 0)), tuple(map(int, saved.get("begins", ())))
    if min(window, offset, row, rows, *begins) < 0:
        raise ValueError(f"window {window}, offset {offset}, row {row}, rows {rows}, begins {begins}")
    return InputPosition(Cursor(window, offset, tuple(sources), rows, begins), row)


def describe(
    settings: Mapping[str, Any], tokenizer: tokenizers.Tokenizer, sources: Sequence[OpenSource]
) -> dict[str, Any]:
    """Returns everything that determines an input's batches, except the position, as JSON values."""
    name = getattr(tokenizer, "name", getattr(tokenizer, "model", type(tokenizer).__name__))
    return {
        "settings": dict(settings),
        "tokenizer": {**tokenizer.fingerprint(), "name": str(name)},
        "order": [one.name for one in sources],
        "sources": {one.name: {"settings": one.settings(), "files": one.source.fingerprint()} for one in sources},
    }


def changes(before: Mapping[str, Any], now: Mapping[str, Any], sources: Sequence[OpenSource]) -> list[str]:
    """Lists what has changed in an input since a position was saved, one clause per change.

    Args:
      before: the result of `describe` that was saved with the position.
      now: the current result of `describe`.
      sources: the current sources.

    Raises:
      KeyError, TypeError, AttributeError: `before` is malformed.
    """
    # Older positions use the setting's former name.
    renamed = {"stopping_strategy" if k == "when_one_ends" else k: value for k, value in before["settings"].items()}
    found = _differences(renamed, now["settings"])
    old, new = dict(before["tokenizer"]), dict(now["tokenizer"])
    names = old.pop("name"), new.pop("name")
    if old != new:
        found.append(f"the tokenizer was {names[0]} ({_listed(old)}) and is {names[1]} ({_listed(new)})")
    found += _changed_sources(before["sources"], now["sources"], sources)
    # The order of the sources breaks ties between sources that are equally far behind their shares.
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
