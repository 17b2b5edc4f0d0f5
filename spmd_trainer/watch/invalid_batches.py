"""Writes the batches of the first invalid steps into the run's directory, for `--mode=replay`."""

from __future__ import annotations

import collections
import io
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step.packing import Scalars
from spmd_trainer.storage import reading
from spmd_trainer.storage.run_files import names_in
from spmd_trainer.train_states import PyTree
from spmd_trainer.training.invalid_steps import is_finite, is_valid

# Maximum number of batches that are written to a run's directory.
MAX_BATCHES = 5
# Steps with finite loss and gradients (too large for the learner) write only up to this many batches: a NaN may follow.
_MAX_FINITE = 3
# Prefix of the array names in a file, because `np.savez` has arguments of its own, such as 'file'.
_PREFIX = "batch/"


class InvalidBatches(Callback):
    """Keeps the batch of each dispatched step, and writes it to a file if the step turns out to be invalid.

    Each process writes its own rows to `replay/step_N/process_I.npz` in the run's directory. At most `MAX_BATCHES` batches are
    written; to replay later invalid steps, `--mode=replay` reads their batches from the input.
    """

    turn = Turn.FIRST  # before the callback that may end the run at an invalid step

    def __init__(self) -> None:
        self._in_flight: collections.deque[tuple[int, PyTree]] = collections.deque()
        self._written: set[int] | None = None

    def after_dispatch(self, run: Run, step: int) -> None:
        """Keeps the step's batch until the step's scalars arrive."""
        self._in_flight.append((step, run.dispatched))

    def after_step(self, run: Run, step: int, scalars: Scalars) -> None:
        batch = None
        while self._in_flight and self._in_flight[0][0] <= step:
            number, kept = self._in_flight.popleft()
            batch = kept if number == step else batch
        if batch is None or is_valid(scalars):
            return
        if self._written is None:
            self._written = written_steps(run.job_log_dir)
        finite = is_finite(scalars)
        most = _MAX_FINITE if finite else MAX_BATCHES
        if len(self._written) >= most and step not in self._written:
            return
        try:
            path = write(run.job_log_dir, step, batch)
        except Exception as error:  # training goes on: the input can give the batch again
            logging.warning("the batch of the invalid step %d could not be written: %s", step, error)
            return
        self._written.add(step)
        more = f"; it is the last of {most} batches that are kept" if len(self._written) == most else ""
        logging.warning(
            "the batch of the invalid step %d is in %s%s. --mode=replay --step=%d, with the other flags as they are, %s",
            step,
            path,
            more,
            step,
            "takes it again" if finite else "says where the first NaN came from",
        )


def batch_file(job_log_dir: epath.Path, step: int) -> epath.Path:
    return job_log_dir / "replay" / f"step_{step}" / f"process_{jax.process_index()}.npz"


def written_steps(job_log_dir: epath.Path) -> set[int]:
    names = names_in(job_log_dir / "replay")
    numbers = [name.removeprefix("step_") for name in names if name.startswith("step_")]
    return {int(number) for number in numbers if number.isdecimal()}


def write(job_log_dir: epath.Path, step: int, batch: PyTree) -> epath.Path:
    """Writes this process's rows of a batch, including its padding rows, and returns the file's path.

    Args:
      step: number of the training step that used the batch.
      batch: global arrays, sharded over the devices on dimension 0.

    Raises:
      OSError: the file can't be written.
    """
    path, buffer = batch_file(job_log_dir, step), io.BytesIO()
    arrays: dict[str, Any] = {_PREFIX + name: local_rows(x) for name, x in named_leaves(batch)}
    np.savez(buffer, **arrays)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(buffer.getvalue())
    return path


def read(job_log_dir: epath.Path, step: int, like: PyTree) -> PyTree | None:
    """Returns this process's rows of a step's batch, as `write` stored them; None if there is no such file.

    The result is a pytree of numpy arrays with the same structure and dtypes as `like`.

    Raises:
      ValueError: the file was written for a different input, or is damaged.
    """
    path = batch_file(job_log_dir, step)
    try:
        data = reading.read(str(path))
    except FileNotFoundError:
        return None
    try:
        with np.load(io.BytesIO(data)) as file:
            arrays = {name.removeprefix(_PREFIX): file[name] for name in file.files}
    except Exception as error:  # zipfile and NumPy have many
        raise ValueError(f"{path} can't be read: {error}") from error
    names = [name for name, _ in named_leaves(like)]
    if sorted(names) != sorted(arrays):
        raise ValueError(f"{path} holds {', '.join(sorted(arrays))}; the input gives {', '.join(sorted(names))}")
    leaves = []
    for name, leaf in named_leaves(like):
        x = arrays[name]
        if x.dtype.kind == "V" and x.dtype.itemsize == np.dtype(leaf.dtype).itemsize:
            x = x.view(leaf.dtype)  # NumPy's files know no bfloat16
        leaves.append(x)
        if x.dtype != leaf.dtype:
            raise ValueError(f"{path} holds {name} as {x.dtype}; the input gives {leaf.dtype}")
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def local_rows(x: jax.Array) -> np.ndarray:
    """Returns this process's rows of a global array that is sharded on dimension 0. Waits for the devices."""
    shards = {shard.index[0].start or 0: shard.data for shard in x.addressable_shards}
    return np.concatenate([jax.device_get(shards[start]) for start in sorted(shards)])
