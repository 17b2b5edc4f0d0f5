"""Where a training run begins: its own newest checkpoint, another run's, or fresh variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import Checkpointer, check_storage, checkpoint_bytes, loading_rules
from spmd_trainer.interop import foreign, hf
from spmd_trainer.metrics.early_stopping import EarlyStopping
from spmd_trainer.optim.learner import has_ema, reset_ema
from spmd_trainer.programs.checkpoints import no_checkpoint_in, open_checkpoints
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.phases import Phase
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.train_states import TrainState


def first_state(job: Job, checkpoints: Checkpointer) -> tuple[TrainState, dict[str, Any] | None]:
    """Restores the run's newest checkpoint, else the one of `--restore_checkpoint_dir`, else initialises.

    Args:
      job: the job.
      checkpoints: the run's own checkpoints.

    Returns:
      The state, and the input's position as it was saved (None: from the beginning).

    Raises:
      UserError: `--restore_checkpoint_dir` holds no checkpoint.
      CheckpointError: the checkpoint is another model's; the run has checkpoints and none is whole; or there is no room for
        its own.
    """
    config, train_p = job.config, job.task.train
    variables, mesh = job.partitioner.metadata.variables, job.partitioner.mesh
    if config.enable_checkpoint_saving:
        check_storage(checkpoints.directory, checkpoint_bytes(variables), train_p.save_max_to_keep)
        if isinstance(job.task.early_stopping_fn, EarlyStopping):
            check_storage(config.job_log_dir / "best", checkpoint_bytes(variables), 1)
    # A run whose steps are all damaged must not start over: restoring them raises.
    if checkpoints.holds_steps():
        with Phase("restoring the newest step") as phase:
            restored = checkpoints.restore(variables, mesh, with_input=train_p.enable_input_checkpointing)
            phase.done = f"restored step {restored.step} from {checkpoints.directory}"
        return restored.state, restored.input_state
    if config.restore_checkpoint_dir is not None:
        return _restore_from(config.restore_checkpoint_dir, config.restore_checkpoint_step, job)
    with Phase("initialising the variables", _sizes(job)):
        # Waited for: what takes long here is the devices' work.
        state = jax.block_until_ready(job.partitioner.initialize_train_state(job.prng_key))
    if train_p.init_from_checkpoint_rules:
        state = _warm_start(job, state, train_p.init_from_checkpoint_rules)
    return state, None


def _restore_from(directory: epath.Path, step: int | None, job: Job) -> tuple[TrainState, dict[str, Any] | None]:
    if hf.find_agreed(directory):
        with Phase(f"reading the Hugging Face folder {directory}") as phase:
            state = _with_averages(job, hf.load(directory, job))
            phase.done = f"read the variables of {directory}; the optimizer states are fresh"
        return state, None
    with open_checkpoints(directory) as other:
        if not other.holds_steps():
            raise no_checkpoint_in(directory)
        with Phase(f"restoring {'the newest step' if step is None else f'step {step}'} of {directory}") as phase:
            restored = other.restore(
                job.partitioner.metadata.variables,
                job.partitioner.mesh,
                step=step,
                with_input=job.task.train.enable_input_checkpointing,
            )
            phase.done = f"restored step {restored.step} from {directory}"
    logging.info("this run's own checkpoints go to %s", job.config.job_log_dir / "checkpoints")
    return restored.state, restored.input_state


def _sizes(job: Job) -> str:
    """How much there is to initialise: '15 variables; with optimizer states, 44.1 KiB per device'."""
    metadata, mesh_shape = job.partitioner.metadata, job.partitioner.mesh_shape()
    num_bytes = sum(variable.bytes_per_device(mesh_shape) for variable in metadata.records())
    variables = count_text(len(jax.tree.leaves(metadata.variables.mdl_vars)), "variable")
    return f"{variables}; with optimizer states, {bytes_text(num_bytes)} per device"


def _warm_start(job: Job, state: TrainState, rules: Mapping[epath.PathLike, Any]) -> TrainState:
    variables, mesh = job.partitioner.metadata.variables, job.partitioner.mesh
    with Phase("loading variables by init_from_checkpoint_rules"):
        resolved = loading_rules.resolve_rules(variables, rules, check_contents=True, open_foreign=foreign.open_source)
        report = resolved.report
        loaded = {path for _, saved_paths in resolved.parts for path in saved_paths}
        for path, leaf in named_leaves(state):
            if path in loaded:
                leaf.delete()  # the loaded value needs the memory of the initial one
        for source, _ in resolved.parts:
            hf.warn_of_differences(source, job.task)
        state = resolved.load(state, variables, mesh)
    logging.log(logging.WARNING if report.warnings else logging.INFO, "init_from_checkpoint_rules: %s", report)
    return state if report.opt_states_loaded else _with_averages(job, state)


def _with_averages(job: Job, state: TrainState) -> TrainState:
    """Returns the state with moving averages, if the learner has them, that begin at the loaded variables."""
    if not has_ema(job.task.learner):
        return state
    restarted: TrainState = jax.jit(
        lambda s: s.replace(opt_states=reset_ema(s.opt_states, s.mdl_vars)),
        out_shardings=job.partitioner.metadata.shardings,
        donate_argnums=0,
    )(state)
    return restarted
