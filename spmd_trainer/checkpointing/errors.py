"""Errors that are raised if a checkpoint can't be saved, found or read."""

from __future__ import annotations

# The exit status of a command that needs a checkpoint and finds only damaged ones.
_DAMAGED = 5


class CheckpointError(Exception):
    """A checkpoint could not be saved, found or read. The message says which one, why, and what to do.

    Attributes:
      exit_status: the exit status of a command that fails with this error.
    """

    exit_status = 2


class CheckpointNotFoundError(CheckpointError, ValueError):
    """The requested step does not exist, or the directory has no undamaged step."""


class NoWholeCheckpointError(CheckpointNotFoundError):
    """The directory has steps, and all of them are damaged."""

    exit_status = _DAMAGED


class CheckpointReadError(CheckpointError):
    """Storage did not respond or denied access, even after retries. The checkpoint may be undamaged; it is not changed.

    Every function that lists a directory of checkpoints or reads a file in it may raise this error; most docstrings omit it.
    """


class DamagedCheckpointError(CheckpointError, ValueError):
    """The requested step lacks files, or its files differ from those that were written."""

    exit_status = _DAMAGED


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is undamaged, but its variables differ from those of the model."""


class NonFiniteStateError(CheckpointError, ValueError):
    """A state was not saved because it holds NaN or infinity."""
