"""Text for a terminal. Names of files, templates and messages of libraries come from others, and a terminal obeys them.

Standard library only, and imported by every room: whatever the trainer says to a person goes through `visible`.
"""

from __future__ import annotations

import os
import re
import sys
from typing import TextIO

from spmd_trainer.errors import UserError, disk_is_full

# What acts on a terminal or reorders its text: C0 and C1 controls (ESC is one), marks of writing direction, separators of lines
# and paragraphs, and halves of surrogate pairs, which stand for bytes of a file's name that are not UTF-8.
_ACTS = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u206f\ufeff\ufff9-\ufffb\ud800-\udfff]")
# Lines and columns of a message.
_MEANT = "\n\t"


def visible(text: str, *, keep: str = _MEANT) -> str:
    r"""Returns a text with `\x1b` for an ESC, and likewise for every character that would act on a terminal.

    Args:
      keep: the characters that may act; '' for text that must stay in one row.
    """
    return _ACTS.sub(lambda found: found[0] if found[0] in keep else repr(found[0])[1:-1], text)


def write(text: str, stream: TextIO | None = None, *, styled: bool = False) -> None:
    """Writes a text and flushes. Characters that the stream's encoding lacks come out escaped.

    Args:
      text: with its line ends.
      stream: `sys.stdout` unless given.
      styled: the text has colours, and `visible` was applied to everything else in it.

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


def discard(stream: TextIO) -> None:
    """Sends what a stream still holds, and all that follows, nowhere: Python would exit with status 120 for it."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
