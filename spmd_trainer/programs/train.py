"""The training loop. `train` reads top to bottom; the maths is in `step_fns.train_step`."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax
from absl import logging
from praxis import base_layer

from spmd_trainer import learners, step_fns
from spmd_trainer.checkpointing import Checkpointer
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.metrics.packing import ScalarPacking
from spmd_trainer.metrics.progress import Progress
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs import decode, elastic, evaluate
from spmd_trainer.programs.initial_state import first_state
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.signals import save_requests
from spmd_trainer.state_specs import StateMetadata
from spmd_trainer.train_states import TrainState


def train(job: Job) -> None:
    """Trains until `task.train.num_train_steps`, from the newest checkpoint of the job's directory if there is one.

    On Ctrl-C or SIGTERM the step in progress is finished and saved, and the function returns.
    """
    settings, train_p = job.settings, job.task.train
    num_steps = int(train_p.num_train_steps)
    with contextlib.ExitStack() as stack:
        checkpoints = stack.enter_context(open_checkpointer(job))
        writers = SummaryWriters(settings.job_log_dir, enabled=jax.process_index() == 0)
        stack.callback(writers.close)
        request = stack.enter_context(
            save_requests(exit_after_ondemand_checkpoint=settings.exit_after_ondemand_checkpoint)
        )
        job.write_description()

        compiled, state, batches = _start_up(job, checkpoints, stack)
        step = int(state.step)
        key = job.prng_key
        evals, decodes = evaluate.Evaluations(job, writers), decode.Decodes(job, writers)
        reports = _Reports(job, writers, compiled.packing, num_steps)
        reports.progress.start(step)
        profile = stack.enter_context(_profile(job))
        logging.info("training from step %d to %d", step, num_steps)
        if step == 0:
            logging.info("variables:\n%s", _overview(job.partitioner.metadata))

        leave = False
        while step < num_steps and not leave:
            prefetched = next(batches, None)
            if prefetched is None:
                logging.warning("the training input has ended after step %d of %d", step, num_steps)
                leave = True
            else:
                batch = prefetched.batch
                state, packed = compiled.fn(state, key, batch)
                step += 1
                profile(step)
                # The host waits for an older step, never for the one it just dispatched.
                reports.add(step, packed, keep=max(1, train_p.max_inflight_steps))

            devices = elastic.changed_devices(job, step)
            if devices is not None:
                reports.add_none()
                job, state = elastic.rebuild(job, devices, state)
                compiled, batches = _go_on(job, batches, stack)
                evals, decodes = evaluate.Evaluations(job, writers), decode.Decodes(job, writers)
                reports.use(compiled.packing, step)

            asked = request.take()
            leave |= asked and request.leaves
            due = _due(job, checkpoints, step, asked=asked, leaves=leave)
            if not due.any:
                continue
            reports.add_none()
            if due.save:
                # A checkpoint never outlives the scalars before it.
                writers.flush()
                _save(job, checkpoints, step, state, batches.state)
            if due.evaluate:
                train_batch = None if train_p.eval_skip_train else batch
                metrics = evals.run(_eval_state(job, state, ema=train_p.eval_use_ema_states), step, train_batch)
                leave = _stops_early(job, metrics, step, num_steps)
            if due.decode:
                decodes.run(_eval_state(job, state, ema=train_p.decode_use_ema_states), step)
            reports.progress.start(step)

        reports.add_none()
        if leave and settings.enable_checkpoint_saving:
            writers.flush()
            _save(job, checkpoints, step, state, batches.state)
        checkpoints.wait_until_finished()
        logging.info("stopped after step %d of %d", step, num_steps)


def _start_up(
    job: Job, checkpoints: Checkpointer, stack: contextlib.ExitStack
) -> tuple[CompiledTrainStep, TrainState, Prefetcher]:
    """Compiles the step while the state is restored or initialised: most of the compiler's work leaves Python free."""
    with concurrent.futures.ThreadPoolExecutor(1, "compile") as pool:
        step_future = pool.submit(compile_train_step, job)
        state, saved_input_state = first_state(job, checkpoints)
        batches = stack.enter_context(_train_batches(job, saved_input_state))
        return step_future.result(), state, batches


def _go_on(job: Job, batches: Prefetcher, stack: contextlib.ExitStack) -> tuple[CompiledTrainStep, Prefetcher]:
    """Compiles the step for other devices, and goes on with the input where it stood; batches that were ready are made anew."""
    batches.close()
    return compile_train_step(job), stack.enter_context(_train_batches(job, {"state": batches.state}))


class _Reports:
    """Steps whose scalars are still on the devices, and where they are reported once they are known."""

    def __init__(self, job: Job, writers: SummaryWriters, packing: ScalarPacking, num_steps: int):
        self.progress = _make_progress(job, num_steps)
        self._interval = max(1, job.task.train.summary_interval_steps)
        self._writers = writers
        self._packing = packing
        self._in_flight: collections.deque[tuple[int, Any]] = collections.deque()

    def use(self, packing: ScalarPacking, step: int) -> None:
        """Reads the scalars of the steps after `step` with this packing."""
        self._packing = packing
        self.progress.start(step)

    def add(self, step: int, packed: Any, *, keep: int) -> None:
        """Adds a step just dispatched; reports the oldest ones until only `keep` are in flight."""
        self._in_flight.append((step, packed))
        self._report_until(keep)

    def add_none(self) -> None:
        """Waits for every step in flight and reports it."""
        self._report_until(0)

    def _report_until(self, keep: int) -> None:
        while len(self._in_flight) > keep:
            step, packed = self._in_flight.popleft()
            scalars = self._packing.unpack(packed)
            timing = self.progress.report(step, scalars)
            if step % self._interval == 0:
                loss = {} if scalars.loss is None else {"loss": scalars.loss}
                self._writers.write("train", step, {**loss, **scalars.values, **scalars.summaries, **timing})


@contextlib.contextmanager
def _profile(job: Job) -> Iterator[Callable[[int], object]]:
    """Yields what is called after each step: at `profiler_capture_step` it takes a profile into `job_log_dir/profile`."""
    train_p = job.task.train
    if train_p.profiler_capture_step is None:
        yield lambda step: None
        return
    from clu import periodic_actions

    action = periodic_actions.Profile(
        logdir=str(job.settings.job_log_dir / "profile"),
        num_profile_steps=train_p.profiler_num_steps,
        profile_duration_ms=int(1000 * train_p.profiler_min_duration_sec),
        first_profile=train_p.profiler_capture_step,
        every_secs=None,
    )
    yield action
    # Ends a profile that spans the end of training.
    action(2**62, math.inf)


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
    train_input = job.build_input(job.resolved.config.train_datasets[0])
    if input_state is not None and job.task.train.enable_input_checkpointing:
        train_input.set_state(input_state["state"])
    padded = job.partitioner.pad_inputs_shape_dtype(job.global_shape_dtype(job.process_inputs_shape_dtype))
    specs = job.partitioner.inputs_partition_spec(padded)
    with Prefetcher(train_input, lambda batch: job.partitioner.preprocess_inputs(batch, specs)) as batches:
        yield batches


def _make_progress(job: Job, num_steps: int) -> Progress:
    shapes = job.global_shape_dtype(job.process_inputs_shape_dtype)
    tokens = shapes.get("ids") if hasattr(shapes, "get") else None
    interval = job.task.train.log_train_output_interval_steps or job.task.train.summary_interval_steps
    if tokens is not None:
        return Progress(num_steps=num_steps, items_per_step=math.prod(tokens.shape), unit="tokens", interval=interval)
    batch = jax.tree.leaves(shapes)[0].shape[0]
    return Progress(num_steps=num_steps, items_per_step=batch, unit="examples", interval=interval)


def _save(job: Job, checkpoints: Checkpointer, step: int, state: TrainState, input_state: bytes | None) -> None:
    metadata = {
        "experiment": job.resolved.name,
        "mesh": job.partitioner.mesh_shape(),
        "config": job.config_lines(),
        "num_train_steps": int(job.task.train.num_train_steps),
    }
    started = checkpoints.save(
        step,
        state,
        job.partitioner.metadata.variables,
        input_state={"state": input_state},
        metadata=metadata,
        force=True,
    )
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


def _stops_early(job: Job, metrics: dict[str, float], step: int, num_steps: int) -> bool:
    if job.task.early_stopping_fn is None:
        return False
    stops = bool(job.task.early_stopping_fn(metrics, "eval", step, step == num_steps))
    if stops:
        logging.info("early_stopping_fn ends training at step %d", step)
    return stops


@dataclasses.dataclass(frozen=True)
class _Due:
    """What is to be done after a step."""

    save: bool
    evaluate: bool
    decode: bool

    @property
    def any(self) -> bool:
        return self.save or self.evaluate or self.decode


def _due(job: Job, checkpoints: Checkpointer, step: int, *, asked: bool, leaves: bool) -> _Due:
    """Works out what is due after `step`; a run that leaves only saves, and does that after its loop."""
    settings, train_p = job.settings, job.task.train
    last = step == int(train_p.num_train_steps)
    save = settings.enable_checkpoint_saving and (checkpoints.should_save(step) or last or asked)
    decode_now = settings.decode_during_train and step >= train_p.decode_start_after_n_steps
    return _Due(
        save=save and not leaves,
        evaluate=settings.eval_on_test and _at_interval(step, train_p.eval_interval_steps) and not leaves,
        decode=decode_now and _at_interval(step, train_p.decode_interval_steps) and not leaves,
    )


def _at_interval(step: int, interval: int | None) -> bool:
    return bool(interval and step % interval == 0)
