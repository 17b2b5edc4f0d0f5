"""Input over TFRecord files of tf.train.Example. Restoring a position doesn't read the records before it."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import examples as examples_lib
from spmd_trainer.inputs import record_files
from spmd_trainer.inputs.tensorflow_bridge import check_tensorflow_installed, import_tensorflow, plain

ENCODINGS = ("numbers", "raw", "image")


@dataclasses.dataclass(frozen=True)
class Feature:
    """Description of one feature of a tf.train.Example.

    Attributes:
      shape: shape of the feature's array in one example.
      dtype: dtype of the array. With encoding 'numbers', a value that doesn't fit this dtype is an error.
      encoding: how the Example stores the array. 'numbers': a list of floats (for a float dtype) or integers (for other
        dtypes) that fills `shape`. 'raw': one string with the array's bytes in row-major order, little endian. 'image': one
        string with a PNG, JPEG, GIF or BMP image; `shape` must then be [height, width, channels] and `dtype` uint8.
      key: the feature's key in the Example; None means the same as the feature's name in the batch.
    """

    shape: tuple[int, ...] = ()
    dtype: str = "float32"
    encoding: str = "numbers"
    key: str | None = None


class TfRecordInput(examples_lib.ExamplesInput):
    """Input over TFRecord files of tf.train.Example. Needs TensorFlow. See `ExamplesInput` for order, batches, `transform`.

    Example: `features={'image': Feature((28, 28, 1), 'uint8', 'image', key='image/encoded'), 'label': Feature((), 'int32')}`
    gives batches of B rows: `image` uint8 [B, 28, 28, 1], `label` int32 [B] and `eval_sample_weights` float32 [B].

    Broken records are errors. A wrong length is found when the files are opened, wrong data when the record is read.

    Attributes:
      files: a path, folder or glob pattern ('records/*.tfrecord', whose matches are sorted); a list of these; or a
        function without arguments that returns one of them or a list. The files must not be compressed.
      features: {name in the batch: Feature}. A feature with the name 'a.b' becomes `batch['a']['b']`.
    """

    files: Any = None
    features: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        with self.naming():
            check_tensorflow_installed()
        if not isinstance(self.features, Mapping) or not self.features:
            raise self.error(f"features={self.features!r}; give e.g. features={{'label': Feature((), 'int32')}}")
        for name, feature in self.features.items():
            self._check(name, feature)

    @functools.cached_property
    def records(self) -> record_files.RecordFiles:
        """The records of all files. Raises UserError if a file can't be read or is broken, or all files are empty."""
        with self.naming():
            return record_files.RecordFiles(self.files)

    @property
    def num_examples(self) -> int:
        return len(self.records)

    @property
    def example_specs(self) -> NestedMap:
        return examples_lib.nest(
            {name: jax.ShapeDtypeStruct(x.shape, np.dtype(x.dtype)) for name, x in self.features.items()}
        )

    def read_examples(self, examples: np.ndarray) -> NestedMap:
        serialized = self.records.data(examples)
        parser = ExampleParser(self.features, lambda row: self.records.describe(int(examples[row])))
        return examples_lib.nest(parser.parse(serialized))

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "files": self.records.checksum, "features": repr(dict(self.features))}

    def _sizes_behind_checksums(self) -> dict[str, str]:
        return {**super()._sizes_behind_checksums(), "files": self.records.size_text}

    def _check(self, name: str, feature: Any) -> None:
        if not isinstance(feature, Feature):
            raise self.error(f"features[{name!r}]={feature!r} is not a Feature; give e.g. Feature((), 'int32')")
        if feature.encoding not in ENCODINGS:
            raise self.error(f"features[{name!r}] has encoding {feature.encoding!r}; it is one of {ENCODINGS}")
        if feature.encoding == "image" and (len(feature.shape) != 3 or np.dtype(feature.dtype) != np.uint8):
            raise self.error(
                f"features[{name!r}] is an image of shape {feature.shape} and dtype {feature.dtype}; images have the "
                "shape (height, width, channels) and the dtype uint8: convert them with `transform`"
            )


class ExampleParser:
    """Parses batches of serialized tf.train.Examples with TensorFlow."""

    def __init__(self, features: Mapping[str, Feature], describe: Callable[[int], str]):
        """Stores the features, {name in the batch: Feature}. `describe(i)` names the record of row i in error messages."""
        # A shape may be a list, which doesn't equal an image's.
        self._features = {name: dataclasses.replace(x, shape=tuple(x.shape)) for name, x in features.items()}
        self._describe = describe

    def parse(self, serialized: list[bytes]) -> dict[str, np.ndarray]:
        """Returns {name in the batch: array [B, ...]} for B serialized Examples.

        Raises:
          UserError: a record is not an Example, or one of its features is missing or doesn't match its `Feature`. The
            message names the record.
        """
        tf = import_tensorflow()
        wanted = {feature.key or name: _parsed_as(tf, feature) for name, feature in self._features.items()}
        try:
            parsed = _compiled_parser(tuple(wanted.items()))(tf.constant(serialized, tf.string))
        except (tf.errors.OpError, UnicodeDecodeError) as error:  # TensorFlow can't always decode its own message
            raise self._explain(tf, serialized, wanted) from error
        return {name: self._convert(tf, name, parsed[x.key or name].numpy()) for name, x in self._features.items()}

    def _convert(self, tf: Any, name: str, values: np.ndarray) -> np.ndarray:
        feature = self._features[name]
        if feature.encoding == "numbers":
            return self._cast(name, values)
        decode = _decode_image if feature.encoding == "image" else _decode_raw
        rows = []
        for row, value in enumerate(values):
            try:
                rows.append(decode(tf, value, feature))
            except UserError as error:
                raise UserError(f"{self._describe(row)}: feature {name!r} {error}") from error
        return np.stack(rows)

    def _cast(self, name: str, values: np.ndarray) -> np.ndarray:
        dtype = np.dtype(self._features[name].dtype)
        with np.errstate(over="ignore"):
            cast = values.astype(dtype)
        # A float may be rounded but not overflow; an integer must stay the same.
        wrong = np.isfinite(values) & ~np.isfinite(cast) if values.dtype.kind == "f" else cast != values
        if wrong.any():
            row = int(np.argwhere(wrong)[0][0])
            raise UserError(
                f"{self._describe(row)}: feature {name!r} holds {values[wrong][0]}, which {dtype} can't hold"
            )
        return cast

    def _explain(self, tf: Any, serialized: list[bytes], wanted: dict[str, Any]) -> UserError:
        """Returns the error for the first row that TensorFlow can't parse. (TensorFlow's error for a batch names no row.)"""
        for row, record in enumerate(serialized):
            try:
                tf.io.parse_example([record], wanted)
            except (tf.errors.OpError, UnicodeDecodeError) as error:
                is_known = isinstance(error, tf.errors.OpError)
                problem = plain(error) if is_known else "it is not a tf.train.Example"
                return UserError(
                    f"{self._describe(row)} does not match `features`: {problem}. Make `features` fit, or write the file again"
                )
        raise AssertionError("a batch of records failed to parse, and none of them did by itself")


@functools.lru_cache(maxsize=16)
def _compiled_parser(wanted: tuple[tuple[str, Any], ...]) -> Any:
    """Returns `tf.io.parse_example` compiled for the features `wanted`. Compiled, a call takes a third less time."""
    tf = import_tensorflow()
    signature = [tf.TensorSpec([None], tf.string)]
    parser = tf.function(lambda records: tf.io.parse_example(records, dict(wanted)), input_signature=signature)
    return parser.get_concrete_function()


def _parsed_as(tf: Any, feature: Feature) -> Any:
    if feature.encoding != "numbers":
        return tf.io.FixedLenFeature((), tf.string)
    return tf.io.FixedLenFeature(tuple(feature.shape), tf.float32 if _is_float(feature) else tf.int64)


def _is_float(feature: Feature) -> bool:
    return bool(jax.dtypes.issubdtype(np.dtype(feature.dtype), np.floating))


def _decode_raw(tf: Any, value: bytes, feature: Feature) -> np.ndarray:
    del tf
    dtype = np.dtype(feature.dtype)
    size = int(np.prod(feature.shape)) * dtype.itemsize
    if len(value) != size:
        raise UserError(f"has {len(value)} bytes; {feature.shape} of {dtype} are {size}")
    return np.frombuffer(value, dtype.newbyteorder("<")).astype(dtype).reshape(feature.shape)


def _decode_image(tf: Any, value: bytes, feature: Feature) -> np.ndarray:
    try:
        image = tf.io.decode_image(value, channels=feature.shape[2], expand_animations=False).numpy()
    except tf.errors.OpError as error:
        raise UserError(f"is not an image: {plain(error)}") from error
    if image.shape != feature.shape:
        raise UserError(f"is an image of shape {image.shape}, not {feature.shape}")
    return image
