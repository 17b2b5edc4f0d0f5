"""Writes text to a terminal safely, although file names, templates and library messages may contain control characters.

All text that the trainer shows to a person goes through `visible`. Every package of the trainer imports this module, so it
depends on the standard library only.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from typing import TextIO

from spmd_trainer.errors import UserError, disk_is_full

# What acts on a terminal or reorders its text: C0 and C1 controls (ESC is one), marks of writing direction, separators of lines
# and paragraphs, and halves of surrogate pairs, which stand for bytes of a file's name that are not UTF-8.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]")
# Control characters that messages use for their lines and columns.
_MEANT = "\n\t"


def visible(text: str, *, keep: str = _MEANT) -> str:
    r"""Returns a text in which every character that would control a terminal is escaped, e.g. ESC as `\x1b`.

    Args:
      keep: the characters to leave as they are; '' for text that must stay on one line.
    """
    return _ACTS.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def write(text: str, stream: TextIO | None = None, *, styled: bool = False) -> None:
    """Writes a text and flushes. Escapes characters that the stream's encoding lacks. Ignores a closed pipe or terminal.

    Args:
      text: the text, including its newlines.
      stream: `sys.stdout` unless given.
      styled: True if the text contains color codes. The caller has then applied `visible` to the rest of the text.

    Raises:
      UserError: the stream is a file, and its disk is full.
    """
    stream = stream or sys.stdout
    encoding = getattr(stream, "encoding", None) or "utf-8"
    shown = text if styled else visible(text)
    try:
        stream.write(shown.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except OSError as error:
        # Otherwise the reader is gone; the end of the command discards what is left.
        if disk_is_full(error):
            discard(stream)
            raise UserError(f"the output can't be written: {error.strerror}") from error


def write_last(text: str) -> None:
    """Writes 'spmd-trainer: TEXT' to stderr, for a process that is about to exit. Ignores errors, such as a full disk."""
    with contextlib.suppress(OSError, UserError):
        write(f"spmd-trainer: {text}\n", sys.stderr)


def flush() -> None:
    """Flushes stdout and stderr. Discards output that can't be written because the terminal is gone or the disk is full."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)


def discard(stream: TextIO) -> None:
    """Redirects a stream and its buffered text to the null device, because a failed flush makes Python exit with status 120."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
