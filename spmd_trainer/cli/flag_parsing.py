"""Flag errors as one message and exit status 2."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from absl import app, flags

from spmd_trainer.errors import did_you_mean


def parse(argv: Sequence[str]) -> list[str]:
    """Parses absl flags; an unknown flag or a bad value ends the program with one message, before anything else is done."""
    try:
        return app.parse_flags_with_usage(list(argv)) if _asks_for_help(argv) else flags.FLAGS(list(argv))
    except flags.UnrecognizedFlagError as error:
        leave(f"unknown flag --{error.flagname}{did_you_mean(error.flagname, list(flags.FLAGS))}")
    except flags.Error as error:
        leave(str(error))


def leave(message: str) -> NoReturn:
    """Prints the message to stderr and exits with status 2."""
    sys.stderr.write(f"spmd-trainer: {message}\n")
    raise SystemExit(2)


def _asks_for_help(argv: Sequence[str]) -> bool:
    return any(arg.lstrip("-").startswith("help") or arg == "-?" for arg in argv[1:])
