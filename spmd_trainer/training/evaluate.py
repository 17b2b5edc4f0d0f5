"""Evaluation, both during training and in a separate job that follows a training run's checkpoints."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np
from absl import logging
from praxis.py_utils import NestedMap

from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.sharding.messages import format_duration
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.packing import Packed, ScalarPacking, Scalars, WeightedMean, computed_clu
from spmd_trainer.storage.files import write_atomically
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import averages, checkpoints
from spmd_trainer.training.dataset_batches import FiniteDataset, log_first_call, no_op
from spmd_trainer.training.decode_records import arrays_of_row
from spmd_trainer.training.ending import shown
from spmd_trainer.training.job import Job
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

# The key in `metrics.jsonl` for the fingerprint of what was evaluated.
_IDENTITY = "identity"


class Evaluations:
    """Evaluates every evaluation dataset of a job. The first call of `run` builds the inputs and compiles the steps."""

    def __init__(self, job: Job, writers: SummaryWriters):
        self._job = job
        self._writers = writers
        self._datasets: list[EvalDataset] | None = None
        self._train_step: EvalStep | None = None

    def use_batch(self, job: Job) -> None:
        """Makes later calls of `run` evaluate training batches of a new shape: the shape of `job`'s batches."""
        self._job, self._train_step = job, None

    def run(
        self,
        state: TrainState,
        step: int,
        train_batch: PyTree | None = None,
        *,
        next_batch: Callable[[], PyTree | None] | None = None,
        between_batches: Callable[[], None] = no_op,
    ) -> dict[str, float]:
        """Evaluates all datasets, except those that `metrics.jsonl` records as evaluated with the same variables.

        Args:
          state: a state without optimizer states.
          train_batch: a training batch, on the devices, to evaluate as well (in evaluation mode, without dropout).
          next_batch: called if `train_batch` is None; returns a training batch to evaluate, or None if the input has ended. Not
            called if the run has evaluated a training batch at this step before it was restarted.
          between_batches: called before each batch of a dataset. If it raises, the evaluation stops.

        Returns:
          {'DATASET/metric': mean}, also written to the summaries `eval_DATASET`.

        Raises:
          UserError: a dataset is empty.
        """
        if self._datasets is None:
            configs = self._job.config.experiment.config.eval_datasets
            self._datasets = [EvalDataset(self._job, config, index) for index, config in enumerate(configs)]
        results: dict[str, float] = {}
        if train_batch is None and next_batch is not None:
            if record := self._recorded("train", step):
                results |= _results_again("train", step, record)
            else:
                train_batch = next_batch()
        if train_batch is not None:
            results |= self._write("train", step, self._evaluate_train_batch(state, train_batch), {})
        for dataset in self._datasets:
            same = dataset.fingerprint(state)
            record = self._recorded(dataset.name, step)
            if record.get(_IDENTITY) == same:
                results |= _results_again(dataset.name, step, record)
            else:
                metrics = dataset.evaluate(state, step, between_batches)
                results |= self._write(dataset.name, step, metrics, {_IDENTITY: same})
        return results

    def _recorded(self, name: str, step: int) -> dict[str, Any]:
        """Returns the scalars and notes of a dataset's evaluation at `step` as process 0 reads them; {} if there are none."""
        directory = self._job.config.job_log_dir
        return decided_by_process_0(lambda: read_metrics(directory, f"eval_{name}").get(step, {}))

    def _evaluate_train_batch(self, state: TrainState, batch: PyTree) -> dict[str, float]:
        if self._train_step is None:
            self._train_step = EvalStep(self._job, self._job.inputs_shape_dtype, "a training batch")
        scalars, _ = self._train_step(state, batch)
        means = {name: value for name, value in scalars.means.items() if scalars.weights[name]}
        return means | computed_clu(scalars.clu)

    def _write(self, name: str, step: int, metrics: dict[str, float], notes: dict[str, str]) -> dict[str, float]:
        self._writers.write(f"eval_{name}", step, metrics, notes)
        seconds = f" ({format_duration(metrics['eval_seconds'])})" if "eval_seconds" in metrics else ""
        logging.info("eval %s at step %d: %s%s", name, step, shown(metrics), seconds)
        return {f"{name}/{key}": value for key, value in metrics.items()}


def _results_again(name: str, step: int, record: Mapping[str, Any]) -> dict[str, float]:
    metrics = {key: value for key, value in record.items() if key not in ("step", _IDENTITY)}
    logging.info("eval %s at step %d was already done: %s", name, step, shown(metrics))
    return {f"{name}/{key}": value for key, value in metrics.items()}


class EvalStep:
    """The evaluation step for batches of one shape, compiled at the first call."""

    def __init__(self, job: Job, shapes: PyTree, data: str, *, per_example: bool = False):
        """Prepares the step.

        Args:
          shapes: ShapeDtypeStructs of the global batch.
          data: name of the evaluated dataset, for the log.
          per_example: also return the outputs of each example.
        """
        self._packing = ScalarPacking()

        def step(
            layout: Layout, state: TrainState, key: jax.Array, inputs: NestedMap, *rest: Any
        ) -> tuple[None, tuple[Packed, PyTree]]:
            _, output = step_fns.eval_step(layout, state, key, inputs, *rest)
            rows = (output.per_example_out, inputs.get("eval_sample_weights")) if per_example else None
            return None, (self._packing.pack(output), rows)

        compiled = job.partitioner.partition(step, shapes, is_eval=True)
        self._fn = log_first_call(compiled, f"compiling the evaluation step for {data}")
        self._key = jax.random.key(job.task.evaluate.random_seed)

    def __call__(self, state: TrainState, inputs: PyTree) -> tuple[Scalars, PyTree]:
        """Evaluates one batch that is already on the devices.

        Returns:
          The scalars; and the pair (per-example outputs, `eval_sample_weights` or None), or None instead of the pair if this
            object was created with `per_example=False`.
        """
        _, (packed, rows) = self._fn(state, self._key, inputs)
        return self._packing.unpack(packed), rows


class EvalDataset(FiniteDataset):
    """One evaluation dataset with its compiled evaluation step. For the arguments, see `FiniteDataset`."""

    def __init__(self, job: Job, input_p: Any, index: int):
        super().__init__(job, input_p, "eval", index)
        self._per_example = job.task.evaluate.per_example_outputs
        self._directory = job.config.job_log_dir / "eval_out" / self.name
        self._step = EvalStep(job, self.shapes, self.name, per_example=self._per_example)

    def evaluate(self, state: TrainState, step: int, between_batches: Callable[[], None] = no_op) -> dict[str, float]:
        """Evaluates every example once.

        If `task.evaluate.per_example_outputs` is set, also writes the outputs of each example to
        `eval_out/DATASET/step_N.jsonl`.

        Args:
          state: a state without optimizer states.
          between_batches: called before each batch. If it raises, the evaluation stops.

        Returns:
          {metric: mean over all examples}, where counts are summed and clu metrics are merged.

        Raises:
          UserError: the dataset is empty, or its first batch differs from its declared specs.
        """
        mean, batches, started = WeightedMean(), 0, time.monotonic()
        lines: list[str] = []
        for number, batch in self.each_batch(f"evaluating {self.name} at step {step}", between_batches):
            scalars, rows = self._step(state, self.put(batch))
            mean.add(scalars.means, scalars.weights, scalars.clu)
            if self._per_example:
                lines += _example_lines(jax.tree.map(np.asarray, rows), first=number * self.num_rows)
            batches += 1
        if self._per_example and jax.process_index() == 0:
            write_atomically(self._directory / f"step_{step}.jsonl", lines)
        return {**mean.result(), "eval_batches": float(batches), "eval_seconds": time.monotonic() - started}


def _example_lines(rows: PyTree, *, first: int) -> Iterator[str]:
    """Yields one JSON line for each example whose weight isn't 0, with its index in the dataset and its outputs by name."""
    outputs, weights = rows
    size = len(jax.tree.leaves(outputs)[0])
    for row in np.flatnonzero(np.ones(size) if weights is None else weights).tolist():
        yield json.dumps({"index": first + row, **arrays_of_row(outputs, row)})


def evaluate_checkpoints(job: Job) -> None:
    """Evaluates the newest checkpoint and then each new one, up to the last step of the training run.

    With `--restore_checkpoint_step`, evaluates only that checkpoint.

    Raises:
      UserError: there is neither a checkpoint nor a training run that could write one.
    """
    checkpoints.run_on(job, Evaluations, checkpoints.follow(job, averages.of(job)))
