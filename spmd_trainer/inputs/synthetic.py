"""Synthetic batches: random values of any shapes, or a small language that a model can learn. Uses numpy only.

Each value is a hash of (seed, name of the array, number of the example, index in the example). An example's values depend
neither on the number of processes, nor on numpy's version, nor on earlier batches.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from praxis.py_utils import NestedMap

from spmd_trainer.inputs import batches, indexed
from spmd_trainer.inputs.permutations import mix


class _SyntheticBase(indexed.IndexedInput):
    """Base class of the synthetic inputs.

    Attributes:
      num_examples: number of examples. Training repeats them in the same order. Evaluation gives each example once, fills up
        the last batch with rows of weight 0, then raises StopIteration. None makes an endless sequence of different examples.
    """

    num_examples: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.num_examples is not None:
            self.require_positive("num_examples")
        self.settle_reset_for_eval()

    @property
    def order(self) -> indexed.ExampleOrder:
        return indexed.ExampleOrder(self.num_examples, self.is_training or self.num_examples is None, seed=self.seed)

    def _sample_weights(self, position: int) -> np.ndarray:
        """Returns the weight of each row of batch `position`, float32 [B]: 1, or 0 after the end of a finite set."""
        examples = self.examples_at(position)
        if self.num_examples is None:
            return np.ones(self.batch_size, np.float32)
        return (examples < self.num_examples).astype(np.float32)


class SyntheticInput(_SyntheticBase):
    """Batches of given shapes and dtypes with uniformly distributed values.

    Example: `specs={'images': ((28, 28, 1), 'float32', 1.0), 'labels': ((), 'int32', 10)}` gives batches of B rows with `images`
    float32 [B, 28, 28, 1] in [0, 1), `labels` int32 [B] in 0..9, and `eval_sample_weights` float32 [B].

    Attributes:
      specs: {name: (shape without the batch dimension, dtype, maxval)}. Values lie in [0, maxval); bool ignores maxval.
        A name with a dot makes a nested entry: 'src.ids' becomes batch.src.ids.
    """

    specs: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.specs, Mapping) or not self.specs:
            raise self.error(f"specs={self.specs!r}; give e.g. specs={{'ids': ((128,), 'int32', 257)}}")
        for name, spec in self.specs.items():
            self._check(name, spec)

    def input_specs(self) -> NestedMap:
        specs = NestedMap()
        for name, (shape, dtype, _) in self.specs.items():
            specs.Set(name, jax.ShapeDtypeStruct((self.batch_size, *shape), np.dtype(dtype)))
        specs.eval_sample_weights = jax.ShapeDtypeStruct((self.batch_size,), np.float32)
        return specs

    def batch_at(self, position: int) -> NestedMap:
        examples = self.examples_at(position)
        batch = NestedMap()
        for name, (shape, dtype, maxval) in self.specs.items():
            bits = random_bits(self.seed, name, examples, int(np.prod(shape, dtype=np.int64)))
            values = _uniform(bits, np.dtype(dtype), maxval)
            batch.Set(name, values.reshape(self.batch_size, *shape))
        batch.eval_sample_weights = self._sample_weights(position)
        return batch

    def _fingerprint(self) -> dict[str, Any]:
        specs = {name: [list(s), str(np.dtype(d)), float(maxval)] for name, (s, d, maxval) in self.specs.items()}
        return {**super()._fingerprint(), "specs": specs}

    def _check(self, name: str, spec: Any) -> None:
        try:
            shape, dtype, maxval = spec
            kind = _kind(np.dtype(dtype))
            sizes_fit = all(int(size) == size >= 0 for size in shape)
            maxval_fits = _maxval_fits(np.dtype(dtype), float(maxval))
        except (TypeError, ValueError) as error:
            raise self.error(f"specs[{name!r}]={spec!r} is not (shape, dtype, maxval): {error}") from error
        if not (kind and sizes_fit and maxval_fits):
            raise self.error(
                f"specs[{name!r}]={spec!r} is not (shape, dtype, maxval) with sizes of 0 or more, a float, integer or "
                "bool dtype, and a maxval above 0 (for integers 1 or more, and within the dtype)"
            )


class SyntheticLmInput(_SyntheticBase):
    """A synthetic language in which each token determines the next one. Batches match `batches.lm_input_specs`.

    The token after token t is (5 t + 3) mod vocab_size, and a row starts with a random token. A model that learns this rule
    reaches a loss near 0. A model that ignores its input stays near log(vocab_size). Rows have no padding.

    Attributes:
      seq_len: tokens per row, T.
      vocab_size: number of tokens; they are 0 to vocab_size - 1.
    """

    seq_len: int = 0
    vocab_size: int = 256

    def __post_init__(self) -> None:
        super().__post_init__()
        self.require_positive("seq_len")
        self.require_positive("vocab_size")

    def input_specs(self) -> NestedMap:
        return batches.lm_input_specs(self.batch_size, self.seq_len)

    def batch_at(self, position: int) -> NestedMap:
        starts = random_bits(self.seed, "start", self.examples_at(position), 1) % np.uint64(self.vocab_size)
        factors, offsets = _powers_of_the_rule(self.vocab_size, self.seq_len + 1)
        tokens = ((starts.astype(np.int64) * factors + offsets) % self.vocab_size).astype(np.int32)
        shape = (self.batch_size, self.seq_len)
        eval_sample_weights = self._sample_weights(position)
        weights = np.broadcast_to(eval_sample_weights[:, None], shape).copy()
        mask = weights.astype(np.int32)
        return NestedMap(
            ids=tokens[:, :-1] * mask,
            labels=tokens[:, 1:] * mask,
            paddings=1.0 - weights,
            weights=weights,
            segment_ids=mask,
            segment_pos=np.arange(self.seq_len, dtype=np.int32) * mask,
            eval_sample_weights=eval_sample_weights,
        )

    def _fingerprint(self) -> dict[str, Any]:
        return {**super()._fingerprint(), "seq_len": self.seq_len, "vocab_size": self.vocab_size}


@functools.lru_cache(maxsize=8)
def _powers_of_the_rule(vocab_size: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (factors, offsets), both int64 [length]. The i-th token after t is (factors[i] * t + offsets[i]) % vocab_size."""
    factors, offsets = np.ones(length, np.int64), np.zeros(length, np.int64)
    for i in range(1, length):
        factors[i] = 5 * factors[i - 1] % vocab_size
        offsets[i] = (5 * offsets[i - 1] + 3) % vocab_size
    return factors, offsets


def random_bits(seed: int, name: str, examples: np.ndarray, count: int) -> np.ndarray:
    """Returns random bits, uint64 [B, count]: splitmix64 hashes of (seed, name, example, index in the example).

    Args:
      seed: 0 or more.
      name: name of an array of the batch, so that the arrays of a batch differ.
      examples: numbers of the examples, int64 [B].
      count: number of values per example.
    """
    key = mix(np.array([seed % 2**64, zlib.crc32(name.encode())], np.uint64))
    rows = mix(examples.astype(np.uint64) + key[0] + key[1])
    return mix(rows[:, None] + np.arange(count, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15))


def _kind(dtype: np.dtype) -> str:
    for kind, parent in (("bool", np.bool_), ("int", np.integer), ("float", np.floating)):
        if jax.dtypes.issubdtype(dtype, parent):
            return kind
    return ""


def _maxval_fits(dtype: np.dtype, maxval: float) -> bool:
    if _kind(dtype) == "int":
        return 1 <= maxval <= min(float(jax.numpy.iinfo(dtype).max) + 1, 2.0**63)
    return _kind(dtype) == "bool" or 0 < maxval <= float(jax.numpy.finfo(dtype).max)


def _uniform(bits: np.ndarray, dtype: np.dtype, maxval: float) -> np.ndarray:
    kind = _kind(dtype)
    if kind == "bool":
        return (bits >> np.uint64(63)).astype(bool)
    if kind == "int":
        return (bits % np.uint64(maxval)).astype(dtype)
    # As many bits as the dtype's mantissa holds, so that rounding never gives maxval.
    digits = min(jax.numpy.finfo(dtype).nmant, 52)
    return ((bits >> np.uint64(64 - digits)).astype(np.float64) * (2.0**-digits * maxval)).astype(dtype)
