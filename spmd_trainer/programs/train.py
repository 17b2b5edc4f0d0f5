"""The training loop. `train` reads top to bottom; the maths is in `step_fns.train_step`."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging
from praxis import base_layer

from spmd_trainer import garbage, hardware, learners, step_fns
from spmd_trainer.checkpointing import Checkpointer, NonFiniteStateError
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.metrics.packing import ScalarPacking
from spmd_trainer.metrics.progress import Progress
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs import decode, elastic, evaluate
from spmd_trainer.programs.checkpoints import mark_end_of_training
from spmd_trainer.programs.initial_state import first_state
from spmd_trainer.programs.invalid_steps import InvalidSteps
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.profiling import profile_capture
from spmd_trainer.programs.schedule import Due, Schedule
from spmd_trainer.programs.signals import save_requests
from spmd_trainer.programs.stopping import Stopping
from spmd_trainer.programs.watchdog import Watchdog
from spmd_trainer.state_specs import StateMetadata
from spmd_trainer.train_states import TrainState


@dataclasses.dataclass(frozen=True)
class Guards:
    """What watches over a run.

    Attributes:
      watchdog_seconds: a step (or save, evaluation, ...) that takes longer is reported; 0 reports none.
      stop_on_invalid_step: end the run at a step whose loss or gradient is NaN or Inf, or that the learner would skip.
    """

    watchdog_seconds: float = 600.0
    stop_on_invalid_step: bool = False


def train(job: Job, guards: Guards | None = None) -> None:
    """Trains until `task.train.num_train_steps`, from the newest checkpoint of the job's directory if there is one.

    On Ctrl-C or SIGTERM the step in progress is finished and saved, and the function returns. With several processes, all
    call it; a SIGTERM to any of them makes all of them save the same step.

    Raises:
      UserError: the run cannot go on: numbers went wrong, or a checkpoint could not be read or written.
    """
    settings, schedule = job.settings, Schedule.of_job(job)
    num_steps = schedule.num_steps
    with contextlib.ExitStack() as stack:
        run = _Run(job, guards or Guards(), stack)
        request = stack.enter_context(
            save_requests(exit_after_ondemand_checkpoint=settings.exit_after_ondemand_checkpoint)
        )
        job.write_description()

        compiled, state, batches = _start_up(job, run.checkpoints, stack)
        garbage.resume()
        step = int(state.step)
        key = job.prng_key
        run.begins(step, compiled.packing)
        profile = stack.enter_context(profile_capture(job))

        leave, input_ended = run.stopping.has_stopped, False
        while step < num_steps and not leave:
            run.watchdog.begins(f"training step {step + 1}")
            prefetched = next(batches, None)
            if prefetched is None:
                logging.warning("the training input has ended after step %d of %d", step, num_steps)
                leave = input_ended = True
            else:
                batch = prefetched.batch
                state, packed = compiled.fn(state, key, batch)
                step += 1
                profile(step)
                # The host waits for an older step, never for the one it just dispatched.
                run.reports.add(step, packed)

            devices = elastic.changed_devices(job, step)
            if devices is not None:
                run.reports.add_none()
                job, state = elastic.rebuild(job, devices, state)
                compiled, batches = _go_on(job, batches, stack)
                batch = None  # It lies on the devices before: an evaluation now does without it.
                run.moves(step, job, compiled.packing)

            asked = request.take()
            leave |= asked and request.leaves
            due = schedule.due(run.checkpoints, step, asked=asked, leaves=leave)
            if due.any:
                leave |= run.does(due, step, state, batches.state, batch)

        run.reports.add_none()
        if leave and settings.enable_checkpoint_saving:
            run.saves(step, state, batches.state)
        run.checkpoints.wait_until_finished()
        if step == num_steps or run.stopping.has_stopped or input_ended:
            mark_end_of_training(job, step)
        logging.info("stopped after step %d of %d", step, num_steps)


class _Run:
    """What a run has open, and what it does between two steps.

    Attributes:
      watchdog: is told what begins.
      checkpoints: the run's own.
      reports: the scalars of its steps; from `begins` on.
      stopping: whether a metric ends it; from `begins` on.
    """

    reports: _Reports
    stopping: Stopping

    def __init__(self, job: Job, guards: Guards, stack: contextlib.ExitStack):
        """Opens checkpoints and summaries; `stack` closes them."""
        self.watchdog = stack.enter_context(Watchdog(guards.watchdog_seconds))
        self.checkpoints = stack.enter_context(open_checkpointer(job))
        self._writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
        stack.callback(self._writers.close)
        self._guards = guards
        self._stack = stack
        self._use(job)

    def _use(self, job: Job) -> None:
        self._job = job
        self._evals, self._decodes = evaluate.Evaluations(job, self._writers), decode.Decodes(job, self._writers)

    def begins(self, step: int, packing: ScalarPacking) -> None:
        """The run begins at the state after `step`."""
        num_steps = int(self._job.task.train.num_train_steps)
        self.reports = _Reports(self._job, self._writers, packing, num_steps, self._guards)
        self.reports.progress.start(step)
        self.stopping = self._stack.enter_context(Stopping(self._job, step))
        mark_end_of_training(self._job, None)
        logging.info("training from step %d to %d", step, num_steps)
        if step == 0:
            logging.info("variables:\n%s", _overview(self._job.partitioner.metadata))

    def moves(self, step: int, job: Job, packing: ScalarPacking) -> None:
        """After `step` the run goes on on other devices."""
        self._use(job)
        self.reports.use(job, packing, step)

    def does(self, due: Due, step: int, state: TrainState, input_state: bytes | None, batch: Any) -> bool:
        """Does what is due after a step; returns whether training is to end."""
        job, train_p = self._job, self._job.task.train
        self.reports.add_none()
        if due.save:
            self.saves(step, state, input_state)
        if due.evaluate:
            self.watchdog.begins(f"evaluation at step {step}")
            train_batch = None if train_p.eval_skip_train else batch
            metrics = self._evals.run(_eval_state(job, state, ema=train_p.eval_use_ema_states), step, train_batch)
            self.stopping.stops(metrics, step)
            if self.stopping.found_best:
                _save(job, self.stopping.best_checkpoints, step, state, input_state)
        if due.decode:
            self.watchdog.begins(f"decoding at step {step}")
            self._decodes.run(_eval_state(job, state, ema=train_p.decode_use_ema_states), step)
        self.reports.progress.start(step)
        return due.evaluate and self.stopping.has_stopped

    def saves(self, step: int, state: TrainState, input_state: bytes | None) -> None:
        """Starts to save the state after `step`."""
        self.watchdog.begins(f"saving step {step}")
        # A checkpoint never outlives the scalars before it.
        self._writers.flush()
        _save(self._job, self.checkpoints, step, state, input_state)


def _start_up(
    job: Job, checkpoints: Checkpointer, stack: contextlib.ExitStack
) -> tuple[CompiledTrainStep, TrainState, Prefetcher]:
    """Compiles the step while the state is restored or initialised: most of the compiler's work leaves Python free."""
    with concurrent.futures.ThreadPoolExecutor(1, "compile") as pool:
        step_future = pool.submit(compile_train_step, job)
        state, saved_input_state = first_state(job, checkpoints)
        if not job.task.train.enable_input_checkpointing:
            saved_input_state = None
        batches = stack.enter_context(_train_batches(job, saved_input_state))
        return step_future.result(), state, batches


def _go_on(job: Job, batches: Prefetcher, stack: contextlib.ExitStack) -> tuple[CompiledTrainStep, Prefetcher]:
    """Compiles the step for other devices, and goes on with the input where it stood; batches that were ready are made anew."""
    batches.close()
    return compile_train_step(job), stack.enter_context(_train_batches(job, {"state": batches.state}))


class _Reports:
    """Steps whose scalars are still on the devices, and where they are reported once they are known."""

    def __init__(self, job: Job, writers: SummaryWriters, packing: ScalarPacking, num_steps: int, guards: Guards):
        self.progress = _make_progress(job, num_steps)
        # Read once: a field of a config costs the loop as much as waking a thread.
        self._interval = max(1, job.task.train.summary_interval_steps)
        self._keep = max(1, job.task.train.max_inflight_steps)
        self._writers = writers
        self._packing = packing
        self._invalid = InvalidSteps(job.task.learner, stop=guards.stop_on_invalid_step)
        self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()

    def use(self, job: Job, packing: ScalarPacking, step: int) -> None:
        """The steps after `step` are this job's, their scalars packed so."""
        self._packing = packing
        self.progress.items_per_step = _items_per_step(job)[0]
        self.progress.peak_flops = _peak_flops(job)
        self.progress.start(step)

    def add(self, step: int, packed: Any) -> None:
        """Adds a step just dispatched; reports the oldest ones until only `max_inflight_steps` are in flight."""
        self._in_flight.append((step, packed))
        self._report_until(self._keep)

    def add_none(self) -> None:
        """Waits for every step in flight and reports it."""
        self._report_until(0)

    def _report_until(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            step, packed = self._in_flight.popleft()
            scalars = self._packing.unpack(packed)
            invalid = self._invalid.look_at(step, scalars)
            timing = self.progress.report(step, scalars)
            if step % self._interval == 0:
                loss = {} if scalars.loss is None else {"loss": scalars.loss}
                self._writers.write("train", step, {**loss, **scalars.values, **scalars.summaries, **invalid, **timing})


def _overview(metadata: StateMetadata) -> str:
    """The trainable variables at their logical shapes, as clu's table."""
    from clu import parameter_overview

    params = metadata.variables.mdl_vars.get(base_layer.PARAMS, {})
    shapes = jax.tree.map(lambda v: jax.ShapeDtypeStruct(v.logical_shape, v.dtype), params)
    return str(parameter_overview.get_parameter_overview(shapes, include_stats=False))


@dataclasses.dataclass(frozen=True)
class CompiledTrainStep:
    """The train step, compiled, and how to read its scalars."""

    fn: Any
    packing: ScalarPacking


def compile_train_step(job: Job) -> CompiledTrainStep:
    """Compiles the train step ahead of time. Its outputs are the new state and one vector of scalars."""
    packing = ScalarPacking()

    def step(*args: Any) -> tuple[TrainState, jax.Array]:
        state, output = step_fns.train_step(*args)
        return state, packing.pack(output)

    partitioner = job.partitioner
    partitioned = partitioner.partition(step, job.global_shape_dtype(job.process_inputs_shape_dtype), is_eval=False)
    inputs = partitioner.abstract_inputs(partitioned)
    lowered = partitioned.fn.lower(partitioner.abstract_state(), job.prng_key, inputs)
    return CompiledTrainStep(lowered.compile(), packing)


def open_checkpointer(job: Job, *, read_only: bool = False) -> Checkpointer:
    """Opens the job's checkpoints with the retention that the task asks for."""
    train_p = job.task.train
    directory = job.settings.checkpoint_dir if read_only else job.settings.job_log_dir / "checkpoints"
    return Checkpointer(
        directory,
        save_interval_steps=train_p.save_interval_steps,
        save_max_to_keep=train_p.save_max_to_keep,
        save_keep_interval_duration=train_p.save_keep_interval_duration,
        read_only=read_only,
    )


@contextlib.contextmanager
def _train_batches(job: Job, input_state: Any) -> Iterator[Prefetcher]:
    """The training input on the devices, from where the checkpoint left it."""
    train_input = job.build_train_input()
    if input_state is not None and input_state["state"] is None:
        logging.warning("the training input %r has no position, so it begins anew", train_input.name)
    elif input_state is not None:
        train_input.set_state(input_state["state"])
    padded = job.partitioner.pad_inputs_shape_dtype(job.global_shape_dtype(job.process_inputs_shape_dtype))
    specs = job.partitioner.inputs_partition_spec(padded)
    with Prefetcher(train_input, lambda batch: job.partitioner.preprocess_inputs(batch, specs)) as batches:
        yield batches


def _items_per_step(job: Job) -> tuple[int, str]:
    """How much a step works on, and what of."""
    shapes = job.global_shape_dtype(job.process_inputs_shape_dtype)
    tokens = shapes.get("ids") if hasattr(shapes, "get") else None
    return (job.num_rows, "examples") if tokens is None else (math.prod(tokens.shape), "tokens")


def _make_progress(job: Job, num_steps: int) -> Progress:
    items, unit = _items_per_step(job)
    interval = job.task.train.log_train_output_interval_steps or job.task.train.summary_interval_steps
    flops = hardware.model_flops(job.partitioner.metadata.num_params(), 1) if unit == "tokens" else None
    return Progress(
        num_steps=num_steps,
        items_per_step=items,
        unit=unit,
        interval=interval,
        flops_per_item=flops,
        peak_flops=_peak_flops(job),
    )


def _peak_flops(job: Job) -> float | None:
    """FLOP/s of the mesh's devices, None where they aren't known."""
    devices = job.partitioner.mesh.devices
    return hardware.peak_flops(devices.flat[0].device_kind, devices.size)


def _save(job: Job, checkpoints: Checkpointer, step: int, state: TrainState, input_state: bytes | None) -> None:
    metadata = {
        "experiment": job.resolved.name,
        "mesh": job.partitioner.mesh_shape(),
        "config": job.config_lines(),
        "num_train_steps": int(job.task.train.num_train_steps),
    }
    try:
        started = checkpoints.save(
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
    if started:
        logging.info("saving step %d", step)


def _eval_state(job: Job, state: TrainState, *, ema: bool) -> TrainState:
    """The part of the training state that evaluation reads, with averaged variables when asked."""
    if not ema:
        return state.to_eval_state()
    if not learners.has_ema(job.task.learner):
        raise ValueError(
            "eval_use_ema_states or decode_use_ema_states is set, but the learner's optimizer has no ema_decay"
        )
    averages = learners.extract_ema(state.opt_states, state.mdl_vars)
    return dataclasses.replace(state.to_eval_state(), mdl_vars=averages)
