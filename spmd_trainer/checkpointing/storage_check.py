"""Finds out before training starts that its checkpoints could not be written."""

from __future__ import annotations

import math
import os
import shutil
from typing import Any

import jax
import numpy as np
from etils import epath

from spmd_trainer.checkpointing import records
from spmd_trainer.checkpointing.errors import CheckpointError


def checkpoint_bytes(variables: Any) -> int:
    """Returns the bytes of one checkpoint's arrays, for a tree of VariableSpecs. On disk they are compressed: fewer."""
    return sum(math.prod(spec.padded_shape) * _itemsize(spec.dtype) for spec in records.by_path(variables).values())


def check_storage(directory: epath.PathLike, bytes_needed: int) -> None:
    """Makes the directory, writes to it, and looks for free space.

    Args:
      directory: `job_log_dir/checkpoints`.
      bytes_needed: what will lie there at most: `checkpoint_bytes` times the steps kept, plus one being written.

    Raises:
      CheckpointError: it cannot be written, or has less free space. Says what to do. (Object stores don't tell what is
        free.)
    """
    directory = epath.Path(directory)
    probe = directory / f".writable-{jax.process_index()}-{os.getpid()}"
    try:
        directory.mkdir(parents=True, exist_ok=True)
        probe.write_text("This file may be deleted.")
        probe.unlink()
    except Exception as e:  # Object stores raise errors of their own.
        raise CheckpointError(
            f"Checkpoints cannot be written to {directory}: {type(e).__name__}: {e}. Give another --job_log_dir, or "
            "make this one writable for the user of this job."
        ) from e
    if "://" in str(directory):
        return
    free = shutil.disk_usage(directory).free
    if free < bytes_needed:
        raise CheckpointError(
            f"Checkpoints need {_gib(bytes_needed)} in {directory}, and {_gib(free)} are free. Free some space, give "
            "another --job_log_dir, or keep fewer steps (task.train.save_max_to_keep)."
        )


def _itemsize(dtype: Any) -> int:
    if jax.dtypes.issubdtype(dtype, jax.dtypes.prng_key):
        key = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct((), dtype))
        return int(key.size) * key.dtype.itemsize
    return np.dtype(dtype).itemsize


def _gib(count: int) -> str:
    return f"{count / 2**30:.2f} GiB"
