"""Decodes image files to arrays of a fixed size, and augments them.

Uses TensorFlow, which is installed with the trainer and releases the GIL while decoding. Ignores the EXIF orientation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import traceback
from collections.abc import Callable
from typing import Any

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow, plain

CROP, STRETCH, EXACT = "crop", "stretch", "exact"
RESIZES = (CROP, STRETCH, EXACT)
# Number of random crops that are tried. If none fits into the image, the central crop is taken, as in torchvision.
_TRIES = 10

# Top, left, height and width of a crop of an image, in pixels.
Box = tuple[int, int, int, int]
Augment = Callable[[np.ndarray, np.random.Generator], np.ndarray]


class DecodingError(UserError):
    """Raised if decoding failed although the image may be good: `augment` failed, or a worker process died."""


@dataclasses.dataclass(frozen=True)
class RandomResizedCrop:
    """Takes a random crop of an image and scales it, like Inception's preprocessing and torchvision's `RandomResizedCrop`.

    Attributes:
      scale: lower and upper bound of the crop's area, as fractions of the image's area.
      ratio: lower and upper bound of the crop's width / height, whose logarithm is drawn uniformly.
    """

    scale: tuple[float, float] = (0.08, 1.0)
    ratio: tuple[float, float] = (3 / 4, 4 / 3)

    def __post_init__(self) -> None:
        for field, largest, end in (("scale", 1.0, " <= 1"), ("ratio", math.inf, "")):
            value = getattr(self, field)
            is_pair = isinstance(value, tuple | list) and len(value) == 2
            is_pair = is_pair and all(isinstance(one, int | float) and math.isfinite(one) for one in value)
            if not is_pair or not 0 < value[0] <= value[1] <= largest:
                raise UserError(f"RandomResizedCrop({field}={value!r}); give (low, high) with 0 < low <= high{end}")

    def box(self, rows: int, columns: int, bits: np.random.BitGenerator) -> Box:
        """Draws a random crop of an image of `rows` x `columns` pixels. Returns the crop's top, left, height and width."""
        low, high = map(math.log, self.ratio)
        for _ in range(_TRIES):
            area = rows * columns * (self.scale[0] + uniform(bits) * (self.scale[1] - self.scale[0]))
            ratio = math.exp(low + uniform(bits) * (high - low))
            height, width = round(math.sqrt(area / ratio)), round(math.sqrt(area * ratio))
            if 0 < height <= rows and 0 < width <= columns:
                top, left = (int(uniform(bits) * (free + 1)) for free in (rows - height, columns - width))
                return top, left, height, width
        ratio = min(max(columns / rows, self.ratio[0]), self.ratio[1])
        height, width = min(rows, max(1, round(columns / ratio))), min(columns, max(1, round(rows * ratio)))
        return (rows - height) // 2, (columns - width) // 2, height, width


@dataclasses.dataclass(frozen=True)
class Decoder:
    """Decodes JPEG, PNG, GIF (first frame) and BMP images.

    Attributes:
      shape: height, width and channels of the result: 1 channel is gray, 3 are RGB and 4 RGBA.
      resize: 'crop': scale the largest central part with the shape's aspect ratio. 'stretch': scale the whole image. 'exact':
        refuse images of another shape. `RandomResizedCrop`: scale a random part.
      flip: probability of a horizontal flip.
      augment: function that takes the decoded image (uint8 `shape`) and a numpy Generator, and returns an image of the same
        shape and dtype; called last.
      seed: it and an image's index determine all random choices for the image.
    """

    shape: tuple[int, int, int]
    resize: str | RandomResizedCrop
    flip: float = 0.0
    augment: Augment | None = None
    seed: int = 0

    def decode(self, content: bytes, index: int) -> np.ndarray:
        """Decodes the content of an image file, and returns the image, uint8 `shape`.

        Args:
          content: bytes of the file.
          index: index of the image in the input's order of images. The random choices depend on it.

        Raises:
          DecodingError: `augment` raised an error, or its result isn't an image uint8 `shape`.
          UserError: the content isn't an image, is damaged, or has another shape. The message is a clause without a subject,
            e.g. 'is not a whole image: ...'.
        """
        tf = import_tensorflow()
        height, width, channels = self.shape
        bits = np.random.PCG64(np.random.SeedSequence((self.seed, index)))
        try:
            found = tf.raw_ops.DecodeImage(contents=content, channels=channels, expand_animations=False)
            if self.resize != EXACT:
                rows, columns, _ = found.shape.as_list()
                found = _scaling(height, width)(found, tf.constant(self._box(rows, columns, bits)))
        except (tf.errors.OpError, UnicodeDecodeError) as error:  # TensorFlow can't always decode its own message
            why = "" if isinstance(error, UnicodeDecodeError) else f": {plain(error)}"
            raise UserError(f"is not a whole image{why}") from error
        image: np.ndarray = found.numpy()
        if image.shape != self.shape:
            raise UserError(f"is an image of shape {image.shape}, not {self.shape}; set resize to 'crop' or 'stretch'")
        if self.flip and uniform(bits) < self.flip:
            image = np.ascontiguousarray(image[:, ::-1])
        return image if self.augment is None else self._augmented(self.augment, image, np.random.Generator(bits))

    def _box(self, rows: int, columns: int, bits: np.random.BitGenerator) -> Box:
        """Returns the crop to scale (top, left, height, width), for an image of `rows` x `columns` pixels."""
        if isinstance(self.resize, RandomResizedCrop):
            return self.resize.box(rows, columns, bits)
        if self.resize == STRETCH:
            return 0, 0, rows, columns
        height, width, _ = self.shape
        # Integer arithmetic: half a row is rounded up.
        kept_rows = min(max((2 * columns * height + width) // (2 * width), 1), rows)
        kept_columns = min(max((2 * rows * width + height) // (2 * height), 1), columns)
        return (rows - kept_rows) // 2, (columns - kept_columns) // 2, kept_rows, kept_columns

    def _augmented(self, augment: Augment, image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        try:
            result = augment(image, rng)
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            raise DecodingError(
                f"augment raised {type(error).__name__}: {error} ({place.filename}, line {place.lineno})"
            ) from error
        if not isinstance(result, np.ndarray) or (result.shape, result.dtype) != (self.shape, np.uint8):
            given = f"{result.dtype} {result.shape}" if isinstance(result, np.ndarray) else f"a {type(result).__name__}"
            raise DecodingError(f"augment returned {given}; it must return an array uint8 {self.shape}")
        return result


def uniform(bits: np.random.BitGenerator) -> float:
    """Draws a float from [0, 1). All numpy versions give the same result, because a BitGenerator's raw bits never change."""
    return float(int(bits.random_raw()) >> 11) / 2**53


@functools.lru_cache(maxsize=16)
def _scaling(height: int, width: int) -> Any:
    """Returns a compiled TensorFlow function (image, box) -> the crop of the image, scaled to `height` x `width`."""
    tf = import_tensorflow()

    def scale(image: Any, box: Any) -> Any:
        part = image[box[0] : box[0] + box[2], box[1] : box[1] + box[3]]
        scaled = tf.image.resize(part, (height, width), antialias=True)
        return tf.cast(tf.clip_by_value(tf.round(scaled), 0, 255), tf.uint8)

    signature = [tf.TensorSpec([None, None, None], tf.uint8), tf.TensorSpec([4], tf.int32)]
    return tf.function(scale, input_signature=signature).get_concrete_function()
