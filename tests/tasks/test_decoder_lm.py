"""The decoder as a language model: packed rows, losses, rematerialisation, bfloat16, dropout, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import LINEAR, Decoder, evaluating, next_token_labels, random_ids, small_spec
from facts import raises_naming
from praxis import base_layer, layers
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer.decoder import lm
from spmd_trainer.errors import UserError
from spmd_trainer.kernels import kernels
from spmd_trainer.models.decoder_spec import MoeSpec

WINDOWS = {"layer_pattern": ("local", "global"), "window": 3, "num_layers": 3, "local_rotary_base": 100.0}


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param(WINDOWS, marks=pytest.mark.full),
        {"positions": "learned", "max_positions": 9},
        {**LINEAR, "num_layers": 2},
    ],
    ids=["rotary", "learned", "linear"],
)
def test_packed_texts_do_not_see_each_other(fields):
    decoder = Decoder(small_spec(**fields))
    texts = [random_ids((1, n), seed=n) for n in (4, 3)]
    packed = np.concatenate([*texts, np.zeros((1, 2), np.int32)], axis=1)
    segment_ids = np.array([[1, 1, 1, 1, 2, 2, 2, 0, 0]])
    positions = np.array([[0, 1, 2, 3, 0, 1, 2, 0, 0]])
    paddings = (segment_ids == 0).astype(np.float32)
    run = jax.jit(lambda ids, **inputs: decoder(ids, **inputs).logits)
    logits = run(packed, paddings=paddings, segment_ids=segment_ids, segment_pos=positions)
    alone = [run(text) for text in texts]
    np.testing.assert_allclose(logits[:, :7], np.concatenate(alone, axis=1), atol=2e-5)


def test_tokens_see_only_earlier_ones_and_local_layers_only_the_window():
    decoder = Decoder(small_spec(layer_pattern=("local",), window=2, num_layers=2))
    ids = random_ids((1, 6))
    other = ids.copy()
    other[0, 2] = (ids[0, 2] + 1) % 31
    changed = np.abs(decoder(ids).logits - decoder(other).logits).max(-1)[0] > 1e-6
    # Two layers of window 2 reach 2 tokens back.
    np.testing.assert_array_equal(changed, [False, False, True, True, True, False])


def test_losses_and_metrics_are_those_of_praxis():
    decoder = Decoder(small_spec(num_layers=1))
    ids = random_ids((2, 5))
    weights = np.array([[1, 1, 0.5, 0, 1], [0, 1, 1, 1, 0]], np.float32)
    labels = next_token_labels(ids, weights)
    found = decoder(ids, labels=labels)
    softmax_p = Config(layers.FullSoftmax, name="softmax", input_dims=31, num_classes=31)
    softmax_p.feed_forward_tpl = None  # the logits are its inputs
    softmax = base_layer.instantiate(softmax_p)
    with evaluating():
        expected = softmax.apply({}, found.logits, weights[..., None], class_ids=labels.class_ids[..., None])
    for name in ("per_example_argmax", "per_example_xent", "total_xent", "total_weight", "avg_xent", "log_probs"):
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-5, err_msg=name)
    np.testing.assert_allclose(found.per_sequence_xent, (expected.per_example_xent * weights).sum(-1), rtol=1e-5)
    np.testing.assert_allclose(found.total_loss, expected.avg_xent, rtol=1e-6)
    assert found.aux_loss == 0


@pytest.mark.full
def test_the_model_reports_the_metrics_of_praxis_language_model():
    lm_p = Config(lm.DecoderLm, spec=small_spec(num_layers=1))
    model = base_layer.instantiate(Config(lm.DecoderLanguageModel, name="model", lm_tpl=lm_p))
    ids = random_ids((2, 5))
    ones = np.ones(ids.shape, np.float32)
    positions = np.broadcast_to(np.arange(5, dtype=np.int32), ids.shape)
    batch = NestedMap(
        ids=ids, labels=ids, weights=ones, paddings=0 * ones, segment_ids=ones.astype(np.int32), segment_pos=positions
    )

    def losses(model, batch):
        return model.compute_loss(model.compute_predictions(batch), batch)

    with evaluating():
        variables = model.init(jax.random.key(0), batch, method=losses)
        metrics, per_example = model.apply({"params": variables["params"]}, batch, method=losses)
    expected = {
        "total_loss",
        "avg_xent",
        "aux_loss",
        "log_pplx",
        "fraction_of_correct_next_step_preds",
        "num_predictions",
    }
    assert set(metrics) == expected
    assert metrics.num_predictions[0] == 10
    np.testing.assert_allclose(per_example.scores.sum() / 10, -metrics.avg_xent[0], rtol=1e-5)


@pytest.mark.full
def test_the_experts_loss_is_part_of_the_total_loss():
    def total(weight):
        moe_p = Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5, aux_loss_weight=weight)
        ids = random_ids((2, 5))
        return Decoder(small_spec(moe=moe_p, num_layers=3, **_two_kinds()))(ids, labels=next_token_labels(ids))

    found = total(0.5)
    # Load and probability agree on some experts at least: the loss is not below num_experts_per_token by much.
    assert 0.9 < float(found.aux_loss) < 0.5 * 3 * 2
    np.testing.assert_allclose(found.total_loss, found.avg_xent + found.aux_loss, rtol=1e-6)
    np.testing.assert_allclose(found.avg_xent, total(0.0).total_loss, rtol=1e-6)


def _two_kinds():
    return {"layer_pattern": ("global", "local"), "window": 2}  # of 3 layers, one stands alone


@pytest.mark.full
@pytest.mark.parametrize("tied", [True, False])
def test_embedding_scale_soft_cap_and_tied_embeddings(tied):
    plain = Decoder(small_spec(tied_embeddings=tied, num_layers=1))
    ids = random_ids((1, 4))
    logits = plain(ids).logits
    capped = Decoder(small_spec(tied_embeddings=tied, num_layers=1, final_softcap=0.5))
    capped.variables = plain.variables
    np.testing.assert_allclose(capped(ids).logits, 0.5 * np.tanh(logits / 0.5), atol=1e-6)
    scaled = Decoder(small_spec(num_layers=1, embedding_scale=3.0))
    variables = jax.tree.map(np.asarray, scaled.variables)
    before = scaled(ids).logits
    variables["params"]["token_emb"]["w"] = 3 * variables["params"]["token_emb"]["w"]
    unscaled = Decoder(small_spec(num_layers=1))
    unscaled.variables = variables
    np.testing.assert_allclose(unscaled(ids).logits, before, atol=1e-5)


@pytest.mark.full
def test_norm_placements():
    ids = random_ids((1, 4))
    names = {}
    for placement in ("pre", "post", "pre_and_post"):
        decoder = Decoder(small_spec(norm_placement=placement))
        assert np.isfinite(decoder(ids).logits).all()
        layer = decoder.variables["params"]["layers"]["sub"]["layer_0"]
        names[placement] = sorted(name for name in layer if "norm" in name)
    assert names == {
        "pre": ["attention_norm", "mlp_norm"],
        "post": ["attention_post_norm", "mlp_post_norm"],
        "pre_and_post": ["attention_norm", "attention_post_norm", "mlp_norm", "mlp_post_norm"],
    }


def gradient(decoder):
    ids = random_ids((2, 5))

    def loss(params):
        with evaluating():
            labels = next_token_labels(ids)
            return decoder.layer.apply({"params": params}, ids, np.zeros(ids.shape), labels).total_loss

    return jax.grad(loss), decoder.variables["params"]


@pytest.mark.full
def test_checkpoint_policies_save_less_and_change_no_gradient():
    grads, matmuls = {}, {}
    policies = layers.AutodiffCheckpointType
    for policy in (policies.SAVE_NOTHING, policies.SAVE_DOT_ONLY, policies.SAVE_EVERYTHING):
        fn, params = gradient(Decoder(small_spec(**WINDOWS), checkpoint_policy=policy))
        compiled = jax.jit(fn)
        grads[policy] = compiled(params)
        matmuls[policy] = str(jax.make_jaxpr(fn)(params)).count("dot_general[")
    # Without anything saved, the backward pass repeats the matrix products of the forward pass.
    assert matmuls[policies.SAVE_NOTHING] > matmuls[policies.SAVE_DOT_ONLY] == matmuls[policies.SAVE_EVERYTHING]
    for policy in (policies.SAVE_DOT_ONLY, policies.SAVE_EVERYTHING):
        jax.tree.map(
            lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), grads[policy], grads[policies.SAVE_NOTHING]
        )


@pytest.mark.full
def test_policies_that_save_dots_save_the_experts_products():
    moe_p = Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5)
    decoder = Decoder(small_spec(moe=moe_p))
    policies = layers.AutodiffCheckpointType
    products = {}
    for policy in (policies.SAVE_NOTHING, policies.SAVE_DOT_ONLY, policies.SAVE_DOT_WITH_NO_BATCH_DIM):
        fields = {"name": "lm", "spec": decoder.layer.spec, "checkpoint_policy": policy}
        decoder.layer = base_layer.instantiate(Config(lm.DecoderLm, **fields))
        fn, params = gradient(decoder)
        products[policy] = str(jax.make_jaxpr(fn)(params)).count("grouped_dot[")
    # Three forward, and in the backward pass three for the gradients of rows; without anything saved, three are repeated.
    assert products.pop(policies.SAVE_NOTHING) == 3 * 3
    assert set(products.values()) == {2 * 3}


@pytest.mark.full
def test_bfloat16_has_float32_logits_near_those_of_float32():
    exact = Decoder(small_spec(**WINDOWS))
    rounded = Decoder(small_spec(**WINDOWS), fprop_dtype=jnp.bfloat16)
    ids = random_ids((2, 6))
    logits = rounded(ids).logits
    assert logits.dtype == jnp.float32
    difference = np.abs(logits - exact(ids).logits)
    assert 1e-4 < difference.max() < 0.5
    assert difference.mean() < 0.05
    hidden = jax.eval_shape(lambda: rounded.layer.apply(rounded.variables, ids, jnp.zeros(ids.shape), method=_embedded))
    assert hidden.dtype == jnp.bfloat16


def _embedded(layer, ids, paddings):
    del paddings
    return layer.token_emb(ids)


@pytest.mark.full
@pytest.mark.parametrize("fields", [WINDOWS, {"query_scale": 0.3}, {"attention_softcap": 0.5}], ids=str)
def test_every_kernel_gives_the_same(fields):
    plain, blocks = (Decoder(small_spec(**fields), attention_kernel=name) for name in ("reference", "chunked"))
    ids = random_ids((2, 6))
    segments = {"segment_ids": np.array([[1, 1, 1, 2, 2, 2]] * 2), "segment_pos": np.array([[0, 1, 2, 0, 1, 2]] * 2)}
    with kernels.recording() as recorded:
        logits = blocks(ids, **segments).logits
    assert {choice.kernel for choice in recorded.values()} == {"chunked"}
    assert set(recorded) == set(small_spec(**fields).layer_pattern)
    np.testing.assert_allclose(logits, plain(ids, **segments).logits, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize("field", ["dropout", "attention_dropout"])
def test_dropout_is_for_training_only(field):
    plain, dropping = Decoder(small_spec()), Decoder(small_spec(**{field: 0.5}))
    ids = random_ids((2, 6))
    np.testing.assert_allclose(dropping(ids).logits, plain(ids).logits, atol=1e-6)
    assert np.abs(dropping(ids, train=True).logits - plain(ids).logits).max() > 1e-2


@pytest.mark.full
def test_weight_decay_leaves_out_norms_and_biases():
    decoder = Decoder(small_spec(norm="layer", mlp_bias=True, qkv_bias=True))
    ids = jnp.zeros((1, 2), jnp.int32)
    with evaluating():
        hparams = decoder.layer.abstract_init_with_metadata(ids, jnp.zeros(ids.shape))["params"]
    for path, leaf in jax.tree_util.tree_leaves_with_path(hparams):
        name = path[-1].key
        assert base_layer.var_skip_lp_regularization(leaf) == (name in ("scale", "bias", "b")), path


@pytest.mark.full
def test_refusals():
    decoder = Decoder(small_spec(positions="learned", max_positions=4))
    with raises_naming(UserError, "5 tokens", "task.model.lm_tpl.spec.max_positions=4"):
        decoder(random_ids((1, 5)))
    with pytest.raises(UserError, match=r"neither causal_attention_mask"):
        decoder(random_ids((1, 4)), causal_attention_mask=np.ones((1, 4)))
    with pytest.raises(UserError, match=r"rows of 9 tokens are longer"):
        decoder.decode(lambda layer: layer.prefill(random_ids((1, 3)), np.array([3]), 9))
    with raises_naming(UserError, "cache of 2", "prompts of 3"):
        decoder.decode(lambda layer: layer.prefill(random_ids((1, 3)), np.array([3]), 2))
    with raises_naming(UserError, "context_parallel='rnig'", "mean ring", "all_to_all"):
        Decoder(small_spec(), context_parallel="rnig")
    with pytest.raises(UserError, match=r"lazy_prefix_broadcast=False"):
        decoder.decode(lambda layer: layer.lazy_broadcast_prefix(2, 3))
