"""Input over images in Parquet files and tar shards, decoded ahead by threads or processes. Needs `spmd-trainer[grain]`.

Batch n depends only on n and the settings, as in every `IndexedInput`. The number of images in each chunk (a row group of a
Parquet file, or a tar shard) is known from the start. So the input can compute, without reading files, which image has a given
index in the order, even for a mixture of shuffled sources. Random augmentations of an image depend only on the seed and the
image's index in the order. A saved position is one integer, valid for any number of processes and any batch size. Each process
reads and decodes only the images of its own rows.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import numbers
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from absl import logging
from praxis.py_utils import NestedMap

from spmd_trainer.errors import UserError, did_you_mean, require_one_of
from spmd_trainer.inputs import examples, files
from spmd_trainer.inputs.corpus import file_kinds, mixture, open_source
from spmd_trainer.inputs.corpus.documents import BadRecord, Documents
from spmd_trainer.inputs.grain_input import rows_ahead
from spmd_trainer.inputs.images.decode import CROP, RESIZES, Augment, Decoder, DecodingError, RandomResizedCrop
from spmd_trainer.inputs.images.decode_worker import DecodeWorkers
from spmd_trainer.inputs.images.image_files import ParquetImages, TarImages
from spmd_trainer.inputs.images.image_order import ImageOrder, constant_share
from spmd_trainer.inputs.images.images import Image, ImageRecord, Images, ImageSource

_KINDS = ("parquet", "tar")
RAISE, SKIP = "raise", "skip"
# Number of batches that Grain decodes ahead, and minimum number of images.
_BATCHES_AHEAD, _LEAST_AHEAD = 2, 64
_MAX_LABEL = 2**31 - 1

# Pixels and label of an image, a bad image, or the error of its file.
_Row = tuple[np.ndarray, int] | BadRecord | UserError


def open_images(images: Documents) -> ImageSource:
    """Opens the files of `Images`.

    Raises:
      UserError: `images` is not an `Images` or has a wrong setting; there are no files, their kinds differ or are unknown, or
        a file can't be read; or the files hold no image.
    """
    if not isinstance(images, Images):
        raise UserError(f"source is {type(images).__name__}(...); give Images('train/*.tar', label='cls')")
    for field in ("column", "label"):
        value = getattr(images, field)
        if value is not None and not (isinstance(value, str) and value):
            raise UserError(f"{field}={value!r}; set it to the name of a column, to an extension, or to None")
    if images.separator is not None:
        raise UserError(f"separator={images.separator!r} is for text files; images have none")
    if images.kind is not None:
        require_one_of("kind", images.kind, _KINDS)
    found = files.find_files(images.files, open_source.files_of_dataset)
    kind = images.kind or file_kinds.kind_of_all(found.paths)
    source: ImageSource
    if kind == "parquet":
        source = ParquetImages(found, images.column, images.label)
    elif kind == "tar":
        source = TarImages(found, images.column, images.label)
    else:
        raise UserError(
            f"{found.paths[0]} is of the kind {kind!r}; images are read from Parquet files and from tar shards"
        )
    if not len(source.shards):
        raise UserError(
            f"{source.size_text} hold no images, the first is {found.paths[0]}; give at least one with images in it"
        )
    return source


class ImageInput(examples.ExamplesInput):
    """Input over images and labels. See `ExamplesInput` for batches and `transform`, and `Mixture` for mixtures.

    Example, in an experiment:

        def datasets(self):
            images = Images("gs://bucket/train/*.tar", label="cls")
            return [pax_fiddle.Config(
                ImageInput, name="train", is_training=True, batch_size=256, source=images, shape=(224, 224, 3),
                transform=lambda batch: {**batch, "image": batch.image.astype("float32") / 255},
            )]

    A batch of B rows has `image` uint8 [B, height, width, channels], `label` int32 [B] if the sources have labels, and
    `eval_sample_weights` float32 [B].

    Attributes:
      source: `Images`, or a `Mixture` of them whose weights are shares of the number of images.
      shape: height, width and channels of an image: 1 channel is gray, 3 are RGB and 4 RGBA.
      resize: 'crop': scale the largest central part with the shape's aspect ratio. 'stretch': scale the whole image. 'exact':
        refuse images of another shape as bad records. `RandomResizedCrop(scale, ratio)`, for training: scale a random part.
      flip: for training: probability of a horizontal flip.
      augment: for training: function that takes an image (uint8 `shape`) and a numpy Generator, and returns an image of the same
        shape and dtype; called last. The generator's seed depends only on the input's seed and the image's index in the order.
        A saved position stores only the function's name, to check that the function is the same.
      classes: names of the classes; a label becomes the index of its name in this list. None: labels are integers, as numbers
        or as text.
      bad_records: 'raise' stops at an image that can't be decoded or lacks a label, with an error that names its file and its row
        or member. 'skip' counts such an image in `skipped` and logs it; its row of the batch is black, with label 0 and weight
        0, and the other rows stay the same.
      threads: number of Grain threads that read and decode images in advance. 0: the caller's thread reads and decodes.
      workers: number of processes that decode and augment; the threads then only read files. 0: the threads decode. The
        batches don't depend on this number.
    """

    source: Any = None
    shape: tuple[int, int, int] = (224, 224, 3)
    resize: str | RandomResizedCrop = CROP
    flip: float = 0.0
    augment: Augment | None = None
    classes: Sequence[str] | None = None
    bad_records: str = RAISE
    threads: int = 8
    workers: int = 0
    _skipped: Any = dataclasses.field(default=None, init=False, repr=False)
    _decoder: Any = dataclasses.field(default=None, init=False, repr=False)

    def __post_init__(self) -> None:
        self._check_settings()
        super().__post_init__()
        self._skipped: dict[str, int] = {one.name: 0 for one in self.sources}
        decoder = Decoder(self.shape, self.resize, self.flip, self.augment, self.seed)
        with self.naming():
            self._decoder: Decoder | DecodeWorkers = DecodeWorkers(self.workers, decoder) if self.workers else decoder

    @functools.cached_property
    def sources(self) -> list[mixture.OpenSource]:
        """The opened sources. Raises UserError if a source can't be opened; the message names it."""
        with self.naming():
            found = mixture.open_mixture(
                self._mixture, is_training=self.is_training, shuffle=self._shuffles, open_one=open_images
            )
            for one in found:
                constant_share(one)
        if len({_images_of(one).label is None for one in found}) > 1:
            raise self.error("some sources of the mixture have a label and others have none; give all one, or none")
        return found

    @functools.cached_property
    def _mixture(self) -> mixture.Mixture:
        if not isinstance(self.source, Images | mixture.Mixture):
            raise self.error(f"source={self.source!r}; give Images('train/*.tar', label='cls') or a Mixture of them")
        given = mixture.as_mixture(self.source, is_training=self.is_training)
        return dataclasses.replace(given, weigh_by=mixture.DOCUMENTS)

    @functools.cached_property
    def order(self) -> ImageOrder:  # type: ignore[override]
        # Each source's seed is independent of the other sources.
        seeds = [self.seed * 2**32 + zlib.crc32(one.name.encode()) for one in self.sources]
        sizes = [_images_of(one).shards.counts for one in self.sources]
        return ImageOrder(self.sources, sizes, seeds, self._mixture.stopping_strategy)

    @property
    def endless(self) -> bool:
        return self.is_training and self._mixture.stopping_strategy == mixture.REPEAT

    @property
    def num_examples(self) -> int:
        """Number of images in all sources, each counted once."""
        return self.order.num_images

    @property
    def example_specs(self) -> NestedMap:
        specs = NestedMap(image=jax.ShapeDtypeStruct(self.shape, np.uint8))
        if self._has_labels:
            specs.label = jax.ShapeDtypeStruct((), np.int32)
        return specs

    @property
    def skipped(self) -> dict[str, int]:
        """Number of bad images in the batches so far, by source name."""
        return dict(self._skipped)

    def batch_at(self, position: int) -> NestedMap:
        self._revive()
        indices = itertools.count(self.first_index(position))
        return self._batch(position, map(self._row, self.examples_at(position).tolist(), indices))

    def _revive(self) -> None:
        if isinstance(self._decoder, DecodeWorkers):
            self._decoder.revive()

    def _iterate(self, start: int) -> Iterator[NestedMap]:
        self._revive()
        ahead = max(_LEAST_AHEAD, _BATCHES_AHEAD * self.batch_size)
        # Twice as many as processes: one image is read while another is decoded.
        threads = max(self.threads, 2 * self.workers)
        decoded = rows_ahead(self, start, self._row_of, threads=threads, ahead=ahead)
        for position in itertools.count(start):
            yield self._batch(position, decoded)

    def _row_of(self, position: int, column: int) -> _Row:
        return self._row(int(self._numbers(position)[column]), self.first_index(position) + column)

    @functools.cached_property
    def _numbers(self) -> Any:
        # Cached: Grain asks for one row at a time.
        return functools.lru_cache(maxsize=16)(self.examples_at)

    def _row(self, number: int, index: int) -> _Row:
        """Decodes image `number`, or the last if there are fewer. Its `index` in the shuffled order seeds augmentation."""
        source, image = self.order.source_of(min(number, self.num_examples - 1))
        try:
            found: ImageRecord = _images_of(self.sources[source]).image(image)
        except UserError as error:
            return error  # returned, because Grain changes the message of a raised error
        return found if isinstance(found, BadRecord) else self._decode(found, index)

    def _decode(self, image: Image, index: int) -> _Row:
        try:
            label = self._label_of(image.label) if self._has_labels else 0
            return self._decoder.decode(image.content, index), label
        except DecodingError as error:
            error.args = (f"{image.where}: {error}",)
            return error
        except UserError as error:
            return BadRecord(image.where, str(error))

    def _label_of(self, value: Any) -> int:
        if self.classes is not None:
            try:
                return self._class_numbers[str(value)]
            except KeyError:
                near = did_you_mean(str(value), list(self._class_numbers))
                raise UserError(f"has the label {value!r}, which is not one of `classes`{near}") from None
        try:
            is_number = isinstance(value, numbers.Integral) and not isinstance(value, bool)
            number = int(value) if is_number or isinstance(value, str) else None
        except ValueError:
            number = None
        if number is None:
            raise UserError(f"has the label {value!r}, which is not a whole number; set `classes` to the names")
        if abs(number) > _MAX_LABEL:
            raise UserError(f"has the label {number}, which int32 can't hold")
        return number

    @functools.cached_property
    def _class_numbers(self) -> dict[str, int]:
        return {name: number for number, name in enumerate(self.classes or ())}

    def _batch(self, position: int, rows: Iterator[Any]) -> NestedMap:
        numbers_here = self._numbers(position)
        real = numbers_here < self.num_examples
        images = np.zeros((self.batch_size, *self.shape), np.uint8)
        labels = np.zeros(self.batch_size, np.int32)
        for place, number in enumerate(numbers_here.tolist()):
            row: _Row = next(rows)
            if isinstance(row, UserError):
                raise self.error(str(row)) from row
            if not isinstance(row, BadRecord):
                images[place], labels[place] = row
            elif self.bad_records == RAISE:
                end = "" if row.problem.endswith("?") else "."
                raise self.error(f"{row.where} {row.problem}{end} Mend it, leave it out, or set bad_records='skip'")
            elif real[place]:
                real[place] = False
                self._count(number, row)
        batch = NestedMap(image=images, label=labels) if self._has_labels else NestedMap(image=images)
        return self._finish(batch, real)

    def _count(self, number: int, bad: BadRecord) -> None:
        self._skipped[self.sources[self.order.source_of(number)[0]].name] += 1
        logging.log_every_n_seconds(
            logging.WARNING, "input %s leaves out %s: it %s", 10, self.name, bad.where, bad.problem
        )

    @property
    def _has_labels(self) -> bool:
        return _images_of(self.sources[0]).label is not None

    @property
    def _shuffles(self) -> bool:
        return self.shuffle and self.is_training

    def _check_settings(self) -> None:
        shape = self.shape
        is_shape = isinstance(shape, tuple | list) and len(shape) == 3
        if not is_shape or not all(isinstance(size, int) and size > 0 for size in shape) or shape[2] not in (1, 3, 4):
            raise self.error(f"shape={shape!r}; give (height, width, channels), with 1, 3 or 4 channels: (224, 224, 3)")
        self.shape = (shape[0], shape[1], shape[2])
        with self.naming():
            if not isinstance(self.resize, RandomResizedCrop):
                require_one_of("resize", self.resize, RESIZES)
            require_one_of("bad_records", self.bad_records, (RAISE, SKIP))
        for field in ("threads", "workers"):
            value = getattr(self, field)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise self.error(f"{field}={value!r}; set it to 0 or more")
        self._check_augmentation()
        if self.classes is not None and (isinstance(self.classes, str) or len(set(self.classes)) < len(self.classes)):
            raise self.error(f"classes={self.classes!r}; give a list of names, each once")

    def _check_augmentation(self) -> None:
        if isinstance(self.flip, bool) or not isinstance(self.flip, int | float) or not 0 <= self.flip <= 1:
            raise self.error(f"flip={self.flip!r}; set it to a probability, 0 to 1")
        if self.augment is not None and not callable(self.augment):
            raise self.error(f"augment={self.augment!r}; give a function from an image and a generator to an image")
        random = {"resize": isinstance(self.resize, RandomResizedCrop), "flip": self.flip, "augment": self.augment}
        for field in [field for field, is_set in random.items() if is_set and not self.is_training]:
            raise self.error(
                f"{field}={getattr(self, field)!r} changes images at random, which is for training; leave it out, or "
                "set is_training=True"
            )

    def _fingerprint(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "num_images": self.num_examples,
            "shuffle": self._shuffles,
            "seed": self.seed,
            "shape": list(self.shape),
            "resize": str(self.resize),
            "classes": None if self.classes is None else zlib.crc32(repr(list(self.classes)).encode()),
            "bad_records": self.bad_records,
            "stopping_strategy": self._mixture.stopping_strategy,
            "sources": [one.name for one in self.sources],
        }
        if self.flip:
            found["flip"] = self.flip
        if self.augment is not None:
            found["augment"] = getattr(self.augment, "__qualname__", type(self.augment).__qualname__)
        for one in self.sources:
            found[f"settings of {one.name}"] = {**one.settings(), "label": _images_of(one).label}
            found[f"files of {one.name}"] = _images_of(one).fingerprint()["checksum"]
        return found

    def _sizes_behind_checksums(self) -> dict[str, str]:
        return {f"files of {one.name}": one.source.size_text for one in self.sources}


def _images_of(one: mixture.OpenSource) -> ImageSource:
    if not isinstance(one.source, ImageSource):
        raise UserError(f"source {one.name!r} holds no images")
    return one.source
