"""Where a training run begins: its own newest checkpoint, another run's, or fresh variables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
from absl import logging
from etils import epath

from spmd_trainer.checkpointing import Checkpointer, check_storage, checkpoint_bytes, frozen_base
from spmd_trainer.metrics.early_stopping import EarlyStopping
from spmd_trainer.optim.learner import has_ema, reset_ema
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import adapter_checkpoints, checkpoint_sources, rooms
from spmd_trainer.training.adapter_checkpoints import FOLDER_KEY, FrozenBase
from spmd_trainer.training.checkpoints import restore_from
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import TrainConfig


class FirstState(NamedTuple):
    """What a training run begins with.

    Attributes:
      state: the state.
      input_state: the input's position as it was saved; None: from the beginning.
      origin: what the run's checkpoints note of where its variables came from; see `adapter_checkpoints.Beginning`.
    """

    state: TrainState
    input_state: dict[str, Any] | None
    origin: dict[str, Any]


def first_state(job: Job, checkpoints: Checkpointer) -> FirstState:
    """Restores the run's newest checkpoint, else the one of `--restore_checkpoint_dir`, else initialises.

    Args:
      job: the job.
      checkpoints: the run's own checkpoints.

    Raises:
      UserError: `--restore_checkpoint_dir` holds no checkpoint.
      CheckpointError: the checkpoint is another model's; the run has checkpoints and none is whole; or there is no room for
        its own.
    """
    config, train_p = job.config.of(TrainConfig), job.task.train
    metadata = job.partitioner.metadata
    if config.enable_checkpoint_saving:
        size = checkpoint_bytes(frozen_base.trained_part(metadata.variables, metadata.variables))
        check_storage(checkpoints.directory, size, train_p.save_max_to_keep)
        if isinstance(job.task.early_stopping_fn, EarlyStopping):
            check_storage(config.job_log_dir / "best", size, 1)
    # A run whose steps are all damaged must not start over: restoring them raises.
    if checkpoints.holds_steps():
        with Phase("restoring the newest step") as phase:
            restored = checkpoints.restore(
                metadata.variables, metadata.mesh, with_input=bool(train_p.enable_input_checkpointing)
            )
            restored = FrozenBase(job).joined(restored, metadata.variables, checkpoints.directory)
            phase.done = f"restored step {restored.step} from {checkpoints.directory}"
        return FirstState(restored.state, restored.input_state, adapter_checkpoints.origin_of(restored))
    if config.restore_checkpoint_dir is not None:
        return _restore_from(config.restore_checkpoint_dir, config.restore_checkpoint_step, job)
    return _fresh(job, train_p.init_from_checkpoint_rules or {})


def _fresh(job: Job, rules: Mapping[Any, Any], *, restored_from: str | None = None) -> FirstState:
    """Initialises the variables, and loads those that rules name."""
    with Phase("initialising the variables", _sizes(job)):
        # Waited for: what takes long here is the devices' work.
        state = jax.block_until_ready(job.partitioner.initialize_train_state(job.prng_key))
    begun = adapter_checkpoints.begin(job, job.partitioner.metadata, state, rules, restored_from=restored_from)
    report = begun.report
    if report is None:
        return FirstState(begun.state, None, begun.origin)
    logging.log(logging.WARNING if report.warnings else logging.INFO, "init_from_checkpoint_rules: %s", report)
    state = begun.state if report.opt_states_loaded else _with_averages(job, begun.state)
    return FirstState(state, None, begun.origin)


def _restore_from(directory: epath.Path, step: int | None, job: Job) -> FirstState:
    if adapter_checkpoints.begins_with(job, directory):
        rules, restored_from = adapter_checkpoints.rules_of(job, directory)
        return _fresh(job, rules, restored_from=restored_from)
    if checkpoint_sources.is_hf_folder_agreed(directory):
        with Phase(f"reading the Hugging Face folder {directory}") as phase:
            state = _with_averages(job, rooms.need("hf").load(directory, job))
            phase.done = f"read the variables of {directory}; the optimizer states are fresh"
        return FirstState(state, None, {FOLDER_KEY: {"path": str(directory)}})
    with_input = bool(job.task.train.enable_input_checkpointing)
    restored = restore_from(job, job.partitioner.metadata, step=step, with_input=with_input)
    logging.info("this run's own checkpoints go to %s", job.config.job_log_dir / "checkpoints")
    return FirstState(restored.state, restored.input_state, adapter_checkpoints.origin_of(restored))


def _sizes(job: Job) -> str:
    """How much there is to initialise: '15 variables; with optimizer states, 44.1 KiB per device'."""
    metadata, mesh_shape = job.partitioner.metadata, job.partitioner.mesh_shape()
    num_bytes = sum(variable.bytes_per_device(mesh_shape) for variable in metadata.records())
    variables = count_text(len(jax.tree.leaves(metadata.variables.mdl_vars)), "variable")
    return f"{variables}; with optimizer states, {bytes_text(num_bytes)} per device"


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
