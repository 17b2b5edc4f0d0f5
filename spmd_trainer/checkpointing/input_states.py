"""Saves and reads the positions in the training input: one for all processes, or one for each process.

If batch n of an input depends only on n, its position is valid for any number of processes: it is saved in the step's record,
and any job resumes from it. For other inputs (streams, inputs of other libraries), each process, even a single one, writes a
file into the item `input_states`, and only a job with the same number of processes can resume.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any

import jax
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.checkpointing import records, step_files
from spmd_trainer.checkpointing.agreement import agreed_problem
from spmd_trainer.checkpointing.errors import CheckpointMismatchError, DamagedCheckpointError
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.storage import json_values

ITEM = "input_states"
KEY = "input_state"


def file_name(process: int, count: int) -> str:
    """Returns the name of the file with a process' input position, in a job of `count` processes."""
    return f"process_{process}_of_{count}.json"


def agree(input_state: Mapping[str, object] | None, *, shared: bool) -> tuple[dict[str, Any] | None, bool]:
    """Returns this process' input position as JSON values, and whether all processes share it. All processes must call it.

    Args:
      input_state: this process' position.
      shared: whether the input declares its position valid for any number of processes.

    Raises:
      CheckpointError: on every process, if the position of one of them cannot be saved.
    """
    found: list[dict[str, Any] | None] = []
    agreed_problem(lambda: found.append(records.to_json(input_state)))
    digest = hashlib.sha256(json.dumps(found[0], sort_keys=True).encode()).hexdigest()
    answers = multihost.gather("the position of the input", digest)
    return found[0], shared and all(other == digest for other in answers)


def read(step_dir: epath.Path, record: records.Record) -> dict[str, Any] | None:
    """Returns the position from which this process resumes the training input.

    Raises:
      CheckpointMismatchError: each process saved its own position, and this job has a different number of processes.
      DamagedCheckpointError: this process' file is missing or malformed.
      CheckpointNotFoundError, CheckpointReadError: see `step_files.read_file`.
    """
    processes = record.get("input_states")
    if processes is None or processes["same"]:
        return record["input_state"]
    saved, count = processes["processes"], jax.process_count()
    if saved != count:
        raise CheckpointMismatchError(
            f"Checkpoint step {record['step']} in {step_dir.parent} holds {_positions(saved)}, and this job has "
            f"{count_text(count, 'process', 'processes')}. The input reads a share of its own on every process, so only as many "
            f"processes as saved it can resume it. Start {saved}, or begin the input again with "
            "task.train.enable_input_checkpointing=False. (An input whose position holds for any number says so with "
            "the class attribute state_is_shared = True.)"
        )
    name = f"{ITEM}/{file_name(jax.process_index(), count)}"
    try:
        entry = records.from_json(step_files.read_file(step_dir, name, json_values.content_of))
        position: dict[str, Any] | None = entry[KEY]
        return position
    except (step_files.MissingFileError, ValueError, KeyError, TypeError) as error:
        raise DamagedCheckpointError(
            f"Checkpoint step {record['step']}: {step_dir / name} is missing or malformed ({error})."
        ) from error


def _positions(saved: int) -> str:
    if saved == 1:
        return "the position of the training input on the one process that saved it"
    return f"{saved} positions of the training input, one for each of the {saved} processes that saved it"
