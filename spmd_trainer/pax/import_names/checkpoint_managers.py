"""Pax's `checkpoint_managers`. This trainer's is `checkpointing.Checkpointer`."""

from spmd_trainer.checkpoint_paths import INPUT_ITEM_NAME, STATE_ITEM_NAME
from spmd_trainer.checkpoint_types import CheckpointType
from spmd_trainer.errors.absent_names import getter

__all__ = ["INPUT_ITEM_NAME", "STATE_ITEM_NAME", "CheckpointType"]

ABSENT = {
    "OrbaxCheckpointManager": "use spmd_trainer.checkpointing.Checkpointer(directory, save_max_to_keep=..., ...)",
    "CheckpointManagerOptions": "give task.train.save_interval_steps, save_max_to_keep and save_keep_interval_duration, or "
    "the arguments of spmd_trainer.checkpointing.Checkpointer",
}
__getattr__ = getter(__name__, ABSENT)
