"""Errors that a user can cause and fix."""

from __future__ import annotations

from spmd_trainer.errors import unknown_fields
from spmd_trainer.sharding.messages import did_you_mean

__all__ = ["MissingCompilerError", "UserError", "did_you_mean", "first_line", "first_paragraph"]


class UserError(ValueError):
    """Something in the command, the experiment or the files is wrong; the message says what would be right.

    Attributes:
      exit_status: the exit status of a process that it ends.
      leaves_in_order: True if the other processes of the job end at the same point, so that none is told of a failure.
    """

    exit_status = 2
    leaves_in_order = False

    def __init__(self, *args: object, exit_status: int | None = None):
        """Keeps the message, and the exit status if it is not that of the class."""
        super().__init__(*args)
        if exit_status is not None:
            self.exit_status = exit_status


class MissingCompilerError(UserError):
    """The compiler for a topology's chips is not installed."""


def first_paragraph(error: BaseException) -> str:
    """Returns an error's message without the configuration that fiddle appends.

    If the error is about a field that a config doesn't have, the message names the nearest fields.
    """
    text = str(error).split("Fiddle context:")[0].strip()
    unknown = unknown_fields.of(error, text)
    if unknown is None:
        return text
    owner = unknown.owner.removeprefix("spmd_trainer.")
    return f"{owner} has no field {unknown.name!r}{did_you_mean(unknown.name, unknown.known)}"


def first_line(error: BaseException) -> str:
    """Returns the first line of `first_paragraph`, or the error's class if it has no text."""
    return first_paragraph(error).partition("\n")[0] or type(error).__name__
