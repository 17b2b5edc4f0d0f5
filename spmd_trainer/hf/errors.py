"""Exceptions for Hugging Face folders. Each is a UserError, and also the matching kind of CheckpointError."""

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
    """A Hugging Face folder lacks a required file; or a training step was requested, which such folders don't have."""


class HfDamagedError(HfError, DamagedCheckpointError):
    """A file in a Hugging Face folder is malformed or cut off."""


class HfMismatchError(HfError, CheckpointMismatchError):
    """A Hugging Face folder doesn't fit the model, e.g. in its tensor names, shapes or vocabulary size."""
