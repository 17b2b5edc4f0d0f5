"""Pax's `tasks.vision.input_generator`: reads ImageNet's TFRecords for praxis' `LingvoInputAdaptor`. Needs TensorFlow."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from lingvo.core import cluster
from praxis import lingvo_lib
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import examples, record_files
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow
from spmd_trainer.inputs.tfrecord import ExampleParser, Feature
from spmd_trainer.tasks.vision import resnet_preprocessing

TRAIN_EXAMPLES = 1281167
EVAL_EXAMPLES = 50000
IMAGENET_DATA_DIR = "/PATH/TO/IMAGENET_DATA/"


class BaseImageNetInput:
    """Base class of ImageNet inputs for praxis' `LingvoInputAdaptor`.

    A batch has `image` [batch, height, width, 3], `label_probs` [batch, classes] and `weight` [batch], all float32. Training
    never ends. Each epoch yields every image once, shuffled, with new random crops. Evaluation yields every image once, in
    order, and fills up the last batch with rows of weight 0. The adaptor saves no position, so a resumed run starts from the
    beginning of the data.
    """

    @classmethod
    def Params(cls) -> Any:
        """Returns the settings to fill in; `batch_size` is rows per process. Lingvo's thread settings are ignored."""
        p = lingvo_lib.InstantiableParams(cls)
        p.Define("name", "input", "Name of the input.")
        p.Define("file_pattern", "", "Paths of the TFRecord files, with 'tfrecord:' in front.")
        p.Define("batch_size", 128, "Rows per process.")
        p.Define("num_samples", 0, "Not used: the records are counted.")
        p.Define("num_classes", 1000, "Number of classes.")
        p.Define("data_shape", (224, 224, 3), "Height, width and channels of an image.")
        p.Define("label_id_offset", -1, "Added to each label.")
        p.Define("file_random_seed", 0, "Seed of the order and of the crops.")
        for name, value in (("num_batcher_threads", 64), ("file_parallelism", 64), ("file_buffer_size", 10000)):
            p.Define(name, value, "Not used.")
        p.Define("use_per_host_infeed", True, "Not used: each process always reads its own rows.")
        return p

    @classmethod
    def input_specs(cls, p: Any) -> NestedMap:
        """Returns the shapes and dtypes of the batches that the adaptor makes with settings `p`. Reads no file."""
        rows = jax.ShapeDtypeStruct((p.batch_size,), np.float32)
        return NestedMap(
            image=jax.ShapeDtypeStruct((p.batch_size, *p.data_shape), np.float32),
            label_probs=jax.ShapeDtypeStruct((p.batch_size, p.num_classes), np.float32),
            weight=rows,
            eval_sample_weights=rows,
        )

    def __init__(self, params: Any):
        """Finds the records. `params`: the result of `Params()`, filled in.

        Raises:
          UserError: there are no files, or one of them can't be read.
        """
        self.params = params
        infeed = cluster.GetInfeedContext()
        self._images = ImageNetRecords(
            name=params.name,
            batch_size=params.batch_size,
            num_infeed_hosts=infeed.num_infeed_hosts if infeed else 1,
            infeed_host_index=infeed.infeed_host_index if infeed else 0,
            input_random_seed=params.file_random_seed or 0,
            is_training=self._is_training(),
            files=params.file_pattern.removeprefix("tfrecord:"),
            num_classes=params.num_classes,
            data_shape=tuple(params.data_shape),
            label_id_offset=params.label_id_offset,
            preprocess=self._preprocess,
        )

    def GetPreprocessedInputBatch(self) -> NestedMap:
        """Returns the next batch as tensors. The adaptor calls this method inside a tf.function."""
        tf = import_tensorflow()
        specs = self._images.input_specs()
        names = ("image", "label_probs", "weight")
        tensors = tf.py_function(lambda: [self._next()[name] for name in names], [], [tf.float32] * len(names))
        for name, tensor in zip(names, tensors, strict=True):
            tensor.set_shape(specs[name].shape)
        return NestedMap(zip(names, tensors, strict=True))

    def _next(self) -> NestedMap:
        try:
            return self._images.get_next()
        except StopIteration as error:
            tf = import_tensorflow()
            raise tf.errors.OutOfRangeError(None, None, "every image was read") from error

    def _preprocess(self, image: bytes, seed: tuple[int, int]) -> Any:
        """Decodes, crops and resizes a JPEG image to a tensor of shape `data_shape`. Subclasses may override this method."""
        return resnet_preprocessing.preprocess_image(
            image, self._is_training(), image_size=self.params.data_shape[0], seed=seed
        )

    def _is_training(self) -> bool:
        raise UserError(f"{type(self).__name__} is a base class: use ImageNetTrain or ImageNetValidation")


def _of_split(params: Any, split: str, examples: int) -> Any:
    params.file_pattern = f"tfrecord:{IMAGENET_DATA_DIR}{split}-*-of-*"
    params.num_samples = examples
    return params


class ImageNetTrain(BaseImageNetInput):
    """ImageNet's training images."""

    @classmethod
    def Params(cls) -> Any:
        """Returns the settings to fill in; see `BaseImageNetInput.Params`."""
        return _of_split(super().Params(), "train", TRAIN_EXAMPLES)

    def _is_training(self) -> bool:
        return True


class ImageNetValidation(BaseImageNetInput):
    """ImageNet's validation images."""

    @classmethod
    def Params(cls) -> Any:
        """Returns the settings to fill in; see `BaseImageNetInput.Params`."""
        return _of_split(super().Params(), "validation", EVAL_EXAMPLES)

    def _is_training(self) -> bool:
        return False


class ImageNetRecords(examples.ExamplesInput):
    """Reads TFRecords with 'image/encoded' and 'image/class/label'. See `ExamplesInput` for the order of examples.

    Attributes:
      files: paths, folders and glob patterns of the TFRecord files.
      num_classes: number of classes.
      data_shape: height, width and channels of an image.
      label_id_offset: number that is added to each label.
      preprocess: a function (JPEG bytes, seed) -> tensor of shape `data_shape`.
    """

    files: Any = None
    num_classes: int = 1000
    data_shape: tuple[int, int, int] = (224, 224, 3)
    label_id_offset: int = -1
    preprocess: Callable[[bytes, tuple[int, int]], Any] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        try:
            self._records = record_files.RecordFiles(self.files)
        except UserError as error:
            raise self.error(str(error)) from error

    @property
    def num_examples(self) -> int:
        return len(self._records)

    @property
    def example_specs(self) -> NestedMap:
        return NestedMap(
            image=jax.ShapeDtypeStruct(self.data_shape, np.float32),
            label_probs=jax.ShapeDtypeStruct((self.num_classes,), np.float32),
            weight=jax.ShapeDtypeStruct((), np.float32),
        )

    def batch_at(self, position: int) -> NestedMap:
        """Returns batch number `position`. Random crops depend on the seed and the image's position in the example order."""
        examples_at = self.examples_at(position)
        numbers = np.minimum(examples_at, self.num_examples - 1)
        parser = ExampleParser(
            {"label": Feature((), "int32", key="image/class/label")},
            lambda row: self._records.describe(int(numbers[row])),
        )
        serialized = self._records.data(numbers)
        labels = parser.parse(serialized)["label"] + self.label_id_offset
        if labels.min() < 0 or labels.max() >= self.num_classes:
            raise self.error(f"a label is outside 0 to {self.num_classes - 1} after adding label_id_offset: {labels}")
        tf, first = import_tensorflow(), self.first_index(position)
        feature = {"image/encoded": tf.io.FixedLenFeature((), tf.string)}
        encoded = tf.io.parse_example(serialized, feature)["image/encoded"].numpy()
        assert self.preprocess is not None
        images = [
            np.asarray(self.preprocess(image, (self.seed, (first + row) % (1 << 31))))
            for row, image in enumerate(encoded)
        ]
        batch = NestedMap(
            image=np.stack(images),
            label_probs=np.eye(self.num_classes, dtype=np.float32)[labels],
            weight=np.ones(self.batch_size, np.float32),
        )
        return self._finish(batch, examples_at < self.num_examples)
