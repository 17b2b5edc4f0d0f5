"""Pax's `checkpoints`: formats and paths. `checkpointing` and `pax` read and write checkpoints."""

from spmd_trainer.checkpoint_paths import (
    CHECKPOINT_PREFIX,
    get_step_from_checkpoint_asset,
    is_checkpoint_asset,
    latest_checkpoint,
    latest_checkpoint_if_exists,
    make_checkpoint_step_dir,
    retrieve_latest_checkpoint_step,
    retrieve_latest_checkpoint_step_if_exists,
)
from spmd_trainer.checkpoint_types import CheckpointType, retrieve_checkpoint_type
from spmd_trainer.errors.absent_names import getter

__all__ = [
    "CHECKPOINT_PREFIX",
    "CheckpointType",
    "get_step_from_checkpoint_asset",
    "is_checkpoint_asset",
    "latest_checkpoint",
    "latest_checkpoint_if_exists",
    "make_checkpoint_step_dir",
    "retrieve_checkpoint_type",
    "retrieve_latest_checkpoint_step",
    "retrieve_latest_checkpoint_step_if_exists",
]

_READ = "read Pax's checkpoints with spmd_trainer.pax.read_checkpoint(directory, step), and this trainer's with "
_READ += "spmd_trainer.checkpointing.Checkpointer(directory).restore(...)"
_WRITE = "spmd_trainer.checkpointing.Checkpointer(directory).save(...) writes checkpoints"
ABSENT = {
    "restore_checkpoint": _READ,
    "save_checkpoint": _WRITE,
    "get_checkpointer": _WRITE,
    "reregister_type_handlers": "nothing needs to be registered",
    "AsyncCheckpointer": _WRITE,
    "Checkpointer": _WRITE,
    "TrainingCheckpointer": _WRITE,
    "PaxCheckpointHandler": _READ,
    "FlaxCheckpointHandler": _READ,
    "FlaxCheckpointer": _READ,
    "BaseInputCheckpointHandler": "the position of the input is saved with every checkpoint",
}
__getattr__ = getter(__name__, ABSENT)
