"""Errors of Hugging Face folders. All of them are UserErrors, and CheckpointErrors of the matching kind."""

from __future__ import annotations

from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from spmd_trainer.errors import UserError


class HfError(CheckpointError, UserError):
    """A Hugging Face folder can't be read or written. The message says which one, why, and what to do."""


class HfNotFoundError(HfError, CheckpointNotFoundError):
    """The directory is no Hugging Face folder, or lacks a file."""


class HfDamagedError(HfError, DamagedCheckpointError):
    """A file does not hold what its format asks for."""


class HfMismatchError(HfError, CheckpointMismatchError):
    """The folder's tensors are not those of the model."""
