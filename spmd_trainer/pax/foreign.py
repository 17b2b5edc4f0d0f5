"""Finds out what else than this trainer wrote a checkpoint: Pax, a program in plain Flax, or Hugging Face's libraries."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer import hf, pax
from spmd_trainer.checkpointing import flax
from spmd_trainer.checkpointing.sources import OpenForeign, Source
from spmd_trainer.hf import peft

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask
    from spmd_trainer.train_states import TrainState

_OPENERS: tuple[OpenForeign, ...] = (hf.open_source, pax.open_source, flax.open_source)


def open_source(
    directory: epath.Path, step: int | None, variables: TrainState, *, task: SingleTask | None = None
) -> Source | None:
    """Opens a checkpoint that something else wrote, for `init_from_checkpoint_rules`. Called by every process.

    Args:
      directory: a Hugging Face folder, a folder of PEFT, or a directory of Pax' or Orbax' checkpoints.
      step: the step; None for the newest.
      variables: a TrainState of VariableSpecs: the model.
      task: the task, without which adapters of PEFT are refused.

    Returns:
      The source, or None if there is none of these.

    Raises:
      CheckpointError: there is one, and it can't be opened.
    """
    source = next((source for opener in _OPENERS if (source := opener(directory, step, variables))), None)
    return source or peft.open_source(directory, step, variables, task)


def opener(task: SingleTask) -> OpenForeign:
    """Returns `open_source` for a task."""
    return functools.partial(open_source, task=task)


def open_checkpoints(directory: epath.Path) -> hf.HfCheckpoints | pax.PaxCheckpoints | None:
    """Opens a directory with the reading methods of `Checkpointer`; None if it is of this trainer. Called by every process."""
    if hf.find_agreed(directory):
        return hf.HfCheckpoints(directory)
    found = pax.find_agreed(directory)
    return None if found is None else pax.PaxCheckpoints(found)
