"""All-to-all attention gives what the reference gives, for any number of heads, and each array moves once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_rows import BATCH, WIDTH, compiled_programs, crossing_bytes, differences, mesh_of, random_rows

from spmd_trainer.kernels import all_to_all
from spmd_trainer.kernels.kernels import Pattern

PLAIN = Pattern(scale=0.3)


@pytest.mark.parametrize(
    ("length", "seq", "fields"),
    [
        pytest.param(1, 4, {}, marks=pytest.mark.full),
        pytest.param(13, 2, {"packed": True, "heads": 3, "kv_heads": 1}, marks=pytest.mark.full),
        pytest.param(67, 4, {"packed": True, "heads": 6, "kv_heads": 2}, marks=pytest.mark.full),
        (66, 2, {"mdl": 2, "packed": True, "heads": 6, "kv_heads": 3}),
        pytest.param(513, 4, {"mdl": 2, "heads": 8, "kv_heads": 8}, marks=pytest.mark.full),
        pytest.param(513, 4, {"packed": True, "heads": 8, "kv_heads": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_rows_of_any_length(length, seq, fields):
    assert max(differences("all_to_all", length, seq, PLAIN, **fields)) < 1e-5


@pytest.mark.parametrize(
    "pattern",
    [Pattern(scale=0.3, window=9, softcap=2.0), pytest.param(Pattern(causal=False), marks=pytest.mark.full)],
    ids=str,
)
def test_patterns(pattern):
    assert max(differences("all_to_all", 64, 4, pattern, packed=True)) < 1e-5


@pytest.mark.full
def test_bfloat16():
    assert max(differences("all_to_all", 131, 4, PLAIN, packed=True, dtype=jnp.bfloat16)) < 2e-2


@pytest.mark.parametrize(
    ("heads", "kv_heads", "count", "expected"),
    [(8, 4, 4, (8, 4)), (8, 2, 4, (8, 4)), (6, 2, 4, (8, 8)), (3, 1, 2, (4, 4)), (6, 3, 2, (6, 6))],
)
def test_heads_are_repeated_and_padded_until_they_divide(heads, kv_heads, count, expected):
    (query, key, value, _), _ = random_rows(2, heads, kv_heads)
    queries, keys, values = all_to_all.with_divisible_heads(query, key, value, count)
    assert (queries.shape[2], keys.shape[2]) == expected
    np.testing.assert_array_equal(queries[:, :, :heads], query)
    group = queries.shape[2] // keys.shape[2]
    for head in range(heads):
        np.testing.assert_array_equal(keys[:, :, head // group], key[:, :, head // (heads // kv_heads)])
        np.testing.assert_array_equal(values[:, :, head // group], value[:, :, head // (heads // kv_heads)])


def test_each_array_moves_once():
    length, heads, kv_heads = 64, 8, 4
    mesh = mesh_of(4)
    moved = (
        (2 * heads + 2 * kv_heads) * length * WIDTH * 4 * BATCH // 8
    )  # queries, keys, values and outputs on 8 devices
    programs = compiled_programs("all_to_all", PLAIN, mesh, heads=heads, kv_heads=kv_heads, length=length)
    assert [crossing_bytes(program, mesh) for program in programs] == [{"all-to-all": moved}] * 2


def test_the_kernel_gets_whole_rows_with_a_part_of_the_heads():
    query = jax.ShapeDtypeStruct((2, 16, 6, 8), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((2, 16, 2, 8), jnp.bfloat16)
    queries, keys = all_to_all.shapes_of_kernel(query, key, 4)
    assert (queries.shape, keys.shape) == ((2, 64, 2, 8), (2, 64, 2, 8))
