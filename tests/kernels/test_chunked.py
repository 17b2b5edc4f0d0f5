"""The reference against a formula in float64, and the chunked kernel against the reference."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hlo_checks import arrays_over_queries_and_keys
from jax.sharding import PartitionSpec

from spmd_trainer import sharding
from spmd_trainer.kernels import chunked, reference
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.kernels import Pattern, Rows

BATCH, WIDTH = 2, 4
PATTERNS = {
    "causal": Pattern(scale=0.5),
    "window": Pattern(window=90, scale=0.5),
    "window_of_one": Pattern(window=1),
    "softcap": Pattern(softcap=1.5),
    "window_and_softcap": Pattern(window=200, softcap=2.0),
    "bidirectional": Pattern(causal=False, scale=0.5),
    "bidirectional_softcap": Pattern(causal=False, softcap=1.0),
}
# Row length, pattern, heads, key heads, whether packed. The lengths are about multiples of the block, 128 tokens on CPUs.
CASES = [
    (1, "causal", 2, 1, False),
    (2, "bidirectional", 2, 2, True),
    (3, "window_of_one", 2, 1, True),
    (127, "window", 4, 2, False),
    (128, "softcap", 2, 2, False),
    (129, "bidirectional", 2, 1, False),
    (131, "bidirectional_softcap", 2, 1, True),
    (255, "causal", 3, 1, True),
    (256, "causal", 2, 2, False),
    (257, "window_and_softcap", 4, 2, True),
    (389, "window", 2, 2, True),
    (513, "causal", 6, 3, True),
    (513, "window_and_softcap", 2, 1, False),
]


def rows(length, heads, kv_heads, *, packed=False, dtype=jnp.float32):
    """Returns queries, keys, values, output gradients [B, T, heads, H], and segment ids [B, T] or None."""
    rng = np.random.default_rng(length)
    arrays = [
        jnp.asarray(rng.normal(size=(BATCH, length, n, WIDTH)), dtype) for n in (heads, kv_heads, kv_heads, heads)
    ]
    # Segments needn't be in order or in one piece: -1 stands for padding.
    ids = jnp.asarray(rng.integers(-1, 3, (BATCH, -(-length // 20))).repeat(20, axis=1)[:, :length], jnp.int32)
    return *arrays, ids if packed else None


@functools.partial(jax.jit, static_argnums=(0, 1))
def value_and_grads(kernel, pattern, query, key, value, out_grad, segment_ids):
    """Returns the output, and the gradients of queries, keys and values."""
    out, pullback = jax.vjp(lambda q, k, v: kernel.attend(Rows(q, k, v, segment_ids), pattern), query, key, value)
    return out, *pullback(out_grad)


def formula(query, key, value, segment_ids, pattern):
    """Computes attention one query at a time in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    out = np.empty_like(query)
    group = query.shape[2] // key.shape[2]
    for b, i, n in np.ndindex(query.shape[:3]):
        logits = pattern.scale * key[b, :, n // group] @ query[b, i, n]
        if pattern.softcap is not None:
            logits = pattern.softcap * np.tanh(logits / pattern.softcap)
        j = np.arange(len(logits))
        unseen = np.zeros(len(logits), bool)
        if pattern.causal:
            unseen |= j > i
        if pattern.window is not None:
            unseen |= i - j >= pattern.window
        if segment_ids is not None:
            unseen |= np.asarray(segment_ids[b] != segment_ids[b, i])
        exps = np.where(unseen, 0, np.exp(logits))
        out[b, i, n] = exps @ value[b, :, n // group] / exps.sum()
    return out


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pattern", [*PATTERNS.values(), Pattern(window=5)], ids=[*PATTERNS, "window_of_five"])
def test_reference_is_the_formula(pattern, packed):
    query, key, value, _, ids = rows(37, 4, 2, packed=packed)
    out = reference.attend(Rows(query, key, value, ids), pattern)
    np.testing.assert_allclose(out, formula(query, key, value, ids, pattern), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("length", "pattern", "heads", "kv_heads", "packed"), CASES)
def test_chunked_is_the_reference(length, pattern, heads, kv_heads, packed):
    arrays = rows(length, heads, kv_heads, packed=packed)
    found = value_and_grads(chunked, PATTERNS[pattern], *arrays)
    expected = value_and_grads(reference, PATTERNS[pattern], *arrays)
    for name, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("length", "pattern", "packed"),
    [(257, "window_and_softcap", True), pytest.param(300, "causal", False, marks=pytest.mark.full)],
)
def test_chunked_is_the_reference_in_bfloat16(length, pattern, packed):
    arrays = rows(length, 4, 2, packed=packed, dtype=jnp.bfloat16)
    found = value_and_grads(chunked, PATTERNS[pattern], *arrays)
    exact = [x if x is None or x.dtype == jnp.int32 else x.astype(jnp.float32) for x in arrays]
    expected = value_and_grads(reference, PATTERNS[pattern], *exact)
    for name, x, y in zip(("output", "query", "key", "value"), found, expected, strict=True):
        assert x.dtype == jnp.bfloat16
        np.testing.assert_allclose(x.astype(jnp.float32), y, rtol=2e-2, atol=2e-2, err_msg=name)


def test_other_values_have_their_own_dtype():
    query, key, value, _, _ = rows(140, 2, 1)
    assert chunked.attend(Rows(query, key, value.astype(jnp.bfloat16)), Pattern()).dtype == jnp.bfloat16


@pytest.mark.full
def test_logits_of_any_size():
    query, key, value, _, ids = rows(140, 2, 1, packed=True)
    huge = Rows(1e4 * query, key, value, ids)
    found = chunked.attend(huge, Pattern())
    np.testing.assert_allclose(found, reference.attend(huge, Pattern()), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("pattern", PATTERNS.values(), ids=PATTERNS)
def test_pairs_are_those_with_a_visible_key(pattern):
    length, block = 513, 16
    query, key = np.indices((length, length))
    seen = np.ones_like(query, bool)
    if pattern.causal:
        seen &= key <= query
    if pattern.window is not None:
        seen &= query - key < pattern.window
    expected = np.unique(np.stack([query[seen], key[seen]], axis=1) // block, axis=0)
    np.testing.assert_array_equal(chunked.visible_pairs(length, block, pattern), expected)


@functools.cache
def train_step(kernel, length):
    """Returns the compiled train step of one attention layer on a mesh (data 2, mdl 4); 2 rows and 2 heads a device."""
    mesh = sharding.create_device_mesh([("data", 2), ("mdl", 4)])
    split = Split(batch=("data",), heads=("mdl",))

    def loss(weights, x, segment_ids):
        query, key, value = (
            jax.lax.with_sharding_constraint(jnp.einsum("btd,dnh->btnh", x, w), PartitionSpec("data", None, "mdl"))
            for w in weights
        )
        out = attend(query, key, value, PATTERNS["softcap"], segment_ids=segment_ids, split=split, kernel=kernel)
        return jnp.mean(jnp.square(out))

    def step(weights, x, segment_ids):
        grads = jax.grad(loss)(weights, x, segment_ids)
        return jax.tree.map(lambda w, g: w - 0.1 * g, weights, grads)

    weight, x = jax.ShapeDtypeStruct((6, 8, WIDTH), jnp.float32), jax.ShapeDtypeStruct((4, length, 6), jnp.float32)
    with jax.set_mesh(mesh):
        return jax.jit(step).lower((weight,) * 3, x, jax.ShapeDtypeStruct((4, length), jnp.int32)).compile()


def test_compiled_train_step_has_no_array_over_queries_and_keys():
    length = 2048
    program, plain = train_step("chunked", length), train_step("reference", length)
    assert not arrays_over_queries_and_keys(program.as_text(), length)
    assert arrays_over_queries_and_keys(plain.as_text(), length)
    # Temporaries are far below one such array of one row and head.
    assert program.memory_analysis().temp_size_in_bytes < length * length < plain.memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_memory_grows_with_the_length_and_the_program_does_not():
    short, long = train_step("chunked", 2048), train_step("chunked", 8192)
    assert long.memory_analysis().temp_size_in_bytes < 4.2 * short.memory_analysis().temp_size_in_bytes
    # There are 15 times as many pairs of blocks.
    assert long.as_text().count("\n") < 1.5 * short.as_text().count("\n")


@pytest.mark.parametrize(("saved", "forward_passes"), [(("context",), 1), ((), 2)])
@pytest.mark.full
def test_rematerialisation_that_keeps_the_output_needs_no_second_forward_pass(saved, forward_passes):
    query, key, value, _, _ = rows(256, 2, 2)

    @functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(*saved))
    def layer(query):
        return jnp.sum(jnp.sin(attend(jnp.sin(query), key, value, Pattern(), kernel="chunked")))

    program = jax.jit(jax.value_and_grad(layer)).lower(query).compile().as_text()
    # The backward pass is one loop too.
    assert program.count(" while(") == forward_passes + 1
