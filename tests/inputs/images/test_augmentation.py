"""Random augmentation of images depends on the seed and the index alone, in threads and in worker processes."""

import math
import os
import signal
import sys
import threading

import numpy as np
import pytest
from facts import raises_naming
from image_files import SHAPE, encoded_array, pixels, write_tar
from input_helpers import assert_same, stack_processes, take
from praxis import base_hyperparams, pax_fiddle

from spmd_trainer.errors import UserError
from spmd_trainer.inputs import Images, RandomResizedCrop
from spmd_trainer.inputs.images import decode_worker
from spmd_trainer.inputs.images.decode import Decoder, DecodingError
from spmd_trainer.inputs.images.image_input import ImageInput
from spmd_trainer.inputs.worker_process import EndedError, WorkerProcess

PIL = pytest.importorskip("PIL.Image")
pytest.importorskip("grain")
COUNT = 5


def bits(seed, index):
    return np.random.PCG64(np.random.SeedSequence((seed, index)))


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, (*shape, 3), np.uint8)


@pytest.fixture
def images(tmp_path):
    """Images 0 to 4 of noise; the label is the number."""
    all_noise = noise(COUNT, 30, 40)
    return Images(
        write_tar(tmp_path, range(COUNT), change=lambda n, _: {"png": encoded_array(all_noise[n]), "cls": str(n)}),
        label="cls",
    )


def make(source, **kwargs):
    defaults = {"name": "pictures", "batch_size": 6, "shape": SHAPE, "is_training": True, "input_random_seed": 3}
    return base_hyperparams.instantiate(pax_fiddle.Config(ImageInput, source=source, **{**defaults, **kwargs}))


def mixed(image, rng):
    return image ^ rng.integers(0, 256, image.shape, np.uint8)


RANDOM = {"resize": RandomResizedCrop(), "flip": 0.5, "augment": mixed}


@pytest.mark.parametrize("size", [(60, 80), (31, 200), (12, 9)])
def test_a_random_part_is_scaled_as_pillow_scales_it(size):
    image = noise(*size)
    content, crop = encoded_array(image), RandomResizedCrop()
    for index in range(20):
        top, left, height, width = crop.box(*size, bits(7, index))
        part = PIL.fromarray(image).crop((left, top, left + width, top + height))
        expected = np.asarray(part.resize((16, 24), PIL.Resampling.BILINEAR)).astype(int)
        found = Decoder((24, 16, 3), crop, seed=7).decode(content, index)
        assert np.abs(found - expected).max() <= 1
        flipped = Decoder((24, 16, 3), crop, flip=1.0, seed=7).decode(content, index)
        np.testing.assert_array_equal(flipped, found[:, ::-1])


def test_random_parts_have_the_areas_and_ratios_asked_for():
    boxes = np.array([RandomResizedCrop((0.2, 0.7), (0.5, 2.0)).box(300, 400, bits(0, n)) for n in range(2000)])
    top, left, height, width = boxes.T
    areas, ratios = height * width / (300 * 400), np.log2(width / height)
    for values, low, high in ((areas, 0.2, 0.7), (ratios, -1, 1)):
        assert low - 0.01 < values.min() < low + 0.03
        assert high - 0.03 < values.max() < high + 0.01
    assert abs(np.median(ratios)) < 0.15  # parts that stick out are drawn again
    places = np.concatenate([top / np.maximum(300 - height, 1), left / np.maximum(400 - width, 1)])
    np.testing.assert_allclose(np.histogram(places, 4, (0, 1))[0], 1000, atol=120)
    # As torchvision: if no part fits, the largest centre of an allowed ratio.
    assert RandomResizedCrop((1.0, 1.0)).box(10, 1000, bits(0, 0)) == (0, 493, 10, 13)
    assert RandomResizedCrop((1.0, 1.0)).box(1000, 10, bits(0, 0)) == (493, 0, 13, 10)


def test_half_of_the_images_are_flipped():
    image = noise(6, 8)
    found = [Decoder(SHAPE, "crop", flip=0.5).decode(encoded_array(image), n) for n in range(200)]
    kept = [np.array_equal(one, image) for one in found]
    assert all(one or np.array_equal(other, image[:, ::-1]) for one, other in zip(kept, found, strict=True))
    assert 70 < sum(kept) < 130


def test_any_number_of_processes_and_threads_and_a_resume_give_the_same_images(images):
    whole = make(images, **RANDOM)
    expected = take(whole, 6)
    members = [
        make(images, batch_size=2, num_infeed_hosts=3, infeed_host_index=i, threads=0, **RANDOM) for i in range(3)
    ]
    assert_same(stack_processes(*(take(member, 4) for member in members)), expected[:4])
    resumed = make(images, batch_size=3, **RANDOM)
    resumed.set_state(members[0].get_state())
    for batch in expected[4:]:
        for rows in (slice(0, 3), slice(3, 6)):
            np.testing.assert_array_equal(resumed.get_next().image, batch.image[rows])
    assert_same([make(images, **RANDOM).batch_at(2)], [expected[2]])
    labels = np.concatenate([batch.label for batch in expected])
    pictures = np.concatenate([batch.image for batch in expected])
    assert len({one.tobytes() for one in pictures[labels == 0]}) == (labels == 0).sum() > 4  # another one each epoch
    assert not np.array_equal(make(images, **RANDOM, input_random_seed=4).get_next().image, expected[0].image)


def test_another_augmentation_refuses_a_saved_position(images):
    state = make(images, **RANDOM).get_state()
    for changed in ({"resize": "crop"}, {"flip": 0.2}, {"augment": None}):
        with raises_naming(UserError, "saved position", next(iter(changed))):
            make(images, **{**RANDOM, **changed}).set_state(state)


def broken(image, rng):
    raise KeyError("no such thing")


@pytest.mark.parametrize(
    ("augment", "facts"),
    [
        (lambda image, rng: image / 255, ["returned float64 (6, 8, 3)", "uint8 (6, 8, 3)"]),
        (lambda image, rng: image[1:], ["returned uint8 (5, 8, 3)", "uint8 (6, 8, 3)"]),
        (lambda image, rng: None, ["returned a NoneType"]),
        (broken, ["KeyError", "no such thing", "test_augmentation.py"]),
    ],
)
def test_a_function_that_does_not_augment_is_an_error_and_no_bad_image(images, augment, facts):
    with raises_naming(UserError, "ImageInput 'pictures'", "a.tar, member", "augment", *facts):
        make(images, augment=augment, bad_records="skip").get_next()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        *(({"is_training": False, name: value}, [f"{name}=", "is_training"]) for name, value in RANDOM.items()),
        ({"flip": 2}, ["flip=2", "0 to 1"]),
        ({"augment": "flip"}, ["augment='flip'", "a function"]),
        ({"workers": -1}, ["workers=-1", "0 or more"]),
        ({"workers": 1, "augment": threading.Lock().acquire}, ["augment", "workers=0"]),
    ],
)
def test_settings_that_do_not_fit_say_why(images, settings, facts):
    with raises_naming(UserError, "ImageInput 'pictures':", *facts):
        make(images, **settings)


@pytest.mark.parametrize(
    ("scale", "ratio"),
    [
        ((0.5, 0.1), (1, 1)),
        ((0.1, 2), (1, 1)),
        (0.5, (1, 1)),
        ((0.1, 1), (0, 1)),
        (("a", "b"), (1, 1)),
        ((0.1, 1), (1, math.inf)),
    ],
)
def test_bounds_of_a_random_part_are_checked(scale, ratio):
    with raises_naming(UserError, "RandomResizedCrop(", "(low, high)"):
        RandomResizedCrop(scale, ratio)


def test_after_a_death_later_images_end_no_more_processes(monkeypatch):
    asked = []

    def ask(self, request):
        asked.append(int.from_bytes(request[:8], "little"))
        raise EndedError.of_status(-signal.SIGKILL)

    monkeypatch.setattr(decode_worker.WorkerProcess, "ask", ask)
    workers = decode_worker.DecodeWorkers(1, Decoder((2, 2, 3), "crop"))
    for index in (5, 6, 7, 4):
        with raises_naming(DecodingError, "SIGKILL"):
            workers.decode(b"", index)
    assert asked == [5, 4]
    workers.revive()
    with raises_naming(DecodingError, "SIGKILL"):
        workers.decode(b"", 6)
    assert asked == [5, 4, 6]


def test_a_process_that_was_stopped_starts_no_other(tmp_path):
    worker = WorkerProcess(["/usr/bin/touch", str(tmp_path / "started")])
    worker.stop()
    with pytest.raises(EndedError, match="was stopped"):
        worker.ask(b"")
    assert not list(tmp_path.iterdir())


@pytest.mark.full
def test_worker_processes_give_the_same_images_and_their_end_is_an_error(tmp_path):
    def augment(image, rng):
        if os.getpid() != trainer:
            # TensorFlow may import JAX, by way of SciPy; nothing may start its devices.
            bridge = sys.modules.get("jax._src.xla_bridge")
            assert bridge is None or not bridge.backends_are_initialized()
            if (image == deadly).all():
                os.kill(os.getpid(), signal.SIGKILL)
        return image ^ rng.integers(0, 256, image.shape, "uint8")

    def content(number, members):
        return members if number != 2 else {**members, "png": b"no image"}

    deadly, trainer = pixels(5), os.getpid()
    images = Images(write_tar(tmp_path, range(6), change=content), label="cls", epochs=1)
    settings = {"batch_size": 2, "shuffle": False, "flip": 0.5, "bad_records": "skip", "augment": augment}
    expected = take(make(images, **settings), 2)
    source = make(images, workers=1, **settings)
    assert_same(take(source, 2), expected)
    assert source.skipped == {"documents": 1}
    with raises_naming(UserError, "ImageInput 'pictures'", "a.tar, member s005.png", "process", "SIGKILL"):
        source.get_next()
    assert_same([source.batch_at(0)], expected[:1])
