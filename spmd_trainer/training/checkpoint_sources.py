"""Opens checkpoints that other programs wrote (Hugging Face's libraries, PEFT, Pax or plain Flax) as `CheckpointSource`s."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from etils import epath

from spmd_trainer import pax
from spmd_trainer.checkpointing import CheckpointSource, flax
from spmd_trainer.training import rooms

if TYPE_CHECKING:
    from spmd_trainer.tasks_lib import SingleTask
    from spmd_trainer.train_states import TrainState


def open_whole_model(directory: epath.Path, step: int | None, variables: TrainState) -> CheckpointSource | None:
    """Opens a checkpoint for `--restore_checkpoint_dir`, if it has all variables of a model: a HF folder or a Pax checkpoint.

    Returns None for any other directory, e.g. this trainer's checkpoints. For the arguments, see `open_source`.
    """
    hf = _room("hf", directory)
    source: CheckpointSource | None = None if hf is None else hf.open_source(directory, step, variables)
    return source or pax.open_source(directory, step, variables)


def open_source(
    directory: epath.Path, step: int | None, variables: TrainState, *, task: SingleTask | None = None
) -> CheckpointSource | None:
    """Opens a checkpoint that another program wrote, for `init_from_checkpoint_rules`. Called by every process.

    Args:
      directory: a Hugging Face folder, a PEFT folder, or a directory of Pax or Orbax checkpoints.
      step: the checkpoint's step; None for the newest.
      variables: the model's variables, a TrainState of VariableSpecs.
      task: the task. PEFT adapters must fit its adapters; None refuses PEFT adapters.

    Returns:
      The source, or None if the directory contains no such checkpoint.

    Raises:
      CheckpointError: the checkpoint can't be opened.
    """
    source = open_whole_model(directory, step, variables) or flax.open_source(directory, step, variables)
    if source is None and (peft := _room("hf.peft", directory)) is not None:
        source = peft.open_source(directory, step, variables, task)
    return source


def _room(module: str, directory: epath.PathLike) -> ModuleType | None:
    """Imports and returns a module that reads Hugging Face or PEFT folders; returns None if the module isn't installed.

    Raises:
      UserError: the module isn't installed, but `directory` has the config file of a Hugging Face or PEFT folder.
    """
    if any((epath.Path(directory) / name).exists() for name in ("config.json", "adapter_config.json")):
        return rooms.need(module, str(directory))
    return rooms.find(module)


def is_hf_folder(directory: epath.PathLike) -> bool:
    hf = _room("hf", directory)
    return hf is not None and bool(hf.is_folder(directory))


def is_peft_folder(directory: epath.PathLike) -> bool:
    """Returns True for a directory of PEFT adapters, or one that contains such directories."""
    peft = _room("hf.peft", directory)
    return peft is not None and bool(peft.is_folder(directory))


def is_foreign(directory: epath.Path) -> bool:
    """Returns True if this process finds a Hugging Face folder, a PEFT folder or Pax checkpoints in the directory."""
    is_folder = is_hf_folder(directory) or is_peft_folder(directory)
    return is_folder or pax.find(directory) is not None
