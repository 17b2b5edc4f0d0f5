"""Opens what other programs wrote as a checkpoint source: Hugging Face's libraries, PEFT, Pax, plain Flax."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer import hf, pax
from spmd_trainer.checkpointing import CheckpointSource, flax
from spmd_trainer.checkpointing.sources import OpenForeign
from spmd_trainer.hf import peft

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask
    from spmd_trainer.train_states import TrainState

# What `--restore_checkpoint_dir` can name: it holds all variables of a model. Of the others rules say which to take.
_WHOLE_MODELS: tuple[OpenForeign, ...] = (hf.open_source, pax.open_source)


def open_whole_model(directory: epath.Path, step: int | None, variables: TrainState) -> CheckpointSource | None:
    """Opens what `--restore_checkpoint_dir` names; the arguments are those of `open_source`. None if it is of this trainer."""
    return next((source for opener in _WHOLE_MODELS if (source := opener(directory, step, variables))), None)


def open_source(
    directory: epath.Path, step: int | None, variables: TrainState, *, task: SingleTask | None = None
) -> CheckpointSource | None:
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
    source = open_whole_model(directory, step, variables) or flax.open_source(directory, step, variables)
    return source or peft.open_source(directory, step, variables, task)


def opener(task: SingleTask) -> OpenForeign:
    """Returns `open_source` for a task."""
    return functools.partial(open_source, task=task)


def is_foreign(directory: epath.Path) -> bool:
    """Returns True for what `open_whole_model` opens, without opening it. Called by every process."""
    return hf.find_agreed(directory) or pax.find_agreed(directory) is not None
