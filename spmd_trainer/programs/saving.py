"""A training run's own checkpoints: opened as the task asks for, saved with what the run is."""

from __future__ import annotations

from spmd_trainer.checkpointing import Checkpointer, NonFiniteStateError
from spmd_trainer.errors import UserError
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState


def open_checkpointer(job: Job) -> Checkpointer:
    """Opens the run's checkpoints with the retention that the task asks for."""
    train_p = job.task.train
    return Checkpointer(
        job.settings.job_log_dir / "checkpoints",
        save_interval_steps=train_p.save_interval_steps,
        save_max_to_keep=train_p.save_max_to_keep,
        save_keep_interval_duration=train_p.save_keep_interval_duration,
    )


def save(job: Job, checkpoints: Checkpointer, step: int, state: TrainState, input_state: bytes | None) -> None:
    """Starts to save the state after a step, with the position of the training input.

    Raises:
      UserError: the state holds NaN or infinity.
    """
    metadata = {
        "experiment": job.resolved.name,
        "mesh": job.partitioner.mesh_shape(),
        "config": job.config_lines(),
        "num_train_steps": int(job.task.train.num_train_steps),
    }
    try:
        checkpoints.save(
            step,
            state,
            job.partitioner.metadata.variables,
            input_state={"state": input_state},
            metadata=metadata,
            force=True,
            check_finite=True,
        )
    except NonFiniteStateError as error:
        raise UserError(
            f"{error} The run stops here; the newest whole checkpoint is that of step {checkpoints.latest_step()}, and "
            "started again the run goes on from it. Let the learner skip such steps (check_valid_step and "
            "enable_skip_step_on_gradient_anomalies), clip gradients, or lower the learning rate."
        ) from error
