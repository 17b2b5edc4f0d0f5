"""What a process says and returns when Ctrl-C ends it at once."""

from __future__ import annotations

import sys

# The shells' exit status for a program that SIGINT ended: 128 + 2.
STATUS_INTERRUPTED = 130


def say() -> None:
    """Writes to stderr that the process was interrupted, and what to do."""
    sys.stderr.write("spmd-trainer: interrupted; the same command continues from the newest checkpoint\n")
