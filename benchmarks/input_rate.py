"""Examples per second of the trainer's inputs, against the library underneath used directly.

    python -m benchmarks.input_rate [--rounds 10] [--batches 60] [--json FILE]

Four pairs, each in one process: `TextInput` against tf.data on the same windows of the same text, shuffled, whole batches
gathered; `TfRecordInput` against a TFRecordDataset, shuffled and parsed by the batch; `GrainInput` against the same
`grain.MapDataset`, batched by Grain; `ImageInput` over a tar shard against tf.data on the same JPEG images in memory, decoded,
cropped and scaled by the same operations in as many threads. The programs of a pair take turns of --batches batches of 256
(images: a fifth of them), after one unmeasured turn. Then `ImageInput` with random crops and flips, in threads, in one process
and in two, without and with an `augment` that computes in Python for 1.6 ms.
The baselines have no position that any number of processes can resume from, no order independent of buffers, no row weights,
and no checks.
"""

from __future__ import annotations

import io
import os
import random
import sys
import tarfile
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from praxis import base_hyperparams, pax_fiddle

from benchmarks import reporting
from spmd_trainer.inputs import grain_input, stdlib_text, text, tfrecord
from spmd_trainer.inputs.images import image_input
from spmd_trainer.inputs.images.decode import Augment, RandomResizedCrop
from spmd_trainer.inputs.images.images import Images

BATCH, LENGTH = 256, 128
NUM_RECORDS, NUM_FILES, WIDTH = 20_000, 4, 64
GRAIN_THREADS, GRAIN_AHEAD = 4, 64
NUM_IMAGES, IMAGE_THREADS = 512, 8
IMAGE_FILE, IMAGE_SHAPE = "images.tar", (112, 112, 3)

Turn = Callable[[], Any]


def make(kind: Any, **fields: Any) -> Turn:
    """Builds an input of the trainer for training; returns a function that reads the next batch."""
    config = pax_fiddle.Config(kind, name="rate", batch_size=BATCH, is_training=True, input_random_seed=1, **fields)
    return base_hyperparams.instantiate(config).get_next_padded


def text_inputs() -> tuple[Turn, Turn]:
    """Returns both readers of windows of the standard library's sources."""
    import tensorflow as tf

    stream = np.concatenate([np.fromfile(path, np.uint8) for path in stdlib_text.stdlib_train_files()]).astype(
        np.uint16
    )
    count = len(stream) // LENGTH
    table = tf.constant(stream[: count * LENGTH].reshape(count, LENGTH))

    def batch(windows: Any) -> dict[str, Any]:
        labels = tf.cast(tf.gather(table, windows), tf.int32)
        return {"ids": tf.concat([tf.zeros_like(labels[:, :1]), labels[:, :-1]], axis=1), "labels": labels}

    dataset = tf.data.Dataset.range(count).shuffle(count, seed=1).repeat().batch(BATCH).map(batch).prefetch(2)
    ours = make(text.TextInput, files=stdlib_text.stdlib_train_files, seq_len=LENGTH)
    return ours, _next_of(dataset.as_numpy_iterator())


def record_inputs(directory: str) -> tuple[Turn, Turn]:
    """Returns both readers of TFRecord files of numbers."""
    import tensorflow as tf

    paths = _write_records(directory)
    features = {
        "x": tf.io.FixedLenFeature((WIDTH,), tf.float32),
        "label": tf.io.FixedLenFeature((), tf.int64),
    }
    dataset = tf.data.TFRecordDataset(paths).shuffle(NUM_RECORDS, seed=1).repeat().batch(BATCH)
    dataset = dataset.map(lambda records: tf.io.parse_example(records, features)).prefetch(2)
    wanted = {"x": tfrecord.Feature((WIDTH,), "float32"), "label": tfrecord.Feature((), "int32")}
    return make(tfrecord.TfRecordInput, files=paths, features=wanted), _next_of(dataset.as_numpy_iterator())


def _write_records(directory: str) -> list[str]:
    import tensorflow as tf

    rng = np.random.default_rng(0)
    paths = [os.path.join(directory, f"{i}.tfrecord") for i in range(NUM_FILES)]
    for path in paths:
        with tf.io.TFRecordWriter(path) as writer:
            for label in range(NUM_RECORDS // NUM_FILES):
                values = {
                    "x": tf.train.Feature(float_list=tf.train.FloatList(value=rng.random(WIDTH))),
                    "label": tf.train.Feature(int64_list=tf.train.Int64List(value=[label])),
                }
                example = tf.train.Example(features=tf.train.Features(feature=values))
                writer.write(example.SerializeToString())
    return paths


def grain_inputs() -> tuple[Turn, Turn]:
    """Returns both readers of dicts of arrays in memory."""
    import grain

    rows = np.random.default_rng(0).random((NUM_RECORDS, WIDTH)).astype(np.float32)

    def dataset() -> Any:
        numbered = grain.MapDataset.range(NUM_RECORDS).shuffle(seed=1)
        return numbered.map(lambda i: {"x": rows[i], "label": np.int32(i)})

    options = grain.ReadOptions(num_threads=GRAIN_THREADS, prefetch_buffer_size=GRAIN_AHEAD)
    baseline = dataset().repeat().to_iter_dataset(options).batch(BATCH)
    ours = make(grain_input.GrainInput, dataset=dataset, read_threads=GRAIN_THREADS)
    return ours, _next_of(iter(baseline))


def image_inputs(directory: str) -> tuple[Turn, Turn]:
    """Returns both readers of JPEG images, 240 x 320 each, that are scaled to 112 x 112."""
    import tensorflow as tf

    rng = np.random.default_rng(0)
    smooth = tf.image.resize(rng.integers(0, 256, (NUM_IMAGES, 15, 20, 3)).astype(np.float32), (240, 320), "bicubic")
    contents = [tf.io.encode_jpeg(tf.cast(tf.clip_by_value(image, 0, 255), tf.uint8)).numpy() for image in smooth]
    path = os.path.join(directory, IMAGE_FILE)
    with tarfile.open(path, "w") as archive:
        for number, content in enumerate(contents):
            for name, data in ((f"{number:06}.jpg", content), (f"{number:06}.cls", b"%d" % number)):
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))

    def decode(content: Any, label: Any) -> dict[str, Any]:
        image = tf.io.decode_image(content, channels=3, expand_animations=False)[:, 40:280]
        image = tf.image.resize(image, (112, 112), antialias=True)
        return {"image": tf.cast(tf.clip_by_value(tf.round(image), 0, 255), tf.uint8), "label": label}

    images = tf.data.Dataset.from_tensor_slices((contents, np.arange(NUM_IMAGES, dtype=np.int32)))
    images = (
        images.shuffle(NUM_IMAGES, seed=1)
        .repeat()
        .map(decode, num_parallel_calls=IMAGE_THREADS)
        .batch(BATCH)
        .prefetch(2)
    )
    ours = make(image_input.ImageInput, source=Images(path, label="cls"), shape=IMAGE_SHAPE, threads=IMAGE_THREADS)
    return ours, _next_of(images.as_numpy_iterator())


def augmented_inputs(directory: str, augment: Augment | None) -> dict[str, Turn]:
    """Returns readers of the same images, augmented in threads, in one process and in two."""
    source = Images(os.path.join(directory, IMAGE_FILE), label="cls")
    random_parts = {"resize": RandomResizedCrop(), "flip": 0.5, "augment": augment}
    return {
        name: make(image_input.ImageInput, source=source, shape=IMAGE_SHAPE, workers=workers, **random_parts)
        for name, workers in (("threads", 0), ("1 process", 1), ("2 processes", 2))
    }


def slow_augment(image: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Computes in Python, holding the interpreter's lock, for about 1.6 ms."""
    value = int(rng.integers(256))
    for _ in range(40_000):
        value = (5 * value + 1) % 256
    return image ^ np.uint8(value)


def _pair(turns: tuple[Turn, Turn]) -> dict[str, Turn]:
    return dict(zip(("trainer", "baseline"), turns, strict=True))


def _next_of(iterator: Iterator[Any]) -> Turn:
    return lambda: next(iterator)


def compare(report: reporting.Report, name: str, sides: dict[str, Turn], rounds: int, batches: int) -> None:
    """Measures readers of the same, and reports the time of the first relative to each other one."""
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for index in range(rounds + 1):
        for side in random.sample(list(sides), len(sides)):
            started = time.perf_counter()
            for _ in range(batches):
                sides[side]()
            if index:
                seconds[side].append(time.perf_counter() - started)
    for side, values in seconds.items():
        report.figure(f"{name}, {side}", BATCH * batches / np.array(values), "examples/s")
    first, *others = sides
    for other in others:
        report.ratio(f"{name}: time per batch, {first} / {other}", seconds[first], seconds[other])


def main() -> int:
    """Measures and prints; returns the exit status."""
    parser = reporting.parser(__doc__, rounds=10)
    parser.add_argument("--batches", type=int, default=60, help="batches per turn")
    args = parser.parse_args()
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    report = reporting.Report("input_rate", args.json)
    with tempfile.TemporaryDirectory() as directory:
        compare(report, "text", _pair(text_inputs()), args.rounds, args.batches)
        compare(report, "TFRecord", _pair(record_inputs(directory)), args.rounds, args.batches)
        compare(report, "Grain", _pair(grain_inputs()), args.rounds, args.batches)
        few = max(1, args.batches // 5)
        compare(report, "images", _pair(image_inputs(directory)), args.rounds, few)
        for name, augment in (("random parts", None), ("random parts and Python", slow_augment)):
            compare(report, name, augmented_inputs(directory, augment), args.rounds, few)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())
