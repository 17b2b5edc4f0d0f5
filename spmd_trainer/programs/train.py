"""The training loop. `train` reads top to bottom; the maths is in `step_fns.train_step`."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import dataclasses
import math
import signal
import threading
import types
from collections.abc import Iterator
from typing import Any

import jax
from absl import logging

from spmd_trainer import learners, step_fns
from spmd_trainer.checkpointing import Checkpointer, checkpoint_bytes, preflight
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.metrics.packing import ScalarPacking, Scalars
from spmd_trainer.metrics.progress import Progress
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs import decode, evaluate
from spmd_trainer.programs.job import Job
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
        stop = stack.enter_context(_stop_on_signal())
        job.write_description()

        # Compilation (mostly C++) and everything else that start-up needs go side by side.
        with concurrent.futures.ThreadPoolExecutor(1, "compile") as pool:
            step_future = pool.submit(compile_train_step, job)
            state, saved_input_state = _first_state(job, checkpoints)
            batches = stack.enter_context(_train_batches(job, saved_input_state))
            compiled = step_future.result()

        step = int(state.step)
        key = job.prng_key
        evals = evaluate.Evaluations(job, writers)
        decodes = decode.Decodes(job, writers)
        progress = _make_progress(job, num_steps)
        progress.start(step)
        in_flight: collections.deque[tuple[int, Any]] = collections.deque()
        logging.info("training from step %d to %d", step, num_steps)

        while step < num_steps and not stop.is_set():
            batch, _ = next(batches)
            state, packed = compiled.fn(state, key, batch)
            step += 1
            in_flight.append((step, packed))
            # The host waits for an older step, never for the one it just dispatched.
            while len(in_flight) > max(1, train_p.max_inflight_steps):
                _report(job, progress, writers, compiled.packing, *in_flight.popleft())

            save = settings.enable_checkpoint_saving and (checkpoints.should_save(step) or step == num_steps)
            evaluate_now = settings.eval_on_test and _due(step, train_p.eval_interval_steps)
            decode_now = settings.decode_during_train and _due(step, train_p.decode_interval_steps)
            if not (save or evaluate_now or decode_now):
                continue
            while in_flight:
                _report(job, progress, writers, compiled.packing, *in_flight.popleft())
            if save:
                writers.flush()
                _save(job, checkpoints, step, state, batches.state)
            metrics: dict[str, float] = {}
            if evaluate_now:
                metrics = evals.run(_eval_state(job, state, ema=train_p.eval_use_ema_states), step)
            if decode_now:
                decodes.run(_eval_state(job, state, ema=train_p.decode_use_ema_states), step)
            if metrics and job.task.early_stopping_fn is not None and _stops_early(job, metrics, step, num_steps):
                stop.set()
            progress.start(step)

        while in_flight:
            _report(job, progress, writers, compiled.packing, *in_flight.popleft())
        if stop.is_set() and settings.enable_checkpoint_saving:
            writers.flush()
            _save(job, checkpoints, step, state, batches.state)
        checkpoints.wait_until_finished()
        logging.info("stopped after step %d of %d", step, num_steps)


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


def _first_state(job: Job, checkpoints: Checkpointer) -> tuple[TrainState, Any]:
    """Restores the newest checkpoint, or initialises."""
    partitioner = job.partitioner
    variables = partitioner.metadata.variables
    if checkpoints.latest_step() is not None:
        restored = checkpoints.restore(variables, partitioner.mesh)
        logging.info("restored step %d from %s", restored.step, job.settings.checkpoint_dir)
        return restored.state, restored.input_state
    if job.settings.enable_checkpoint_saving:
        kept = job.task.train.save_max_to_keep or 1
        preflight(checkpoints.directory, checkpoint_bytes(variables) * (kept + 1))
    return partitioner.initialize_train_state(job.prng_key), None


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


def _report(
    job: Job, progress: Progress, writers: SummaryWriters, packing: ScalarPacking, step: int, packed: Any
) -> Scalars:
    scalars = packing.unpack(packed)
    timing = progress.report(step, scalars)
    if step % max(1, job.task.train.summary_interval_steps) == 0:
        writers.write("train", step, {"loss": scalars.loss or 0.0, **scalars.values, **scalars.summaries, **timing})
    return scalars


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
    stops = bool(job.task.early_stopping_fn(metrics, "eval", step, step == num_steps))  # type: ignore[misc]
    if stops:
        logging.info("early_stopping_fn ends training at step %d", step)
    return stops


def _due(step: int, interval: int | None) -> bool:
    return bool(interval and step % interval == 0)


@contextlib.contextmanager
def _stop_on_signal() -> Iterator[threading.Event]:
    """Turns the first Ctrl-C or SIGTERM into a request to stop after the step in progress; a second one acts at once."""
    stop = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def handle(number: int, frame: types.FrameType | None) -> None:
        logging.warning(
            "%s: finishing this step, saving, leaving (again to leave at once)", signal.Signals(number).name
        )
        stop.set()
        restore()

    for number in previous:
        signal.signal(number, handle)
    try:
        yield stop
    finally:
        restore()
