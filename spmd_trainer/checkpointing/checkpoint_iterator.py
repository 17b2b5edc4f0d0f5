"""Follows the checkpoints of a training run from another job."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import jax
from absl import logging
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.checkpointing import steps

_NOTHING_NEW = -1
_STOP = -2


def iterate_checkpoints(
    directory: epath.PathLike,
    *,
    last_step_seen: int | None = None,
    stop_fn: Callable[[int | None], bool] | None = None,
    poll_seconds: float = 10.0,
    timeout_seconds: float | None = None,
) -> Iterator[int]:
    """Yields the newest whole step each time there is a newer one. Called by every process of the job.

    Steps that appear while the caller works on one are skipped, but for the newest. The directory need not exist yet.
    The training run may delete a step while the caller reads it, or bytes of it may be damaged: `Checkpointer.restore`
    then raises a CheckpointError, and the caller goes on to the next step.

    Args:
      directory: `job_log_dir/checkpoints` of the training run.
      last_step_seen: only newer steps count.
      stop_fn: called on process 0 before each look with the last step seen (or None); when it returns True and the
        look finds nothing newer, the iteration ends. None: never.
      poll_seconds: how long to wait between looks.
      timeout_seconds: the iteration ends when no new step came for so long; None: never.
    """
    directory = epath.Path(directory)
    seen = last_step_seen
    since = time.monotonic()
    while True:
        answer = _NOTHING_NEW
        if jax.process_index() == 0:
            expired = timeout_seconds is not None and time.monotonic() - since >= timeout_seconds
            # The order matters: a step saved between a look and the question would be lost.
            last_look = expired or (stop_fn is not None and stop_fn(seen))
            newest = steps.newest_whole(directory, newer_than=-1 if seen is None else seen)
            answer = newest if newest is not None else _STOP if last_look else _NOTHING_NEW
        answer = multihost.from_process_0(answer)
        if answer == _STOP:
            return
        if answer == _NOTHING_NEW:
            logging.log_first_n(logging.INFO, "Waiting for checkpoints newer than step %s in %s.", 1, seen, directory)
            time.sleep(poll_seconds)
            continue
        seen = answer
        yield seen
        since = time.monotonic()
