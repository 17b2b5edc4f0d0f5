"""Input over prepared TensorFlow Datasets (TFDS). Needs the package tensorflow-datasets (pip extra `tfds`).

Numbers and images are read without TensorFlow, from TFRecord or ArrayRecord files.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, installation
from spmd_trainer.inputs import examples as examples_lib
from spmd_trainer.inputs import record_files
from spmd_trainer.storage import reading
from spmd_trainer.storage.paths import file_or_pattern


class TfdsInput(examples_lib.ExamplesInput):
    """Input over a prepared dataset of TensorFlow Datasets (TFDS); see `ExamplesInput` for order, batches and `transform`.

    It never downloads: prepare the dataset first as tfrecord or array_record, e.g. `tfds build mnist --data_dir=DIR`.

    Attributes:
      dataset: name of the dataset ('mnist', 'mnist:3.0.1', 'glue/cola'), or the directory of a prepared version.
      split: split in TFDS's syntax: 'train', 'train[:80%]', 'train+test'.
      data_dir: directory that holds the prepared datasets; None means TFDS's default directory.
      features: names of features to use, or {name in the batch: feature}; None uses all numeric features with a fixed
        shape.
      example_fn: a function from an example (a dict of numpy arrays, with all features) to a dict of arrays with fixed
        shapes, e.g. to crop images of different sizes. If given, `features` is ignored, and one example is read to find
        the shapes.
    """

    dataset: str | os.PathLike[str] = ""
    split: str = "train"
    data_dir: str | os.PathLike[str] | None = None
    features: Any = None
    example_fn: Any = None

    @functools.cached_property
    def builder(self) -> Any:
        """The dataset's TFDS builder. Raises UserError if TFDS isn't installed or the dataset isn't prepared."""
        try:
            import tensorflow_datasets as tfds
        except ImportError as error:
            raise self.error(
                f"{error}. Install it with the extra `tfds`: {installation.install_extra('tfds')}"
            ) from error
        name = file_or_pattern("dataset", self.dataset)
        if not name:
            raise self.error("dataset is not set; give a name, e.g. 'mnist:3.0.1', or a prepared dataset's directory")
        try:
            if reading.is_dir(name):
                return tfds.builder_from_directory(name)
            return tfds.core.read_only_builder.builder_from_files(name, data_dir=self.data_dir)
        except (tfds.core.registered.DatasetNotFoundError, FileNotFoundError) as error:
            where = self.data_dir or "TFDS' default folder"
            raise self.error(
                f"there is no prepared dataset {name!r} in {where}: {str(error).partition(chr(10))[0]}. Prepare it with "
                f"`tfds build {name} --data_dir=DIR` and set data_dir, or give its directory"
            ) from error

    @functools.cached_property
    def _read(self) -> tuple[int, Callable[[int], dict[str, Any]]]:
        """The number of examples in the split, and a function that returns an example given its number."""
        splits = self.builder.info.splits
        try:
            split = splits[self.split]
            size = split.num_examples
        except (KeyError, ValueError) as error:
            raise self.error(f"split={self.split!r}: {error}. The dataset has {', '.join(splits)}") from error
        if not size:
            raise self.error(f"split {self.split!r} has no examples")
        file_format = self.builder.info.file_format.value
        if file_format == "array_record":
            return size, functools.partial(_read_from, self.builder.as_data_source(split=self.split))
        if file_format != "tfrecord":
            raise self.error(
                f"the dataset is prepared as {file_format}; prepare it as tfrecord or array_record, e.g. with "
                "`tfds build --file_format=array_record`"
            )
        return size, _tfrecord_reader(split.file_instructions, self.builder.info.features)

    @property
    def num_examples(self) -> int:
        return self._read[0]

    @functools.cached_property
    def example_specs(self) -> NestedMap:
        if self.example_fn is not None:
            with self.naming("the result of example_fn is not an example: "):
                return examples_lib.specs_of(examples_lib.from_nested_dict(self.example_fn(self._read[1](0))))
        specs = {name: _spec(feature) for name, feature in self.builder.info.features.items()}
        for feature in self._taken.values():
            if specs.get(feature) is None:
                fit = ", ".join(sorted(known for known, spec in specs.items() if spec is not None))
                what = "has no fixed shape or is not numeric" if feature in specs else "is not a feature of the dataset"
                raise self.error(
                    f"features: {feature!r} {what}; those that fit are {fit}. `example_fn` can make it fit"
                )
        try:
            return examples_lib.nest({name: specs[feature] for name, feature in self._taken.items()})
        except UserError as error:
            raise self.error(f"features: {error}, e.g. features={{'label': 'label'}}") from error

    @functools.cached_property
    def _taken(self) -> dict[str, str]:
        if isinstance(self.features, str | bytes):
            raise self.error(f"features={self.features!r} is one name; give a list of names: [{self.features!r}]")
        if isinstance(self.features, Mapping):
            return dict(self.features)
        known = self.builder.info.features.items()
        taken = self.features or [name for name, feature in known if _spec(feature) is not None]
        if not taken:
            raise self.error(f"no feature of the dataset is a number of a fixed shape ({known}); give an `example_fn`")
        return {name: name for name in taken}

    def read_examples(self, examples: np.ndarray) -> NestedMap:
        specs = self.example_specs
        read = [self._read[1](int(example)) for example in examples]
        if self.example_fn is not None:
            rows = [self.example_fn(example) for example in read]
        else:
            rows = [examples_lib.nest({name: row[feature] for name, feature in self._taken.items()}) for row in read]
        return examples_lib.stack(rows, specs, lambda row: f"example {examples[row]} of {self.split}")

    def _fingerprint(self) -> dict[str, Any]:
        name = self.builder.info.full_name
        return {**super()._fingerprint(), "dataset": name, "split": self.split, "features": repr(self.features)}


def _tfrecord_reader(instructions: list[Any], features: Any) -> Callable[[int], dict[str, Any]]:
    """Returns a reader of a TFDS split that is prepared as TFRecord files: a function from an example's number to the example.

    Args:
      instructions: the `file_instructions` of the TFDS split.
      features: the dataset's TFDS features, which decode an example.

    Raises:
      UserError: a file is missing or broken, or its number of records differs from the dataset's metadata.
    """
    records = record_files.RecordFiles([os.fspath(part.filename) for part in instructions])
    firsts = np.cumsum([0, *records.counts])
    numbers = []
    for part, first, count in zip(instructions, firsts, records.counts, strict=False):
        if count != part.examples_in_shard:
            raise UserError(
                f"{part.filename} has {count} records, and its dataset's metadata say {part.examples_in_shard}; "
                "prepare the dataset again"
            )
        taken = part.take if part.take != -1 else count - part.skip
        numbers.append(np.arange(part.skip, part.skip + taken) + first)
    record_of_example = np.concatenate(numbers)
    return lambda example: features.deserialize_example_np(records.data([record_of_example[example]])[0])


def _read_from(source: Any, example: int) -> dict[str, Any]:
    try:
        return source[example]
    except (RuntimeError, ValueError, OSError) as error:
        raise UserError(f"example {example} of {source!r} can't be read: {error}. Prepare the dataset again") from error


def _spec(feature: Any) -> jax.ShapeDtypeStruct | None:
    """Returns the shape and dtype of a feature; None if it is not numeric or has no fixed shape."""
    shape, dtype = feature.shape, feature.np_dtype
    if isinstance(shape, Mapping) or isinstance(dtype, Mapping) or None in shape or np.dtype(dtype).kind not in "biuf":
        return None
    return jax.ShapeDtypeStruct(shape, np.dtype(dtype))
