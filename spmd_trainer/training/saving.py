"""Opens a training run's checkpoints with the task's settings, and saves checkpoints with a description of the run."""

from __future__ import annotations

from collections.abc import Callable

from spmd_trainer.callbacks import Callback, Run, Turn
from spmd_trainer.checkpointing import Checkpointer, NonFiniteStateError, frozen_base
from spmd_trainer.errors import UserError


class Checkpoints(Callback):
    """Callback that keeps a run's checkpoints open from the start of the run to its end.

    Attributes:
      checkpointer: the checkpoints in `job_log_dir/checkpoints`. Set by `on_open`.
    """

    turn = Turn.WRITES
    checkpointer: Checkpointer

    def __init__(self, check_owner: Callable[[], None] = lambda: None):
        """Stores `check_owner`, which is called before each save and raises if another process has taken over the directory."""
        self._check_owner = check_owner

    def on_open(self, run: Run) -> None:
        """Opens the checkpoints with `task.train`'s settings for saving and deleting checkpoints. Writes no file."""
        train_p = run.task.train
        self.checkpointer = Checkpointer(
            run.job_log_dir / "checkpoints",
            save_interval_steps=train_p.save_interval_steps,
            save_max_to_keep=train_p.save_max_to_keep,
            save_keep_interval_duration=train_p.save_keep_interval_duration,
        )

    def save(self, run: Run) -> None:
        self._check_owner()
        save_state(self.checkpointer, run)

    def on_failure(self, run: Run, error: BaseException) -> None:
        """Waits for the save in progress. If the save fails, its error is only logged, because `error` is the one to report."""
        del run
        if hasattr(self, "checkpointer"):  # not if an earlier callback's `on_open` failed
            self.checkpointer.__exit__(type(error), error, error.__traceback__)

    def on_end(self, run: Run) -> None:
        """Closes the checkpoints.

        Raises:
          CheckpointError: the save in progress failed.
        """
        del run
        self.checkpointer.close()


def save_state(checkpointer: Checkpointer, run: Run) -> None:
    """Starts to save the run's state, the position of its training input, and metadata that describe the run.

    A run with adapters saves its state without the frozen base.

    Raises:
      UserError: the state contains NaN or infinity.
      CheckpointError: this save could not start, or an earlier save failed.
    """
    metadata = {
        "experiment": run.experiment,
        "mesh": run.partitioner.mesh_shape(),
        "config": list(run.config_lines),
        "num_train_steps": run.num_steps,
        **run.origin,
    }
    variables = run.partitioner.metadata.variables
    try:
        checkpointer.save(
            run.step,
            frozen_base.trained_part(run.state, variables),
            frozen_base.trained_part(variables, variables),
            input_state={"state": None if run.input is None else run.input.state},
            metadata=metadata,
            force=True,
            check_finite=True,
            shared_input_state=run.input is None or run.input.state_is_shared,
        )
    except NonFiniteStateError as error:
        if not run.step:
            raise UserError(
                f"{error} These are the variables before the first step: check the initialisers of the layers, and what "
                "init_from_checkpoint_rules loads."
            ) from error
        newest = checkpointer.latest_step()
        raise UserError(
            f"{error} The run stops here; its newest whole checkpoint is step {newest}, and a restart "
            "continues from there. Let the learner skip invalid steps (check_valid_step and "
            "enable_skip_step_on_gradient_anomalies), clip gradients, or lower the learning rate."
        ) from error
