"""Evaluation: during training, and as a job that follows a training run's checkpoints."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
from absl import logging

from spmd_trainer import step_fns
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.metrics.packing import ScalarPacking, Scalars, WeightedMean
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs import checkpoints
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState


class Evaluations:
    """Evaluates every evaluation dataset of a job; each step is compiled once, each input built once."""

    def __init__(self, job: Job, writers: SummaryWriters):
        """Builds nothing before the first `run`."""
        self._job = job
        self._writers = writers
        self._datasets: list[EvalDataset] | None = None
        self._train_step: EvalStep | None = None

    def run(self, state: TrainState, step: int, train_batch: Any = None) -> dict[str, float]:
        """Evaluates all datasets.

        Args:
          state: a state without optimizer states.
          step: the step it is of.
          train_batch: a training batch on the devices to evaluate as well (without dropout and the like), or None.

        Returns:
          {'DATASET/metric': mean}, also written to the summaries `eval_DATASET`.
        """
        if self._datasets is None:
            configs = self._job.resolved.config.eval_datasets
            self._datasets = [EvalDataset(self._job, config) for config in configs]
        results: dict[str, float] = {}
        if train_batch is not None:
            results |= self._write("train", step, self._evaluate_train_batch(state, train_batch))
        for dataset in self._datasets:
            results |= self._write(dataset.name, step, dataset.evaluate(state))
        return results

    def _evaluate_train_batch(self, state: TrainState, batch: Any) -> dict[str, float]:
        if self._train_step is None:
            self._train_step = EvalStep(self._job, self._job.global_shape_dtype(self._job.process_inputs_shape_dtype))
        scalars = self._train_step(state, batch)
        return {name: value for name, value in scalars.values.items() if scalars.weights[name]}

    def _write(self, name: str, step: int, metrics: dict[str, float]) -> dict[str, float]:
        self._writers.write(f"eval_{name}", step, metrics)
        shown = "  ".join(f"{key} {value:.4f}" for key, value in metrics.items() if math.isfinite(value))
        logging.info("eval %s at step %d: %s", name, step, shown)
        return {f"{name}/{key}": value for key, value in metrics.items()}


class EvalStep:
    """The evaluation step for batches of one shape, compiled at its first call."""

    def __init__(self, job: Job, shapes: Any):
        """`shapes` are ShapeDtypeStructs of the global batch."""
        self._packing = ScalarPacking()

        def step(*args: Any) -> tuple[None, jax.Array]:
            _, output = step_fns.eval_step(*args)
            return None, self._packing.pack(output)

        self._step = job.partitioner.partition(step, shapes, is_eval=True)
        self._key = jax.random.key(job.task.evaluate.random_seed)

    @property
    def inputs_partition_spec(self) -> Any:
        """How inputs arrive."""
        return self._step.inputs_partition_spec

    def __call__(self, state: TrainState, inputs: Any) -> Scalars:
        """Evaluates one batch that is on the devices."""
        _, packed = self._step.fn(state, self._key, inputs)
        return self._packing.unpack(packed)


class EvalDataset:
    """One finite dataset and the step compiled for it."""

    def __init__(self, job: Job, input_p: Any):
        self.name = input_p.name
        self._job = job
        self._input = job.build_input(input_p)
        self._step = EvalStep(job, job.global_shape_dtype(dataset_input_specs(input_p)))

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the mean of each weighted scalar over all examples, each counted once.

        Raises:
          ValueError: the dataset holds nothing.
        """
        self._input.reset()
        mean, batches, started = WeightedMean(), 0, time.monotonic()
        while True:
            try:
                batch = self._input.get_next_padded()
            except StopIteration:
                break
            scalars = self._step(
                state, self._job.partitioner.preprocess_inputs(batch, self._step.inputs_partition_spec)
            )
            mean.add(scalars.values, scalars.weights)
            batches += 1
        if not batches:
            raise ValueError(f"evaluation dataset {self.name} is empty")
        return {**mean.result(), "eval_batches": float(batches), "eval_seconds": time.monotonic() - started}


def evaluate_checkpoints(job: Job) -> None:
    """Evaluates the newest checkpoint and each later one as it appears, until the training run's last step."""
    writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
    try:
        evaluations = Evaluations(job, writers)
        for step, state in checkpoints.follow(job, use_ema=job.task.train.eval_use_ema_states):
            evaluations.run(state, step)
    finally:
        writers.close()
