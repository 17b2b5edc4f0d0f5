"""Positions of a corpus input: where the current window begins in each source, and how many of its rows are taken."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
