"""Trained checkpoints as evaluation and decode see them: variables without optimizer states."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from absl import logging

from spmd_trainer import learners
from spmd_trainer.checkpointing import (
    Checkpointer,
    CheckpointNotFoundError,
    DamagedCheckpointError,
    iterate_checkpoints,
)
from spmd_trainer.errors import UserError
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState


def restore_for_inference(job: Job, *, use_ema: bool, step: int | None = None) -> tuple[int, TrainState]:
    """Restores one checkpoint onto the job's mesh.

    Args:
      job: the job; `--restore_checkpoint_dir` and `--restore_checkpoint_step` say which checkpoint.
      use_ema: take the moving averages of the variables.
      step: this step instead of the flag's.

    Returns:
      The step, and the state without optimizer states.

    Raises:
      UserError: no such checkpoint, or it is another experiment's.
    """
    directory = job.settings.checkpoint_dir
    step = job.settings.restore_checkpoint_step if step is None else step
    partitioner = job.partitioner
    # Averages live in the optimizer's state: only then is it read.
    metadata = partitioner.metadata if use_ema else partitioner.eval_metadata()
    with Checkpointer(directory, read_only=True) as checkpoints:
        if not checkpoints.all_steps():
            raise UserError(f"no checkpoint in {directory}; train first, or give another --restore_checkpoint_dir")
        restored = checkpoints.restore(metadata.variables, partitioner.mesh, step=step, partial=not use_ema)
    state = restored.state
    if use_ema:
        if not learners.has_ema(job.task.learner):
            raise UserError("EMA variables were asked for, but the learner's optimizer has no ema_decay")
        state = dataclasses.replace(state, mdl_vars=learners.extract_ema(state.opt_states, state.mdl_vars))
    logging.info("restored step %d from %s", restored.step, directory)
    return restored.step, state.to_eval_state()


def follow(job: Job, *, use_ema: bool) -> Iterator[tuple[int, TrainState]]:
    """Yields the newest checkpoint and each later one as it appears, until that of the last training step."""
    last = int(job.task.train.num_train_steps)
    for step in iterate_checkpoints(
        job.settings.checkpoint_dir, stop_fn=lambda step: step is not None and step >= last
    ):
        try:
            restored = restore_for_inference(job, use_ema=use_ema, step=step)
        except (CheckpointNotFoundError, DamagedCheckpointError) as error:
            # The training run keeps only its newest steps, and may delete one while it is read.
            logging.warning("step %d is left out: %s", step, error)
            continue
        yield restored
