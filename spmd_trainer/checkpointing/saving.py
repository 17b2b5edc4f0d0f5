"""Helpers for saving checkpoints: checks of storage and of the state, timing, and the error of a failed save."""

from __future__ import annotations

import contextlib
import functools
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
from absl import logging
from etils import epath
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer.checkpointing import manifest, records, step_files, steps
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.checkpointing.errors import (
    CheckpointError,
    CheckpointNotFoundError,
    CheckpointReadError,
    NonFiniteStateError,
)
from spmd_trainer.checkpointing.records import dtype_name
from spmd_trainer.sharding.messages import bytes_text, format_duration
from spmd_trainer.storage import is_remote
from spmd_trainer.storage.access import free_space
from spmd_trainer.storage.retry import retry

if TYPE_CHECKING:
    from spmd_trainer.sharding.variables import VariableSpec
    from spmd_trainer.train_states import TrainState

MAX_LISTED = 20
# The maximum delay with which a network file system shows new files on other hosts.
_VISIBLE_SECONDS = 60.0


def arrays_by_path(state: TrainState, variables: TrainState, specs: Mapping[str, VariableSpec]) -> dict[str, jax.Array]:
    """Returns {path: array} after checking that the state matches its VariableSpecs.

    Args:
      state: a TrainState (or another tree) of jax.Arrays at padded shapes.
      variables: the same tree with VariableSpecs as leaves.
      specs: the VariableSpecs by path, in the tree's order.

    Raises:
      CheckpointError: the trees differ in structure, a leaf is not a jax.Array, or its shape or dtype differs from its spec.
    """
    leaves: list[Any]
    structure: Any
    leaves, structure = jax.tree.flatten(state)
    if structure != jax.tree.structure(variables):
        raise CheckpointError(
            "state and variables have different structures:\n"
            f"  state:     {structure}\n  variables: {jax.tree.structure(variables)}"
        )
    arrays = dict(zip(specs, leaves, strict=True))
    for path, array in arrays.items():
        spec = specs[path]
        if not isinstance(array, jax.Array):
            raise CheckpointError(f"{path} is a {type(array).__name__}, not a jax.Array.")
        if array.shape != tuple(spec.padded_shape) or dtype_name(array.dtype) != dtype_name(spec.dtype):
            raise CheckpointError(
                f"{path} is {array.shape} {dtype_name(array.dtype)}; its VariableSpec says {tuple(spec.padded_shape)} "
                f"{dtype_name(spec.dtype)} (logical shape {tuple(spec.logical_shape)})."
            )
    return arrays


def refuse_non_finite(step: int, arrays: Mapping[str, jax.Array]) -> None:
    """Raises an error if a floating-point array of a state holds NaN or infinity. The arrays are checked on the devices.

    Raises:
      NonFiniteStateError: a variable holds NaN or infinity; the message names such variables.
    """
    floats = {path: x for path, x in arrays.items() if x.size and jnp.issubdtype(x.dtype, jnp.inexact)}
    if not floats:
        return
    sharding = next(iter(floats.values())).sharding
    replicated = None
    if isinstance(sharding, NamedSharding):
        replicated = NamedSharding(sharding.mesh, PartitionSpec())
    finite = _all_finite(replicated)(list(floats.values()))
    bad = [path for path, good in zip(floats, finite.tolist(), strict=True) if not good]
    if bad:
        more = f" and {len(bad) - MAX_LISTED} more" if len(bad) > MAX_LISTED else ""
        raise NonFiniteStateError(
            f"Checkpoint step {step} was not saved: NaN or infinity in {', '.join(bad[:MAX_LISTED])}{more}."
        )


@functools.lru_cache(maxsize=8)
def _all_finite(replicated: NamedSharding | None) -> Callable[[Sequence[jax.Array]], jax.Array]:
    """Returns a jitted function from arrays to one replicated boolean per array: True if all its elements are finite."""

    def all_finite(arrays: Sequence[jax.Array]) -> jax.Array:
        return jnp.stack([jnp.isfinite(x).all() for x in arrays])

    return jax.jit(all_finite, out_shardings=replicated)


class SaveTimes:
    """Measures how long the caller of a save waits, and how long until the checkpoint is on disk.

    The caller continues while the checkpoint is still being written; either may finish first. A line with both times is logged
    when both are known, and never for a save that fails.
    """

    def __init__(self, what: str) -> None:
        """Starts the clock. `what` is the name of the checkpoint in the log, e.g. 'step 200'."""
        self._what = what
        self._began = time.monotonic()
        self._seconds: dict[str, float] = {}
        self._lock = threading.Lock()

    def mark(self, end: Literal["copied", "on disk"]) -> None:
        """Records the time until the arrays are copied to the host, or until every process has written its data to disk.

        The caller of the save marks 'copied'; the writing thread marks 'on disk'.
        """
        with self._lock:
            self._seconds[end] = time.monotonic() - self._began
            if len(self._seconds) == 2:
                took, waited = format_duration(max(self._seconds.values())), format_duration(self._seconds["copied"])
                logging.info("saved %s in %s (the loop waited %s)", self._what, took, waited)


def error_of(
    directory: epath.Path, step: int | None, cause: Exception, latest_step: Callable[[], int | None]
) -> CheckpointError:
    """Deletes the files of a failed save, and returns the error to raise.

    Args:
      directory: the directory of the checkpoints.
      step: the step that was being saved; None if no save was started.
      cause: the exception of the save.
      latest_step: returns the newest undamaged step; may raise CheckpointReadError.
    """
    from spmd_trainer.checkpointing import orbax_io

    if step is not None and jax.process_index() == 0:
        orbax_io.discard(directory, step)
    fate = "The step is discarded."
    try:
        newest = latest_step()
        if newest is not None and newest == step:
            fate = "All of its files are there, and the next start commits it."
        then = "there is no whole step yet." if newest is None else f"the newest whole step is {newest}."
    except CheckpointReadError as error:
        then = f"which steps are whole is not known ({error})"
    return CheckpointError(
        f"Saving checkpoint step {step} to {directory} failed: {type(cause).__name__}: {cause}\n"
        f"{fate} Check free space, quota and permissions there, then start the run again: {then}"
    )


def checkpoint_bytes(variables: TrainState) -> int:
    """Returns the size of one checkpoint's arrays in bytes, before compression.

    Raises:
      CheckpointError: paths would collide in the checkpoint, see `records.check_stored_keys`.
    """
    specs = records.by_path(variables)
    records.check_stored_keys(specs)
    return sum(math.prod(spec.logical_shape) * spec.dtype.itemsize for spec in specs.values())


def check_storage(directory: epath.PathLike, checkpoint_bytes: int, keep: int | None) -> None:
    """Checks that all processes share a directory and can write to it, and that it has free space for the checkpoints.

    Creates the directory, and writes a file to it that all processes must see. All processes must call it. Process 0 checks
    that one checkpoint fits into the free space. It warns if `keep` + 1 would not fit even without the existing checkpoints.
    Free space is checked on file systems only, because object stores report no limit. With a single process, an object store
    is not checked at all: `storage.access.check_writable` wrote to it when the run began.

    Args:
      directory: `job_log_dir/checkpoints`.
      checkpoint_bytes: the size of one checkpoint in bytes, as the function `checkpoint_bytes` returns it.
      keep: how many checkpoints are kept. None keeps all; the warning then assumes that 1 is kept.

    Raises:
      CheckpointError: on every process, if the directory cannot be written, is not shared by all processes, or has too little
        free space for one checkpoint. The message says what to do.
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
    """Writes the file `probe`, after creating its directory, on process 0 only. Returns the error as a text, or None."""
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
    """On every process but 0, waits until the file that process 0 wrote is visible. Returns the problem, or None."""
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
    """Returns the problem if one checkpoint exceeds the free space, else None. Warns if `keep` + 1 checkpoints don't fit."""
    free = free_space(directory)
    if free is None:
        return None
    advice = "Free some space, choose another --job_log_dir, or keep fewer steps (task.train.save_max_to_keep)."
    if free < checkpoint_bytes:
        needs, has = (f"{size / 2**30:.2f} GiB" for size in (checkpoint_bytes, free))
        return f"A checkpoint needs {needs} in {directory}, but only {has} are free. {advice}"
    # One more checkpoint than those kept: the one that is being written.
    needed, room = checkpoint_bytes * ((keep or 1) + 1), free + _used(directory)
    if room < needed:
        logging.warning(
            "%d checkpoints need %s in %s, but only %s are free, checkpoints that are there included. %s",
            (keep or 1) + 1,
            bytes_text(needed),
            directory,
            bytes_text(room),
            advice,
        )
    return None


def _used(directory: epath.Path) -> int:
    """Returns the total size of the existing checkpoints in bytes, by their manifests."""
    used = 0
    for step in steps.present(directory):
        with contextlib.suppress(CheckpointNotFoundError):  # deleted since it was listed
            used += manifest.num_bytes(steps.step_dir(directory, step), step)
    return used
