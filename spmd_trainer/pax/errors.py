"""Errors that are raised while Pax checkpoints are read.

Each class derives from `UserError` and from its counterpart in `checkpointing.errors`, e.g. `PaxNotFoundError` from
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
    """The checkpoint directory doesn't have the requested step, or has no finished step."""


class PaxDamagedError(PaxError, DamagedCheckpointError):
    """The checkpoint lacks files, or the content of its files is not what Pax writes."""


class PaxMismatchError(PaxError, CheckpointMismatchError):
    """The checkpoint's variables differ from those of the model."""
