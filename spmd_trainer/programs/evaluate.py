"""Evaluation: during training, and as a job that follows a training run's checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.metrics.packing import ScalarPacking, Scalars, WeightedMean
from spmd_trainer.metrics.progress import format_duration
from spmd_trainer.metrics.writers import SummaryWriters, read_metrics
from spmd_trainer.programs import checkpoints
from spmd_trainer.programs.dataset_batches import all_batches, go_on, num_batches
from spmd_trainer.programs.decode_records import arrays_of_row
from spmd_trainer.programs.ending import say_results, shown
from spmd_trainer.programs.fingerprint import fingerprint
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.phases import Phase
from spmd_trainer.steps import step_fns
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.train_states import TrainState

# The note in `metrics.jsonl` that says what was evaluated.
_IDENTITY = "identity"


class Evaluations:
    """Evaluates every evaluation dataset of a job; each step is compiled once, each input built once."""

    def __init__(self, job: Job, writers: SummaryWriters):
        """Builds nothing before the first `run`."""
        self._job = job
        self._writers = writers
        self._datasets: list[EvalDataset] | None = None
        self._train_step: EvalStep | None = None

    def run(
        self,
        state: TrainState,
        step: int,
        train_batch: Any = None,
        *,
        next_batch: Callable[[], Any] | None = None,
        between_batches: Callable[[], None] = go_on,
    ) -> dict[str, float]:
        """Evaluates all datasets. One whose record in `metrics.jsonl` is of the same variables is not evaluated again.

        Args:
          state: a state without optimizer states.
          step: the step it is of.
          train_batch: a training batch on the devices to evaluate as well (without dropout and the like), or None.
          next_batch: gives one where `train_batch` is None and no training batch has been evaluated at this step (by an
            earlier start of the run); gives None where there is none.
          between_batches: called before each batch of a dataset; what it raises ends the evaluation.

        Returns:
          {'DATASET/metric': mean}, also written to the summaries `eval_DATASET`.

        Raises:
          UserError: a dataset is empty.
        """
        if self._datasets is None:
            configs = self._job.resolved.config.eval_datasets
            self._datasets = [EvalDataset(self._job, config, index) for index, config in enumerate(configs)]
        results: dict[str, float] = {}
        if train_batch is None and next_batch is not None:
            record = read_metrics(self._job.settings.job_log_dir, "eval_train").get(step, {})
            if multihost.from_process_0(int(bool(record))):
                results |= _results_again("train", step, record)
            else:
                train_batch = next_batch()
        if train_batch is not None:
            results |= self._write("train", step, self._evaluate_train_batch(state, train_batch), {})
        for dataset in self._datasets:
            results |= self._evaluate_once(dataset, state, step, between_batches)
        return results

    def _evaluate_once(
        self, dataset: EvalDataset, state: TrainState, step: int, between_batches: Callable[[], None]
    ) -> dict[str, float]:
        same = dataset.fingerprint(state)
        record = read_metrics(self._job.settings.job_log_dir, f"eval_{dataset.name}").get(step, {})
        if multihost.from_process_0(int(record.get(_IDENTITY) == same)):
            return _results_again(dataset.name, step, record)
        return self._write(dataset.name, step, dataset.evaluate(state, step, between_batches), {_IDENTITY: same})

    def _evaluate_train_batch(self, state: TrainState, batch: Any) -> dict[str, float]:
        if self._train_step is None:
            shapes = self._job.global_shape_dtype(self._job.process_inputs_shape_dtype)
            self._train_step = EvalStep(self._job, shapes, "a training batch")
        scalars, _ = self._train_step(state, batch)
        return {name: value for name, value in scalars.values.items() if scalars.weights[name]}

    def _write(self, name: str, step: int, metrics: dict[str, float], notes: dict[str, str]) -> dict[str, float]:
        self._writers.write(f"eval_{name}", step, metrics, notes)
        seconds = f" ({format_duration(metrics['eval_seconds'])})" if "eval_seconds" in metrics else ""
        logging.info("eval %s at step %d: %s%s", name, step, shown(metrics), seconds)
        return {f"{name}/{key}": value for key, value in metrics.items()}


def _results_again(name: str, step: int, record: Mapping[str, Any]) -> dict[str, float]:
    metrics = {key: value for key, value in record.items() if key not in ("step", _IDENTITY)}
    logging.info("eval %s at step %d is done already: %s", name, step, shown(metrics))
    return {f"{name}/{key}": value for key, value in metrics.items()}


class EvalStep:
    """The evaluation step for batches of one shape, compiled at its first call."""

    def __init__(self, job: Job, shapes: Any, data: str, *, per_example: bool = False):
        """Prepares the step.

        Args:
          job: the job.
          shapes: ShapeDtypeStructs of the global batch.
          data: what it evaluates, for the log.
          per_example: whether the outputs of each example come out too.
        """
        self._packing = ScalarPacking()

        def step(task: Any, state: Any, key: jax.Array, inputs: Any, *rest: Any) -> tuple[None, Any]:
            _, output = step_fns.eval_step(task, state, key, inputs, *rest)
            rows = (output.per_example_out, inputs.get("eval_sample_weights")) if per_example else None
            return None, (self._packing.pack(output), rows)

        self._step = job.partitioner.partition(step, shapes, is_eval=True)
        self._key = jax.random.key(job.task.evaluate.random_seed)
        self._data = data
        self._is_compiled = False

    @property
    def inputs_partition_spec(self) -> Any:
        """How inputs arrive."""
        return self._step.inputs_partition_spec

    def __call__(self, state: TrainState, inputs: Any) -> tuple[Scalars, Any]:
        """Evaluates one batch that is on the devices.

        Returns:
          The scalars, and where asked for (per-example outputs, `eval_sample_weights` or None), else None.
        """
        if self._is_compiled:
            _, (packed, rows) = self._step.fn(state, self._key, inputs)
        else:
            with Phase(f"compiling the evaluation step for {self._data}", announce_after=2.0):
                _, (packed, rows) = self._step.fn(state, self._key, inputs)
            self._is_compiled = True
        return self._packing.unpack(packed), rows


class EvalDataset:
    """One finite dataset and the step compiled for it."""

    def __init__(self, job: Job, input_p: Any, index: int):
        self.name = input_p.name
        self._job = job
        self._index = index
        self._per_example = job.task.evaluate.per_example_outputs
        self._input = job.build_input(input_p)
        self._specs = dataset_input_specs(input_p)
        shapes = job.global_shape_dtype(self._specs)
        self._rows = jax.tree.leaves(shapes)[0].shape[0]
        self._step = EvalStep(job, shapes, self.name, per_example=self._per_example)

    def fingerprint(self, state: TrainState) -> str:
        """What an evaluation of this state is made from."""
        self._input.reset()
        return fingerprint(self._job, "eval", self._index, self._input, state)

    def evaluate(self, state: TrainState, step: int, between_batches: Callable[[], None] = go_on) -> dict[str, float]:
        """Evaluates every example once; `between_batches` is called before each batch.

        Returns:
          The mean of each weighted scalar over all examples (of counts, the sum). Where
          `task.evaluate.per_example_outputs` is set, the outputs of each example are in
          `eval_out/DATASET/step_N.jsonl`.

        Raises:
          UserError: the dataset holds nothing, or its first batch is not what its specs declare.
        """
        self._input.reset()
        mean, batches, started = WeightedMean(), 0, time.monotonic()
        lines: list[str] = []
        total = num_batches(self._input)
        with Phase(f"evaluating {self.name} at step {step}", announce_after=2.0, total=total) as phase:
            for batch in self._batches():
                between_batches()
                scalars, rows = self._step(
                    state, self._job.partitioner.preprocess_inputs(batch, self._step.inputs_partition_spec)
                )
                mean.add(scalars.values, scalars.weights)
                if self._per_example:
                    lines += _example_lines(jax.tree.map(np.asarray, rows), first=batches * self._rows)
                batches += 1
                phase.advance()
        if not batches:
            raise UserError(f"evaluation dataset {self.name} is empty; give it at least one example")
        if self._per_example and jax.process_index() == 0:
            directory = epath.Path(self._job.settings.job_log_dir) / "eval_out" / self.name
            write_atomically(directory / f"step_{step}.jsonl", lines)
        return {**mean.result(), "eval_batches": float(batches), "eval_seconds": time.monotonic() - started}

    def _batches(self) -> Iterator[Any]:
        return all_batches(self._job, self._input, self._specs)


def _example_lines(rows: Any, *, first: int) -> Iterator[str]:
    """One JSON line per example that counts: its place in the dataset and its outputs by name."""
    outputs, weights = rows
    size = len(jax.tree.leaves(outputs)[0])
    for row in np.flatnonzero(np.ones(size) if weights is None else weights).tolist():
        yield json.dumps({"index": first + row, **arrays_of_row(outputs, row)})


def evaluate_checkpoints(job: Job) -> None:
    """Evaluates the newest checkpoint and each later one as it appears, until the training run's last step.

    With `--restore_checkpoint_step` that checkpoint alone.

    Raises:
      UserError: the experiment has nothing to evaluate, or there is no run to follow.
    """
    if not job.resolved.config.eval_datasets:
        raise UserError(
            f"experiment {job.settings.exp} has no evaluation datasets; return some with is_training=False from datasets()"
        )
    writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
    try:
        evaluations = Evaluations(job, writers)
        for step, state in checkpoints.follow(job, use_ema=job.task.train.eval_use_ema_states):
            evaluations.run(state, step)
            # What is written counts as evaluated, should the job be started again.
            writers.flush()
        say_results(job)
    finally:
        writers.close()
