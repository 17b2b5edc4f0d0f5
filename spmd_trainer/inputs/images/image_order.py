"""The order of a mixture's images: computes the image at any index.

Chunk sizes are known from the start, so this doesn't read files.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from spmd_trainer.errors import UserError
from spmd_trainer.inputs.corpus import order
from spmd_trainer.inputs.corpus.mixture import STOP, ChangingShare, OpenSource, Schedule
from spmd_trainer.inputs.shards import ShardIndex


class SourceOrder:
    """Order of one source's images: epoch after epoch, each either shuffled or in order, see `Documents.shuffle`."""

    def __init__(self, sizes: np.ndarray, shuffle: str | int | None, seed: int):
        """Sets the order.

        Args:
          sizes: number of images in each chunk, int64 [chunks].
          shuffle: 'global': a random order of all images. An integer: a random order of the chunks, whose images are shuffled
            within windows of this many images. 'auto': windows of `order.AUTO_WINDOW` images. None: in order.
          seed: 0 or more.
        """
        self.size = int(sizes.sum())
        self._sizes, self._shuffle, self._seed = sizes, shuffle, seed
        self._firsts = np.cumsum(sizes) - sizes
        self._window = shuffle if isinstance(shuffle, int) else order.AUTO_WINDOW
        # Each process needs only the permutations of its batches.
        self._permutation = functools.lru_cache(maxsize=8)(order.permutation)
        self._chunks = functools.lru_cache(maxsize=2)(self._chunks_of_epoch)

    def images(self, indices: np.ndarray) -> np.ndarray:
        """Returns the numbers of the images that have the given indices in the order. Both arrays are int64 [n]."""
        epochs, within = np.divmod(indices, self.size)
        if self._shuffle is None:
            return within
        found = np.empty_like(within)
        for epoch in np.unique(epochs).tolist():
            here = epochs == epoch
            one_epoch = self._by_number if self._shuffle == order.GLOBAL else self._in_windows
            found[here] = one_epoch(epoch, within[here])
        return found

    def _by_number(self, epoch: int, within: np.ndarray) -> np.ndarray:
        return self._permutation(self.size, self._seed, epoch)(within)

    def _in_windows(self, epoch: int, within: np.ndarray) -> np.ndarray:
        chunks, begins = self._chunks(epoch)
        ordinals = np.searchsorted(begins, within, side="right") - 1
        inside = within - begins[ordinals]
        blocks = inside // self._window
        found = np.empty_like(within)
        for ordinal, block in np.unique(np.stack([ordinals, blocks], axis=1), axis=0).tolist():
            here = (ordinals == ordinal) & (blocks == block)
            chunk, first = int(chunks[ordinal]), block * self._window
            count = min(self._window, int(self._sizes[chunk]) - first)
            shuffled = self._permutation(count, self._seed, epoch, chunk, first)(inside[here] - first)
            found[here] = self._firsts[chunk] + first + shuffled
        return found

    def _chunks_of_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns an epoch's non-empty chunks in order, and for each chunk the index of its first image within the epoch."""
        chunks = order.permutation(len(self._sizes), self._seed, epoch)(np.arange(len(self._sizes)))
        chunks = chunks[self._sizes[chunks] > 0]
        sizes = self._sizes[chunks]
        return chunks, np.cumsum(sizes) - sizes


class ImageOrder:
    """Order of the images of all sources. Images are numbered across all sources.

    The next image always comes from the source that is furthest behind its share, as in `mixture.Schedule`: images are ordered
    by k / share[j] for image k of source j. So bisection can find the number of images that each source gives before an index.
    """

    def __init__(
        self, sources: Sequence[OpenSource], sizes: Sequence[np.ndarray], seeds: Sequence[int], stopping_strategy: str
    ):
        """Sets the order.

        Args:
          sources: the sources.
          sizes: for each source, the number of images in each chunk.
          seeds: one seed per source.
          stopping_strategy: see `Mixture`.
        """
        self._shares = [constant_share(one) for one in sources]
        self._orders = [
            SourceOrder(size, one.shuffle, seed) for one, size, seed in zip(sources, sizes, seeds, strict=True)
        ]
        self._shards = ShardIndex([one.size for one in self._orders])
        self._limits = [
            None if one.epochs is None else one.epochs * of.size for one, of in zip(sources, self._orders, strict=True)
        ]
        self.num_images = len(self._shards)
        self.endless = None in self._limits
        self.num_examples = None if self.endless else self._length(stopping_strategy)

    def examples(self, first: int, count: int) -> np.ndarray:
        """Returns the image numbers, int64 [count], at indices from `first` on. After the order's end they are `num_images`."""
        sources, places = self._places(first, count)
        found = np.full(count, self.num_images, np.int64)
        for source in np.unique(sources[sources >= 0]).tolist():
            here = sources == source
            found[here] = self._shards.span(source)[0] + self._orders[source].images(places[here])
        return found

    def source_of(self, image: int) -> tuple[int, int]:
        """Returns the source of an image, and the image's number in this source."""
        return self._shards.locate(image)

    def _places(self, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
        """For indices from `first` on, returns the source (-1: none) and the index in its order, each int64 [count]."""
        taken = self._taken_before(first)
        schedule = Schedule(self._shares, taken)
        sources, places = np.full(count, -1, np.int64), np.zeros(count, np.int64)
        end = count if self.num_examples is None else min(count, self.num_examples - first)
        for number in range(sum(taken) - first, end):
            while (source := schedule.source) is not None and taken[source] == self._limits[source]:
                schedule.drop()
            if source is None:
                break
            if number >= 0:
                sources[number], places[number] = source, taken[source]
            taken[source] += 1
            schedule.advance(taken[source])
        return sources, places

    def _taken_before(self, index: int) -> list[int]:
        """Returns the number of images that each source gives before `index`, or before an index slightly below it."""
        low, high = 0.0, 1.0
        while sum(self._taken_at(high)) <= index and (self.endless or high < self._last):
            low, high = high, high * 2
        while True:
            middle = (low + high) / 2
            if middle in (low, high):
                return self._taken_at(low)
            low, high = (middle, high) if sum(self._taken_at(middle)) <= index else (low, middle)

    @functools.cached_property
    def _last(self) -> float:
        return max(limit / share for limit, share in zip(self._limits, self._shares, strict=True) if limit is not None)

    def _taken_at(self, time: float) -> list[int]:
        """Returns, for each source, the number of its images k with k / share below `time`, up to the end of its last epoch."""
        return [
            _count(time, share) if limit is None else min(limit, _count(time, share))
            for share, limit in zip(self._shares, self._limits, strict=True)
        ]

    def _length(self, stopping_strategy: str) -> int:
        if stopping_strategy != STOP:
            return sum(limit for limit in self._limits if limit is not None)
        # The mixture ends when it is the turn of an exhausted source for the first time.
        ends = [
            (limit / share, j) for j, (limit, share) in enumerate(zip(self._limits, self._shares, strict=True)) if limit
        ]
        time, ended = min(ends)
        # Ties go to the first source.
        return sum(_count(time, share) + (j < ended and _is_turn(time, share)) for j, share in enumerate(self._shares))


def constant_share(one: OpenSource) -> float:
    """Returns the share of a source. Raises UserError if the share changes during training."""
    if isinstance(one.share, ChangingShare):
        raise UserError(f"source {one.name!r} of the mixture has a weight that changes, which only CorpusInput follows")
    return one.share


def _count(time: float, share: float) -> int:
    """Returns the number of integers k >= 0 with k / share < time."""
    count = max(0, int(time * share))
    while count and (count - 1) / share >= time:
        count -= 1
    while count / share < time:
        count += 1
    return count


def _is_turn(time: float, share: float) -> bool:
    return _count(time, share) / share == time
