"""Checksums of variables: the documented formula, on any mesh, with and without padding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.checkpointing.checksums import checksum as tree_checksum
from spmd_trainer.checkpointing.checksums import checksums
from spmd_trainer.sharding.variables import make_variable_spec

SHAPE = (5, 6, 7)
WHOLE = PartitionSpec()
MESHES = [((1, 1), WHOLE), ((2, 4), PartitionSpec("a", None, "b")), ((4, 2), PartitionSpec(("a", "b")))]
DTYPES = [np.float32, ml_dtypes.bfloat16, np.int8, np.bool_, np.float16]


def values(dtype, seed=0):
    return (np.random.default_rng(seed).standard_normal(SHAPE) * 10).astype(dtype)


def checksum(array, sizes=(1, 1), spec=WHOLE, filler=0):
    """The checksum of an array on a mesh; its padding is filled with `filler`."""
    mesh = Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), ("a", "b"))
    variable = make_variable_spec("w", array.shape, array.dtype, spec, dict(mesh.shape), "test")
    paddings = [(0, more) for more in variable.paddings]
    padded = np.pad(array, paddings, constant_values=np.array(filler, array.dtype)) if any(variable.paddings) else array
    return checksums({"w": jax.device_put(padded, NamedSharding(mesh, variable.spec))}, {"w": variable})["w"]


def mixed(x):
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35), (16, 1)):
        x = ((x ^ (x >> shift)) * factor) % 2**32
    return x


def by_formula(array):
    """The formula of the module's docstring, in Python's integers."""
    words = array.view(f"u{array.itemsize}")
    text = ""
    for half in (0, 1):
        factors = [mixed(16 * half + d + 1) | 1 for d in range(array.ndim)]
        total = 0
        for index in np.ndindex(array.shape):
            position = sum(i * factor for i, factor in zip(index, factors, strict=True)) % 2**32
            total += mixed(int(words[index]) ^ position) if words[index] else 0
        text += f"{total % 2**32:08x}"
    return text


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_mesh_gives_what_the_formula_says(dtype):
    array = values(dtype)
    expected = by_formula(array)
    for sizes, spec in MESHES:
        assert checksum(array, sizes, spec) == expected
        # A checksum is of the logical array alone.
        assert checksum(array, sizes, spec, filler=1) == expected


def test_one_bit_and_one_exchange_are_found():
    array = values(np.float32)
    flipped, exchanged, negative = array.copy(), array.copy(), array.copy()
    flipped.view(np.uint32)[3, 2, 1] ^= 1
    exchanged[0], exchanged[4] = array[4], array[0]
    negative[array == array[1, 2, 3]] *= -1
    found = {checksum(x) for x in (array, flipped, exchanged, negative, np.zeros_like(array), -np.zeros_like(array))}
    assert len(found) == 6


def test_padding_with_zeros_needs_no_spec():
    array = values(np.float32)
    padded = np.pad(array, ((0, 3), (0, 0), (0, 1)))
    assert checksums({"w": jnp.asarray(padded)}) == checksums({"w": jnp.asarray(array)}) == {"w": by_formula(array)}


def test_a_tree_has_one_checksum():
    array = values(np.float32)
    trees = [{"a": array}, {"b": array}, {"a": array, "b": array}, {"a": array + 1}]
    assert len({tree_checksum(tree) for tree in trees}) == len(trees)
    assert tree_checksum({"a": jnp.asarray(np.pad(array, ((0, 2), (0, 0), (0, 0))))}) == tree_checksum(trees[0])


@pytest.mark.full
def test_scalars_empty_arrays_and_prng_keys():
    assert checksum(np.full((), 3, np.float32)) != checksum(np.full((), 4, np.float32))
    assert checksum(np.zeros((0, 4), np.float32)) == "0" * 16
    key = jax.random.key(7)
    variable = make_variable_spec("k", (), key.dtype, PartitionSpec(), {}, "test")
    raw = np.asarray(jax.random.key_data(key))
    assert checksums({"k": key}, {"k": variable})["k"] == checksum(raw)
    assert jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
