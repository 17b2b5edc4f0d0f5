"""Saves checkpoints atomically, checks them before a restore, and restores them onto any mesh. A step is a saved checkpoint.

checkpointer.py         Checkpointer: saves in the background, restores onto any mesh
sources.py              CheckpointSource: a checkpoint of any format; restore: checks that it fits a state, then reads it
own_steps.py            the CheckpointSource for steps of this trainer: checks their files, reads them
manifest.py             the list of a step's files with checksums, which shows whether the step is damaged
step_files.py           reads files, with retries; distinguishes missing files from storage that does not respond
steps.py                lists, checks and deletes the steps of a directory, and waits for new ones
retired_steps.py        renames damaged steps, deletes old ones; parses `save_keep_interval_duration`: '12h', '90m'
shards.py               places variables of other trainers' checkpoints on a mesh while the next ones are read
agreement.py            makes checks and saves succeed or fail alike on all processes
records.py              the JSON record of a step: logical shapes, mesh, config, versions, input position
input_states.py         the positions in the training input, one for all processes or one for each process
frozen_base.py          runs with adapters (LoRA): the variables that they save, and the record of their frozen base
checksums.py            checksums of variables, computed on the devices
mismatch.py             explains why a checkpoint does not fit a model
saving.py               checks storage when a run starts, and each state before it is saved; explains why a save failed
loading_rules.py        init_from_checkpoint_rules: warm starts by regex, and their report
rule_matching.py        matches these rules against variable names
flax.py                 the CheckpointSource for checkpoints of plain Flax
orbax_io.py             writes and reads steps with Orbax; imported when first needed
unpadded_arrays.py      makes Orbax write arrays at their logical shapes; only this file and orbax_io.py import Orbax
errors.py               CheckpointError and its subclasses
"""

from spmd_trainer.checkpointing.checkpointer import Checkpointer
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    CheckpointReadError,
    DamagedCheckpointError,
    NonFiniteStateError,
    NoWholeCheckpointError,
)
from spmd_trainer.checkpointing.loading_rules import LoadReport
from spmd_trainer.checkpointing.rule_matching import LOAD_ALL, CheckpointLoadingRules
from spmd_trainer.checkpointing.saving import check_storage, checkpoint_bytes
from spmd_trainer.checkpointing.sources import CheckpointSource, Restored, restore
from spmd_trainer.checkpointing.steps import iterate_checkpoints

__all__ = [
    "LOAD_ALL",
    "CheckpointError",
    "CheckpointLoadingRules",
    "CheckpointMismatchError",
    "CheckpointNotFoundError",
    "CheckpointReadError",
    "CheckpointSource",
    "Checkpointer",
    "DamagedCheckpointError",
    "LoadReport",
    "NoWholeCheckpointError",
    "NonFiniteStateError",
    "Restored",
    "check_storage",
    "checkpoint_bytes",
    "iterate_checkpoints",
    "restore",
]
