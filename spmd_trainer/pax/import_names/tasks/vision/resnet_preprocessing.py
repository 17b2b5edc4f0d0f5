"""Pax's `resnet_preprocessing`: decodes, crops and resizes JPEG images for ResNet, with TensorFlow.

Pixels keep their range [0, 255], as in Pax.
"""

from __future__ import annotations

from typing import Any

from spmd_trainer.inputs.tensorflow_bridge import import_tensorflow

IMAGE_SIZE = 224
# The fraction of the shorter side that the center crop keeps.
CROP_FRACTION = 0.875


def preprocess_image(
    image_bytes: Any,
    is_training: bool = False,
    use_bfloat16: bool = False,
    image_size: int = IMAGE_SIZE,
    seed: tuple[int, int] | None = None,
) -> Any:
    """Decodes, crops and resizes a JPEG image. Returns a tensor [image_size, image_size, 3], values 0 to 255.

    Args:
      image_bytes: the file's bytes.
      is_training: True: a random crop (8% to 100% of the area, aspect ratio 3/4 to 4/3), mirrored at random. False: the
        center crop.
      use_bfloat16: return bfloat16 instead of float32.
      image_size: height and width of the result in pixels.
      seed: seed of the random crop; None: draw a new seed at each call.
    """
    if is_training:
        return preprocess_for_train(image_bytes, use_bfloat16, image_size, seed)
    return preprocess_for_eval(image_bytes, use_bfloat16, image_size)


def preprocess_for_train(
    image_bytes: Any, use_bfloat16: bool, image_size: int = IMAGE_SIZE, seed: tuple[int, int] | None = None
) -> Any:
    """Returns a random crop of a JPEG image, mirrored at random. Arguments and result are as in `preprocess_image`."""
    tf = import_tensorflow()
    seeds = tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32) if seed is None else tf.constant(seed, tf.int32)
    crop = distorted_bounding_box_crop(
        image_bytes,
        tf.constant([0.0, 0.0, 1.0, 1.0], shape=[1, 1, 4]),
        aspect_ratio_range=(3 / 4, 4 / 3),
        area_range=(0.08, 1.0),
        max_attempts=10,
        seed=seeds,
    )
    # True if no crop of these proportions was found in `max_attempts` attempts.
    is_whole = tf.reduce_all(tf.shape(crop) == tf.image.extract_jpeg_shape(image_bytes))
    image = tf.cond(is_whole, lambda: _center_crop(tf, image_bytes, image_size), lambda: _resized(tf, crop, image_size))
    image = tf.image.stateless_random_flip_left_right(image, seeds + 1)
    return _finished(tf, image, use_bfloat16, image_size)


def preprocess_for_eval(image_bytes: Any, use_bfloat16: bool, image_size: int = IMAGE_SIZE) -> Any:
    """Returns the center crop of a JPEG image. Arguments and result are as in `preprocess_image`."""
    tf = import_tensorflow()
    return _finished(tf, _center_crop(tf, image_bytes, image_size), use_bfloat16, image_size)


def distorted_bounding_box_crop(
    image_bytes: Any,
    bbox: Any,
    min_object_covered: float = 0.1,
    aspect_ratio_range: tuple[float, float] = (0.75, 1.33),
    area_range: tuple[float, float] = (0.05, 1.0),
    max_attempts: int = 100,
    seed: Any = None,
) -> Any:
    """Returns a random crop of a JPEG image; the whole image if no crop is found. See tf.image.sample_distorted_bounding_box.

    Args:
      image_bytes: the file's bytes.
      bbox: float [1, boxes, 4]: boxes as ymin, xmin, ymax, xmax from 0 to 1. The crop must contain a part of a box.
      min_object_covered: minimum fraction of a box that the crop must contain.
      aspect_ratio_range: range of the crop's width / height.
      area_range: range of the crop's area, as a fraction of the image's area.
      max_attempts: number of attempts to find a crop.
      seed: int32 [2]; None: draw a new seed at each call.
    """
    tf = import_tensorflow()
    seeds = tf.random.uniform([2], maxval=1 << 30, dtype=tf.int32) if seed is None else seed
    begin, size, _ = tf.image.stateless_sample_distorted_bounding_box(
        tf.image.extract_jpeg_shape(image_bytes),
        bounding_boxes=bbox,
        seed=seeds,
        min_object_covered=min_object_covered,
        aspect_ratio_range=aspect_ratio_range,
        area_range=area_range,
        max_attempts=max_attempts,
        use_image_if_no_bounding_boxes=True,
    )
    return tf.image.decode_and_crop_jpeg(image_bytes, tf.concat([begin[:2], size[:2]], axis=0), channels=3)


def _center_crop(tf: Any, image_bytes: Any, image_size: int) -> Any:
    shape = tf.image.extract_jpeg_shape(image_bytes)
    kept = image_size / (image_size + round(image_size * (1 / CROP_FRACTION - 1)))
    side = tf.cast(kept * tf.cast(tf.minimum(shape[0], shape[1]), tf.float32), tf.int32)
    window = tf.stack([(shape[0] - side + 1) // 2, (shape[1] - side + 1) // 2, side, side])
    return _resized(tf, tf.image.decode_and_crop_jpeg(image_bytes, window, channels=3), image_size)


def _resized(tf: Any, image: Any, image_size: int) -> Any:
    return tf.image.resize(image, [image_size, image_size], method=tf.image.ResizeMethod.BICUBIC)


def _finished(tf: Any, image: Any, use_bfloat16: bool, image_size: int) -> Any:
    image = tf.reshape(image, [image_size, image_size, 3])
    return tf.cast(image, tf.bfloat16 if use_bfloat16 else tf.float32)
