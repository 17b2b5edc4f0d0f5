"""The training loop, `train`, which can be read from top to bottom. The math of a step is in `step_fns.train_step`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Iterator

import jax
from absl import logging
from etils import epath
from praxis import pax_fiddle

from spmd_trainer.callbacks import Callback, Run
from spmd_trainer.checkpointing import CheckpointError
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.storage.lock import locked
from spmd_trainer.train_states import TrainState
from spmd_trainer.training import averages, elastic, ending, garbage, rooms, run_directory, start_up
from spmd_trainer.training.callback_list import CallbackList
from spmd_trainer.training.early_stopping import EarlyStop
from spmd_trainer.training.invalid_steps import InvalidSteps
from spmd_trainer.training.job import Job
from spmd_trainer.training.periodic import PeriodicWork, Schedule
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import TrainConfig
from spmd_trainer.training.saving import Checkpoints
from spmd_trainer.training.signals import SaveRequest, save_requests
from spmd_trainer.training.stages import Stages
from spmd_trainer.training.step_taker import INPUT_ENDED, StepTaker
from spmd_trainer.training.summaries import Summaries
from spmd_trainer.training.summary_writers import SummaryError, SummaryWriters

# Timeout for each callback's `on_failure` if the run hangs. It includes waiting for a save in progress.
_LONGEST_FAILURE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """The result of `train`.

    Attributes:
      state: the train state after the last step, at padded shapes on the mesh's devices.
      metrics: the last training scalars by name ('loss', 'log_pplx', ...; none if no step was taken), and the results of the
        last evaluation as 'DATASET/metric'.
      step: the number of training steps that led to the state.
      job_log_dir: the run's directory, with its checkpoints and summaries.
    """

    state: TrainState
    metrics: dict[str, float]
    step: int
    job_log_dir: epath.Path


def train(job: Job) -> TrainResult:
    """Trains until `task.train.num_train_steps`, from the newest checkpoint of the job's directory if there is one.

    Training is also complete when its input ends, and when `task.early_stopping_fn` or a callback ends it. Then the last step is
    evaluated (and decoded), if the run evaluates (and decodes) during training. On Ctrl-C, SIGTERM or SIGHUP the step in progress
    is finished and saved, and the function returns. A signal during the final evaluation interrupts it; restarting the run
    repeats it. Every process calls this function; a SIGTERM to any of them makes all of them save the same step.

    Raises:
      UserError: the state, a loss or a gradient is invalid; the model no longer learns; or a callback failed.
      CheckpointError: a checkpoint could not be read or written.
    """
    config = job.config.of(TrainConfig)
    schedule = Schedule.of_run(config)
    with contextlib.ExitStack() as stack:
        leaves = config.exit_after_ondemand_checkpoint
        request = stack.enter_context(save_requests(exit_after_ondemand_checkpoint=leaves))
        run, callbacks, checkpoints = stack.enter_context(_open_run(job))
        inputs = stack.enter_context(contextlib.ExitStack())
        steps = StepTaker(job, run, callbacks)
        job, compiled, batches = start_up.start(job, run, callbacks, checkpoints.checkpointer, inputs)
        work, stages = PeriodicWork(job, run, callbacks), Stages(job, run, inputs)
        batch, leave = None, bool(run.stop_reason)
        steps.use(compiled)
        garbage.resume()
        if not leave and schedule.saves_at_start(checkpoints.checkpointer, run.step):
            _save(run, callbacks, checkpoints)
        callbacks.call("after_pause", run, run.step)

        with jax.transfer_guard_device_to_host("disallow"):  # the host may wait for the devices only explicitly
            while run.step < run.num_steps and not leave:
                if stages.is_due():
                    steps.drain()
                    compiled, batches = stages.enter(batches)
                    steps.use(compiled)
                    job = stages.job
                    work.use_batch(job)
                    callbacks.call("after_pause", run, run.step)
                if (taken := steps.take(batches)) is not None:
                    batch = taken

                devices = elastic.changed_devices(job, run.step)
                if devices is not None:
                    steps.drain()
                    job, compiled, batches = start_up.move(job, devices, run, batches, inputs)
                    steps.use(compiled)
                    batch = None  # The old batch is on the old devices: an evaluation now takes the next one.
                    work.use(job)
                    callbacks.call("after_pause", run, run.step)

                asked = _take_request(request, run)
                leave = request.leaving or bool(run.stop_reason)
                due = schedule.due(checkpoints.checkpointer, run.step, asked=asked, leaves=leave)
                if any(due) or (not leave and any(callbacks.call("asks_for_pause", run, run.step))):
                    steps.drain()
                    with _pause(run, callbacks, save=checkpoints if due.save else None):
                        work.do(due, batches, batch)
                    leave = bool(run.stop_reason)
                _report_saved(run, callbacks, checkpoints)

        steps.drain()
        if leave and config.enable_checkpoint_saving:
            _save(run, callbacks, checkpoints)
        if complete := run.is_complete:
            work.complete(schedule, request, batches, batch)
        return _end(job, run, callbacks, checkpoints, work, steps.metrics(), complete=complete)


@contextlib.contextmanager
def _pause(run: Run, callbacks: CallbackList, *, save: Checkpoints | None) -> Iterator[None]:
    """Context manager for a pause between two steps: saves if `save` is given, runs the body, then calls the callbacks."""
    with jax.transfer_guard_device_to_host("allow"):
        if save is not None:
            _save(run, callbacks, save)
        yield
        run.times.begin("other")
        callbacks.call("on_pause", run, run.step)
        callbacks.call("after_pause", run, run.step)


@contextlib.contextmanager
def _open_run(job: Job) -> Iterator[tuple[Run, CallbackList, Checkpoints]]:
    """Context manager that opens a run's summaries, checkpoints and callbacks. Records a failure and calls `on_failure`."""
    config = job.config.of(TrainConfig)
    run = Run(
        experiment=config.experiment.name,
        job_log_dir=config.job_log_dir,
        task=job.task,
        partitioner=job.partitioner,
        batch=job.inputs_shape_dtype,
        summaries=SummaryWriters(
            config.job_log_dir, enabled=jax.process_index() == 0, raises_at_end=jax.process_count() > 1
        ),
        config_lines=config.experiment.lines(),
        saves=config.enable_checkpoint_saving,
        eval_names=[str(input_p.name) for input_p in config.experiment.config.eval_datasets],
        eval_averages=averages.of(job),
    )
    # Only one trainer at a time: a second one would delete this one's unfinished checkpoints and mix both runs' metrics.
    lock = locked(config.job_log_dir) if jax.process_index() == 0 else contextlib.nullcontext()
    with lock as check_owner, contextlib.closing(run.summaries):
        checkpoints = Checkpoints(check_owner or (lambda: None))
        callbacks = CallbackList(_callbacks(job, checkpoints))
        run.fail = functools.partial(_end_hanging, run, callbacks)
        try:
            callbacks.call("on_open", run)
            yield run, callbacks, checkpoints
        except BaseException as error:
            if isinstance(error, SummaryError) and run.saves and run.step > run.first_step and jax.process_count() == 1:
                _save_without_summaries(run, checkpoints)
            if isinstance(error, Exception) and not run.hangs:
                run_directory.mark_failure(config.job_log_dir, run.step, error)
            callbacks.fail(run, error)
            raise


def _end_hanging(run: Run, callbacks: CallbackList, error: Exception) -> None:
    """Records that a run hangs, calls each `on_failure` and flushes summaries, because the training loop may be blocked."""
    run_directory.mark_failure(run.job_log_dir, run.step, error)
    callbacks.fail(run, error, seconds=_LONGEST_FAILURE_SECONDS)
    run.summaries.flush()


def _take_request(request: SaveRequest, run: Run) -> bool:
    """Returns True if all processes save after this step, because one of them got a signal or can't write summaries."""
    if run.summaries.take_failure():
        if request.answered:  # the processes have saved together before, and then continued
            run.summaries.raise_failure(in_order=False)
        logging.error("summaries can't be written any more: the processes save, then exit")
        request.make(leaves=True)
    return request.take()


def _save(run: Run, callbacks: CallbackList, checkpoints: Checkpoints) -> None:
    run.begin(f"saving step {run.step}", "save")
    callbacks.call("before_save", run, run.step)
    checkpoints.save(run)


def _report_saved(run: Run, callbacks: CallbackList, checkpoints: Checkpoints) -> None:
    for step in checkpoints.checkpointer.take_finished():
        callbacks.call("after_save", run, step)


def _save_without_summaries(run: Run, checkpoints: Checkpoints) -> None:
    """Saves a run whose summaries can't be written, so that the steps since its last checkpoint are not lost."""
    try:
        checkpoints.save(run)
    except CheckpointError as error:
        logging.error("step %d could not be saved either: %s", run.step, error)
    except Exception:
        logging.exception("step %d could not be saved either", run.step)


def _callbacks(job: Job, checkpoints: Checkpoints) -> list[Callback]:
    """Returns a run's callbacks. Callbacks with the same `turn` are called in the returned order."""
    config = job.config.of(TrainConfig)
    own = [*(pax_fiddle.build(callback) for callback in job.task.train.callbacks), *config.callbacks]
    watch, tracking = rooms.find("watch.run"), rooms.find("watch.tracking.tracking")
    return [
        Summaries(),
        checkpoints,
        InvalidSteps(stop=config.stop_on_invalid_step),
        *(watch.of_run(job) if watch else ()),
        EarlyStop(),
        *own,
        *(tracking.of_run(own, config.track) if tracking else ()),
    ]


def _end(
    job: Job,
    run: Run,
    callbacks: CallbackList,
    checkpoints: Checkpoints,
    work: PeriodicWork,
    scalars: dict[str, float],
    *,
    complete: bool,
) -> TrainResult:
    """Waits until everything is on disk, logs how the run ended and where its results are, and returns its result."""
    run.begin("waiting for the last save", "save")
    with Phase("waiting for the last save to be on disk", announce_after=2.0):
        checkpoints.checkpointer.wait_until_finished()
        _report_saved(run, callbacks, checkpoints)
    # Recorded before trackers end, which may take a minute: a run that is killed meanwhile must not continue training.
    run_directory.mark_end_of_training(run.job_log_dir, run.step, complete=complete)
    run.begin("the end of the run")
    callbacks.call("on_end", run)
    outcome, next_step = _outcome(run, work.interrupted, complete=complete)
    ending.log_summary(
        *(job.config, outcome, next_step), loss=scalars.get("loss"), metrics=work.results, evaluated=work.evaluated
    )
    run.summaries.raise_failure(in_order=True)
    return TrainResult(run.state, {**scalars, **work.results}, run.step, run.job_log_dir)


def _outcome(run: Run, interrupted: str, *, complete: bool) -> tuple[str, str]:
    """Returns two texts: how the run ended, and how it can continue. Both are '' if there was nothing to do."""
    where = f"step {run.step} of {run.num_steps}"
    if not complete:
        then = "the same command continues from there" if run.saves else "nothing was saved (enable_checkpoint_saving)"
        return f"stopped at {where} by a signal", then
    then = f"the final {interrupted} was interrupted" if interrupted else ""
    then += ", and the same command makes up for it" if then and run.saves else ""
    if run.step == run.first_step and run.stop_reason != INPUT_ENDED:
        return (f"training had ended before, at {where}", then) if then else ("", "")
    why = f" ({run.stop_reason})" if run.step < run.num_steps else ""
    return f"finished: {where} in {format_duration(time.monotonic() - run.began)}{why}", then
