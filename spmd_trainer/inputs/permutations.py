"""Permutations of a set's examples, one for each (seed, epoch). They are the same in all versions of the trainer.

Up to `STORED_SIZE` examples, a permutation is an array shuffled by numpy. For larger sets, `KeyedPermutation` computes each
entry on demand and stores nothing.
"""

from __future__ import annotations

import functools

import numpy as np

# The largest set whose permutations are stored: 64 MiB each, and about a second to make.
STORED_SIZE = 2**24
# Feistel networks of 4 rounds are hard to distinguish from random permutations (Luby and Rackoff 1988); 8 rounds are safer.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the numbers of the examples at `indices` of an epoch's permutation, int64 [n].

    Args:
      indices: indices into the permutation, from 0 to `size` - 1, int64 [n].
      size: number of examples.
      seed, epoch: integers, 0 or more, that together select the permutation.
    """
    if size <= STORED_SIZE:
        return _stored(size, seed, epoch)[indices].astype(np.int64)
    return KeyedPermutation(size, seed, epoch)(indices)


@functools.lru_cache(maxsize=4)
def _stored(size: int, seed: int, epoch: int) -> np.ndarray:
    # RandomState, not Generator: numpy guarantees that its streams never change, and a resumed run relies on that.
    bits = np.random.MT19937(np.random.SeedSequence((seed, epoch)))
    # The same as RandomState.permutation(size), in half the memory.
    examples = np.arange(size, dtype=np.uint32)
    np.random.RandomState(bits).shuffle(examples)
    return examples


class KeyedPermutation:
    """A pseudo-random permutation of 0 to size - 1 in constant memory: a Feistel network with cycle walking.

    An index is a cell (left, right) of a nearly square grid of rows x columns that has at least `size` cells: index =
    left * columns + right. Each round adds a hash of one coordinate to the other coordinate. This is reversible, so the
    rounds permute the cells. A result of `size` or more is permuted again until it is below `size`.
    """

    def __init__(self, size: int, seed: int, epoch: int):
        """Makes the permutation for (seed, epoch), both 0 or more. `size` is the number of entries, from 1 to 2**62."""
        self._size = np.uint64(size)
        self._columns = np.uint64(max(1, int(np.ceil(np.sqrt(size)))))
        self._rows = np.uint64(-(-size // int(self._columns)))
        # numpy guarantees that SeedSequence never changes.
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Returns the permutation's entries at `indices`. Both are int64 [n]."""
        entries = self._step(indices.astype(np.uint64))
        while len(outside := np.flatnonzero(entries >= self._size)):
            entries[outside] = self._step(entries[outside])
        return entries.astype(np.int64)

    def _step(self, values: np.ndarray) -> np.ndarray:
        left, right = np.divmod(values, self._columns)
        for first, second in self._keys.reshape(-1, 2):
            left = (left + mix(right + first) % self._rows) % self._rows
            right = (right + mix(left + second) % self._columns) % self._columns
        return left * self._columns + right


def mix(values: np.ndarray) -> np.ndarray:
    """Returns the splitmix64 hashes of uint64 values."""
    values = values + _GOLDEN
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
