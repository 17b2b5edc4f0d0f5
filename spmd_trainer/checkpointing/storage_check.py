"""Checks before training starts that its checkpoints can be written."""

from __future__ import annotations

import contextlib
import functools
import math
import time
import uuid
from typing import TYPE_CHECKING

import jax
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import manifest, records, step_files, steps
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointNotFoundError
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.access import free_space
from spmd_trainer.storage.retry import retry

if TYPE_CHECKING:
    from spmd_trainer.train_states import TrainState

# A network file system may show new files this much later on other hosts.
_VISIBLE_SECONDS = 60.0


def checkpoint_bytes(variables: TrainState) -> int:
    """Returns the size of one checkpoint's arrays in bytes, before compression.

    Args:
      variables: a TrainState (or another tree) of VariableSpecs.

    Raises:
      CheckpointError: their paths can't stand in one checkpoint, see `records.check_stored_keys`.
    """
    specs = records.by_path(variables)
    records.check_stored_keys(specs)
    return sum(math.prod(spec.logical_shape) * spec.dtype.itemsize for spec in specs.values())


def check_storage(directory: epath.PathLike, checkpoint_bytes: int, keep: int | None) -> None:
    """Creates the directory, writes a file to it that all processes must see, and compares the free space with what is needed.

    Called by every process; process 0 measures. Checkpoints that are there count as room, because later ones take their place.
    Free space is checked on file systems only: object stores have no limit to report. A single process writes nothing to an
    object store here: `storage.access.check_writable` has done so when the run began.

    Args:
      directory: `job_log_dir/checkpoints`.
      checkpoint_bytes: the size of one checkpoint, see the function of this name.
      keep: how many checkpoints are kept; None keeps all, and only the first two are counted.

    Raises:
      CheckpointError: on every process, if the directory cannot be written, is not shared by all processes, or has no room
        for one checkpoint. The message says what to do. If there is room for one but not for all, a warning is logged.
    """
    directory = epath.Path(directory)
    if is_remote(directory) and jax.process_count() == 1:
        return
    probe = directory / decided_by_process_0(lambda: f".writable-{uuid.uuid4().hex}")
    try:
        for check in (_write, _find):
            if problem := agreed_problem(functools.partial(check, probe)):
                raise CheckpointError(problem)
    finally:
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):
                probe.unlink(missing_ok=True)
    if problem := agreed_problem(lambda: None if jax.process_index() else _room(directory, checkpoint_bytes, keep)):
        raise CheckpointError(problem)


def _write(probe: epath.Path) -> str | None:
    """Writes a file into the directory, on process 0. Returns the problem, or None."""
    if jax.process_index():
        return None
    try:
        probe.parent.mkdir(parents=True, exist_ok=True)
        retry(lambda: probe.write_text("This file may be deleted."), what=f"writing to {probe.parent}")
    except Exception as e:  # Object stores raise errors of their own.
        return (
            f"Checkpoints cannot be written to {probe.parent}: {type(e).__name__}: {e}. Choose another --job_log_dir, or "
            "make this directory writable for the user of this job."
        )
    return None


def _find(probe: epath.Path) -> str | None:
    """Looks for process 0's file, on the others. Returns the problem, or None."""
    if jax.process_index() == 0:
        return None
    deadline = time.monotonic() + _VISIBLE_SECONDS
    while not step_files.read(f"looking for {probe}", probe.exists):
        if time.monotonic() > deadline:
            return (
                f"process {jax.process_index()} does not see in {probe.parent} what process 0 writes there: the directory is not "
                "shared. Choose a --job_log_dir on storage that all processes share."
            )
        time.sleep(1.0)
    return None


def _room(directory: epath.Path, checkpoint_bytes: int, keep: int | None) -> str | None:
    """Compares the free space with what is needed; warns, or returns the problem."""
    free = free_space(directory)
    if free is None:
        return None
    advice = "Free some space, choose another --job_log_dir, or keep fewer steps (task.train.save_max_to_keep)."
    if free < checkpoint_bytes:
        return f"A checkpoint needs {_gib(checkpoint_bytes)} in {directory}, but only {_gib(free)} are free. {advice}"
    # Besides those kept there is the one that is being written.
    needed, room = checkpoint_bytes * ((keep or 1) + 1), free + _used(directory)
    if room < needed:
        logging.warning(
            "%d checkpoints need %s in %s, but only %s are free, checkpoints that are there included. %s",
            (keep or 1) + 1,
            _gib(needed),
            directory,
            _gib(room),
            advice,
        )
    return None


def _used(directory: epath.Path) -> int:
    """Returns the bytes of the checkpoints that are there, by their manifests."""
    used = 0
    for step in steps.present(directory):
        with contextlib.suppress(CheckpointNotFoundError):  # deleted since it was listed
            used += manifest.num_bytes(steps.step_dir(directory, step), step)
    return used


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
