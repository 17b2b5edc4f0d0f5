"""Text helpers shared by errors and reports.

This module imports only the standard library: `spmd_trainer.errors` imports it, and errors in command-line flags must not wait
for the import of JAX.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence


def mesh_text(mesh_shape: Mapping[str, int]) -> str:
    """Returns axis names and sizes as text: `replica=1, data=4, mdl=2`."""
    return ", ".join(f"{name}={size}" for name, size in mesh_shape.items()) or "no axes"


def spec_text(spec: Iterable[object] | None) -> str:
    """Returns a PartitionSpec as a user would write it: `P('data', None)`; None is `P()`.

    JAX's own repr has changed between releases and ends a single entry with a comma. Reports need a stable text.
    """
    return f"P({', '.join(repr(entry) for entry in spec or ())})"


def nearest_names(name: object, known: Iterable[object], *, count: int = 3, cutoff: float = 0.6) -> list[str]:
    """Returns at most `count` of the known names that are spelled like `name`, the most similar first."""
    return difflib.get_close_matches(str(name), [str(k) for k in known], n=count, cutoff=cutoff)


def suggestion_text(near: Iterable[str]) -> str:
    """Returns `; did you mean a or b?` for the names a and b; '' without names."""
    names = " or ".join(near)
    return f"; did you mean {names}?" if names else ""


def did_you_mean(name: object, known: Iterable[object], *, otherwise: str | None = None, prefix: str = "") -> str:
    """Returns `; did you mean a or b?` with the known names spelled like `name`.

    Args:
      name: the user's misspelled name.
      known: the valid names.
      otherwise: the result if no name is similar. None: `; known: a, b, c`, with the first 40 names in alphabetical order.
      prefix: text before each name in the result, e.g. '--'; names are compared without it.
    """
    names = [str(k) for k in known]
    suggestion = suggestion_text(f"{prefix}{near}" for near in nearest_names(name, names))
    if suggestion or otherwise is not None:
        return suggestion or otherwise or ""
    return f"; known: {', '.join(f'{prefix}{known_name}' for known_name in sorted(names)[:40])}" if names else ""


def count_text(number: int, singular: str, plural: str | None = None) -> str:
    """Returns `1 device` or `8 devices`."""
    return f"{number:,} {singular if number == 1 else plural or singular + 's'}"


def named_text(names: Sequence[object], singular: str, plural: str | None = None) -> str:
    """Returns `device 3` or `devices 3, 4`."""
    return f"{singular if len(names) == 1 else plural or singular + 's'} {', '.join(map(str, names))}"


def shortened(text: str, most: int, end: str = "...") -> str:
    """Returns the text, or its first `most` characters and `end` if it is longer."""
    return text if len(text) <= most else text[:most] + end


def short_hash(text: str, digits: int = 16) -> str:
    """Returns the first `digits` hexadecimal digits of a text's SHA-256, for use as a key."""
    return hashlib.sha256(text.encode()).hexdigest()[:digits]


def table_lines(rows: Sequence[Sequence[str]], *, right: Collection[int] = (), ruled: bool = False) -> list[str]:
    """Returns the rows as lines, with aligned columns.

    Args:
      rows: the texts of each row's cells; all rows have the same number of cells. A header is given as the first row.
      right: indices of the right-aligned columns.
      ruled: draw a line below the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = [["-" * width for width in widths]] if ruled else []
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
        ).rstrip()
        for cells in [*rows[:1], *rule, *rows[1:]]
    ]


def bytes_text(number: float) -> str:
    """Returns a number of bytes as text, in the largest binary unit that fits: `512 B`, `4.0 KiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """Returns a duration as text in whole seconds, e.g. '42s', '3m05s', '2h10m'."""
    seconds = round(seconds)
    if seconds < 60:
        return f"{seconds}s"
    if seconds < 3600:
        return f"{seconds // 60}m{seconds % 60:02d}s"
    return f"{seconds // 3600}h{seconds % 3600 // 60:02d}m"


def format_duration(seconds: float) -> str:
    """Returns a duration as text, e.g. '0.42 s', '4.2 s', '42 s', '3m05s', '2h10m'."""
    if seconds < 0.995:
        return f"{seconds:.2f} s"
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    return f"{seconds:.0f} s" if seconds < 59.5 else format_seconds(seconds)
