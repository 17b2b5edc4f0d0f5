"""A finite dataset, batch by batch, as evaluation and decode go through it."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator
from typing import Any

import jax

from spmd_trainer.checkpointing.checksums import checksum
from spmd_trainer.errors import UserError
from spmd_trainer.inputs.batch_checks import check_values
from spmd_trainer.inputs.batches import dataset_input_specs
from spmd_trainer.models.config_lines import lines_of
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.step.compiled_step import CompiledStep
from spmd_trainer.train_states import PyTree, TrainState
from spmd_trainer.training import first_batch
from spmd_trainer.training.agreed_input import agree_on_input
from spmd_trainer.training.job import Job, vocabulary_size
from spmd_trainer.training.phases import Phase


def no_op() -> None:
    """Does nothing: what evaluation and decode call between two batches where nothing can interrupt them."""


class FiniteDataset:
    """One finite dataset of a job.

    Attributes:
      name: the dataset's name.
      shapes: ShapeDtypeStructs of the global batch.
      num_rows: rows of the global batch.
      put: puts one process's rows of a batch on the devices.
    """

    def __init__(self, job: Job, input_p: Any, kind: str, index: int):
        """Builds the input.

        Args:
          job: the job.
          input_p: the input's config.
          kind: 'eval' or 'decode'.
          index: which of the job's datasets of this kind it is.

        Raises:
          UserError: the input's settings don't fit each other or its files.
        """
        self.name = str(input_p.name)
        self._job = job
        self._kind = kind
        self._activity = "evaluation" if kind == "eval" else kind
        self._index = index
        self._input = agree_on_input(
            job.build_input(input_p), self._activity, count=jax.process_count(), must_end_together=True
        )
        self._specs = dataset_input_specs(input_p)
        self.put = job.partitioner.layout.put
        self.shapes = job.global_shape_dtype(self._specs)
        self.num_rows = int(jax.tree.leaves(self.shapes)[0].shape[0])

    def fingerprint(self, state: TrainState) -> str:
        """Returns a text that is equal only for equal variables, data and settings, on any mesh. Finished work is not redone.

        Args:
          state: has the variables, padded or not; all their bits count.
        """
        self._input.reset()
        config = self._job.config
        settings = "evaluate" if self._kind == "eval" else "decode"
        seeds = ("task.infer",) if config.mode == "infer" else ()
        dataset = f"{self._kind}_datasets[{self._index}]"
        parts = [
            *lines_of(
                config.experiment.lines(),
                ("task.model", "task.lora", "task.metrics", f"task.{settings}", dataset, *seeds),
            ),
            _state_of(self._input),
            f"processes {jax.process_count()}",
            f"step {int(state.step)}",
            f"variables {checksum(state.mdl_vars)}",
        ]
        return short_hash(json.dumps(parts))

    def each_batch(
        self, activity: str, between_batches: Callable[[], None], *, done: int = 0
    ) -> Iterator[tuple[int, PyTree]]:
        """Yields the number of each batch and the batch, from the dataset's beginning, and logs the progress.

        Args:
          activity: what is done with the batches, for the log, e.g. 'evaluating heldout at step 5'.
          between_batches: called before each batch; what it raises ends the iteration.
          done: the first `done` batches are read and left out.

        Raises:
          UserError: the dataset is empty, or its first batch is not what its specs declare.
        """
        self._input.reset()
        total, number = _num_batches(self._input), -1
        left = None if total is None else total - done
        with Phase(activity, announce_after=2.0, total=left) as phase:
            for number, batch in enumerate(self._batches()):
                if number < done:
                    continue
                between_batches()
                yield number, batch
                phase.advance()
        if number < 0:
            raise UserError(f"{self._activity} dataset {self.name} is empty; give it at least one example")

    def _batches(self) -> Iterator[PyTree]:
        """Yields the batches of the input until it ends. The first is compared with the declared specs."""
        unchecked, vocabulary = self._job.task.train.enforce_input_specs, vocabulary_size(self._job.task)
        added_rows = getattr(self._input, "batch_padding_size", 0)
        limit = _limit(self._input)
        for _ in itertools.count() if limit is None else range(limit):
            try:
                batch = self._input.get_next_padded()
            except StopIteration:
                return
            if unchecked:
                first_batch.check(self.name, batch, _with_rows(self._specs, added_rows))
                unchecked = False
            check_values(self.name, batch, vocabulary)
            yield batch


def log_first_call(fn: CompiledStep, activity: str) -> CompiledStep | Callable[..., tuple[Any, Any]]:
    """Returns `fn` with a log line for its first call, which compiles it.

    Args:
      fn: a jitted step.
      activity: e.g. 'compiling the evaluation step for heldout'.
    """
    is_compiled = False

    def call(*args: Any) -> tuple[Any, Any]:
        nonlocal is_compiled
        if is_compiled:
            return fn(*args)
        with Phase(activity, announce_after=2.0):
            result = fn(*args)
        is_compiled = True
        return result

    return call


def _state_of(data: Any) -> str:
    """Returns the state of an input at its beginning, which changes with its files; '' if it has none."""
    try:
        return repr(data.get_state())
    except NotImplementedError:
        return ""


def _num_batches(data: Any) -> int | None:
    """Returns how many batches a built input has, or None if it can't tell."""
    number = getattr(data, "num_batches", None)
    return number if isinstance(number, int) and number > 0 else _limit(data)


def _limit(data: Any) -> int | None:
    """Returns how many batches to take from an input that never ends; None for one that ends by itself.

    An input of Pax such as praxis' LingvoInputAdaptor around random data has a `num_batches` without a limit (None, or 0 and
    below), and says how many to take.
    """
    number = getattr(data, "num_batches", 1)
    if (isinstance(number, int) and number > 0) or getattr(data, "reset_for_eval", True):
        return None
    limit: int | None = getattr(data, "eval_loop_num_batches", None)
    return limit or None


def _with_rows(declared: PyTree, added: int) -> PyTree:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct((x.shape[0] + added, *x.shape[1:]), x.dtype), declared)
