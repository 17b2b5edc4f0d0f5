"""Finds out which trainer wrote a checkpoint, for `init_from_checkpoint_rules`."""

from __future__ import annotations

from etils import epath

from spmd_trainer.checkpointing.sources import OpenForeign, Source
from spmd_trainer.interop import flax, pax
from spmd_trainer.train_states import TrainState

_OPENERS: tuple[OpenForeign, ...] = (pax.open_source, flax.open_source)


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> Source | None:
    """Opens a checkpoint that another trainer wrote. Called by every process.

    Args:
      directory: the directory of a checkpoint or of checkpoints.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model.

    Returns:
      The source, or None if no other trainer's checkpoint is there.

    Raises:
      CheckpointError: there is one, and it can't be opened.
    """
    return next((source for opener in _OPENERS if (source := opener(directory, step, variables))), None)
