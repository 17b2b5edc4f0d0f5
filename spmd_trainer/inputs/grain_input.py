"""Inputs over Grain datasets. Needs the package grain (pip extra `grain`).

`GrainInput` takes a `grain.MapDataset`, which can read element n directly, so sharding among processes, evaluation and
saved positions work as in every other input. `GrainStreamInput` takes a `grain.IterDataset`, which is read in
order, and saves the position as the state of Grain's iterator.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, installation
from spmd_trainer.inputs import batches, examples, indexed

# Number of elements that Grain reads ahead.
_READ_AHEAD = 64


class GrainInput(indexed.IndexedInput):
    """Input over a `grain.MapDataset` of examples (dicts of arrays of fixed shapes), not batched and not sharded.

    Training (`is_training=True`) repeats the dataset. For a different order in each epoch, call the dataset's
    `.shuffle(seed=...)`. Evaluation gives each element once, in the dataset's order, then raises StopIteration until
    `reset()`. Rows that fill up the last batch repeat the last element with `eval_sample_weights` 0. Grain's threads read
    elements ahead of time.

    A batch is a NestedMap of numpy arrays [B, ...] of B rows, including `eval_sample_weights` float32 [B]; 64-bit arrays
    become 32-bit. A saved position is valid for any number of processes and any batch size. Restoring a position checks only
    the dataset's length and the shapes and dtypes of its first element; other changes of the dataset go unnoticed.

    Attributes:
      dataset: the dataset, or a function without arguments that returns it. Random transformations must draw from
        Grain's own generator, so that an element is the same each time it is read.
      read_threads: number of threads that read elements; 0 reads them in the thread that makes the batch.
    """

    dataset: Any = None
    read_threads: int = 4

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.read_threads < 0:
            raise self.error(f"read_threads={self.read_threads}; set it to 0 or more")
        self.settle_reset_for_eval()

    @functools.cached_property
    def source(self) -> Any:
        """The Grain dataset. Raises UserError if Grain isn't installed, or `dataset` is not a MapDataset or is empty."""
        grain = import_grain(self.error)
        dataset = self.dataset() if callable(self.dataset) else self.dataset
        if isinstance(dataset, grain.IterDataset):
            raise self.error(
                "dataset gives an IterDataset; GrainStreamInput takes these, or leave out to_iter_dataset()"
            )
        if not isinstance(dataset, grain.MapDataset):
            raise self.error(f"dataset gives {type(dataset).__name__}; give a grain.MapDataset or a function that does")
        if not len(dataset):
            raise self.error("the dataset has no element")
        if len(dataset) >= sys.maxsize:
            raise self.error(
                "the dataset is repeated without end; leave out repeat(): a training input repeats by itself"
            )
        return dataset

    @property
    def num_examples(self) -> int:
        """Number of elements in one epoch."""
        return len(self.source)

    @property
    def endless(self) -> bool:
        return self.is_training

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(self.num_examples, self.is_training)

    def input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of one process's batch, unpadded, as jax.ShapeDtypeStruct. Reads the first element."""
        return _batch_specs(self._example_specs, self.batch_size)

    @functools.cached_property
    def _example_specs(self) -> NestedMap:
        with self.naming("element 0 of the dataset is not an example: "):
            return examples.specs_of(examples.from_nested_dict(self.source[0]))

    def batch_at(self, position: int) -> NestedMap:
        return self._batch(position, map(self._element, self._indices(position).tolist()))

    def _iterate(self, start: int) -> Iterator[NestedMap]:
        def element(position: int, column: int) -> tuple[Any]:
            return self._element(self.first_index(position) + column)

        rows = rows_ahead(self, start, element, threads=self.read_threads, ahead=_READ_AHEAD)
        for position in itertools.count(start):
            yield self._batch(position, rows)

    def _indices(self, position: int) -> np.ndarray:
        first = self.first_index(position)
        return np.arange(first, first + self.batch_size)

    def _element(self, index: int) -> tuple[Any]:
        # In a tuple, because Grain would silently drop an element that is None, which this input reports as an error.
        return (self._repeated[index] if self.is_training else self.source[min(index, self.num_examples - 1)],)

    @functools.cached_property
    def _repeated(self) -> Any:
        return self.source.repeat()

    def _batch(self, position: int, elements: Iterator[tuple[Any]]) -> NestedMap:
        indices = self._indices(position)
        taken = [next(elements)[0] for _ in indices]
        if any(element is None for element in taken):
            raise self.error(
                "the dataset leaves out elements (a filter), so that a batch would be short; filter before, or use "
                "GrainStreamInput"
            )
        real = np.ones(len(indices), bool) if self.is_training else indices < self.num_examples
        with self.naming():
            stacked = examples.stack(taken, self._example_specs, lambda row: f"element {indices[row]}")
            return batches.blank_rows(examples.for_devices(stacked), real)

    def _fingerprint(self) -> dict[str, Any]:
        shapes = {path: [list(x.shape), str(x.dtype)] for path, x in self._example_specs.FlattenItems()}
        return {**super()._fingerprint(), "element": shapes}


class GrainStreamInput(indexed.CheckpointedInput):
    """Input over a `grain.IterDataset` of examples (dicts of arrays of fixed shapes), not batched.

    It suits datasets without random access, which filter, pack or mix elements. Each process reads its own share of the
    dataset. A saved position is the state of Grain's iterator, valid only for the same number of processes. Training datasets
    should be endless. Evaluation must run on a single process: it gives each element once, fills up the last batch with rows
    of weight 0, then raises StopIteration until `reset()`.

    A batch is a NestedMap of numpy arrays [B, ...] of B rows, including `eval_sample_weights` float32 [B]; 64-bit arrays
    become 32-bit.

    Attributes:
      dataset: a function (process index, number of processes) that returns this process's share of the dataset.
    """

    dataset: Any = None
    _source: Any = dataclasses.field(default=None, init=False, repr=False)
    _iterator: Any = dataclasses.field(default=None, init=False, repr=False)
    _taken: int = dataclasses.field(default=0, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        grain = import_grain(self.error)
        if not self.is_training and self.num_infeed_hosts > 1:
            raise self.error(
                f"it is not for training, and {self.num_infeed_hosts} processes share it: their shares of a stream may "
                "have different lengths. Use GrainInput on a grain.MapDataset"
            )
        if not callable(self.dataset):
            raise self.error(f"dataset={self.dataset!r}; give a function (process index, processes) -> IterDataset")
        self._source = self.dataset(self.infeed_host_index, self.num_infeed_hosts)
        if not isinstance(self._source, grain.IterDataset):
            raise self.error(f"dataset gives {type(self._source).__name__}; it must give a grain.IterDataset")
        self.reset_for_eval: bool = not self.is_training
        self._iterator = iter(self._source)

    @functools.cached_property
    def _example_specs(self) -> NestedMap:
        try:
            return examples.specs_of(examples.from_nested_dict(next(iter(self._source))))
        except StopIteration as error:
            raise self.error("the dataset has no element") from error
        except UserError as error:
            raise self.error(f"the first element of the dataset is not an example: {error}") from error

    def input_specs(self) -> NestedMap:
        """Returns the shapes and dtypes of one process's batch, unpadded, as jax.ShapeDtypeStruct.

        Reads the first element with a separate iterator, so that the first batch still contains it.
        """
        return _batch_specs(self._example_specs, self.batch_size)

    def get_next(self) -> NestedMap:
        """Returns the next batch.

        Raises:
          StopIteration: the dataset has ended. Training drops an incomplete last batch.
          UserError: the leaves of an element, or their shapes or dtypes, differ from those of the first element.
        """
        specs = self._example_specs
        rows = list(itertools.islice(self._iterator, self.batch_size))
        if not rows or (self.is_training and len(rows) < self.batch_size):
            raise StopIteration
        with self.naming():
            batch = examples.stack(rows, specs, lambda row: f"element {self._taken + row}")
            batch = batches.blank_rows(examples.for_devices(batch), np.ones(len(rows), bool))
        self._taken += len(rows)
        return batches.pad_batch(batch, self.batch_size)

    def reset(self) -> None:
        """Goes back to the first batch."""
        super().reset()
        self._iterator, self._taken = iter(self._source), 0

    def _get_state_internal(self) -> bytes:
        state = {"grain": self._iterator.get_state(), "taken": self._taken, "processes": self.num_infeed_hosts}
        return json.dumps(state, sort_keys=True, default=int).encode()

    def _set_state_internal(self, state: bytes) -> None:
        try:
            saved = json.loads(state)
            position, taken, processes = saved["grain"], int(saved["taken"]), saved["processes"]
        except (ValueError, KeyError, TypeError) as error:
            raise self._not_a_position(state) from error
        if processes != self.num_infeed_hosts:
            raise self.error(
                f"the saved position is one of {processes} processes, and these are {self.num_infeed_hosts}; use as many, "
                "or start the input from its beginning with task.train.enable_input_checkpointing=False"
            )
        self.reset()
        try:
            self._iterator.set_state(position)
        except (ValueError, KeyError, TypeError) as error:
            raise self.error(f"the saved position belongs to another pipeline: {error!r}") from error
        self._taken = taken


def _batch_specs(example: NestedMap, batch_size: int) -> NestedMap:
    specs = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((batch_size, *x.shape), jax.dtypes.canonicalize_dtype(x.dtype)), example
    )
    if "eval_sample_weights" not in specs:
        specs.eval_sample_weights = jax.ShapeDtypeStruct((batch_size,), np.float32)
    return specs


def rows_ahead(
    source: indexed.IndexedInput, start: int, row: Callable[[int, int], Any], *, threads: int, ahead: int
) -> Iterator[Any]:
    """Yields this process's rows of an input, from batch `start` on. Grain's threads make up to `ahead` rows in advance.

    Args:
      source: the input.
      start: the position of the first batch.
      row: function (position of a batch, index of a row in this process's part of that batch) -> the row.
      threads: number of threads; 0 makes the rows in the caller's thread.
      ahead: number of rows to make in advance.
    """
    grain = import_grain(source.error)

    stop = sys.maxsize if source.num_batches is None else source.num_batches * source.batch_size
    # Row numbers across all batches of this process.
    numbers = grain.MapDataset.range(start * source.batch_size, stop)
    options = grain.ReadOptions(num_threads=threads, prefetch_buffer_size=ahead)
    return iter(numbers.map(lambda number: row(*divmod(int(number), source.batch_size))).to_iter_dataset(options))


def import_grain(error_of: Callable[[str], UserError]) -> Any:
    """Imports Grain. If it isn't installed, raises `error_of(message)`."""
    try:
        import grain
    except ImportError as error:
        raise error_of(f"{error}. Install it with the extra `grain`: {installation.install_extra('grain')}") from error
    return grain
