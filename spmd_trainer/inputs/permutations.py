"""Permutations of a set's examples, one for each (seed, epoch). They never change between versions.

Up to `STORED_SIZE` examples, a permutation is an array shuffled by numpy. Larger ones are functions:
`KeyedPermutation` computes each entry on demand and stores nothing. The choice depends on the size alone.
"""

from __future__ import annotations

import functools

import numpy as np

# The largest set whose permutations are stored: 64 MiB each, and about a second to make.
STORED_SIZE = 2**24
# Feistel networks of 4 rounds are already hard to tell from random permutations (Luby and Rackoff 1988); 8 leave a margin.
_ROUNDS = 8
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def permute(indices: np.ndarray, size: int, seed: int, epoch: int) -> np.ndarray:
    """Returns the examples at the given indices of an epoch's permutation, int64 [n].

    Args:
      indices: int64 [n], 0 to `size` - 1.
      size: number of examples.
      seed, epoch: 0 or more; they choose the permutation.
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

    Each index is a pair (left, right) of digits, left * columns + right, in the smallest grid of rows x columns that
    holds the set. A round adds a hash of one digit to the other, which is reversible, so the rounds permute the grid.
    An entry outside the set, in the grid's last row, is permuted again until it lands inside.
    """

    def __init__(self, size: int, seed: int, epoch: int):
        """`size` is 1 to 2**62; `seed` and `epoch`, 0 or more, choose the permutation."""
        self._size = np.uint64(size)
        self._columns = np.uint64(max(1, int(np.ceil(np.sqrt(size)))))
        self._rows = np.uint64(-(-size // int(self._columns)))
        # numpy guarantees that SeedSequence never changes.
        self._keys = np.random.SeedSequence((seed, epoch)).generate_state(_ROUNDS, np.uint64)

    def __call__(self, indices: np.ndarray) -> np.ndarray:
        """Returns the entries at int64 [n] indices, int64 [n]."""
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
