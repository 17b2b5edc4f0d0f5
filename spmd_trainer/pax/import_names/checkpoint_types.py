"""Pax's `checkpoint_types`: the formats in which Pax writes checkpoints. This trainer writes one format, Orbax'."""

from __future__ import annotations

import enum
from typing import Any


@enum.unique
class CheckpointType(enum.StrEnum):
    """A checkpoint format of Pax."""

    UNSPECIFIED = "unspecified"
    FLAX = "flax"
    GDA = "gda"
    PERSISTENCE = "persistence"


def retrieve_checkpoint_type(maybe_use_persistence_checkpointing: bool, task: Any) -> CheckpointType:
    """Returns the format in which Pax would write a task's checkpoints.

    Args:
      maybe_use_persistence_checkpointing: True for the format that Pax calls persistence.
      task: a task or its config.
    """
    if task.model.ici_mesh_shape is None:
        return CheckpointType.FLAX
    return CheckpointType.PERSISTENCE if maybe_use_persistence_checkpointing else CheckpointType.GDA
