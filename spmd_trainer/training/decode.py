"""Decode: runs the model's decode step over the decode datasets and writes the outputs and metrics."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from praxis import decoder_hparams
from praxis.py_utils import NestedMap

from spmd_trainer import multihost
from spmd_trainer.sharding.messages import count_text
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.step.packing import Packed, ScalarPacking
from spmd_trainer.storage import json_values
from spmd_trainer.tasks_lib import SingleTask
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import averages, checkpoints, decode_records, rooms
from spmd_trainer.training.dataset_batches import FiniteDataset, log_first_call, no_op
from spmd_trainer.training.decode_records import DecodeOutput
from spmd_trainer.training.job import Job
from spmd_trainer.training.summary_writers import SummaryWriters, read_metrics

# Maximum number of decoded examples per dataset that are also logged.
_LOGGED = 5
# Maximum number of decoded examples per dataset that callbacks get.
_SAMPLES = 32
# Inputs that the step returns with the outputs, so that process 0 can write the examples of all processes.
_RETURNED = ("ids", "eval_sample_weights", "prompt_index", "prefix_lengths")


class Decodes:
    """Decodes every decode dataset of a job. The first call of `run` builds the inputs and compiles the decode steps."""

    def __init__(self, job: Job, writers: SummaryWriters):
        self._job = job
        self._writers = writers
        self._datasets: list[DecodeDataset] | None = None

    def run(self, state: TrainState, step: int, between_batches: Callable[[], None] = no_op) -> None:
        """Decodes all datasets into `decode_out/DATASET/step_N.jsonl` and writes their metrics.

        Args:
          state: a state without optimizer states.
          between_batches: called before each batch. If it raises, decoding stops; the next `run` continues from that batch.

        Raises:
          UserError: a dataset is empty, or a prompt is too long. Earlier outputs are kept.
        """
        job = self._job
        if self._datasets is None:
            configs = job.config.experiment.config.decode_datasets
            self._datasets = [DecodeDataset(job, config, index) for index, config in enumerate(configs)]
        prefix = job.task.decode.metrics_prefix
        for dataset in self._datasets:
            metrics = dataset.decode(state, step, between_batches)
            name = f"decode_{dataset.name}"
            scalars = {f"{prefix}{key}": value for key, value in metrics.items()}
            if read_metrics(job.config.job_log_dir, name).get(step, {}).items() >= scalars.items():
                continue  # an earlier run wrote these metrics
            self._writers.write(name, step, scalars)

    def samples(self, step: int) -> dict[str, list[dict[str, Any]]]:
        """Returns {dataset: its first 32 records or fewer} of a step that `run` has decoded. Called by process 0 only."""
        found = {}
        for dataset in self._datasets or ():
            with (dataset.directory / f"step_{step}.jsonl").open() as file:
                lines = itertools.islice(file, _SAMPLES)
                found[dataset.name] = [json_values.parse_object(line, finite=False) for line in lines]
        return found


class DecodeDataset(FiniteDataset):
    """One decode dataset with its compiled decode step and output directory. For the arguments, see `FiniteDataset`."""

    def __init__(self, job: Job, input_p: Any, index: int):
        super().__init__(job, input_p, "decode", index)
        task, infers = job.task, job.config.mode == "infer"
        self._task = task
        self.directory = job.config.job_log_dir / "decode_out" / self.name
        self._packing = ScalarPacking()
        self._tokenizer = getattr(self._input, "tokenizer", None)
        self._generation = rooms.find("decoder.generation.decode")
        self._text_of: Callable[[np.ndarray], str] | None = None
        if self._generation is not None:
            self._text_of = self._generation.text_before_stops(task.model, self._tokenizer)
        self._key = jax.random.key(task.infer.random_seed if infers else task.decode.random_seed)
        self._may_be_too_long = decode_records.may_be_too_long(task, self.name, self.shapes)
        self._step = job.partitioner.partition(self._decode_step, self.shapes, is_eval=True)
        self._fn = log_first_call(self._step, f"compiling the decode step for {self.name}")

    def _decode_step(
        self, layout: Layout, state: TrainState, key: jax.Array, inputs: NestedMap, *rest: Any
    ) -> tuple[None, tuple[Packed, PyTree, PyTree]]:
        inputs = with_sampling_keys(layout.task, inputs, jax.random.fold_in(key, state.step))
        # praxis combines its own keys with the rows' keys, so both must be raw uint32 keys.
        key = jax.random.key_data(key)
        generation = self._generation
        with generation.tokenizer_of_texts(self._tokenizer) if generation else contextlib.nullcontext():
            _, output = step_fns.decode_step(layout, state, key, inputs, *rest)
        returned = {name: inputs[name] for name in _RETURNED if name in inputs}
        return None, (self._packing.pack(output), output.per_example_out, returned)

    def decode(self, state: TrainState, step: int, between_batches: Callable[[], None] = no_op) -> dict[str, float]:
        """Decodes every example once. Reuses what an earlier run has decoded with the same variables, data and settings.

        Returns:
          The metrics, averaged over all examples, on process 0; {} on the others.

        Raises:
          UserError: the dataset is empty, or a prompt is too long.
        """
        writes = jax.process_index() == 0
        output = DecodeOutput(self.directory, step, self.fingerprint(state))
        metrics = output.finished_metrics() if writes else None
        if multihost.broadcast(metrics is not None):
            logging.info("%s at step %d was already decoded with these variables: %s", self.name, step, output.path)
            return metrics or {}
        if self._may_be_too_long:  # checked before decoding, so that an overlong prompt doesn't fail hours later
            self._input.reset()
            for index, batch in enumerate(self._batches()):
                decode_records.check_prompts(self._task, self.name, batch, index * self.num_rows)
        done = multihost.broadcast(output.batches_done() if writes else 0)
        if done:
            logging.info("%s at step %d: %d batches were already decoded", self.name, step, done)
        batches = self._decode_batches(state, step, done, output if writes else None, between_batches)
        if not writes:
            return {}
        metrics, examples = output.finish(batches)
        found = count_text(examples, "example")
        logging.info("decoded %s of %s at step %d into %s", found, self.name, step, output.path)
        return metrics

    def _decode_batches(
        self, state: TrainState, step: int, done: int, output: DecodeOutput | None, between_batches: Callable[[], None]
    ) -> int:
        """Decodes all batches after the first `done` batches. Returns the dataset's total number of batches."""
        logged, batches = 0, done
        for index, batch in self.each_batch(f"decoding {self.name} at step {step}", between_batches, done=done):
            batches = index + 1
            packed, *arrays = self._run_step(state, batch, index)
            if output is None:
                continue
            scalars = self._packing.unpack(packed)
            outputs, inputs = jax.tree.map(np.asarray, arrays)
            first = index * self.num_rows
            records = list(decode_records.records(self._input, outputs, inputs, first=first, text_of=self._text_of))
            output.add(index, records, scalars.means, scalars.weights)
            for record in records[: _LOGGED - logged]:
                decode_records.say(self.name, step, record, output.path)
                logged += 1
        return batches

    def lower(self) -> jax.stages.Lowered:
        return self._step.lower(self._key)

    def outputs(self, state: TrainState, batch: PyTree, index: int = 0) -> PyTree:
        """Decodes the batch with this index, given this process's rows. Returns the per-example outputs of `model.decode`."""
        return self._run_step(state, batch, index)[1]

    def _run_step(self, state: TrainState, batch: PyTree, index: int) -> tuple[Packed, PyTree, PyTree]:
        """Returns the packed scalars, the per-example outputs, and the inputs named in `_RETURNED`."""
        folds = self._task.decode.prng_key_fold_with_batch_index
        key = jax.random.fold_in(self._key, index) if folds else self._key
        result: tuple[Packed, PyTree, PyTree] = self._fn(state, key, self.put(batch))[1]
        return result


def with_sampling_keys(task: SingleTask, inputs: NestedMap, key: jax.Array) -> NestedMap:
    """Adds one random key per row to the batch, as `gumbel_prng_key`, if praxis' sampler accepts such keys.

    With a single key for the whole batch, a row's noise would depend on the padded vocabulary size and therefore on the mesh.
    Does not change the batch for greedy and beam search, which need no noise, for praxis' vanilla sampling, which refuses
    per-row keys, and for classifier-free guidance, which doubles the rows.

    Returns:
      The batch with `gumbel_prng_key`, uint32 [batch, key size], or the unchanged batch.
    """
    hparams = getattr(task.model, "decoder_tpl", None)
    if not isinstance(hparams, decoder_hparams.SampleDecoderHParams) or "gumbel_prng_key" in inputs:
        return inputs
    if hparams.vanilla_sample_decode or hparams.cf_guidance_scale is not None:
        return inputs
    rows = jnp.arange(jax.tree.leaves(inputs)[0].shape[0])
    keys = jax.vmap(lambda row: jax.random.key_data(jax.random.fold_in(key, row)))(rows)
    return type(inputs)({**inputs, "gumbel_prng_key": keys})


def decode_once(job: Job) -> int:
    """Decodes with one checkpoint, `--restore_checkpoint_step` or the newest, and returns its step."""
    restored = checkpoints.restore_for_inference(job, averages.of(job, decodes=True))
    checkpoints.run_on(job, Decodes, [restored])
    return restored.step


def decode_checkpoints(job: Job) -> None:
    """Decodes with the newest checkpoint and then with each new one, up to the last step of the training run."""
    checkpoints.run_on(job, Decodes, checkpoints.follow(job, averages.of(job, decodes=True)))
