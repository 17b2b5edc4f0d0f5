"""Restores trained checkpoints without optimizer states, for evaluation, decode and export.

They may be checkpoints of this trainer or of Pax, or Hugging Face or PEFT folders.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
from absl import logging
from etils import epath

from spmd_trainer import pax
from spmd_trainer.checkpointing import (
    Checkpointer,
    CheckpointNotFoundError,
    CheckpointSource,
    DamagedCheckpointError,
    Restored,
    frozen_base,
    iterate_checkpoints,
    mismatch,
    records,
    restore,
    steps,
)
from spmd_trainer.checkpointing.agreement import agreed_problem, decided_by_process_0
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.messages import named_text
from spmd_trainer.step.layout import Layout
from spmd_trainer.storage.run_files import has_run
from spmd_trainer.train_states import is_adapter
from spmd_trainer.training import adapter_checkpoints, checkpoint_sources, rooms, run_directory
from spmd_trainer.training.adapter_checkpoints import FOLDER_KEY, FrozenBase
from spmd_trainer.training.averages import LAST, NONE, TooFewCheckpointsError, evaluated, last_count, mean
from spmd_trainer.training.ending import say_results
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import RunConfig
from spmd_trainer.training.summary_writers import SummaryWriters


def restore_for_inference(
    job: Job, averages: str, *, step: int | None = None, base: FrozenBase | None = None
) -> Restored:
    """Restores a checkpoint's variables, or averages of them, onto the job's mesh. Leaves optimizer states out.

    Args:
      job: the job. Its flags `--restore_checkpoint_dir` and `--restore_checkpoint_step` choose the checkpoint.
      averages: 'ema', 'schedule_free', 'none', or 'last:K' for the mean of the checkpoint and the K - 1 before it.
      step: the step to restore, instead of `--restore_checkpoint_step`.
      base: the frozen base of adapters; pass the same object for several steps of a run. None loads the base.

    Raises:
      UserError: there is no such checkpoint; or `averages` isn't 'none' for a Hugging Face or PEFT folder, which has no averages.
      TooFewCheckpointsError: there are fewer than K checkpoints.
      CheckpointError: see `restore_from`.
    """
    directory = job.config.checkpoint_dir
    step = job.config.restore_checkpoint_step if step is None else step
    if job.config.eval_averages is None and averages != NONE and _lacks_opt_states(job, step):
        logging.info("%s has no optimizer states: its variables are taken, not %s", directory, averages)
        averages = NONE
    if adapter_checkpoints.begins_with(job, directory):
        return _of_folder(job, directory, averages, step=step)
    if count := last_count(averages):
        restored = _mean_of_last(job, count, step, base or FrozenBase(job))
    else:
        # Averages are in the optimizer states, which are read only if averages are wanted.
        plain = averages == NONE
        layout = job.partitioner.layout.without_opt_states() if plain else job.partitioner.metadata
        restored = restore_from(job, layout, step=step, partial=plain, with_input=False, base=base)
    owner = restored.metadata["metadata"].get("experiment")
    if owner not in (None, job.config.experiment.name):
        logging.warning(
            "%s was written by experiment %s; its variables fit %s", directory, owner, job.config.experiment.name
        )
    return dataclasses.replace(restored, state=evaluated(restored.state, averages))


def _lacks_opt_states(job: Job, step: int | None) -> bool:
    """Returns True if a checkpoint of this trainer has no optimizer states, e.g. because `--export_checkpoint` wrote it."""
    own = Checkpointer(job.config.checkpoint_dir, read_only=True)

    def lacks() -> bool:
        at = own.latest_step() if step is None else step
        if at is None or not steps.is_whole(own.directory, at):
            return False
        return not any(path.startswith("opt_states/") for path in own.read_metadata(at)["variables"])

    return decided_by_process_0(lacks)


def _mean_of_last(job: Job, count: int, step: int | None, base: FrozenBase) -> Restored:
    """Restores the mean of the last `count` checkpoints up to `step`, or up to the newest one if `step` is None."""
    directory = job.config.checkpoint_dir
    if decided_by_process_0(lambda: checkpoint_sources.is_foreign(directory)):
        raise UserError(
            f"--eval_averages={LAST}{count}: {directory} is of another trainer; give checkpoints of this one"
        )
    there = decided_by_process_0(Checkpointer(directory, read_only=True).all_steps)
    there = [one for one in there if step is None or one <= step]
    if len(there) < count:
        found = named_text(there, "step", "steps") if there else "none"
        upto = "" if step is None else f" up to step {step}"
        raise TooFewCheckpointsError(
            f"--eval_averages={LAST}{count} takes {count} checkpoints{upto}, and {directory} has {found}. Save more often "
            "(task.train.save_interval_steps), or keep more (save_max_to_keep)"
        )
    layout = job.partitioner.layout.without_opt_states()
    restore_one = functools.partial(restore_from, job, layout, partial=True, with_input=False, base=base)
    return mean(job, there[-count:], lambda one: restore_one(step=one))


def restore_from(
    job: Job,
    layout: Layout,
    *,
    step: int | None,
    partial: bool = False,
    with_input: bool,
    base: FrozenBase | None = None,
) -> Restored:
    """Restores a state from `RunConfig.checkpoint_dir`: a checkpoint of this trainer or Pax, or a Hugging Face folder.

    Args:
      layout: the layout of the state to restore, with or without optimizer states.
      step: the checkpoint's step; None for the newest complete checkpoint.
      partial: see `checkpointing.restore`.
      with_input: see `checkpointing.restore`.
      base: the frozen base to add to a state with adapters; None loads the base.

    Raises:
      UserError: the directory has no checkpoint.
      CheckpointError: see `checkpointing.restore`; or both the task and a different trainer's checkpoint have adapters.
    """
    directory = job.config.checkpoint_dir
    with Phase(f"restoring {'the newest step' if step is None else f'step {step}'} of {directory}") as phase:
        source = checkpoint_sources.open_whole_model(directory, step, layout.variables)
        if source is not None:
            if FOLDER_KEY in source.metadata:
                rooms.need("hf").require_model(directory, job.task)
            agreed_problem(functools.partial(_refuse_foreign_adapters, source, layout))
            restored = restore(source, layout, partial=partial, with_input=with_input)
        else:
            own = Checkpointer(directory, read_only=True)
            if not own.holds_steps():
                raise no_checkpoint_in(directory)
            restored = own.restore(layout.variables, layout.mesh, step=step, partial=partial, with_input=with_input)
            restored = (base or FrozenBase(job)).joined(restored, layout.variables, directory)
        phase.done = f"restored step {restored.step} from {directory}"
    return restored


def _refuse_foreign_adapters(source: CheckpointSource, layout: Layout) -> None:
    if frozen_base.has_adapters(layout.variables) and any(map(is_adapter, source.saved)):
        raise source.mismatch_error(mismatch.adapters_without_base(source.label, source.saved))


def _of_folder(job: Job, directory: epath.Path, averages: str, *, step: int | None) -> Restored:
    """Returns the initial state (step 0) of a run with adapters that begins from a Hugging Face or PEFT folder."""
    metadata = job.partitioner.layout.without_opt_states()
    if step:
        raise UserError(f"no step {step} in {directory}: a folder has no steps")
    if averages != NONE:
        raise UserError(f"{directory} has no optimizer states and no moving averages, and so no {averages}")
    rules, restored_from = adapter_checkpoints.rules_of(job, directory)
    state = job.partitioner.initialize_train_state(job.prng_key, with_opt_states=False)
    state, origin, _ = adapter_checkpoints.begin(job, metadata, state, rules, restored_from=restored_from)
    record = records.make(0, state, records.by_path(metadata.variables), None, origin)
    return Restored(state, 0, None, record)


def present_in_source(config: RunConfig) -> list[int] | None:
    """Returns the checkpoint steps, ascending, that this process sees in the directory from which a job restores.

    Returns [0] for a Hugging Face or PEFT folder. Returns None for a training run that doesn't read `--restore_checkpoint_dir`,
    because the flag isn't given or the run already has checkpoints of its own.

    Raises:
      PaxError: the Pax save of the requested step is incomplete, or the directory has no finished Pax step.
    """
    begins_anew = config.mode == "train" and config.restore_checkpoint_dir is None
    if begins_anew or (config.mode == "train" and has_own(config)):
        return None
    directory = config.checkpoint_dir
    if checkpoint_sources.is_hf_folder(directory) or checkpoint_sources.is_peft_folder(directory):
        return [0]
    if (found := pax.find(directory)) is not None:
        return pax.finished_steps(found, config.restore_checkpoint_step)
    return steps.present(directory)


def prefers_own(config: RunConfig) -> bool:
    """Returns True if `--mode=export` should export the run's own checkpoints although `--restore_checkpoint_dir` is given.

    This is so if the run has checkpoints and the flag names a Hugging Face folder, because the command that trained the run
    has the same flag. The result depends on the files that this process sees.
    """
    folder = config.restore_checkpoint_dir
    return folder is not None and checkpoint_sources.is_hf_folder(folder) and has_own(config)


def has_own(config: RunConfig) -> bool:
    """Returns True if a run has its own checkpoints, complete or damaged. Ignores the files of an interrupted save."""
    return steps.present_and_committed(config.job_log_dir / "checkpoints")[1]


def follow(job: Job, averages: str) -> Iterator[Restored]:
    """Yields the newest checkpoint and each later one as it appears, until the training run has ended.

    The last one is the checkpoint of step `num_train_steps`, or of the step at which training ended earlier. With
    `--restore_checkpoint_step`, yields only that checkpoint. Of a different trainer's checkpoints, yields only the newest.

    Raises:
      UserError: there is neither a checkpoint nor a training run that could write one; or the training run has failed, after
        its last checkpoint was yielded.
    """
    if job.config.restore_checkpoint_step is not None:
        yield restore_for_inference(job, averages)
        return
    directory = job.config.checkpoint_dir
    if decided_by_process_0(lambda: checkpoint_sources.is_foreign(directory)):
        logging.info(
            "%s is of another trainer, and nothing there tells whether its run goes on: only the newest checkpoint is used",
            directory,
        )
        yield restore_for_inference(job, averages)
        return
    require_run(directory)
    last = int(job.task.train.num_train_steps)

    def has_ended(step: int | None) -> bool:
        end = run_directory.end_of_training(directory.parent)
        ended = step is not None and (step >= last or (end is not None and step >= end))
        return ended or run_directory.failure(directory.parent) is not None

    seen, base, too_few = -1, FrozenBase(job), None
    for step in iterate_checkpoints(directory, stop_fn=has_ended):
        try:
            restored = restore_for_inference(job, averages, step=step, base=base)
        except (CheckpointNotFoundError, DamagedCheckpointError, TooFewCheckpointsError) as error:
            # The training run keeps only its newest checkpoints, and may delete one while this job reads it.
            logging.warning("step %d is left out: %s", step, error)
            too_few = error if isinstance(error, TooFewCheckpointsError) else None
            continue
        seen = step
        yield restored
    # Processes may see the directory at different moments, so all of them follow what process 0 sees.
    if (failed := decided_by_process_0(lambda: _failure(directory))) and seen < last:
        raise UserError(failed)
    if seen < 0 and too_few:
        raise too_few


def run_on(job: Job, make: Callable[[Job, SummaryWriters], Any], checkpoints: Iterable[Restored]) -> None:
    """Runs evaluations or decodes on one checkpoint after the other, and logs where the results are.

    Args:
      make: `Evaluations` or `Decodes`.
      checkpoints: yields the restored checkpoints.
    """
    with contextlib.closing(SummaryWriters(job.config.job_log_dir, enabled=jax.process_index() == 0)) as writers:
        work = make(job, writers)
        for restored in checkpoints:
            work.run(restored.state, restored.step)
            # If the job is restarted, it skips the results that are on disk.
            writers.flush()
        say_results(job.config.job_log_dir)


def _failure(directory: epath.Path) -> str:
    """Returns a message that says how the training run of a checkpoint directory has failed; '' if it has not failed."""
    failed = run_directory.failure(directory.parent)
    if failed is None:
        return ""
    return (
        f"the training run in {directory.parent} failed after step {failed.step} (process {failed.process}): "
        f"{failed.reason}\nNo further checkpoints will come. Start training again, then this job"
    )


def require_run(directory: epath.Path) -> None:
    """Makes sure that a directory has a checkpoint or a training run that may write one, so that a job doesn't wait in vain.

    Raises:
      UserError: there is neither a checkpoint nor a run that has begun.
    """
    if checkpoint_sources.is_foreign(directory) or any(directory.glob("[0-9]*")) or has_run(directory.parent):
        return
    raise UserError(
        f"no checkpoint in {directory}, and no training run has begun in {directory.parent}; start training first, or give "
        "the --job_log_dir or --restore_checkpoint_dir of a run"
    )


def no_checkpoint_in(directory: epath.Path) -> UserError:
    below = directory / "checkpoints"
    fix = (
        f"did you mean --restore_checkpoint_dir={below}?"
        if any(below.glob("[0-9]*"))
        else "train first, or give --restore_checkpoint_dir=DIR with a directory that has some, e.g. RUN/checkpoints"
    )
    return UserError(f"no checkpoint in {directory}; {fix}")
