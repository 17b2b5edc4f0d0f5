"""Evaluation: during training, and as a job that follows a training run's checkpoints."""

from __future__ import annotations

import math
import time
from typing import Any

import jax
from absl import logging

from spmd_trainer import step_fns
from spmd_trainer.metrics.packing import ScalarPacking, WeightedMean
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState


class Evaluations:
    """Evaluates every evaluation dataset of a job; each step is compiled once, each input built once."""

    def __init__(self, job: Job, writers: SummaryWriters):
        """Builds nothing before the first `run`."""
        self._job = job
        self._writers = writers
        self._datasets: list[EvalDataset] | None = None

    def run(self, state: TrainState, step: int) -> dict[str, float]:
        """Evaluates all datasets.

        Args:
          state: a state without optimizer states.
          step: the step it is of.

        Returns:
          {'DATASET/metric': mean}, also written to the summaries `eval_DATASET`.
        """
        if self._datasets is None:
            configs = self._job.resolved.config.eval_datasets
            self._datasets = [EvalDataset(self._job, config) for config in configs]
        results: dict[str, float] = {}
        for dataset in self._datasets:
            metrics = dataset.evaluate(state)
            self._writers.write(f"eval_{dataset.name}", step, metrics)
            shown = "  ".join(f"{name} {value:.4f}" for name, value in metrics.items() if math.isfinite(value))
            logging.info("eval %s at step %d: %s", dataset.name, step, shown)
            results |= {f"{dataset.name}/{name}": value for name, value in metrics.items()}
        return results


class EvalDataset:
    """One finite dataset and the step compiled for it."""

    def __init__(self, job: Job, input_p: Any):
        self.name = input_p.name
        self._job = job
        self._input = job.build_input(input_p)
        self._packing = ScalarPacking()
        shapes = job.global_shape_dtype(_input_shapes(job, input_p))

        def step(*args: Any) -> tuple[None, jax.Array]:
            _, output = step_fns.eval_step(*args)
            return None, self._packing.pack(output)

        self._step = job.partitioner.partition(step, shapes, is_eval=True)
        self._key = jax.random.key(job.task.evaluate.random_seed)

    def evaluate(self, state: TrainState) -> dict[str, float]:
        """Returns the mean of each weighted scalar over all examples, each counted once."""
        self._input.reset()
        mean, batches, started = WeightedMean(), 0, time.monotonic()
        while True:
            try:
                batch = self._input.get_next_padded()
            except StopIteration:
                break
            inputs = self._job.partitioner.preprocess_inputs(batch, self._step.inputs_partition_spec)
            _, packed = self._step.fn(state, self._key, inputs)
            scalars = self._packing.unpack(packed)
            mean.add(scalars.values, scalars.weights)
            batches += 1
        if not batches:
            raise ValueError(f"evaluation dataset {self.name} is empty")
        return {**mean.result(), "eval_batches": float(batches), "eval_seconds": time.monotonic() - started}


def _input_shapes(job: Job, input_p: Any) -> Any:
    from spmd_trainer.inputs.batches import dataset_input_specs

    return dataset_input_specs(input_p)


def evaluate_checkpoints(job: Job) -> None:
    """Evaluates the newest checkpoint and each later one as it appears, until the training run's last step."""
    from spmd_trainer.programs import checkpoints

    writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
    try:
        evaluations = Evaluations(job, writers)
        for step, state in checkpoints.follow(job, use_ema=job.task.train.eval_use_ema_states):
            evaluations.run(state, step)
    finally:
        writers.close()
