"""Checksums of variables, computed on the devices from the bits of the logical arrays. They are equal on every mesh.

A variable is a sequence of unsigned 32-bit words: each element is one word (narrower elements are zero-extended) or, if it
has 64 bits, two words, the low one first. The index of a word consists of the indices of its element and, last, the word's
number within the element. The checksum has two halves, s = 0 and s = 1. With all arithmetic modulo 2**32, half s is

    sum over all words that are not 0 of  mix(word XOR sum over d of index[d] * factor(s, d))
    factor(s, d) = mix(16 * s + d + 1) OR 1

So padding with zeros changes nothing.

`mix` is the finalizer of MurmurHash3. A sum does not depend on the order of its terms, so it does not matter which device
holds which words. Because of the index, equal words at different positions contribute differently. The checksum is written as
16 hexadecimal digits, half 0 first. It detects accidental differences; it does not protect against a forged checkpoint.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from spmd_trainer.sharding.host_devices import finish_on_host_devices
from spmd_trainer.sharding.messages import short_hash
from spmd_trainer.sharding.variables import VariableSpec, named_leaves
from spmd_trainer.train_states import PyTree

_Words = TypeVar("_Words", jax.Array, npt.NDArray[Any])

_HALVES = 2
_WORDS: Mapping[int, type[np.unsignedinteger]] = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint32}


def checksums(arrays: Mapping[str, jax.Array], specs: Mapping[str, VariableSpec] | None = None) -> dict[str, str]:
    """Returns the checksum of each variable. All processes must call it; all of them get the same result.

    Args:
      arrays: arrays at padded shapes by path.
      specs: their VariableSpecs by path, so that values in the padding are ignored. None if the padding is zero or absent.

    Returns:
      {path: 16 hexadecimal digits}.
    """
    shapes = {path: x.shape if specs is None else specs[path].logical_shape for path, x in arrays.items()}
    # All sums are dispatched before the first is waited for, except where that deadlocks.
    sums = {path: finish_on_host_devices(_summing(shapes[path], x.sharding)(x)) for path, x in arrays.items()}
    return {path: "".join(f"{half:08x}" for half in np.asarray(both).tolist()) for path, both in sums.items()}


def checksum(tree: PyTree) -> str:
    """Returns one checksum of a tree's arrays and their paths, 16 hexadecimal digits. Padding must be zero or absent."""
    parts = checksums({path: jnp.asarray(leaf) for path, leaf in named_leaves(tree)})
    return short_hash(json.dumps(parts, sort_keys=True))


def bits_checksum(x: jax.Array) -> jax.Array:
    """Returns the checksum of an array's bits, padding included, as uint32 [2]. For use under jit."""
    words = _words(x)
    return jnp.stack([_half(words, half, None) for half in range(_HALVES)])


@functools.lru_cache(maxsize=256)
def _summing(logical_shape: tuple[int, ...], sharding: Sharding) -> Callable[[jax.Array], jax.Array]:
    """Returns a jitted function from an array at its padded shape to its checksum, uint32 [2], replicated."""
    replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else None

    def both_halves(x: jax.Array) -> jax.Array:
        words = _words(x)
        inside = None
        for dim, size in enumerate(logical_shape):
            if size != words.shape[dim]:
                fits = lax.broadcasted_iota(jnp.uint32, words.shape, dim) < size
                inside = fits if inside is None else inside & fits
        return jnp.stack([_half(words, half, inside) for half in range(_HALVES)])

    return jax.jit(both_halves, out_shardings=replicated)


def _words(x: jax.Array) -> jax.Array:
    """Returns the bits of an array as uint32 [..., words per element]."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if jnp.issubdtype(x.dtype, jnp.complexfloating):
        x = jnp.stack([x.real, x.imag], axis=-1)
    if x.dtype == jnp.bool_ or x.dtype.name in ("int4", "uint4", "int2", "uint2"):
        x = x.astype(jnp.int8)
    words = lax.bitcast_convert_type(x, _WORDS[x.dtype.itemsize]).astype(jnp.uint32)
    return words if x.dtype.itemsize == max(_WORDS) else words[..., None]


def _half(words: jax.Array, half: int, inside: jax.Array | None) -> jax.Array:
    position = jnp.uint32(0)
    for dim in range(words.ndim):
        factor = _mix(np.array([16 * half + dim + 1], np.uint32))[0] | np.uint32(1)
        position = position + lax.broadcasted_iota(jnp.uint32, words.shape, dim) * factor
    counts = words != 0 if inside is None else (words != 0) & inside
    return jnp.sum(jnp.where(counts, _mix(words ^ position), jnp.uint32(0)), dtype=jnp.uint32)


def _mix(x: _Words) -> _Words:
    x = x ^ (x >> np.uint32(16))
    x = x * np.uint32(0x85EBCA6B)
    x = x ^ (x >> np.uint32(13))
    x = x * np.uint32(0xC2B2AE35)
    mixed: _Words = x ^ (x >> np.uint32(16))
    return mixed
