"""praxis' layers, configured as in the experiments, against their definitions: fails if a new JAX breaks praxis."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import layers
from praxis.layers import activations, attentions, embedding_softmax, multi_query_attention, stochastics
from praxis_layer_helpers import Config, apply, build, check, layer_norm, normal

BATCH, TIME, WIDTH, HEADS, HEAD, HIDDEN, VOCAB = 2, 5, 6, 2, 3, 7, 11


def dense(params, x):
    return x @ params["linear"]["w"] + params["bias"]["b"]


@pytest.mark.parametrize(
    ("activation", "function"),
    [
        pytest.param(activations.ReLU, jax.nn.relu, marks=pytest.mark.full),
        (activations.GELU, jax.nn.gelu),
        pytest.param(activations.SiLU, jax.nn.silu, marks=pytest.mark.full),
    ],
)
def test_feed_forward(activation, function):
    layer_p = Config(layers.FeedForward, input_dims=WIDTH, output_dims=HIDDEN, activation_tpl=Config(activation))
    check(layer_p, lambda p, x: function(dense(p, x)), normal(BATCH, TIME, WIDTH))


@pytest.mark.full
def test_linear_and_bias():
    x = normal(BATCH, WIDTH)
    check(Config(layers.Linear, input_dims=WIDTH, output_dims=HIDDEN), lambda p, x: x @ p["w"], x)
    check(Config(layers.Bias, dims=WIDTH), lambda p, x: x + p["b"], x)


def test_layer_norm_and_rms_norm():
    x = normal(BATCH, TIME, WIDTH)
    check(Config(layers.LayerNorm, dim=WIDTH), layer_norm, x)

    def rms(p, x):  # Zhang, Sennrich 2019 (arXiv:1910.07467)
        return x / jnp.sqrt((x * x).mean(-1, keepdims=True) + 1e-6) * p["scale"]

    check(Config(layers.RmsNorm, dim=WIDTH), rms, x)


@pytest.mark.full
def test_embedding_lookup():
    ids = jnp.array([[1, 4, 4], [0, 10, 2]])
    layer_p = Config(embedding_softmax.Embedding, num_classes=VOCAB, input_dims=WIDTH)
    check(layer_p, lambda p, ids: p["emb_var"][ids], ids)


@pytest.mark.full
@pytest.mark.parametrize("style", ["index", "matmul"])
def test_shared_embedding_lookup_is_scaled_by_the_root_of_its_width(style):
    cls = embedding_softmax.SharedEmbeddingSoftmax
    layer_p = Config(cls, num_classes=VOCAB, input_dims=WIDTH, scale_sqrt_depth=True, lookup_style=style)
    ids = jnp.array([[1, 4, 4], [0, 10, 2]])

    def lookup(p, ids):
        return p["logits_ffn"]["linear"]["w"].T[ids] * WIDTH**0.5

    check(layer_p, lookup, ids, method=cls.emb_lookup)


@pytest.mark.parametrize("cap", [pytest.param(0.0, marks=pytest.mark.full), 2.0])
@pytest.mark.full
def test_softmax_cross_entropy_is_a_weighted_mean(cap):
    layer_p = Config(embedding_softmax.FullSoftmax, num_classes=VOCAB, input_dims=WIDTH, soft_cap_logits=cap)
    x, ids = normal(BATCH, TIME, WIDTH), jnp.array([[1, 2, 3, 4, 5], [6, 7, 8, 9, 10]])[..., None]
    weights = jnp.array([[1.0, 1, 0.5, 0, 1], [1, 0, 0, 2, 1]])[..., None]

    def mean_xent(p, x, weights, ids):
        logits = dense(p["logits_ffn"], x)
        logits = cap * jnp.tanh(logits / cap) if cap else logits
        xent = jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, ids, -1)[..., 0]
        return (xent * weights[..., 0]).sum() / (weights.sum() + 1e-6)

    check(layer_p, mean_xent, x, weights, ids, pick=lambda out: out.avg_xent)


def test_sinusoid_positions():
    layer_p = Config(embedding_softmax.PositionalEmbedding, embedding_dims=6)
    ours = apply(build(layer_p), {}, seq_length=4)[0]
    position, scale = np.arange(4)[:, None], 10000.0 ** (-np.arange(3) / 2)
    np.testing.assert_allclose(ours, np.concatenate([np.sin(position * scale), np.cos(position * scale)], 1), atol=1e-6)


def rotate(x):
    """Su et al. 2021 (arXiv:2104.09864), on halves instead of pairs; x is [batch, time, heads, width]."""
    half = x.shape[-1] // 2
    angle = jnp.arange(x.shape[1])[:, None, None] / 10000 ** (jnp.arange(half) / half)
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * jnp.cos(angle) - b * jnp.sin(angle), b * jnp.cos(angle) + a * jnp.sin(angle)], -1)


@pytest.mark.full
def test_rotary_positions():
    layer_p = Config(embedding_softmax.RotaryPositionalEmbedding, embedding_dims=4)
    check(layer_p, lambda p, x: rotate(x), normal(BATCH, TIME, HEADS, 4))


def attend(q, k, v, mask, cap=0.0):
    """Vaswani et al. 2017 (arXiv:1706.03762); q, k, v are [batch, time, heads, width], and the mask is added to the logits."""
    logits = jnp.einsum("btnh,bsnh->bnts", q, k)
    logits = cap * jnp.tanh(logits / cap) if cap else logits
    return jnp.einsum("bnts,bsnh->btnh", jax.nn.softmax(logits + mask, -1), v)


def per_dim_scale(p, q):
    return q * jax.nn.softplus(p["per_dim_scale"]["per_dim_scale"]) / jnp.log(2.0) / q.shape[-1] ** 0.5


def causal_and_segments():
    segments = jnp.array([[1, 1, 2, 2, 2], [1, 1, 1, 1, 1]])
    return attentions.causal_segment_mask(segments, jnp.float32), segments


def test_the_mask_lets_a_token_attend_to_its_own_segment_up_to_itself():
    mask, segments = causal_and_segments()
    time = np.arange(TIME)
    visible = (segments[:, :, None] == segments[:, None, :]) & (time[:, None] >= time[None, :])
    np.testing.assert_array_equal(mask[:, 0] > -1, visible)


@pytest.mark.parametrize(
    ("combined", "rotary", "cap"),
    [
        pytest.param(False, False, 0.0, marks=pytest.mark.full),
        (True, True, 0.0),
        pytest.param(True, False, 5.0, marks=pytest.mark.full),
    ],
)
@pytest.mark.full
def test_attention(combined, rotary, cap):
    layer_p = Config(attentions.DotProductAttention, input_dim=8, hidden_dim=8, num_heads=HEADS, combine_qkv=combined)
    layer_p.use_rotary_position_emb = rotary
    layer_p.atten_logit_cap = cap
    mask, _ = causal_and_segments()

    def reference(p, x, *_):
        if combined:
            w, b = p["combined_qkv"]["w"], p["combined_qkv"]["b"]
            q, k, v = jnp.einsum("btd,cdnh->cbtnh", x, w) + b[:, None, None]
        else:
            q, k, v = (jnp.einsum("btd,dnh->btnh", x, p[n]["w"]) + p[n]["b"] for n in ("query", "key", "value"))
        if rotary:
            q, k = rotate(q), rotate(k)
        mixed = attend(per_dim_scale(p, q), k, v, mask, cap)
        return jnp.einsum("btnh,dnh->btd", mixed, p["post"]["w"]) + p["post"]["b"]

    class SelfAttention(attentions.DotProductAttention):
        def __call__(self, x, mask):
            return super().__call__(x, x, x, mask)

    own_p = Config(SelfAttention, **{name: getattr(layer_p, name) for name in layer_p.__arguments__})
    check(own_p, reference, normal(BATCH, TIME, 8), mask, by=[0], pick=lambda out: out[0])


@pytest.mark.full
def test_multi_query_attention_shares_keys_and_values():
    cls = multi_query_attention.MultiQueryDotProductAttention

    class SelfAttention(cls):
        def __call__(self, x, mask):
            return super().__call__(x, x, x, mask)

    layer_p = Config(SelfAttention, input_dim=8, hidden_dim=8, num_heads=HEADS, num_kv_heads=1, use_bias=False)
    mask, _ = causal_and_segments()

    def reference(p, x, mask):
        q = jnp.einsum("btd,dnh->btnh", x, p["query"]["w"])
        k, v = (jnp.einsum("btd,dh->bth", x, p[n]["w"])[:, :, None].repeat(HEADS, 2) for n in ("key", "value"))
        mixed = attend(per_dim_scale(p, q) if "per_dim_scale" in p else q / q.shape[-1] ** 0.5, k, v, mask)
        return jnp.einsum("btnh,dnh->btd", mixed, p["post"]["w"])

    check(layer_p, reference, normal(BATCH, TIME, 8), mask, by=[0], pick=lambda out: out[0])


@pytest.mark.parametrize("gated", [pytest.param(False, marks=pytest.mark.full), True])
def test_transformer_feed_forward(gated):
    layer_p = Config(layers.TransformerFeedForward, input_dims=WIDTH, hidden_dims=HIDDEN, use_gated_activation=gated)
    layer_p.activation_tpl = Config(activations.GELU)
    paddings = jnp.array([[0, 0, 0, 0, 1.0], [0, 0, 1, 1, 1]])

    def reference(p, x, paddings):
        keep = 1 - paddings[..., None]
        y = layer_norm(p["layer_norm"], x)
        h = dense(p["ffn_layer1"], y)
        h = h * jax.nn.gelu(dense(p["ffn_layer1_gate"], y)) if gated else jax.nn.gelu(h)
        return x + dense(p["ffn_layer2"], h * keep) * keep

    check(layer_p, reference, normal(BATCH, TIME, WIDTH), paddings, by=[0])


@pytest.mark.full
def test_mixture_of_experts_mixes_the_two_best_by_their_gates():
    """Shazeer et al. 2017 (arXiv:1701.06538), GShard's normalisation (arXiv:2006.16668), capacity for every token."""
    experts = 3
    layer_p = Config(
        layers.TransformerFeedForwardMoe,
        input_dims=WIDTH,
        hidden_dims=HIDDEN,
        num_experts=experts,
        num_groups=1,
        expert_capacity_dim=2 * BATCH * TIME,
    )

    def reference(p, x, paddings):
        y = layer_norm(p["layer_norm"], x)
        gates = jax.nn.softmax(y @ p["gate"], -1)
        best, which = jax.lax.top_k(gates, 2)
        best = best / best.sum(-1, keepdims=True)
        outs = jnp.einsum("ebth,ehd->ebtd", jax.nn.relu(jnp.einsum("btd,edh->ebth", y, p["wi_0"])), p["wo_0"])
        chosen = jax.nn.one_hot(which, experts)
        return x + jnp.einsum("btk,btke,ebtd->btd", best, chosen, outs)

    check(layer_p, reference, normal(BATCH, TIME, WIDTH), jnp.zeros((BATCH, TIME)), by=[0])


def test_dropout_scales_kept_values_is_off_in_evaluation_and_follows_the_key():
    layer = build(Config(stochastics.Dropout, keep_prob=0.75))
    x = jnp.ones((40, 50))
    np.testing.assert_array_equal(apply(layer, {}, x), x)
    dropped = apply(layer, {}, x, do_eval=False)
    np.testing.assert_allclose(np.unique(dropped), [0, 1 / 0.75], rtol=1e-6)
    assert abs(float(dropped.mean()) - 1) < 0.05
    np.testing.assert_array_equal(dropped, apply(layer, {}, x, do_eval=False))
    assert (dropped != apply(layer, {}, x, do_eval=False, key=jax.random.key(9))).any()
