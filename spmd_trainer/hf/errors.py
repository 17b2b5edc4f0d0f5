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
    """A Hugging Face folder can't be read or written. The message names the folder, the reason, and a fix."""


class HfNotFoundError(HfError, CheckpointNotFoundError):
    """The directory lacks a file of a Hugging Face folder."""


class HfDamagedError(HfError, DamagedCheckpointError):
    """A file's content violates its format."""


class HfMismatchError(HfError, CheckpointMismatchError):
    """The folder's tensors differ from the model's."""
