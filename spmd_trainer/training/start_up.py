"""Prepares a built job for its first training step: makes the state, the compiled step and the input in parallel.

A run begins with its own newest checkpoint, a different run's checkpoint, or newly initialized variables; see `first_state`.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import platform
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from absl import logging
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.callbacks import Run
from spmd_trainer.checkpointing import Checkpointer, Restored, check_storage, checkpoint_bytes, frozen_base
from spmd_trainer.checkpointing.agreement import agreed, decided_by_process_0
from spmd_trainer.errors import UserError
from spmd_trainer.errors.installation import library_versions
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.sharding.messages import bytes_text, count_text
from spmd_trainer.step import host_states, step_fns
from spmd_trainer.step.layout import LogicalLayout
from spmd_trainer.step.learner import has_ema
from spmd_trainer.step.optax_bridge import reset_ema
from spmd_trainer.step.packing import Packed, ScalarPacking
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import (
    adapter_checkpoints,
    checkpoint_sources,
    elastic,
    reference_logps,
    report_parts,
    rooms,
    run_directory,
    same_settings,
    step_inputs,
    xla_flags,
)
from spmd_trainer.training.adapter_checkpoints import FOLDER_KEY, FrozenBase
from spmd_trainer.training.agreed_input import agree_on_input
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.checkpoints import restore_from
from spmd_trainer.training.corpus_stores import tokenised_ahead
from spmd_trainer.training.dataset_batches import batch_checker, check_first_batch
from spmd_trainer.training.early_stopping import EarlyStopping
from spmd_trainer.training.job import Job
from spmd_trainer.training.periodic import Schedule
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import TrainConfig


class FirstState(NamedTuple):
    """The state that a training run begins with.

    Attributes:
      state: the train state.
      input_state: the saved position of the training input; None to begin with the first batch.
      origin: where the variables came from, for the metadata of the run's checkpoints; see `adapter_checkpoints.begin`.
    """

    state: TrainState
    input_state: dict[str, Any] | None
    origin: dict[str, Any]


def first_state(job: Job, checkpoints: Checkpointer) -> FirstState:
    """Restores the run's newest checkpoint, else the one in `--restore_checkpoint_dir`, else initializes the variables.

    Raises:
      UserError: `--restore_checkpoint_dir` has no checkpoint; or the run's checkpoint was trained with a different `task.mup`.
      CheckpointError: the checkpoint is of a different model; all checkpoints of the run are damaged; or storage has too little
        space for the run's checkpoints.
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
            _require_same_mup(job, restored)
            restored = FrozenBase(job).joined(restored, metadata.variables, checkpoints.directory)
            phase.done = f"restored step {restored.step} from {checkpoints.directory}"
        return FirstState(restored.state, restored.input_state, adapter_checkpoints.origin_of(restored))
    if config.restore_checkpoint_dir is not None:
        return _restore_from(config.restore_checkpoint_dir, config.restore_checkpoint_step, job)
    return _fresh(job, train_p.init_from_checkpoint_rules or {})


def _require_same_mup(job: Job, restored: Restored) -> None:
    """Refuses to continue a run with different muP multipliers, because its variables and optimizer states depend on them.

    Raises:
      UserError: `task.mup` differs from the `task.mup` in the restored checkpoint.
    """
    saved = restored.metadata["metadata"].get("config")
    if saved is None:
        return
    before, now = (
        [line for line in lines if line.startswith("task.mup") and line != "task.mup: None"]
        for lines in (saved, job.config.experiment.lines())
    )
    if before != now:
        raise UserError(
            f"{job.config.job_log_dir}: step {restored.step} was trained with {'; '.join(before) or 'task.mup: None'}, and this "
            f"start has {'; '.join(now) or 'task.mup: None'}; give the same, or a new --job_log_dir"
        )


def _fresh(job: Job, rules: Mapping[Any, Any], *, restored_from: str | None = None) -> FirstState:
    with Phase("initialising the variables", _sizes(job)):
        # Waits for the devices, whose work takes most of the time of this phase.
        state = jax.block_until_ready(job.partitioner.initialize_train_state(job.prng_key))
    metadata = job.partitioner.metadata
    state, origin, report = adapter_checkpoints.begin(job, metadata, state, rules, restored_from=restored_from)
    if report is not None:
        logging.log(logging.WARNING if report.warnings else logging.INFO, "init_from_checkpoint_rules: %s", report)
        state = state if report.opt_states_loaded else _with_averages(job, state)
    return FirstState(state, None, origin)


def _restore_from(directory: epath.Path, step: int | None, job: Job) -> FirstState:
    if adapter_checkpoints.begins_with(job, directory):
        rules, restored_from = adapter_checkpoints.rules_of(job, directory)
        return _fresh(job, rules, restored_from=restored_from)
    if decided_by_process_0(lambda: checkpoint_sources.is_hf_folder(directory)):
        with Phase(f"reading the Hugging Face folder {directory}") as phase:
            state = _with_averages(job, rooms.need("hf").load(directory, job))
            phase.done = f"read the variables of {directory}; the optimizer states are fresh"
        return FirstState(state, None, {FOLDER_KEY: {"path": str(directory)}})
    with_input = bool(job.task.train.enable_input_checkpointing)
    restored = restore_from(job, job.partitioner.metadata, step=step, with_input=with_input)
    logging.info("this run's own checkpoints go to %s", job.config.job_log_dir / "checkpoints")
    return FirstState(restored.state, restored.input_state, adapter_checkpoints.origin_of(restored))


def _sizes(job: Job) -> str:
    """Returns the size of the state to initialize, e.g. '15 variables; with optimizer states, 44.1 KiB per device'."""
    metadata, mesh_shape = job.partitioner.metadata, job.partitioner.mesh_shape()
    num_bytes = sum(variable.bytes_per_device(mesh_shape) for variable in metadata.records())
    variables = count_text(len(jax.tree.leaves(metadata.variables.mdl_vars)), "variable")
    return f"{variables}; with optimizer states, {bytes_text(num_bytes)} per device"


def _with_averages(job: Job, state: TrainState) -> TrainState:
    """Returns the state with moving averages reset to the loaded variables, if the learner keeps moving averages."""
    if not has_ema(job.task.learner):
        return state
    restarted: TrainState = jax.jit(
        lambda s: s.replace(opt_states=reset_ema(s.opt_states, s.mdl_vars)),
        out_shardings=job.partitioner.metadata.shardings,
        donate_argnums=0,
    )(state)
    return restarted


@dataclasses.dataclass(frozen=True)
class CompiledTrainStep:
    """The compiled train step, and how to read its scalars.

    Attributes:
      fn: function of (state, key, batch) that returns (new state, packed scalars); None for a run that is finished already.
      packing: unpacks the scalars.
      attention: one line per chosen attention or expert kernel; see `report_parts.traced`.
      xla_flags: the experiment's XLA flags with which the step is compiled.
    """

    fn: Any
    packing: ScalarPacking
    attention: Sequence[str] = ()
    xla_flags: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def start(
    job: Job, run: Run, callbacks: CallbackList, checkpointer: Checkpointer, inputs: contextlib.ExitStack
) -> tuple[Job, CompiledTrainStep, Prefetcher]:
    """Compiles the train step in a thread while the state is restored or initialized, and opens the training input.

    Returns:
      The job in the ramp stage of the run's first step; its compiled step; and the training input, which `inputs` closes.

    Raises:
      UserError: the input, or the checkpoint that the run begins with, doesn't fit the job.
      CheckpointError: see `first_state`.
    """
    config = job.config
    run_directory.describe(config.job_log_dir, _about(job), job.settings_lines())
    pool = concurrent.futures.ThreadPoolExecutor(1, "compile")
    newest = decided_by_process_0(checkpointer.latest_step)
    job = job.at_step(newest or 0)
    compiling = None if _seems_finished(job, newest) else pool.submit(compile_train_step, job)
    # Doesn't wait for the thread, so that an error in the checkpoint or the input is reported before the compiler is done.
    pool.shutdown(wait=False)
    run.state, saved_input_state, run.origin = first_state(job, checkpointer)
    run.step = run.first_step = int(run.state.step)
    if (now := job.at_step(run.step)) is not job:  # the run began with another checkpoint than its own newest one
        job, compiling = now, None
    run.batch = job.inputs_shape_dtype
    # Only a run without checkpoints still has the reference model's variables. Listing the directory is slow, so it comes second.
    if reference_logps.inputs_of(job) and not checkpointer.holds_steps():
        reference_logps.compute(job, run.state)
    if not job.task.train.enable_input_checkpointing:
        saved_input_state = None
    run.input = batches = inputs.enter_context(train_batches(job, saved_input_state))
    callbacks.call("on_start", run)
    trains = run.step < run.num_steps and not run.stop_reason
    if not trains:
        step = CompiledTrainStep(None, ScalarPacking())
        why = run.stop_reason or "there is nothing to train"
        said = f"already finished at step {run.step} of {run.num_steps}: {why}"
    else:
        run.times.begin("input")
        batches.peek()
        _check_datasets(job)
        run.times.begin("compile")
        step = compiling.result() if compiling else compile_train_step(job)
        run.times.begin("start")
        # Each process waits here until all have compiled, because collectives in the first step would wait for only 30 s.
        same_settings.check_same_code()
        report_parts.log_choices(step.attention)
        said = f"training from step {run.step} to {run.num_steps}"
    if not jax.process_index():  # only now, because the compiled step names the kernels
        run_directory.write_report(job.sharding_report(step.attention), config.job_log_dir)
    run_directory.mark_begin_of_training(config.job_log_dir, config.experiment.overrides, config.given(), trains=trains)
    logging.info("%s%s", said, f", with {job.stage}" if job.stage else "")
    return job, step, batches


def _check_datasets(job: Job) -> None:
    """Checks the first batch of each dataset that training will evaluate or decode, so that data errors are found early.

    Called by every process, while the train step is compiled.

    Raises:
      UserError: see `check_first_batch`.
    """
    datasets, schedule = job.config.experiment.config, Schedule.of_run(job.config.of(TrainConfig))
    used = [("evaluation", one) for one in datasets.eval_datasets if schedule.eval_interval]
    used += [("decode", one) for one in datasets.decode_datasets if schedule.decode_interval]
    for kind, input_p in used:
        built = agreed(functools.partial(check_first_batch, job, input_p, kind))
        # All processes must do the same, because building an input exchanges data between them.
        if all(multihost.gather(f"the beginning of {kind} dataset {input_p.name}", built is not None)):
            job.keep_input(input_p, built)


def _about(job: Job) -> dict[str, object]:
    """Returns facts about this launch for the run's record: experiment, number of parameters, devices, versions."""
    devices = job.partitioner.mesh.devices
    return {
        "experiment": job.config.experiment.name,
        "parameters": job.partitioner.metadata.num_params() + job.partitioner.metadata.num_frozen_params(),
        "devices": {"count": int(devices.size), "kind": devices.flat[0].device_kind, "processes": jax.process_count()},
        "versions": {"python": platform.python_version(), **library_versions()},
    }


def move(
    job: Job, devices: Sequence[jax.Device], run: Run, batches: Prefetcher, inputs: contextlib.ExitStack
) -> tuple[Job, CompiledTrainStep, Prefetcher]:
    """Moves a run to other devices: its state, compiled step and input. Prefetched batches are dropped and read again.

    Args:
      run: the run, whose state, partitioner, batch and input are replaced.
      batches: the current training input.
      inputs: the exit stack that closes the training input. This function closes the old input, and enters the new one.

    Returns:
      The job on the new devices, its compiled step, and the new training input at the position of the old one.

    Raises:
      UserError: see `elastic.rebuild`.
    """
    run.times.begin("compile")
    with jax.transfer_guard_device_to_host("allow"):
        job, run.state = elastic.rebuild(job, devices, run.state)
        inputs.close()
        run.partitioner, run.batch = job.partitioner, job.inputs_shape_dtype
        run.input = inputs.enter_context(train_batches(job, {"state": batches.state}))
        return job, compile_train_step(job), run.input


def _seems_finished(job: Job, newest: int | None) -> bool:
    """Returns True if the newest checkpoint is the last one of the run, so that the train step need not be compiled ahead.

    This is a guess: an older checkpoint may be restored if the newest is damaged.
    """
    finished = newest is not None and newest >= int(job.task.train.num_train_steps)
    if newest is not None and job.task.early_stopping_fn is not None:
        finished |= run_directory.end_of_training(job.config.job_log_dir) == newest
    return multihost.broadcast(finished)


def compile_train_step(job: Job) -> CompiledTrainStep:
    """Compiles the train step ahead of time. The step returns the new state and the packed scalars.

    Raises:
      UserError: see `xla_flags.compile_with`.
    """
    packing, learner_p = ScalarPacking(), job.config.experiment.task_p.train.learner

    def lower(numbers: Mapping[str, float]) -> jax.stages.Lowered:
        def step(layout: LogicalLayout, state: TrainState, key: Any, *rest: Any) -> tuple[TrainState, Packed]:
            if numbers:
                key, traced = key
                layout = step_inputs.with_numbers(layout, learner_p, traced)
            state, output = step_fns.train_step(layout, state, key, *rest)
            return state, packing.pack(output)

        key: Any = job.abstract_prng_key
        key = (key, step_inputs.abstract(numbers)) if numbers else key
        return job.partitioner.partition(step, job.inputs_shape_dtype, is_eval=False).lower(key)

    with Phase("compiling the train step"):
        # Other modes, such as a plan, compile the step too.
        numbers = job.config.step_inputs if isinstance(job.config, TrainConfig) else {}
        try:
            lowered, attention = report_parts.traced(functools.partial(lower, numbers))
        except Exception:  # Python compares or converts a number; any other error will be raised again
            if not numbers:
                raise
            numbers = step_inputs.traceable(numbers, lower)
            lowered, attention = report_parts.traced(functools.partial(lower, numbers))
        flags = xla_flags.flags_for(job.config.experiment.experiment, job.partitioner.mesh.devices.flat[0])
        compiled = xla_flags.compile_with(lowered, flags, job.config.experiment.label)
        host_states.check_program(job.partitioner.layout, lowered, compiled)
    fn = (lambda state, key, batch: compiled(state, (key, numbers), batch)) if numbers else compiled
    return CompiledTrainStep(fn, packing, attention, flags)


@contextlib.contextmanager
def train_batches(job: Job, input_state: dict[str, Any] | None) -> Iterator[Prefetcher]:
    """Context manager that opens the training input, and yields a `Prefetcher` that prefetches batches to the devices.

    Args:
      input_state: {'state': the saved position of the input}; None starts at the beginning.
    """
    built = job.build_train_input()
    train_input = agree_on_input(built, "training", count=jax.process_count(), must_end_together=False)
    if input_state is not None and input_state["state"] is None:
        logging.warning("the training input %r has no position, so it starts from the beginning", train_input.name)
    elif input_state is not None:
        train_input.set_state(input_state["state"])
    check = batch_checker(job, train_input.name, job.process_inputs_shape_dtype)

    def put(batch: PyTree) -> PyTree:
        batch = job.cut(batch)
        check(batch)
        return job.partitioner.layout.put(batch)

    with tokenised_ahead(built, job.config), Prefetcher(train_input, put) as batches:
        yield batches
