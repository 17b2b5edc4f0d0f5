"""Sinks: a further logit of each head's softmax. Every kernel and form gives the outputs and gradients of plain attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from split_rows import SPLIT, mesh_of

from spmd_trainer.kernels import chunked, kernels, sequence_order, splash
from spmd_trainer.kernels.attend import Split, attend
from spmd_trainer.kernels.chips import Target
from spmd_trainer.kernels.kernels import Pattern, Rows

ROWS, WIDTH = 3, 8
PATTERN = Pattern(scale=0.3, window=50, softcap=4.0)
# One of them takes nearly all of the probability, and one nearly none.
SINKS = jnp.asarray([0.5, 30.0, -20.0, 1.0, 0.0, -1.0])


def arrays_of(length, heads, kv_heads):
    """Returns queries, keys, values, sinks, segment ids and the gradient of the output."""
    rng = np.random.default_rng(length)
    query, key, value, out_grad = (
        jnp.asarray(rng.normal(size=(ROWS, length, n, WIDTH)), jnp.float32) for n in (heads, kv_heads, kv_heads, heads)
    )
    ids = jnp.asarray(np.sort(rng.integers(1, 4, (ROWS, length)), axis=1), jnp.int32)
    return (query, key, value, SINKS[:heads]), ids, out_grad


def plain(query, key, value, sinks, *, ids):
    """A key beside the others, that all queries see, whose value is 0."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    logits = PATTERN.logits(jnp.einsum("btnh,bsnh->bnts", query, key))
    distance = np.arange(query.shape[1])[:, None] - np.arange(query.shape[1])
    seen = (distance >= 0) & (distance < PATTERN.window) & (ids[:, :, None] == ids[:, None])
    logits = jnp.where(seen[:, None], logits, -jnp.inf)
    beside = jnp.broadcast_to(sinks[:, None, None], (*logits.shape[:3], 1))
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(jnp.concatenate([logits, beside], -1))[..., :-1], value)


def assert_like_plain(fn, length, heads, kv_heads):
    arrays, ids, out_grad = arrays_of(length, heads, kv_heads)

    @functools.partial(jax.jit, static_argnums=0)
    def both(fn, ids, *arrays):
        out, pull = jax.vjp(functools.partial(fn, ids=ids), *arrays)
        return out, *pull(out_grad)

    names = ("output", "query", "key", "value", "sinks")
    for name, found, wanted in zip(names, both(fn, ids, *arrays), both(plain, ids, *arrays), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5, err_msg=name)


def on_mesh(query, key, value, sinks, *, ids, split, kernel=None, form=None):
    order = sequence_order.of_rows(query.shape[1], split.length, form)
    rows = [order.apply(x) for x in (query, key, value)]
    ids = order.apply(ids, fill=-1)
    out = attend(
        *rows, PATTERN, segment_ids=ids, sinks=sinks, split=split, kernel=kernel, context_parallel=form, name="layer"
    )
    return order.undo(out)


@pytest.mark.full
@pytest.mark.parametrize("kernel", ["reference", "chunked"])
def test_on_one_device(kernel):
    assert_like_plain(functools.partial(on_mesh, split=Split(), kernel=kernel), 259, 6, 2)


@pytest.mark.full
def test_splash(monkeypatch):
    monkeypatch.setattr(splash, "_BLOCKS", (128,))

    def fn(query, key, value, sinks, *, ids):
        sinks = jnp.broadcast_to(sinks, (ROWS, len(sinks)))
        return splash.attend(Rows(query, key, value, ids, sinks), PATTERN)

    assert_like_plain(fn, 259, 6, 2)


# Neither the rows nor the heads divide by the devices.
@pytest.mark.parametrize(
    ("form", "seq"),
    [
        (None, 1),
        pytest.param("ring", 2, marks=pytest.mark.full),
        pytest.param("all_to_all", 2, marks=pytest.mark.full),
    ],
)
def test_on_a_mesh(form, seq, monkeypatch):
    monkeypatch.setattr(chunked, "_BLOCK_ON_CPU", 16)
    split = SPLIT if form else Split(batch=SPLIT.batch, heads=SPLIT.heads)
    kernel = None if form == "all_to_all" else "chunked"
    with jax.set_mesh(mesh_of(seq, 2)):
        assert_like_plain(functools.partial(on_mesh, split=split, kernel=kernel, form=form), 39, 3, 1)


def test_kernels_without_sinks_are_not_chosen():
    heads = jax.ShapeDtypeStruct((1, 1024, 4, 64), jnp.bfloat16)
    h100 = Target("cuda", "NVIDIA H100 80GB HBM3", (9, 0))
    call = kernels.Call(heads, heads, Pattern(), segments=False, dropout=False, target=h100, sinks=True)
    assert "it has no sinks" in kernels.kernel("cudnn").reasons_against(call)
    assert kernels.choose(call).kernel == "chunked"
