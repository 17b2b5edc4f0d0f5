"""Norms, attention and feed-forward layers against references in numpy, token by token."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import evaluating, small_spec
from praxis import base_layer, pax_fiddle
from praxis.pax_fiddle import Config

from spmd_trainer.decoder import attention, axes, feed_forward
from spmd_trainer.decoder.context import Context
from spmd_trainer.decoder.router import Router
from spmd_trainer.models.decoder_spec import MoeSpec, TemperatureSpec

SEGMENTS = np.array([[1, 1, 1, 1, 2, 2, 2, 0], [1, 1, 1, 1, 1, 1, 1, 1]])
# The second row continues a text, as in a corpus.
POSITIONS = np.array([[0, 1, 2, 3, 0, 1, 2, 0], [7, 8, 9, 10, 11, 12, 13, 14]])


def built(cls, spec_p, *inputs, **fields):
    """Returns a layer's output for these inputs, its variables in numpy, and what it sowed."""
    layer = base_layer.instantiate(Config(cls, name="layer", spec=spec_p, **fields))
    with evaluating():
        params = layer.init(jax.random.key(0), *inputs)["params"]
        leaves, treedef = jax.tree.flatten(params)
        rng = np.random.default_rng(3)
        params = treedef.unflatten([x + 0.3 * rng.normal(size=x.shape).astype(np.float32) for x in leaves])
        output, sown = layer.apply({"params": params}, *inputs, mutable=[base_layer.AUX_LOSS])
    return np.asarray(output), jax.tree.map(np.asarray, params), sown


def random(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def rms(x, scale, epsilon=1e-6, dims=(-1,)):
    return x / np.sqrt(np.mean(x**2, axis=dims, keepdims=True) + epsilon) * scale


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(offset):
    x = random(2, 3, 12)
    output, params, _ = built(axes.Norm, small_spec(norm_scale_offset=offset, norm_epsilon=0.1), x, shape=(12,))
    np.testing.assert_allclose(output, rms(x, params["scale"] + offset, 0.1), rtol=1e-5)


def test_a_new_norm_has_scale_1_whatever_its_offset():
    for offset in (0.0, 1.0):
        layer = base_layer.instantiate(
            Config(axes.Norm, name="norm", spec=small_spec(norm_scale_offset=offset), shape=(12,))
        )
        x = random(2, 12)
        output, _ = layer.init_with_output(jax.random.key(0), x)
        np.testing.assert_allclose(output, rms(x, 1.0), rtol=1e-5)


def test_layer_norm():
    x = random(2, 3, 12) + 5
    output, params, _ = built(axes.Norm, small_spec(norm="layer", norm_epsilon=0.1), x, shape=(12,))
    centred = x - x.mean(-1, keepdims=True)
    expected = centred / np.sqrt(x.var(-1, keepdims=True) + 0.1) * params["scale"] + params["bias"]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_norms_compute_in_float32():
    x = jnp.asarray(300 + random(1, 12), jnp.bfloat16)
    output, params, _ = built(axes.Norm, small_spec(norm="layer"), x, shape=(12,))
    assert output.dtype == jnp.bfloat16
    exact = np.asarray(x, np.float32)
    expected = (exact - exact.mean()) / np.sqrt(exact.var() + 1e-6) * params["scale"] + params["bias"]
    np.testing.assert_allclose(output.astype(np.float32), expected, rtol=1e-2, atol=1e-2)


def is_seen(spec, b, t, s):
    """Whether the token t of the row b sees the token s before it."""
    if SEGMENTS[b, s] != SEGMENTS[b, t]:
        return False
    if spec.layer_pattern[0] == "chunked":
        return POSITIONS[b, s] // spec.window == POSITIONS[b, t] // spec.window
    return spec.layer_pattern[0] == "global" or t - s < spec.window


def attended(spec, params, x):
    """Attention as loops over rows, heads, queries and keys, without rotary embeddings."""
    batch, length, _ = x.shape
    q, k, v = (
        np.einsum("btd,dnh->btnh", x, params[name]["w"]) + params[name].get("b", 0)
        for name in ("query", "key", "value")
    )
    if spec.temperature is not None:
        intervals = np.floor((POSITIONS + 1) / spec.temperature.interval)
        q = q * (1 + spec.temperature.factor * np.log(1 + intervals))[:, :, None, None]
    if spec.query_key_norm in ("head", "all"):
        dims = (-2, -1) if spec.query_key_norm == "all" else (-1,)
        q, k = rms(q, params["query_norm"]["scale"], dims=dims), rms(k, params["key_norm"]["scale"], dims=dims)
    heads = np.zeros_like(q)
    for b, n, t in np.ndindex(batch, spec.num_heads, length):
        group = n // (spec.num_heads // spec.num_kv_heads)
        seen = [s for s in range(t + 1) if is_seen(spec, b, t, s)]
        logits = np.array([q[b, t, n] @ k[b, s, group] for s in seen]) * (spec.query_scale or spec.head_dims**-0.5)
        if spec.attention_softcap is not None:
            logits = spec.attention_softcap * np.tanh(logits / spec.attention_softcap)
        weights = np.exp(logits - logits.max())
        heads[b, t, n] = sum(w * v[b, s, group] for w, s in zip(weights / weights.sum(), seen, strict=True))
    return np.einsum("btnh,nhd->btd", heads, params["output"]["w"]) + params["output"].get("b", 0)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"num_kv_heads": 6},
        {"num_kv_heads": 1, "query_scale": 0.3},
        {"qkv_bias": True, "output_bias": True},
        {"query_key_norm": "head"},
        {"query_key_norm": "all"},
        {"attention_softcap": 0.7},
        {"layer_pattern": ("local",), "window": 3},
        {"layer_pattern": ("local",), "window": 1},
        {"layer_pattern": ("chunked",), "window": 3},
        {"layer_pattern": ("chunked",), "window": 9},
        {"temperature": TemperatureSpec(factor=0.7, interval=3)},
    ],
    ids=str,
)
def test_attention(fields):
    spec_p = small_spec(positions="learned", max_positions=8, **fields)
    spec = pax_fiddle.build(spec_p)
    x = random(2, 8, 12, seed=4)
    context = Context({}, jnp.asarray(POSITIONS), jnp.asarray(SEGMENTS))
    output, params, _ = built(attention.Attention, spec_p, x, context, layer_kind=spec.layer_pattern[0])
    expected = attended(spec, params, x)
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def silu(x):
    return x / (1 + np.exp(-x))


def test_gated_feed_forward():
    x = random(2, 3, 12)
    output, params, _ = built(feed_forward.FeedForward, small_spec(mlp_bias=True), x)
    gate, up, down = ((params[name]["w"], params[name]["b"]) for name in ("gate", "up", "down"))
    expected = (silu(x @ gate[0] + gate[1]) * (x @ up[0] + up[1])) @ down[0] + down[1]
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "relu"])
def test_plain_feed_forward(activation):
    x = random(2, 3, 12)
    output, params, _ = built(feed_forward.FeedForward, small_spec(gated=False, activation=activation), x)
    assert sorted(params) == ["down", "up"]
    hidden = x @ params["up"]["w"]
    normal = jax.scipy.stats.norm.cdf(hidden)
    expected = {
        "gelu": hidden * normal,
        "gelu_tanh": 0.5 * hidden * (1 + np.tanh(np.sqrt(2 / np.pi) * (hidden + 0.044715 * hidden**3))),
        "relu": np.maximum(hidden, 0),
    }[activation]
    np.testing.assert_allclose(output, expected @ params["down"]["w"], rtol=1e-4, atol=1e-5)


def moe_spec(**fields):
    return small_spec(moe=Config(MoeSpec, num_experts=5, num_experts_per_token=2, hidden_dims=7, **fields))


@pytest.mark.parametrize("normalise", [True, False])
@pytest.mark.full
def test_mixture_of_experts(normalise):
    x = random(2, 8, 12, seed=5)
    output, params, _ = built(feed_forward.MixtureOfExperts, moe_spec(normalise_top_k=normalise), x, SEGMENTS > 0)
    expected = np.zeros_like(x)
    used = set()
    for b, t in np.ndindex(2, 8):
        token = x[b, t]
        logits = token @ params["router"]["w"]
        probabilities = np.exp(logits) / np.exp(logits).sum()
        chosen = np.argsort(-probabilities)[:2]
        used |= set(chosen)
        total = probabilities[chosen].sum() if normalise else 1.0
        for e in chosen:
            hidden = silu(token @ params["gate"]["w"][e]) * (token @ params["up"]["w"][e])
            expected[b, t] += probabilities[e] / total * (hidden @ params["down"]["w"][e])
    assert len(used) == 5
    np.testing.assert_allclose(output, expected, rtol=1e-4, atol=1e-5)


def test_the_only_expert_of_a_token_has_weight_1_whatever_the_router():
    """Also where all experts are equally likely, and the sum of the chosen probabilities is the least that it can be."""
    moe_p = Config(MoeSpec, num_experts=8, num_experts_per_token=1, hidden_dims=7)
    router = base_layer.instantiate(Config(Router, name="router", spec=small_spec(moe=moe_p)))

    def weights(w):
        return jnp.sum(router.apply({"params": {"w": w}}, random(2, 8, 12), SEGMENTS > 0)[1])

    with evaluating():
        total, gradient = jax.value_and_grad(weights)(jnp.zeros((12, 8)))
    assert total == 2 * 8
    np.testing.assert_allclose(gradient, 0, atol=1e-7)


def test_the_load_balancing_loss_counts_real_tokens_only():
    x, real = random(2, 8, 12, seed=6), SEGMENTS > 0
    _, params, sown = built(feed_forward.MixtureOfExperts, moe_spec(aux_loss_weight=0.5), x, real)
    tokens = x[real]
    logits = tokens @ params["router"]["w"]
    probabilities = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    chosen = np.argsort(-probabilities, axis=-1)[:, :2]
    load = np.array([(chosen == e).sum() / len(tokens) for e in range(5)])
    expected = 0.5 / 2 * 5 * np.sum(load * probabilities.mean(0))  # two layers
    loss = sown[base_layer.AUX_LOSS]["router"]["load_balancing"]
    np.testing.assert_allclose(loss.value, expected, rtol=1e-5)


@pytest.mark.full
def test_no_load_balancing_loss_without_a_weight():
    _, _, sown = built(feed_forward.MixtureOfExperts, moe_spec(), random(2, 8, 12), SEGMENTS > 0)
    assert not sown
