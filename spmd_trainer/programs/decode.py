"""Decode: continue prompts with a trained model, write what came out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from absl import logging
from etils import epath

from spmd_trainer import step_fns
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.metrics.packing import ScalarPacking, WeightedMean
from spmd_trainer.metrics.writers import SummaryWriters
from spmd_trainer.programs import checkpoints
from spmd_trainer.programs.job import Job
from spmd_trainer.train_states import TrainState

# Decoded examples that are also logged, per dataset.
_LOGGED = 5


class Decodes:
    """Decodes every decode dataset of a job; each step is compiled once."""

    def __init__(self, job: Job, writers: SummaryWriters):
        """Builds nothing before the first `run`."""
        self._job = job
        self._writers = writers
        self._datasets: list[DecodeDataset] | None = None

    def run(self, state: TrainState, step: int) -> None:
        """Decodes all datasets into `decode_out/DATASET/step_N.jsonl` and writes their metrics."""
        if self._datasets is None:
            self._datasets = [DecodeDataset(self._job, config) for config in self._job.resolved.config.decode_datasets]
        prefix = self._job.task.decode.metrics_prefix
        for dataset in self._datasets:
            metrics = dataset.decode(state, step)
            scalars = {f"{prefix}{name}": value for name, value in metrics.items()}
            self._writers.write(f"decode_{dataset.name}", step, scalars)


class DecodeDataset:
    """One finite set of prompts and the step compiled for it."""

    def __init__(self, job: Job, input_p: Any):
        self.name = input_p.name
        self._job = job
        self._input = job.build_input(input_p)
        self._packing = ScalarPacking()

        def step(*args: Any) -> tuple[None, tuple[jax.Array, Any]]:
            _, output = step_fns.decode_step(*args)
            return None, (self._packing.pack(output), output.per_example_out)

        shapes = job.global_shape_dtype(dataset_input_specs(input_p))
        self._step = job.partitioner.partition(step, shapes, is_eval=True)
        self._key = jax.random.key(job.task.decode.random_seed)

    def decode(self, state: TrainState, step: int) -> dict[str, float]:
        """Decodes every example once; returns the mean metrics."""
        self._input.reset()
        mean = WeightedMean()
        directory = epath.Path(self._job.settings.job_log_dir) / "decode_out" / self.name
        directory.mkdir(parents=True, exist_ok=True)
        final = directory / f"step_{step}.jsonl"
        partial = directory / f"step_{step}.jsonl.partial"
        count = 0
        with partial.open("w") as file:
            for index, batch in enumerate(self._batches()):
                key = jax.random.fold_in(self._key, index) if self._fold() else self._key
                inputs = self._job.partitioner.preprocess_inputs(batch, self._step.inputs_partition_spec)
                _, (packed, outputs) = self._step.fn(state, key, inputs)
                scalars = self._packing.unpack(packed)
                mean.add(scalars.values, scalars.weights)
                for record in self._records(batch, outputs):
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    if count < _LOGGED:
                        logging.info(
                            "decoded %s\n  prompt: %r\n  output: %r", self.name, record["prompt"], record["output"]
                        )
                    count += 1
        partial.replace(final)
        logging.info("decoded %d examples of %s at step %d into %s", count, self.name, step, final)
        return mean.result()

    def _fold(self) -> bool:
        return self._job.task.decode.prng_key_fold_with_batch_index

    def _batches(self) -> Iterator[Any]:
        while True:
            try:
                yield self._input.get_next_padded()
            except StopIteration:
                return

    def _records(self, batch: Any, outputs: Any) -> Iterator[dict[str, Any]]:
        """One record per example that counts: the prompt, the best output, its score, and the ids."""
        outputs = jax.tree.map(np.asarray, outputs)
        counts = np.asarray(batch.get("eval_sample_weights", np.ones(len(batch.ids))))
        for row in np.flatnonzero(counts).tolist():
            # praxis gives [batch, samples, length]; the first sample is the best.
            ids = outputs.output_ids[row]
            lengths = np.atleast_1d(outputs.decode_lengths[row])
            prefix = int(np.atleast_1d(outputs.prefix_lengths[row])[0])
            samples = [sample[prefix : int(length)] for sample, length in zip(np.atleast_2d(ids), lengths, strict=True)]
            texts = self._texts(samples)
            yield {
                "prompt": self._texts([np.asarray(batch.ids)[row, :prefix]])[0],
                "output": texts[0],
                "outputs": texts,
                "score": _scores(outputs, row)[0],
                "scores": _scores(outputs, row),
                "ids": [sample.tolist() for sample in samples],
                "index": int(batch.prompt_index[row]) if "prompt_index" in batch else int(row),
            }

    def _texts(self, rows: list[np.ndarray]) -> list[str]:
        longest = max(1, max(len(row) for row in rows))
        padded = np.zeros((len(rows), longest), np.int32)
        for i, row in enumerate(rows):
            padded[i, : len(row)] = row
        return list(self._input.ids_to_strings(padded, np.asarray([len(row) for row in rows], np.int32)))


def _scores(outputs: Any, row: int) -> list[float | None]:
    """Log-probability of each sample: praxis' `scores` where beam search gives them, else the sum over decoded tokens."""
    if "scores" in outputs:
        return [float(score) for score in np.atleast_1d(outputs.scores[row])]
    if "logprobs" not in outputs:
        return [None]
    totals: list[float | None] = []
    lengths = np.atleast_1d(outputs.decode_lengths[row])
    prefix = int(np.atleast_1d(outputs.prefix_lengths[row])[0])
    for logprobs, length in zip(np.atleast_2d(outputs.logprobs[row]), lengths, strict=True):
        totals.append(float(np.sum(logprobs[prefix : int(length)], dtype=np.float64)))
    return totals


def decode_once(job: Job) -> None:
    """Decodes with one checkpoint: `--restore_checkpoint_step`, or the newest."""
    step, state = checkpoints.restore_for_inference(job, use_ema=job.task.train.decode_use_ema_states)
    _with_writers(job, [(step, state)])


def decode_checkpoints(job: Job) -> None:
    """Decodes with the newest checkpoint and each later one as it appears, until the training run's last step."""
    _with_writers(job, checkpoints.follow(job, use_ema=job.task.train.decode_use_ema_states))


def _with_writers(job: Job, states: Any) -> None:
    writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
    try:
        decodes = Decodes(job, writers)
        for step, state in states:
            decodes.run(state, step)
    finally:
        writers.close()
