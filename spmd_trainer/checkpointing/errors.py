"""What can go wrong with a checkpoint, by name."""

from __future__ import annotations


class CheckpointError(Exception):
    """A checkpoint could not be saved, found or read. The message says which, why, and what to do."""


class CheckpointNotFoundError(CheckpointError, ValueError):
    """There is no such step, or no whole step at all."""


class DamagedCheckpointError(CheckpointError, ValueError):
    """The step asked for lacks files, or they do not hold what was written."""


class CheckpointMismatchError(CheckpointError, ValueError):
    """The checkpoint is whole, but holds other variables than the model wants."""


class NonFiniteStateError(CheckpointError, ValueError):
    """A state that holds NaN or infinity was not saved."""
