"""Finds out what else than this trainer wrote a checkpoint: Pax, a program in plain Flax, or Hugging Face's libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer.checkpointing.sources import OpenForeign, Source
from spmd_trainer.interop import flax, hf, pax

if TYPE_CHECKING:
    from spmd_trainer.train_states import TrainState

_OPENERS: tuple[OpenForeign, ...] = (hf.open_source, pax.open_source, flax.open_source)


def open_source(directory: epath.Path, step: int | None, variables: TrainState) -> Source | None:
    """Opens a checkpoint that something else wrote, for `init_from_checkpoint_rules`. Called by every process.

    Args:
      directory: a Hugging Face folder, or a directory of Pax' or Orbax' checkpoints.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model.

    Returns:
      The source, or None if there is none of these.

    Raises:
      CheckpointError: there is one, and it can't be opened.
    """
    return next((source for opener in _OPENERS if (source := opener(directory, step, variables))), None)


def open_checkpoints(directory: epath.Path) -> hf.HfCheckpoints | pax.PaxCheckpoints | None:
    """Opens a directory with the reading methods of `Checkpointer`; None if it is of this trainer. Called by every process."""
    if hf.find_agreed(directory):
        return hf.HfCheckpoints(directory)
    found = pax.find_agreed(directory)
    return None if found is None else pax.PaxCheckpoints(found)
