"""Pax's `checkpoint_paths`: finds the steps in a checkpoint directory of Pax (`checkpoint_00000020`) or of this trainer (`20`).

Also Pax's `checkpoint_types`: the formats in which Pax writes checkpoints. This trainer writes one format, that of Orbax.
"""

from __future__ import annotations

import enum
import re
from typing import Any

from etils import epath

from spmd_trainer.checkpointing.errors import CheckpointNotFoundError

__all__ = [
    "CHECKPOINT_PREFIX",
    "INPUT_ITEM_NAME",
    "STATE_ITEM_NAME",
    "CheckpointType",
    "checkpoint_name",
    "get_step_from_checkpoint_asset",
    "is_checkpoint_asset",
    "is_tmp_checkpoint_asset",
    "latest_checkpoint",
    "latest_checkpoint_if_exists",
    "make_checkpoint_step_dir",
    "retrieve_checkpoint_type",
    "retrieve_latest_checkpoint_step",
    "retrieve_latest_checkpoint_step_if_exists",
]

CHECKPOINT_PREFIX = "checkpoint_"
TMP_PREFIX = "tmp_"
STATE_ITEM_NAME = "state"
INPUT_ITEM_NAME = "train_input"
CHECKPOINT_PATTERN_RE = re.compile(rf"({CHECKPOINT_PREFIX})?\d+$")
TMP_CHECKPOINT_PATTERN_RE = re.compile(rf"{TMP_PREFIX}\d+\.{CHECKPOINT_PREFIX}\d+$")


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


def checkpoint_name(
    step: int, checkpoint_type: CheckpointType = CheckpointType.UNSPECIFIED, use_digit_step_subdirectory: bool = False
) -> str:
    """Returns Pax's name for a step's directory, e.g. 'checkpoint_00000020', or '20' with `use_digit_step_subdirectory`."""
    if use_digit_step_subdirectory:
        return str(step)
    return f"{CHECKPOINT_PREFIX}{step}" if checkpoint_type == CheckpointType.FLAX else f"{CHECKPOINT_PREFIX}{step:08d}"


def make_checkpoint_step_dir(
    checkpoint_dir: epath.PathLike,
    step: int,
    checkpoint_type: CheckpointType = CheckpointType.UNSPECIFIED,
    use_digit_step_subdirectory: bool = False,
) -> epath.Path:
    """Returns the path of a step's directory, with the name that Pax gives it; see `checkpoint_name`."""
    return epath.Path(checkpoint_dir) / checkpoint_name(step, checkpoint_type, use_digit_step_subdirectory)


def is_checkpoint_asset(x: epath.PathLike) -> bool:
    """Returns True if a path is named like the directory of a step, by Pax or by this trainer."""
    return bool(CHECKPOINT_PATTERN_RE.match(epath.Path(x).name))


def is_tmp_checkpoint_asset(x: epath.PathLike) -> bool:
    """Returns True if a path is named like the directory of a step that was not written completely."""
    name = epath.Path(x).name
    return bool(TMP_CHECKPOINT_PATTERN_RE.match(name)) or ".orbax-checkpoint-tmp" in name


def get_step_from_checkpoint_asset(checkpoint_dir: epath.PathLike) -> int:
    """Returns the step number in the name of a step's directory.

    Raises:
      ValueError: the path's name is not the name of a step's directory.
    """
    name = epath.Path(checkpoint_dir).name
    if not is_checkpoint_asset(name):
        raise ValueError(
            f"{checkpoint_dir} is not the directory of a step; its name is like 'checkpoint_00000020' or '20'"
        )
    return int(name.removeprefix(CHECKPOINT_PREFIX))


def latest_checkpoint_if_exists(checkpoint_dir: epath.PathLike) -> epath.Path | None:
    """Returns the directory of the newest step; None if there is none. Reads only names, so the step may be damaged."""
    directory = epath.Path(checkpoint_dir)
    if not directory.exists():
        return None
    found = [path for path in directory.iterdir() if is_checkpoint_asset(path)]
    return max(found, key=get_step_from_checkpoint_asset, default=None)


def latest_checkpoint(checkpoint_dir: epath.PathLike) -> epath.Path:
    """Returns the directory of the newest step.

    Raises:
      CheckpointNotFoundError: the directory has no steps.
    """
    found = latest_checkpoint_if_exists(checkpoint_dir)
    if found is None:
        raise CheckpointNotFoundError(f"there is no checkpoint in {checkpoint_dir}")
    return found


def retrieve_latest_checkpoint_step_if_exists(checkpoint_dir: epath.PathLike) -> int | None:
    """Returns the number of the newest step; None if there is no step. See `latest_checkpoint_if_exists`."""
    found = latest_checkpoint_if_exists(checkpoint_dir)
    return None if found is None else get_step_from_checkpoint_asset(found)


def retrieve_latest_checkpoint_step(checkpoint_dir: epath.PathLike) -> int:
    """Returns the number of the newest step.

    Raises:
      CheckpointNotFoundError: the directory has no steps.
    """
    return get_step_from_checkpoint_asset(latest_checkpoint(checkpoint_dir))
