"""The order of a mixture of images, which is computed for any index, is that of the schedule step by step."""

import dataclasses
import itertools

import numpy as np
import pytest

from spmd_trainer.inputs import Images
from spmd_trainer.inputs.corpus.mixture import DROP, REPEAT, STOP, OpenSource, Schedule
from spmd_trainer.inputs.images.image_order import ImageOrder, SourceOrder

SIZES = ([3, 0, 4], [5], [2, 9])
SHARES = (0.5, 0.25, 0.25)


@dataclasses.dataclass(frozen=True)
class Nothing:
    """Stands for a source that isn't read."""


def opened(shares, epochs, shuffle=None):
    return [
        OpenSource(str(n), Images("unread"), Nothing(), share, shuffle, epochs[n]) for n, share in enumerate(shares)
    ]


def step_by_step(shares, limits, stopping_strategy):
    """The source of each image and the images that it has given before."""
    taken = [0] * len(shares)
    schedule = Schedule(shares, taken)
    while (source := schedule.source) is not None:
        if taken[source] == limits[source]:
            if stopping_strategy == STOP:
                return
            schedule.drop()
            continue
        yield source, taken[source]
        taken[source] += 1
        schedule.advance(taken[source])


@pytest.mark.parametrize("shares", [SHARES, (0.1, 0.7, 0.2), (1 / 3, 1 / 3, 1 / 3), (0.999999, 5e-7, 5e-7)])
@pytest.mark.parametrize(
    ("epochs", "stopping_strategy"), [((None,) * 3, REPEAT), ((2, 1, 1), DROP), ((2, 3, 1), STOP), ((1, 1, 1), STOP)]
)
def test_any_index_gives_what_the_schedule_gives(shares, epochs, stopping_strategy):
    sizes = [np.array(size) for size in SIZES]
    found = ImageOrder(opened(shares, epochs), sizes, (1, 2, 3), stopping_strategy)
    limits = [None if epoch is None else epoch * sum(size) for epoch, size in zip(epochs, SIZES, strict=True)]
    ends = np.cumsum([0, *map(sum, SIZES)])
    expected = [
        int(ends[source]) + place % sum(SIZES[source])
        for source, place in itertools.islice(step_by_step(shares, limits, stopping_strategy), 307)
    ]
    assert found.num_examples == (None if stopping_strategy == REPEAT else len(expected))
    if not found.endless:
        expected += [found.num_images] * 7
    for first in range(0, len(expected) - 6, 3):
        assert found.examples(first, 7).tolist() == expected[first : first + 7]


@pytest.mark.parametrize("shuffle", ["global", "auto", 3, None])
def test_every_epoch_holds_every_image_once(shuffle):
    sizes = np.array([3, 0, 7, 1])
    of = SourceOrder(sizes, shuffle, 5)
    images = of.images(np.arange(5 * 11)).reshape(5, 11)
    assert (np.sort(images) == np.arange(11)).all()
    assert len({tuple(epoch) for epoch in images}) == (1 if shuffle is None else 5)
    parts = [of.images(np.arange(first, first + 4)) for first in range(0, 52, 4)]
    assert np.concatenate(parts).tolist() == images.ravel()[:52].tolist()
    if shuffle == 3:  # chunk by chunk, window by window
        for epoch in images.tolist():
            place = [epoch.index(image) for image in range(11)]
            assert max(place[3:6]) - min(place[3:6]) == 2
            assert max(place[3:6]) < min(place[6:9])


def test_far_indices_take_no_longer():
    sizes = [np.array(size) for size in SIZES]
    found = ImageOrder(opened(SHARES, (None,) * 3, "global"), sizes, (1, 2, 3), REPEAT)
    far = found.examples(4 * 10**12, 400)
    counts = np.bincount([found.source_of(image)[0] for image in far.tolist()])
    assert counts.tolist() == [200, 100, 100]
