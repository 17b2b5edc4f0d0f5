"""`--mode=replay --step=N`: repeats training step N of a run, and reports where the step's first NaN or infinity came from.

Replay restores the newest complete checkpoint before step N, and repeats the steps in between as in training, with the same
batches, random key and compiled step. Then it evaluates step N with a flag on each value (`value_flags`), and runs step N once
more as in training. Replay writes nothing but its log and acquires no lock, so the original run may continue at the same time.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding, PartitionSpec

from spmd_trainer import multihost
from spmd_trainer.checkpointing import Checkpointer, DamagedCheckpointError, Restored, steps
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.errors import UserError, terminal
from spmd_trainer.inputs.prefetch import Prefetcher
from spmd_trainer.planner import replay_report
from spmd_trainer.planner.nan_origin import Flags, Value
from spmd_trainer.planner.replay_report import Observed
from spmd_trainer.planner.value_flags import Frame, run_with_flags
from spmd_trainer.sharding.messages import mesh_text
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.packing import Scalars
from spmd_trainer.step.step_fns import GradFn
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import checkpoint_sources, run_directory, start_up
from spmd_trainer.training.adapter_checkpoints import FrozenBase
from spmd_trainer.training.checkpoints import no_checkpoint_in
from spmd_trainer.training.job import Job
from spmd_trainer.training.phases import Phase
from spmd_trainer.training.run_config import ReplayConfig
from spmd_trainer.training.summary_writers import read_metrics
from spmd_trainer.watch import invalid_batches

# Relative difference up to which a repeated step's loss counts as equal to the loss that the run wrote.
_SAME_LOSS = 1e-3
_NOT_WRITTEN = "not written"
# Prefix of a gradient's name in the step's program. The variable's path follows it.
_GRADIENT = "gradient of "


def replay(job: Job) -> None:
    """Repeats step `job.config.replay_step`, and prints where its first NaN or infinity came from.

    Must be called by every process; process 0 prints.

    Raises:
      UserError: the run hasn't reached this step, has no complete checkpoint before it, or can't provide the steps' batches.
      CheckpointError: the checkpoint can't be read.
    """
    step = job.config.of(ReplayConfig).replay_step
    _check_step(job, step)
    restored = _restore(job, step)
    job, last = job.at_step(restored.step), job.at_step(step - 1)
    if job.stage != last.stage:
        raise UserError(
            f"--step={step} is of another stage than the checkpoint of step {restored.step}: {job.stage}; {last.stage}"
        )
    with _input_after(job, restored) as data:
        batches = _Batches(job, data, step)
        compiled, key, state = start_up.compile_train_step(job), job.prng_key, restored.state
        averages = job.task.train.summary_accumulate_interval_steps is not None
        records = {} if averages else read_metrics(job.config.job_log_dir, "train")
        written = {step: float(record["loss"]) for step, record in records.items() if "loss" in record}
        for number in range(restored.step + 1, step):
            state, packed = compiled.fn(state, key, batches.take(number))
            _compare(number, compiled.packing.unpack(packed), written)
        batch = batches.take(step)
        with Phase(f"taking step {step} with a flag on each value"):
            observed = observe(job, state, key, batch)
            if observed.is_of_update():
                observed = observe(job, state, key, batch, update=True)
        _, packed = compiled.fn(state, key, batch)  # donates the state
        scalars = compiled.packing.unpack(packed)
        _compare(step, scalars, written)
    where = f"{job.config.job_log_dir}, from the checkpoint of step {restored.step}"
    lines = [f"step {step} of {where}, on {mesh_text(job.partitioner.mesh.shape)}", *batches.notes]
    lines += replay_report.lines(observed, scalars, step, job.task)
    if jax.process_index() == 0:
        terminal.write("\n".join([*lines, ""]))


def observe(job: Job, state: TrainState, key: jax.Array, batch: PyTree, *, update: bool = False) -> Observed:
    """Runs a training step and computes a flag for each of its values; see `value_flags`. The state is not donated.

    Args:
      state: the train state before the step, on the mesh, with padded shapes.
      batch: the step's batch, on the mesh.
      update: True to also flag the values inside the learner, not only the learner's results.
    """
    partitioner = job.partitioner
    partitioned = partitioner.partition(_named_step, job.inputs_shape_dtype, is_eval=False)
    traced = partitioned.trace(job.abstract_prng_key)
    frames: list[Frame] = []

    def run(*args: Any) -> PyTree:
        _, flags, frame = run_with_flags(traced.jaxpr, args, until=None if update else _GRADIENT)
        frames.append(frame)
        return flags

    replicated = NamedSharding(partitioner.mesh, PartitionSpec())
    # It runs once, so compiling it must be cheap.
    on_cpu = partitioner.mesh.devices.flat[0].platform == "cpu"
    options: dict[str, Any] | None = {"xla_backend_optimization_level": 0} if on_cpu else None
    with jax.set_mesh(partitioner.mesh):
        found = jax.jit(run, out_shardings=replicated, compiler_options=options)(*jax.tree.leaves((state, key, batch)))
    flags = Flags(frames[-1], jax.tree.map(lambda x: np.asarray(x.addressable_data(0)), found))
    names = [name for name, _ in named_leaves(state)] + ["key"] + [f"batch/{name}" for name, _ in named_leaves(batch)]
    new_state, outputs = jax.tree.unflatten(
        jax.tree.structure(traced.out_info), [Value((), number) for number in flags.frame.results]
    )
    new_values = named_leaves(new_state, is_leaf=lambda x: isinstance(x, Value))
    results = dict(outputs) | {f"new {name}": value for name, value in new_values}
    tags = {name: Value((), number) for name, (number, _) in flags.frame.tags.items() if name.startswith(_GRADIENT)}
    begins = [at for name, (_, at) in flags.frame.tags.items() if name.startswith(_GRADIENT)]
    gradients = {name.removeprefix(_GRADIENT): value for name, value in tags.items()}
    return Observed(flags, names, results, gradients, min(begins, default=0))


def _named_step(
    layout: Layout, state: TrainState, key: jax.Array, rows: PyTree, grad_fn: GradFn | None = None
) -> tuple[TrainState, dict[str, jax.Array]]:
    """Runs `train_step` with a `checkpoint_name` on each gradient. Returns the new state, and {name: loss or summary}."""

    run = grad_fn or functools.partial(step_fns.gradients, layout)

    def named(*args: Any) -> tuple[Any, PyTree, PyTree]:
        output, written, grads = run(*args)
        paths = iter([path for path, _ in named_leaves(grads)])
        return output, written, jax.tree.map(lambda x: checkpoint_name(x, _GRADIENT + next(paths)), grads)

    new_state, output = step_fns.train_step(layout, state, key, rows, named)
    summaries = {f"summary {name}": x for name, x in output.summary_tensors.items()}
    assert output.loss is not None  # only decoding has none
    return new_state, {"loss": output.loss, **summaries}


def _check_step(job: Job, step: int) -> None:
    last = run_directory.end_of_training(job.config.job_log_dir)
    planned = int(job.task.train.num_train_steps)
    if last is not None and step > last:
        raise UserError(f"--step={step}: the run in {job.config.job_log_dir} ended at step {last}; give 1 to {last}")
    if step > planned:
        raise UserError(f"--step={step}: task.train.num_train_steps is {planned}; give 1 to {planned}")
    if last is None:
        logs, saves = job.config.job_log_dir, job.config.checkpoint_dir
        written = decided_by_process_0(lambda: max([*read_metrics(logs, "train"), *steps.whole(saves)], default=None))
        # Summaries come at intervals, so the run may be one interval further.
        if written is not None and step > written + int(job.task.train.summary_interval_steps):
            raise UserError(
                f"--step={step}: the run in {job.config.job_log_dir} has written up to step {written}; give 1 to {written}"
            )


def _restore(job: Job, step: int) -> Restored:
    """Restores the newest complete checkpoint before a step, or that of `--restore_checkpoint_step` if this flag is given."""
    directory = job.config.checkpoint_dir
    if decided_by_process_0(lambda: checkpoint_sources.is_foreign(directory)):
        raise UserError(f"{directory} is of another trainer; --mode=replay needs a run of this one")
    own, layout = Checkpointer(directory, read_only=True), job.partitioner.metadata
    there = decided_by_process_0(lambda: steps.whole(directory))
    asked = job.config.restore_checkpoint_step
    before = [n for n in reversed(there) if n < step and asked in (None, n)]
    for number in before:
        try:
            with Phase(f"restoring step {number}") as phase:
                restored = own.restore(layout.variables, layout.mesh, step=number)
                restored = FrozenBase(job).joined(restored, layout.variables, directory)
                phase.done = f"restored step {restored.step} from {directory}"
            return restored
        except DamagedCheckpointError as error:
            logging.warning("step %d is left out: %s", number, error)
    if asked is not None:
        raise UserError(f"--restore_checkpoint_step={asked}: no whole checkpoint of a step before --step={step}")
    if not there:
        raise no_checkpoint_in(directory)
    raise UserError(
        f"--step={step} needs a whole checkpoint of step {step - 1} or earlier in {directory}; there are "
        f"{', '.join(map(str, there))}. The run keeps task.train.save_max_to_keep={job.task.train.save_max_to_keep} "
        f"checkpoints: the earliest step that can be replayed is {there[0] + 1}"
    )


def _input_after(job: Job, restored: Restored) -> contextlib.AbstractContextManager[Prefetcher | None]:
    """Returns a context manager that yields the training input after a checkpoint, or None if its position was not saved."""
    saved = restored.input_state
    has_position = job.task.train.enable_input_checkpointing and saved is not None and saved["state"] is not None
    if restored.step and not has_position:
        return contextlib.nullcontext()
    return start_up.train_batches(job, saved if restored.step else None)


class _Batches:
    """The repeated steps' batches, from the training input. For the last step, prefers the batch in the run's directory.

    Attributes:
      notes: lines about the last step's batch, for the report.
    """

    def __init__(self, job: Job, data: Prefetcher | None, step: int):
        self.notes: list[str] = []
        self._job, self._input, self._last = job, data, step
        self._unusable = ""

    def take(self, step: int) -> PyTree:
        """Returns the batch of a step, on the devices. Called for each step in order.

        Raises:
          UserError: neither the input nor the run's directory has the batch.
        """
        prefetched = None if self._input is None else next(self._input, None)
        batch = None if prefetched is None else prefetched.batch
        written = self._written() if step == self._last else None
        if written is None:
            if batch is not None:
                unusable = f"; what the run wrote down is not used: {self._unusable}" if self._unusable else ""
                self.notes += [f"batch: from the input{unusable}"] if step == self._last else []
                return batch
            if self._unusable:
                raise UserError(f"the batch of step {step} that the run wrote can't be used: {self._unusable}")
            why = (
                "has ended" if self._input is not None else "can't go back to the checkpoint: it has no saved position"
            )
            raise UserError(
                f"the training input {why}, and the batch of step {step} is not in the run's directory "
                f"({invalid_batches.batch_file(self._job.config.job_log_dir, step)}); training writes the batches of the first "
                f"{invalid_batches.MAX_BATCHES} invalid steps there"
            )
        self.notes.append("batch: " + _comparison(written, batch))
        return written

    def _written(self) -> PyTree | None:
        """Returns the last step's batch as the run wrote it, on the devices; None if a process's rows are missing or unusable."""
        job, partitioner = self._job, self._job.partitioner
        padded = partitioner.layout.pad_inputs_shape_dtype(job.inputs_shape_dtype)
        rows, problem = None, ""
        try:
            rows = invalid_batches.read(job.config.job_log_dir, self._last, padded)
            problem = _NOT_WRITTEN if rows is None else self._wrong_shape(rows, padded)
        except (ValueError, OSError) as error:
            problem = str(error)
        problems = multihost.gather("the batch of a replayed step", problem)
        if not any(problems):
            return partitioner.layout.put(rows)
        if any(one != _NOT_WRITTEN for one in problems):  # the batch was written, but is incomplete
            process, why = next((n, one) for n, one in enumerate(problems) if one)
            self._unusable = f"process {process}: {why}"
            logging.warning("the batch that the run wrote is not used: %s", self._unusable)
        return None

    def _wrong_shape(self, rows: PyTree, padded: PyTree) -> str:
        """Returns the reason why the written rows have the wrong shape for this mesh; '' if they have the right one."""
        for (name, x), (_, whole) in zip(named_leaves(rows), named_leaves(padded), strict=True):
            expected = (whole.shape[0] // jax.process_count(), *whole.shape[1:])
            if x.shape != expected:
                return (
                    f"{invalid_batches.batch_file(self._job.config.job_log_dir, self._last)}: {name} has shape {x.shape}, and "
                    f"this mesh needs {expected}; replay with the run's number of devices and processes"
                )
        return ""


def _comparison(written: PyTree, own: PyTree | None) -> str:
    if own is None:
        return "the one that the run wrote down; the input can't give it again"
    others = []
    for (name, x), (_, y) in zip(named_leaves(written), named_leaves(own), strict=True):
        may_be_nan, rows = jax.numpy.issubdtype(x.dtype, jax.numpy.floating), invalid_batches.local_rows
        others += [] if np.array_equal(rows(x), rows(y), equal_nan=may_be_nan) else [name]
    if not others:
        return "the one that the run wrote down; the input gives the same"
    logging.warning("the input gives another batch than the run had: %s differ", ", ".join(others))
    return (
        f"the one that the run wrote down. THE INPUT GIVES ANOTHER ONE ({', '.join(others)} differ): it has changed, or is not "
        "deterministic, so the steps before may have had other batches too"
    )


def _compare(step: int, scalars: Scalars, written: Mapping[int, float]) -> None:
    """Warns if the loss of a repeated step differs from the loss that the run wrote."""
    then, now = written.get(step), scalars.loss
    if then is None or now is None or np.isclose(then, now, rtol=_SAME_LOSS, atol=0, equal_nan=True):
        return
    logging.warning(
        "step %d has loss %g when it is taken again, and the run wrote %g: the settings, the code, the input or the devices "
        "are others than the run's",
        step,
        now,
        then,
    )
