"""Decode: continue prompts with a trained model, write what came out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from etils import epath
from praxis import decoder_hparams

from spmd_trainer import multihost
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.metrics.packing import ScalarPacking
from spmd_trainer.metrics.writers import SummaryWriters, read_metrics
from spmd_trainer.programs import checkpoints, decode_records
from spmd_trainer.programs.dataset_batches import all_batches, go_on, num_batches
from spmd_trainer.programs.decode_output import DecodeOutput
from spmd_trainer.programs.ending import say_results
from spmd_trainer.programs.fingerprint import fingerprint
from spmd_trainer.programs.job import Job
from spmd_trainer.programs.phases import Phase
from spmd_trainer.steps import step_fns
from spmd_trainer.train_states import TrainState

# Decoded examples that are also logged, per dataset.
_LOGGED = 5
# Inputs that come back with the outputs, so that one process can write the examples of all.
_RETURNED = ("ids", "eval_sample_weights", "prompt_index", "prefix_lengths")


class Decodes:
    """Decodes every decode dataset of a job; each step is compiled once."""

    def __init__(self, job: Job, writers: SummaryWriters):
        """Builds nothing before the first `run`."""
        self._job = job
        self._writers = writers
        self._datasets: list[DecodeDataset] | None = None

    def run(self, state: TrainState, step: int, between_batches: Callable[[], None] = go_on) -> None:
        """Decodes all datasets into `decode_out/DATASET/step_N.jsonl` and writes their metrics.

        Args:
          state: a state without optimizer states.
          step: the step it is of.
          between_batches: called before each batch; what it raises ends the decode, which goes on there the next time.

        Raises:
          UserError: the experiment has no decode dataset, one is empty, or a prompt is too long. What was decoded before
            stays.
        """
        job = self._job
        if self._datasets is None:
            configs = job.resolved.config.decode_datasets
            if not configs:
                raise UserError(
                    f"experiment {job.settings.exp} has no decode datasets; return some from decode_datasets()"
                )
            self._datasets = [DecodeDataset(job, config, index) for index, config in enumerate(configs)]
        prefix = job.task.decode.metrics_prefix
        for dataset in self._datasets:
            metrics = dataset.decode(state, step, between_batches)
            name = f"decode_{dataset.name}"
            scalars = {f"{prefix}{key}": value for key, value in metrics.items()}
            if read_metrics(job.settings.job_log_dir, name).get(step, {}).items() >= scalars.items():
                continue  # a decode that was there already
            self._writers.write(name, step, scalars)


class DecodeDataset:
    """One finite set of prompts and the step compiled for it."""

    def __init__(self, job: Job, input_p: Any, index: int):
        self.name = input_p.name
        self._job = job
        self._dataset_index = index
        self._input = job.build_input(input_p)
        self._packing = ScalarPacking()
        infers = job.settings.mode == "infer"
        self._key = jax.random.key(job.task.infer.random_seed if infers else job.task.decode.random_seed)
        self._is_compiled = False
        self._specs = dataset_input_specs(input_p)
        shapes = job.global_shape_dtype(self._specs)
        self._rows = jax.tree.leaves(shapes)[0].shape[0]
        self._may_be_too_long = decode_records.may_be_too_long(job.task, self.name, shapes)
        self._step = job.partitioner.partition(self._decode_step, shapes, is_eval=True)

    def _decode_step(
        self, task: Any, state: TrainState, key: jax.Array, inputs: Any, *rest: Any
    ) -> tuple[None, tuple[jax.Array, Any, Any]]:
        inputs = with_sampling_keys(task, inputs, jax.random.fold_in(key, state.step))
        # praxis puts its own keys where those of the rows would stand, so they have to be of their kind: plain integers.
        key = jax.random.key_data(key)
        _, output = step_fns.decode_step(task, state, key, inputs, *rest)
        returned = {name: inputs[name] for name in _RETURNED if name in inputs}
        return None, (self._packing.pack(output), output.per_example_out, returned)

    def decode(self, state: TrainState, step: int, between_batches: Callable[[], None] = go_on) -> dict[str, float]:
        """Decodes every example once; what an earlier run of the same has decoded is taken over.

        Args:
          state, step, between_batches: see `Decodes.run`.

        Returns:
          The mean metrics (on process 0).

        Raises:
          UserError: the dataset holds nothing, or a prompt is too long.
        """
        self._input.reset()
        same = fingerprint(self._job, "decode", self._dataset_index, self._input, state)
        writes = jax.process_index() == 0
        output = DecodeOutput(epath.Path(self._job.settings.job_log_dir) / "decode_out" / self.name, step, same)
        metrics = output.finished_metrics() if writes else None
        if multihost.from_process_0(int(metrics is not None)):
            logging.info("%s at step %d is decoded already, with the same variables: %s", self.name, step, output.path)
            return metrics or {}
        self._check_prompts()
        done = multihost.from_process_0(output.batches_done() if writes else 0)
        if done:
            logging.info("%s at step %d: %d batches are decoded already", self.name, step, done)
        total = num_batches(self._input)
        left = None if total is None else total - done
        with Phase(f"decoding {self.name} at step {step}", announce_after=2.0, total=left) as phase:
            batches = self._decode_batches(state, done, output if writes else None, phase, between_batches)
        if not writes:
            return {}
        metrics, examples = output.finish(batches)
        logging.info("decoded %d examples of %s at step %d into %s", examples, self.name, step, output.path)
        return metrics

    def _check_prompts(self) -> None:
        """All prompts before the first is decoded: an error at the last one would come hours too late."""
        if self._may_be_too_long:
            for index, batch in enumerate(self._batches()):
                decode_records.check_prompts(self._job.task, self.name, batch, index * self._rows)
            self._input.reset()

    def _decode_batches(
        self,
        state: TrainState,
        done: int,
        output: DecodeOutput | None,
        phase: Phase,
        between_batches: Callable[[], None],
    ) -> int:
        """Decodes all batches but the first `done`; returns how many there are in all."""
        logged, batches = 0, 0
        for index, batch in enumerate(self._batches()):
            batches += 1
            if index < done:
                continue
            between_batches()
            packed, *arrays = self._run_step(state, batch, index)
            phase.advance()
            if output is None:
                continue
            scalars = self._packing.unpack(packed)
            outputs, inputs = jax.tree.map(np.asarray, arrays)
            records = list(decode_records.records(self._input, outputs, inputs, first=index * self._rows))
            output.add(index, records, scalars.values, scalars.weights)
            for record in records[: _LOGGED - logged]:
                logging.info("decoded %s\n%s", self.name, decode_records.shown(record))
                logged += 1
        if not batches:
            raise UserError(f"decode dataset {self.name} is empty; give it at least one example")
        return batches

    def lower(self) -> Any:
        """Returns the step lowered for its mesh, to be compiled and looked at."""
        partitioner = self._job.partitioner
        state = partitioner.abstract_state(with_opt_states=False)
        return self._step.fn.lower(state, self._key, partitioner.abstract_inputs(self._step))

    def outputs(self, state: TrainState, batch: Any, index: int = 0) -> Any:
        """Decodes one batch of this process's rows, number `index` of the dataset: what `model.decode` gives by example."""
        return self._run_step(state, batch, index)[1]

    def _run_step(self, state: TrainState, batch: Any, index: int) -> tuple[jax.Array, Any, Any]:
        """Returns the packed scalars, the outputs by example, and the inputs that come back with them."""
        folds = self._job.task.decode.prng_key_fold_with_batch_index
        key = jax.random.fold_in(self._key, index) if folds else self._key
        inputs = self._job.partitioner.preprocess_inputs(batch, self._step.inputs_partition_spec)
        if self._is_compiled:
            return self._step.fn(state, key, inputs)[1]
        with Phase(f"compiling the decode step for {self.name}", announce_after=2.0):
            result = self._step.fn(state, key, inputs)[1]
        self._is_compiled = True
        return result

    def _batches(self) -> Iterator[Any]:
        return all_batches(self._job, self._input, self._specs)


def with_sampling_keys(task: Any, inputs: Any, key: jax.Array) -> Any:
    """Gives each row a key of its own, `gumbel_prng_key`, where praxis' sampler takes one.

    Drawn from one key for the whole batch, the noise of a row would depend on how many words the vocabulary is padded to,
    and so on the mesh. Not where the sampler has no use for it: greedy and beam search, praxis' vanilla sampling (which
    refuses keys by row) and classifier-free guidance (which doubles the rows).

    Args:
      task: the task as the step sees it.
      inputs: the batch, NestedMap.
      key: the key of this batch and step.

    Returns:
      The batch with `gumbel_prng_key`, uint32 [B, key size], or as it was.
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
    """Decodes with one checkpoint: `--restore_checkpoint_step`, or the newest. Returns its step."""
    step, state = checkpoints.restore_for_inference(job, use_ema=job.task.train.decode_use_ema_states)
    _with_writers(job, [(step, state)])
    return step


def decode_checkpoints(job: Job) -> None:
    """Decodes with the newest checkpoint and each later one as it appears, until the training run's last step."""
    _with_writers(job, checkpoints.follow(job, use_ema=job.task.train.decode_use_ema_states))


def _with_writers(job: Job, states: Iterable[tuple[int, TrainState]]) -> None:
    writers = SummaryWriters(job.settings.job_log_dir, enabled=jax.process_index() == 0)
    try:
        decodes = Decodes(job, writers)
        for step, state in states:
            decodes.run(state, step)
            writers.flush()
        say_results(job)
    finally:
        writers.close()
