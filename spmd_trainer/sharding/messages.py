"""Words that the errors and reports of this package share, so that the same thing always reads the same."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any


def mesh_text(mesh_shape: Mapping[str, int]) -> str:
    """A mesh as people say it: `replica=1, data=4, mdl=2`."""
    return ", ".join(f"{name}={size}" for name, size in mesh_shape.items()) or "no axes"


def spec_text(spec: Iterable[Any] | None) -> str:
    """A PartitionSpec as a user would write it: `P('data', None)`; None reads as `P()`.

    JAX's own repr keeps a comma behind a single entry and has changed between releases; reports and golden files need
    one that stays.
    """
    return f"P({', '.join(repr(entry) for entry in spec or ())})"


def nearest_text(name: object, known: Iterable[object]) -> str:
    """` Did you mean 'data'?` (with a space before it), or nothing where no known name is close to `name`."""
    close = difflib.get_close_matches(str(name), [str(k) for k in known], n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def count_text(number: int, singular: str, plural: str | None = None) -> str:
    """`1 device`, `8 devices`."""
    return f"{number} {singular if number == 1 else plural or singular + 's'}"


def bytes_text(number: float) -> str:
    """Bytes with a unit people read: `512 B`, `4.0 KiB`, `1.2 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:.0f} B" if unit == "B" else f"{number:.1f} {unit}"
        number /= 1024
    return f"{number:.1f} TiB"
