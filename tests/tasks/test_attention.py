"""Fused attention of praxis' layers has the losses and gradients of praxis' own, and names the settings it does not support."""

import functools

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from facts import assert_names, raises_naming
from lm_cloud_helpers import num_params
from praxis import base_layer, layers
from praxis.layers.transformer_models import LanguageModelType
from praxis.pax_fiddle import Config

from spmd_trainer import partitioning, tasks_lib
from spmd_trainer.errors import UserError
from spmd_trainer.experiments.lm import cloud
from spmd_trainer.kernels import kernels
from spmd_trainer.tasks.lm import attention, model_params

SMALL = {"input_dim": 24, "hidden_dim": 24, "num_heads": 3, "dim_per_head": 8}


class Plain(cloud.TinyCloud, cloud.LmCloudSpmd):
    """3 heads, which the 2 devices of mdl don't divide."""

    MODEL_DIMS = 24
    ATTEN_LOGIT_CAP = 2.0
    ICI_MESH_SHAPE = (1, 4, 2)


class Fused(Plain):
    USE_FUSED_ATTENTION = True


def packed_batch() -> base_layer.NestedMap:
    """8 rows of 16 tokens; two sequences in each, of other lengths in each row, and padding behind them."""
    rng = np.random.default_rng(0)
    ids = rng.integers(0, 61, (8, 16)).astype(np.int32)
    first, length = np.arange(8)[:, None] + 4, np.array([16, 15, 14, 13, 16, 16, 15, 14])[:, None]
    place = np.broadcast_to(np.arange(16), ids.shape)
    segment_ids = np.where(place >= length, 0, np.where(place < first, 1, 2)).astype(np.int32)
    paddings = (segment_ids == 0).astype(np.float32)
    return base_layer.NestedMap(
        ids=ids,
        labels=np.roll(ids, -1, 1),
        paddings=paddings,
        weights=1 - paddings,
        segment_ids=segment_ids,
        segment_pos=np.where(place < first, place, place - first).astype(np.int32),
    )


def steps(cls, batch) -> tuple[list[float], dict]:
    """Losses of 3 steps on 8 devices (the later ones tell of the gradients), and the variables after them."""
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    key = jax.random.key(0)
    state, _, _, train_step, _, _ = partitioning.partition_spmd_model(cls().task(), key, shapes)
    losses = []
    for _ in range(3):
        state, loss, *_ = train_step(state, key, batch)
        losses.append(float(loss))
    return losses, jax.tree.map(np.asarray, state.mdl_vars)


class Pipelined(cloud.LmCloudSpmdPipelineTiny):
    MODEL_DIMS = 24


class FusedPipelined(Pipelined):
    USE_FUSED_ATTENTION = True


class ChunkedPipelined(FusedPipelined):
    ATTENTION_KERNEL = "chunked"


# Without a kernel of its own, an experiment with rows this short uses 'reference'.
@pytest.mark.full
@pytest.mark.parametrize(
    ("plain_cls", "fused_cls", "kernel"),
    [(Plain, Fused, "reference"), (Pipelined, FusedPipelined, "reference"), (Pipelined, ChunkedPipelined, "chunked")],
)
def test_an_experiment_trains_alike_with_packed_rows_and_uneven_heads(plain_cls, fused_cls, kernel):
    batch = packed_batch()
    plain = steps(plain_cls, batch)
    with kernels.recording() as recorded:
        fused = steps(fused_cls, batch)
    assert kernel in {choice.kernel for choice in recorded.values()} <= {kernel, "reference"}
    np.testing.assert_allclose(fused[0], plain[0], rtol=1e-5)
    assert plain[0][-1] < plain[0][0]
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-3, atol=1e-4), fused[1], plain[1])


def test_an_experiment_names_the_templates():
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), packed_batch())
    plain, fused = (tasks_lib.build_task(cls().task()) for cls in (Plain, Fused))
    lm_p = fused.model.lm_tpl
    layer_p = lm_p.stacked_transformer_tpl.block.transformer_layer_params_tpl
    assert fdl.get_callable(lm_p) is attention.SegmentedTransformerLm
    assert fdl.get_callable(layer_p.tr_atten_tpl) is attention.FusedDotProductAttention
    assert num_params(fused, shapes) == num_params(plain, shapes)


def language_model(model_type=LanguageModelType.CAUSAL, dropout=0.0, **attention_fields):
    """A praxis TransformerLm of one layer, and the same one with fused attention."""
    plain_p = Config(layers.TransformerLm, name="lm", model_dims=24, vocab_size=29, model_type=model_type)
    plain_p.packed_input = True
    stack_p = plain_p.stacked_transformer_tpl
    stack_p.set(num_layers=1, model_dims=24, hidden_dims=32, num_heads=3)
    stack_p.atten_dropout_prob = dropout  # the stack sets its layers' dropout
    stack_p.transformer_layer_params_tpl.tr_atten_tpl.set(**attention_fields)
    fused_p = plain_p.clone()
    attention.use_fused_attention_in(fused_p)
    return base_layer.instantiate(plain_p), base_layer.instantiate(fused_p)


def rows(**others):
    """3 packed rows of 7 tokens, with padding at both ends; `others` are further arguments of the model."""
    ids = jax.random.randint(jax.random.key(1), (3, 7), 0, 29)
    segments = jnp.asarray([[1, 1, 1, 2, 2, 2, 2], [0, 1, 1, 1, 2, 2, 0], [1, 2, 2, 2, 2, 2, 3]], jnp.int32)
    positions = jnp.broadcast_to(jnp.arange(7), (3, 7))
    labels = base_layer.NestedMap(class_ids=ids, class_weights=(segments > 0).astype(jnp.float32))
    paddings = (segments == 0).astype(jnp.float32)
    arguments = {"labels": labels, "segment_ids": segments, "segment_pos": positions}
    return (ids, paddings), arguments | others


@functools.cache
def variables_of(model_type=LanguageModelType.CAUSAL, key=0):
    plain, _ = language_model(model_type)
    positional, arguments = rows()
    with base_layer.JaxContext.new_context():
        return jax.jit(lambda key: plain.init(key, *positional, **arguments))(jax.random.key(key))


def both(models, positional, arguments, *, train=False, variables=None):
    """Losses and gradients of both models; also the choices of the fused one."""
    variables = variables or variables_of()
    context = base_layer.JaxContext.HParams(do_eval=not train)
    found = []
    with kernels.recording() as recorded, base_layer.JaxContext.new_context(hparams=context):
        for model in models:

            def loss(variables, model=model):
                return model.apply(variables, *positional, **arguments, rngs={"random": jax.random.key(5)}).total_loss

            found.append(jax.jit(jax.value_and_grad(loss))(variables))
    return found, recorded


def assert_alike(found, tolerance=1e-5):
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(close, found[1], found[0])


@pytest.mark.parametrize(
    "model_type", [LanguageModelType.CAUSAL, pytest.param(LanguageModelType.BIDIRECTIONAL, marks=pytest.mark.full)]
)
@pytest.mark.parametrize("packed", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.full
def test_a_model_hands_segment_ids_to_its_layers(model_type, packed):
    others = {} if packed else {"segment_ids": None, "segment_pos": None}
    found, recorded = both(language_model(model_type), *rows(**others))
    assert_alike(found)
    assert {name: choice.kernel for name, choice in recorded.items()} == {
        "transformer/x_layers_0/self_attention": "reference"
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("fields", "train"),
    [
        ({"atten_logit_cap": 0.5, "zero_fully_masked": True}, False),
        pytest.param({"dropout": 0.3}, True, marks=pytest.mark.full),
        pytest.param({"dropout": 0.3}, False, marks=pytest.mark.full),
        pytest.param({"scale_logits_by_head_dims": True, "atten_logit_cap": 1.0}, False, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_settings_of_the_kernels_are_those_of_praxis(fields, train):
    found, _ = both(language_model(**fields), *rows(), train=train)
    assert_alike(found)
    if train:  # something was dropped
        assert not np.isclose(found[1][0], both(language_model(**fields), *rows())[0][1][0], rtol=1e-4)


@pytest.mark.full
def test_a_local_attention_becomes_a_window():
    plain, fused = (
        Config(layers.TransformerLm, name="lm", model_dims=24, vocab_size=29, packed_input=True) for _ in range(2)
    )
    for lm_p in (plain, fused):
        stack_p = lm_p.stacked_transformer_tpl
        stack_p.set(num_layers=1, model_dims=24, hidden_dims=32, num_heads=3)
        stack_p.transformer_layer_params_tpl.tr_atten_tpl = Config(
            layers.attentions.LocalSelfAttention, left_context=3, right_context=0, atten_logit_cap=2.0
        )
    attention.use_fused_attention_in(fused)
    models = base_layer.instantiate(plain), base_layer.instantiate(fused)
    found, recorded = both(models, *rows())
    assert_alike(found)
    assert {choice.kernel for choice in recorded.values()} == {"reference"}
    assert not np.isclose(found[1][0], both(language_model(), *rows())[0][1][0], rtol=1e-4)


@pytest.mark.parametrize(
    ("model_type", "others"),
    [
        (LanguageModelType.PREFIX, {"causal_attention_mask": jnp.asarray([[0, 0, 1, 1, 1, 1, 1]] * 3)}),
        pytest.param(
            LanguageModelType.CAUSAL,
            {"segment_mask": layers.attentions.segment_mask(jnp.asarray([[1] * 3 + [2] * 4] * 3))},
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_masks_are_left_to_praxis_and_the_choice_says_so(model_type, others):
    found, recorded = both(language_model(model_type), *rows(**others))
    assert_alike(found)
    assert [choice.kernel for choice in recorded.values()] == ["praxis"]
    assert_names(kernels.choice_lines(recorded)[0], "mask", "segment ids")
    with raises_naming(UserError, "'chunked' can't", "a mask"):
        both([with_kernel(model_type, "chunked")], *rows(**others))


def with_kernel(model_type, kernel):
    lm_p = Config(layers.TransformerLm, name="lm", model_dims=24, vocab_size=29, model_type=model_type)
    lm_p.packed_input = True
    lm_p.stacked_transformer_tpl.set(num_layers=1, model_dims=24, hidden_dims=32, num_heads=3)
    attention.use_fused_attention_in(lm_p, kernel)
    return base_layer.instantiate(lm_p)


@pytest.mark.full
def test_the_kernel_can_be_named():
    found, recorded = both([language_model()[0], with_kernel(LanguageModelType.CAUSAL, "chunked")], *rows())
    assert_alike(found)
    assert {choice.kernel for choice in recorded.values()} == {"chunked"}
    _, recorded = both([with_kernel(LanguageModelType.CAUSAL, "xla")], *rows())
    assert {choice.kernel for choice in recorded.values()} == {"reference"}


@pytest.mark.full
def test_a_prefix_fills_the_cache_and_decoding_goes_on_from_it():
    (ids, paddings), arguments = rows()
    del arguments["labels"]
    found = []
    for model in language_model(use_rotary_position_emb=True):
        with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):

            def decode(variables, model=model):
                prefix, state = model.apply(
                    variables, ids, paddings, **arguments, start_time_step=6, mutable=[base_layer.DECODE_CACHE]
                )
                step, _ = model.apply(
                    variables | state, ids[:, 6], method=model.extend_step, mutable=[base_layer.DECODE_CACHE]
                )
                return prefix.logits, step.logits

            found.append(jax.jit(decode)(variables_of()))
    assert_alike(found)


def layer(cls, **fields):
    return base_layer.instantiate(Config(cls, name="attention", **{**SMALL, **fields}))


def run(layer_, variables, x, mask):
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=True)):
        return layer_.apply(variables, x, x, x, mask)[0]


@pytest.mark.parametrize(
    ("dtype", "fields"),
    [
        pytest.param(jnp.bfloat16, {}, marks=pytest.mark.full),
        (jnp.float32, {"combine_qkv": True, "use_rotary_position_emb": True}),
        pytest.param(
            jnp.float32, {"internal_enable_per_dim_scale": False, "zero_fully_masked": True}, marks=pytest.mark.full
        ),
        pytest.param(
            jnp.float32,
            {"internal_enable_query_scale": False, "scale_logits_by_head_dims": True, "dconv_qkv": True},
            marks=pytest.mark.full,
        ),
    ],
)
@pytest.mark.full
def test_a_layer_gives_the_same_outputs_and_gradients(dtype, fields):
    plain, fused = (
        layer(cls, fprop_dtype=dtype, **fields)
        for cls in (layers.DotProductAttention, attention.FusedDotProductAttention)
    )
    x = jax.random.normal(jax.random.key(1), (2, 6, 24), dtype)
    paddings = jnp.zeros((2, 6)).at[1, 4:].set(1.0)
    mask = jnp.minimum(layers.attentions.causal_mask(x), layers.attentions.convert_paddings_to_mask(paddings))
    # A place that sees nothing at all.
    mask = mask.at[0, 0, 3].set(mask.min())
    with base_layer.JaxContext.new_context():
        variables = jax.jit(lambda key, x: plain.init(key, x, x, x, mask))(jax.random.key(0), x)

    def loss(layer_, variables, x):
        encoded = run(layer_, variables, x, mask).astype(jnp.float32)
        return jnp.sum(jnp.sin(encoded)), encoded

    def results(layer_):
        found = jax.jit(jax.grad(functools.partial(loss, layer_), argnums=(0, 1), has_aux=True))(variables, x)
        return jax.tree.map(lambda value: np.asarray(value, np.float32), found)

    tolerance = 1e-5 if dtype == jnp.float32 else 5e-2
    close = functools.partial(np.testing.assert_allclose, rtol=tolerance, atol=tolerance)
    jax.tree.map(close, results(fused), results(plain))


@pytest.mark.parametrize(
    ("cls", "fields", "says"),
    [
        (
            attention.FusedDotProductAttention,
            {"relative_bias_tpl": Config(layers.RelativeBias)},
            "RELATIVE_BIAS = False",
        ),
        (attention.FusedDotProductAttention, {"attention_extra_logit": 0.0}, "attention_extra_logit"),
        (attention.FusedDotProductAttention, {"attention_mask_summary": True}, "attention_mask_summary"),
        (attention.FusedDotProductAttention, {"kernel": "flash"}, "'flash'"),
        (attention.FusedLocalSelfAttention, {"left_context": 2, "right_context": 1}, "right_context is 1"),
        (
            attention.FusedLocalSelfAttention,
            {"left_context": 2, "right_context": 0, "scale_logits_by_head_dims": True},
            "scale_logits_by_head_dims",
        ),
    ],
)
def test_what_it_cannot_honour_is_refused(cls, fields, says):
    x = jnp.ones((1, 4, 24))
    with pytest.raises(UserError, match=says), base_layer.JaxContext.new_context():
        layer(cls, **fields).init(jax.random.key(0), x, x, x, jnp.ones((1, 4), jnp.int32))


def test_other_attentions_are_refused():
    attributes = {"USE_FUSED_ATTENTION": True, "REL_POS_EMB_DIM": 8, "datasets": lambda self: []}
    cls = type("Mine", (model_params.TransformerLmPmapAdam,), attributes)
    with pytest.raises(UserError, match="DotProductAttentionXL"):
        cls().task()


@pytest.mark.full
def test_one_attention_config_becomes_fused_and_keeps_its_fields():
    attention_p = Config(layers.DotProductAttention, num_heads=3, atten_logit_cap=5.0)
    attention.use_fused_attention_in(attention_p, "chunked")
    assert fdl.get_callable(attention_p) is attention.FusedDotProductAttention
    assert (attention_p.num_heads, attention_p.atten_logit_cap, attention_p.kernel) == (3, 5.0, "chunked")
