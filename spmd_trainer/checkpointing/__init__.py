"""Checkpoints that are whole or absent, fit the model or are refused, and move between meshes.

checkpointer.py    Checkpointer: save in the background, restore onto any mesh
manifest.py        which files a step has and what they hold: tells whole steps from damaged ones
steps.py           the steps of a directory
records.py         the JSON record: logical shapes, mesh, config, versions, input position
mismatch.py        why a checkpoint does not fit a model
state_checks.py    what a state must pass before it is saved
loading_rules.py   init_from_checkpoint_rules: warm starts by regex
checkpoint_iterator.py  evaluation and decoding jobs that follow a run
storage_check.py   writable and enough space, before training starts
orbax_io.py        all that is Orbax, imported when first needed
"""

from spmd_trainer.checkpointing.checkpoint_iterator import iterate_checkpoints
from spmd_trainer.checkpointing.checkpointer import Checkpointer, Restored
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    NonFiniteStateError,
)
from spmd_trainer.checkpointing.loading_rules import LOAD_ALL, CheckpointLoadingRules, LoadReport, init_from_rules
from spmd_trainer.checkpointing.storage_check import check_storage, checkpoint_bytes

__all__ = [
    "LOAD_ALL",
    "CheckpointError",
    "CheckpointLoadingRules",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "Checkpointer",
    "DamagedCheckpointError",
    "LoadReport",
    "NonFiniteStateError",
    "Restored",
    "check_storage",
    "checkpoint_bytes",
    "init_from_rules",
    "iterate_checkpoints",
]
