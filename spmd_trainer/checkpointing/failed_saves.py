"""What becomes of a step whose save failed, and what the user is told of it."""

from __future__ import annotations

from collections.abc import Callable

import jax
from etils import epath

from spmd_trainer.checkpointing.errors import CheckpointError, CheckpointReadError


def error_of(
    directory: epath.Path, step: int | None, cause: Exception, latest_step: Callable[[], int | None]
) -> CheckpointError:
    """Discards what a failed save has written, and returns the error to raise.

    Args:
      directory: the directory of the checkpoints.
      step: the step that was saved; None if no save was started.
      cause: what the save raised.
      latest_step: returns the newest whole step; may raise CheckpointReadError.
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
