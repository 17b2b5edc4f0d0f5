"""Cheaper layers have praxis' variables, values and gradients, on a mesh and alone."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from praxis import base_layer, layers
from praxis.pax_fiddle import Config

from spmd_trainer import sharding
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.kernels import cross_entropy
from spmd_trainer.tasks.lm import cheaper_layers

WIDTH, ROWS, LENGTH = 12, 4, 6
MESH = [("replica", 1), ("data", 4), ("mdl", 2)]
AXES = [name for name, _ in MESH]


def softmax(vocab, weight_split=("data", "mdl"), use=cheaper_layers.use_cheaper_layers, **fields):
    """A praxis softmax that is split as `set_sharding_params_v1` splits it, and the same one made cheaper by `use`."""
    plain_p = Config(
        layers.SharedEmbeddingSoftmax,
        name="softmax",
        input_dims=WIDTH,
        num_classes=vocab,
        scale_sqrt_depth=True,
        **fields,
    )
    plain_p.lookup_style = "matmul"
    plain_p.set(ici_mesh_shape=[size for _, size in MESH], mesh_axis_names=AXES)
    plain_p.weight_split_dims_mapping.wt = list(weight_split)
    plain_p.activation_split_dims_mapping.out = [("replica", "data"), None, "mdl"]
    plain_p.activation_split_dims_mapping.emb_out_split_dims_mapping = [("replica", "data"), None, "mdl"]
    cheaper_p = plain_p.clone()
    use(cheaper_p)
    return base_layer.instantiate(plain_p), base_layer.instantiate(cheaper_p)


def tokens(vocab):
    ids, labels = np.random.default_rng(0).integers(0, vocab, (2, ROWS, LENGTH), dtype=np.int32)
    ids[0, :3] = ids[1, 2]  # a token that comes several times
    weights = np.ones((ROWS, LENGTH, 1), np.float32)
    weights[1, 3:] = 0
    return ids, labels[..., None], weights


def results(layer, variables, ids, labels, weights, mesh=None):
    """The outputs of looking tokens up and predicting labels from them, and the gradients of the loss."""

    def loss(variables):
        embedded = layer.apply(variables, ids, method=layer.emb_lookup)
        output = layer.apply(variables, jnp.sin(embedded), weights, class_ids=labels)
        return output.avg_xent, (embedded, output)

    context = base_layer.JaxContext.HParams(do_eval=False)
    with base_layer.JaxContext.new_context(hparams=context):
        found = jax.jit(jax.value_and_grad(loss, has_aux=True))
        if mesh is None:
            return jax.tree.map(np.asarray, found(variables))
        with jax.set_mesh(mesh):
            return jax.tree.map(np.asarray, found(variables))


def variables_of(layer, ids, labels, weights):
    with base_layer.JaxContext.new_context():
        variables = layer.init(jax.random.key(0), jnp.ones((*ids.shape, WIDTH)), weights, class_ids=labels)
    return jax.tree.map(lambda x: x + 0.1 * jnp.sin(jnp.arange(x.size, dtype=x.dtype)).reshape(x.shape), variables)


@pytest.mark.parametrize("on_mesh", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("vocab", "fields"),
    [
        pytest.param(16, {"soft_cap_logits": 2.0}, marks=pytest.mark.full),
        (13, {"soft_cap_logits": 2.0}),  # 2 devices don't divide the table's rows
    ],
    ids=str,
)
@pytest.mark.parametrize("tokens_at_a_time", [pytest.param(1024, marks=pytest.mark.full), 4])
@pytest.mark.full
def test_lookup_and_its_gradient_are_those_of_praxis(vocab, fields, on_mesh, tokens_at_a_time, monkeypatch):
    monkeypatch.setattr(cheaper_layers, "_LOOKUP_TOKENS", tokens_at_a_time)
    ids, labels, weights = tokens(vocab)
    mesh = sharding.create_device_mesh(MESH) if on_mesh else None
    plain, cheaper = softmax(vocab, **fields)
    variables = variables_of(plain, ids, labels, weights)
    assert jax.tree.structure(variables) == jax.tree.structure(variables_of(cheaper, ids, labels, weights))
    ours, praxis = (results(layer, variables, ids, labels, weights, mesh) for layer in (cheaper, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), ours, praxis)


def test_all_tokens_of_a_long_row_reach_the_gradient(monkeypatch):
    monkeypatch.setattr(cheaper_layers, "_LOOKUP_TOKENS", 4)
    ids, layer = tokens(8)[0], softmax(8)[1]
    variables = {"params": {"logits_ffn": {"linear": {"w": np.ones((WIDTH, 8), np.float32)}}}}

    def total(variables):
        return layer.apply(variables, ids, method=layer.emb_lookup).sum()

    with base_layer.JaxContext.new_context():
        (found,) = jax.tree.leaves(jax.jit(jax.grad(total))(variables))
    expected = np.bincount(ids.ravel(), minlength=8) * WIDTH**0.5
    np.testing.assert_allclose(found, np.broadcast_to(expected, (WIDTH, 8)), rtol=1e-6)


@pytest.mark.full
def test_a_vocabulary_that_is_not_split():
    """-1 is praxis' other way to say so."""
    ids, labels, weights = tokens(16)
    plain, cheaper = softmax(16, weight_split=["mdl", -1])
    variables = variables_of(plain, ids, labels, weights)
    mesh = sharding.create_device_mesh(MESH)
    ours, praxis = (results(layer, variables, ids, labels, weights, mesh) for layer in (cheaper, plain))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), ours, praxis)


@pytest.mark.full
def test_ids_outside_of_the_table_have_zeros_for_embeddings():
    ids, labels, weights = tokens(16)
    plain, cheaper = softmax(16)
    variables = variables_of(plain, ids, labels, weights)
    outside = np.asarray([[-1, 16, 3, 0, 15, 99]] * ROWS, np.int32)
    ours, praxis = (results(layer, variables, outside, labels, weights)[0][1][0] for layer in (cheaper, plain))
    np.testing.assert_array_equal(ours, praxis)
    assert not ours[:, [0, 1, 5]].any()


@pytest.mark.full
def test_no_program_of_the_forward_pass_multiplies_with_one_hot_ids():
    ids, labels, weights = tokens(16)
    plain, cheaper = softmax(16)
    variables = variables_of(plain, ids, labels, weights)

    def products(layer):
        with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
            return str(jax.make_jaxpr(lambda v: layer.apply(v, ids, method=layer.emb_lookup))(variables)).count(
                "dot_general"
            )

    assert (products(plain), products(cheaper)) == (1, 0)


@pytest.mark.full
def test_experiments_use_them_and_keep_the_fields():
    lm_p = cloud.LmCloudSpmdAdamTiny().task().model.lm_tpl
    assert fdl.get_callable(lm_p.softmax_tpl) is cheaper_layers.SharedEmbeddingSoftmax
    assert fdl.get_callable(lm_p.final_ln_tpl) is cheaper_layers.LayerNorm
    assert lm_p.softmax_tpl.soft_cap_logits == 30.0
    own_p = Config(layers.TransformerLm, softmax_tpl=Config(Own))
    cheaper_layers.use_cheaper_layers(own_p)
    assert fdl.get_callable(own_p.softmax_tpl) is Own


class Own(layers.SharedEmbeddingSoftmax):
    """Somebody's own."""


@pytest.mark.parametrize("on_mesh", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("vocab", "fields"),
    [
        (13, {"soft_cap_logits": 2.0, "z_loss_weight": 0.01, "label_smoothing_prob": 0.1, "scale_before_logits": True}),
        pytest.param(16, {"label_smoothing_prob": 0.2}, marks=pytest.mark.full),
        pytest.param(13, {}, marks=pytest.mark.full),
        pytest.param(13, {"chunk_size": 3}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_fused_loss_is_that_of_praxis(vocab, fields, on_mesh, monkeypatch):
    monkeypatch.setattr(cross_entropy, "BLOCK_LOGITS", 5 * vocab)
    ids, labels, weights = tokens(vocab)
    mesh = sharding.create_device_mesh(MESH) if on_mesh else None
    plain, fused = softmax(vocab, use=cheaper_layers.use_fused_loss_in, **fields)
    variables = variables_of(plain, ids, labels, weights)
    assert isinstance(fused, cheaper_layers.FusedFullSoftmax)
    ours, praxis = (results(layer, variables, ids, labels, weights, mesh) for layer in (fused, plain))
    assert jax.tree.structure(ours) == jax.tree.structure(praxis)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=2e-6, atol=2e-6), ours, praxis)


@pytest.mark.parametrize("asks", [(), ("logits",)], ids=str)
def test_logits_are_computed_where_something_asks_for_them(asks):
    ids, labels, weights = tokens(13)
    _, fused = softmax(13, use=cheaper_layers.use_fused_loss_in)
    variables = variables_of(fused, ids, labels, weights)

    def outputs(variables, hidden):
        output = fused.apply(variables, hidden, weights, class_ids=labels)
        return output.avg_xent, *(output[name] for name in asks)

    with (
        base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)),
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(cross_entropy, "BLOCK_LOGITS", 13 * 2)
        text = jax.jit(outputs).lower(variables, np.ones((ROWS, LENGTH, WIDTH), np.float32)).compile().as_text()
    assert (f"[{ROWS},{LENGTH},13]" in text) == bool(asks)
