"""Files that are seen whole or not at all."""

from __future__ import annotations

from collections.abc import Iterable

from etils import epath


def write_atomically(path: epath.Path, lines: Iterable[str]) -> None:
    """Writes a text file that is seen whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.writing"
    with unfinished.open("w", encoding="utf-8") as file:
        for line in lines:
            file.write(line + "\n")
    unfinished.replace(path)
