"""Errors that a user can cause and mend."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Something in the command, the experiment or the files is wrong; the message says what would be right."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Returns '; did you mean a or b?' for the nearest of `known`, or '; known: ...' when none is near."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=3, cutoff=0.6)
    if near:
        return f"; did you mean {' or '.join(near)}?"
    return f"; known: {', '.join(sorted(known)[:40])}" if known else ""
