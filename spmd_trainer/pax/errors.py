"""Errors of Pax checkpoints.

Each derives from `UserError` and from its counterpart in `checkpointing.errors`, e.g. `PaxNotFoundError` from
`CheckpointNotFoundError`.
"""

from __future__ import annotations

from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
)
from spmd_trainer.errors import UserError


class PaxError(CheckpointError, UserError):
    """A Pax checkpoint can't be read. The message says which one, why, and what to do."""


class PaxNotFoundError(PaxError, CheckpointNotFoundError):
    """The directory has no such step, or no finished step."""


class PaxDamagedError(PaxError, DamagedCheckpointError):
    """The checkpoint lacks files, or its files don't hold what Pax writes."""


class PaxMismatchError(PaxError, CheckpointMismatchError):
    """The checkpoint's variables are not those of the model."""
