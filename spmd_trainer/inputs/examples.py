"""Inputs over numbered examples: an input over arrays in memory, and the base class of the inputs over record files."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import batches, indexed


class ExamplesInput(indexed.IndexedInput):
    """Base class of inputs over a set of numbered examples.

    A subclass implements `num_examples`, `example_specs` and `read_examples`. Training (`is_training=True`) is endless: each
    epoch gives every example once, in an order drawn from (input_random_seed, epoch). Evaluation gives every example once, in
    order, then raises StopIteration until `reset()`. If its last batch is incomplete, it is filled up with copies of the last
    example that have `eval_sample_weights` (and `weights`, if present) 0.

    A batch is a NestedMap of numpy arrays [B, ...], where B is the number of rows. It includes `eval_sample_weights` float32
    [B]. If `jax_enable_x64` is off, int64 and float64 arrays become int32 and float32; a value that doesn't fit is an error.

    Attributes:
      shuffle: False gives a training input's examples in the order of their numbers.
      transform: a function from a batch (NestedMap of numpy arrays) to the batch that the input returns, e.g. to convert
        uint8 to float32. It must be pure, treat each row separately, and accept any values: it is called with zeros to
        find the shapes and dtypes of its result.
    """

    shuffle: bool = True
    transform: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.transform is not None and not callable(self.transform):
            raise self.error(f"transform={self.transform!r}; give a function from a batch to a batch")
        self.settle_reset_for_eval()

    @property
    def num_examples(self) -> int:
        """Number of examples in the set, 1 or more."""
        raise NotImplementedError

    @property
    def example_specs(self) -> NestedMap:
        """Shapes and dtypes of one example before `transform`, a NestedMap of jax.ShapeDtypeStruct."""
        raise NotImplementedError

    def read_examples(self, examples: np.ndarray) -> NestedMap:
        """Returns the B examples whose numbers are `examples`, int64 [B], as a NestedMap of numpy arrays [B, ...].

        The arrays match `example_specs`.
        """
        raise NotImplementedError

    @property
    def endless(self) -> bool:
        return self.is_training

    @property
    def order(self) -> indexed.ExampleOrder:
        shuffle = self.shuffle and self.is_training
        return indexed.ExampleOrder(self.num_examples, self.is_training, shuffle, self.seed)

    def input_specs(self) -> NestedMap:
        zeros = jax.tree.map(lambda x: np.zeros((self.batch_size, *x.shape), x.dtype), self.example_specs)
        batch = self._finish(zeros, np.ones(self.batch_size, bool))
        return specs_of(batch)

    def batch_at(self, position: int) -> NestedMap:
        examples = self.examples_at(position)
        batch = self.read_examples(np.minimum(examples, self.num_examples - 1))
        return self._finish(batch, examples < self.num_examples)

    def _finish(self, batch: NestedMap, real: np.ndarray) -> NestedMap:
        try:
            if self.transform is not None:
                batch = from_nested_dict(self.transform(batch))
                for path, leaf in batch.FlattenItems():
                    if np.shape(leaf)[:1] != (self.batch_size,):
                        raise UserError(f"{path} has the shape {np.shape(leaf)}, not {self.batch_size} rows")
            return batches.blank_rows(for_devices(batch), real)
        except UserError as error:
            raise self.error(
                f"{'the result of transform' if self.transform else 'this'} is not a batch: {error}"
            ) from error


class ArrayInput(ExamplesInput):
    """Input over arrays in memory.

    Attributes:
      arrays: {name: array [examples, ...]}, or a function without arguments that returns such a dict. A name with a dot
        makes a nested entry: 'src.ids' becomes batch.src.ids.
    """

    arrays: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not callable(self.arrays):
            self._check(self.arrays)

    @functools.cached_property
    def _loaded(self) -> dict[str, np.ndarray]:
        return self._check(self.arrays() if callable(self.arrays) else self.arrays)

    @property
    def num_examples(self) -> int:
        return len(next(iter(self._loaded.values())))

    @property
    def example_specs(self) -> NestedMap:
        return nest({name: jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for name, x in self._loaded.items()})

    def read_examples(self, examples: np.ndarray) -> NestedMap:
        return nest({name: x[examples] for name, x in self._loaded.items()})

    @functools.cached_property
    def _checksum(self) -> int:
        crc = 0
        for name, array in sorted(self._loaded.items()):
            crc = zlib.crc32(np.ascontiguousarray(array).view(np.uint8).data, zlib.crc32(name.encode(), crc))
        return crc

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "arrays": self._checksum}

    def _check(self, arrays: Any) -> dict[str, np.ndarray]:
        if not isinstance(arrays, Mapping) or not arrays:
            raise self.error("`arrays` has no array; give e.g. {'images': images, 'labels': labels}, or a function")
        checked = {name: np.asarray(array) for name, array in arrays.items()}
        sizes = {name: array.shape[0] if array.ndim else 0 for name, array in checked.items()}
        if len(set(sizes.values())) != 1 or 0 in sizes.values():
            raise self.error(f"arrays have {sizes} examples; all must have the same number, 1 or more")
        return checked


def nest(values: Mapping[str, Any]) -> NestedMap:
    """Returns the values as a NestedMap. A name with a dot makes a nested entry: 'src.ids' becomes map.src.ids.

    Raises:
      UserError: a name can't be a key of a NestedMap.
    """
    nested = NestedMap()
    for name, value in values.items():
        try:
            nested.Set(name, value)
        except (AssertionError, ValueError) as error:
            raise UserError(
                f"{name!r} can't be a name in a batch ({error}); give it another, e.g. {name!r} + '_'"
            ) from error
    return nested


def from_nested_dict(example: Any) -> NestedMap:
    """Returns a nested dict as a NestedMap. Raises UserError if it is not a dict, or a NestedMap can't have one of its keys."""
    if not isinstance(example, Mapping):
        raise UserError(f"it is {type(example).__name__}, and must be a dict of arrays")
    # Not NestedMap.FromNestedDict: lingvo's imports TensorFlow.
    return nest({str(k): from_nested_dict(v) if isinstance(v, Mapping) else v for k, v in example.items()})


def for_devices(batch: NestedMap) -> NestedMap:
    """Returns a batch of numpy arrays that devices can hold: casts 64-bit arrays to 32 bits if `jax_enable_x64` is off.

    Raises:
      UserError: a value doesn't fit in 32 bits, or an array has a string, bytes or object dtype. The message names the array.
    """

    def cast(path: str, leaf: Any) -> np.ndarray:
        array = np.asarray(leaf)
        if array.dtype.kind in "USO":
            raise UserError(f"{path} holds {array.dtype} values, which no device can hold; make numbers of them")
        to = jax.dtypes.canonicalize_dtype(array.dtype)
        with np.errstate(over="ignore"):  # overflow is checked below
            small = array.astype(to, copy=False)
        if to == array.dtype:
            return small
        lost = np.isfinite(array) & ~np.isfinite(small) if array.dtype.kind == "f" else small != array
        if array.dtype.kind in "iuf" and lost.any():
            raise UserError(f"{path} holds {array[lost][0]}, which {to} can't hold; make it fit into 32 bits")
        return small

    return batch.Pack([cast(path, leaf) for path, leaf in batch.FlattenItems()])


def specs_of(tree: NestedMap) -> NestedMap:
    """Returns the shapes and dtypes of a NestedMap of arrays or numbers, as jax.ShapeDtypeStruct."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(np.shape(x), np.asarray(x).dtype), tree)


def stack(examples: list[Any], specs: NestedMap, name_of: Callable[[int], str]) -> NestedMap:
    """Stacks examples into a NestedMap of numpy arrays [len(examples), ...].

    Args:
      examples: nested dicts of arrays.
      specs: shapes and dtypes of every example, a NestedMap of jax.ShapeDtypeStruct.
      name_of: returns the name of `examples[i]` for error messages, given i.

    Raises:
      UserError: the leaves of an example, or their shapes or dtypes, differ from `specs`.
    """
    flat = specs.FlattenItems()
    names = {path for path, _ in flat}
    columns: dict[str, list[np.ndarray]] = {path: [] for path, _ in flat}
    for i, example in enumerate(examples):
        try:
            row = _leaves(example, names)
        except UserError as error:
            raise UserError(f"{name_of(i)} is not an example: {error}") from error
        if row.keys() != names:
            raise UserError(f"{name_of(i)} has {sorted(row)}, others have {sorted(names)}; all must have the same")
        for path, spec in flat:
            value = np.asarray(row[path])
            if value.shape != spec.shape or value.dtype != spec.dtype:
                raise UserError(
                    f"{name_of(i)} has {path} of shape {value.shape} and dtype {value.dtype}, others have {spec.shape} "
                    f"and {spec.dtype}; crop, pad or cast it before it is batched"
                )
            columns[path].append(value)
    return specs.Pack([np.stack(columns[path]) for path, _ in flat])


def _leaves(example: Any, names: set[str]) -> Mapping[str, Any]:
    """Returns {path: leaf} for an example. If `example` is already a flat dict with the keys `names`, returns `example`."""
    if (
        isinstance(example, dict)
        and example.keys() == names
        and not any(isinstance(x, Mapping) for x in example.values())
    ):
        return example
    return dict(from_nested_dict(example).FlattenItems())
