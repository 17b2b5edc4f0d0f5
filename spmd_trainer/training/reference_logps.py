"""Computes the reference model's log-probabilities of answers for preference training, once, when a run begins.

The reference is the model that the run begins with, including any adapters. Before the first step, `compute` evaluates it on
every preference pair of the datasets with `reference='file'`, and stores the values in the job_log_dir; see `reference_files`.
"""

from __future__ import annotations

import json
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging

from spmd_trainer import multihost
from spmd_trainer.checkpointing.agreement import decided_by_process_0
from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.errors import UserError
from spmd_trainer.models import config_lines
from spmd_trainer.sharding.messages import count_text, short_hash
from spmd_trainer.step import step_fns
from spmd_trainer.step.layout import Layout
from spmd_trainer.train_states import NestedJTensor, TrainState
from spmd_trainer.training.dataset_batches import FiniteDataset, no_op
from spmd_trainer.training.job import Job
from spmd_trainer.training.reference_files import ReferenceFiles, takes_reference

# Computed values are written to a file at intervals of this many seconds, and when the dataset has ended.
_SECONDS_BETWEEN_PARTS = 20.0
# The settings that log-probabilities depend on.
_MODEL = ("task.lora", "task.model.lm_tpl", "task.model.fprop_dtype", "task.model.model_type")


def inputs_of(job: Job) -> list[Any]:
    """Returns the configs of the inputs that read reference log-probabilities from the run's files."""
    config = job.config.experiment.config
    return [
        input_p
        for input_p in (*config.train_datasets[:1], *config.eval_datasets)
        if takes_reference(input_p.cls) and input_p.reference is not None
    ]


def compute(job: Job, state: TrainState) -> None:
    """Computes the missing reference log-probabilities for preference training. Called by every process, when a run begins.

    Raises:
      UserError: a dataset has `reference='file'`, but the model doesn't learn from preference pairs.
    """
    wanted = inputs_of(job)
    if not wanted:
        return
    if not hasattr(job.task.model, "with_reference"):
        raise UserError(
            f"input {wanted[0].name!r} has reference='file', and task.model is a {type(job.task.model).__name__}, which has no "
            "reference; use spmd_trainer.decoder.preferences.model.PreferenceModel"
        )
    # Identifies the model: its settings and the bits of its variables, on any mesh.
    lines = config_lines.lines_of(job.config.experiment.lines(), _MODEL)
    model = short_hash(json.dumps([*lines, checksum(state.mdl_vars)]), 32)
    for input_p in wanted:
        _Dataset(job, input_p, model).compute(state.to_eval_state())


class _Dataset(FiniteDataset):
    """A dataset that gives each preference pair once, with the compiled step that evaluates the reference model on a batch."""

    def __init__(self, job: Job, input_p: Any, model: str):
        # Values are kept in the order of the files.
        super().__init__(job, input_p.clone().set(is_training=False, shuffle=False), "eval", 0)
        self._num_pairs = self._input.num_pairs
        # The evaluation step also compares the model with reference values, which don't matter here.
        self._input.use_reference(np.zeros((self._num_pairs, 2), np.float32))
        self._files = ReferenceFiles(job.config.job_log_dir, self._input, model)
        self._step = job.partitioner.partition(_logps_step, self.shapes, is_eval=True)

    def compute(self, state: TrainState) -> None:
        where = self._files.directory
        if outdated := decided_by_process_0(self._files.remove_of_other_models):
            logging.warning(
                "%s held the values of another model (%s): they are computed again", where, count_text(outdated, "file")
            )
        done, given = decided_by_process_0(self._files.num_done)
        if done == self._num_pairs:
            logging.info("the reference log-probabilities of %s are in %s", self.name, where)
            return
        key, batches_done, written = jax.random.key(0), given // self.num_rows, time.monotonic()
        ready: list[np.ndarray] = []
        for _, batch in self.each_batch(f"reference log-probabilities of {self.name}", no_op, done=batches_done):
            _, output = self._step(state, key, self.put(batch))
            found = _in_order(*map(np.asarray, output), first=done)
            ready.append(found)
            done += len(found)
            if time.monotonic() - written > _SECONDS_BETWEEN_PARTS:
                self._files.write(np.concatenate(ready), end=done)
                ready, written = [], time.monotonic()
        ready.append(np.full((self._num_pairs - done, 2), np.nan, np.float32))  # last pairs that the input leaves out
        self._files.write(np.concatenate(ready), end=self._num_pairs)
        multihost.barrier(f"the reference log-probabilities of {self.name} are written")
        logging.info("wrote the reference log-probabilities of %s to %s", count_text(self._num_pairs, "pair"), where)


def _logps_step(
    layout: Layout, state: TrainState, key: jax.Array, inputs: NestedJTensor, *rest: Any
) -> tuple[None, tuple[jax.Array, jax.Array]]:
    """Evaluates the model on a batch. The arguments are those of `step_fns.eval_step`.

    Returns:
      (None, (indices, logps)): the indices of the preference pairs, int32 [batch], -1 for padding rows; and the log-probabilities
      of the pairs' two answers, float32 [batch, 2 (chosen, rejected)].
    """
    _, output = step_fns.eval_step(layout, state, key, inputs, *rest)
    pairs = jnp.where(inputs["eval_sample_weights"] > 0, inputs["pair_index"], -1)
    return None, (pairs, output.per_example_out["logps"])


def _in_order(pairs: np.ndarray, logps: np.ndarray, *, first: int) -> np.ndarray:
    """Sorts a batch's log-probabilities by pair. Returns them from pair `first` to the last one; NaN for missing pairs.

    The rows need sorting because, with several processes, they are in the order of the mesh's devices.

    Args:
      pairs: index of each row's pair, int32 [batch], -1 for padding rows.
      logps: log-probabilities of the pairs' two answers, float32 [batch, 2 (chosen, rejected)].
      first: index of the first pair to return.
    """
    wanted = pairs >= first
    found = np.full((max(0, int(pairs.max()) + 1 - first), 2), np.nan, np.float32)
    found[pairs[wanted] - first] = logps[wanted]
    return found
