"""Our layer normalisation has praxis' values, gradients and variables, and the experiments use it."""

import fiddle as fdl
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fiddle import selectors
from praxis import base_layer, layers
from praxis.pax_fiddle import Config

from spmd_trainer.experiments.lm import cloud, stdlib
from spmd_trainer.tasks.lm import cheaper_layers


class Special(layers.LayerNorm):
    """Somebody's own."""


def value_and_gradients(cls, dtype, **fields):
    x = jnp.asarray(np.random.default_rng(0).normal(30, 2, (4, 6, 32)), dtype)
    ct = jnp.asarray(np.random.default_rng(1).normal(size=x.shape), dtype)
    layer = base_layer.instantiate(Config(cls, name="norm", dim=32, fprop_dtype=dtype, **fields))
    with base_layer.JaxContext.new_context(hparams=base_layer.JaxContext.HParams(do_eval=False)):
        variables = layer.init(jax.random.key(0), x)
        variables = jax.tree.map(lambda v: v + 0.1 * jnp.arange(v.size, dtype=v.dtype), variables)
        value, pull = jax.vjp(lambda v, x: layer.apply(v, x), variables, x)
    assert value.dtype == dtype
    return value, pull(ct)


@pytest.mark.parametrize(
    "fields",
    [{}, {"use_bias": False}, {"use_scale": False}, {"direct_scale": True}, {"reductions_in_fp32": True}],
    ids=str,
)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 5e-2)], ids=["float32", "bfloat16"]
)
def test_values_and_gradients_are_those_of_praxis(dtype, tolerance, fields):
    if fields.get("reductions_in_fp32"):  # then bfloat16 costs no more than the last rounding
        tolerance = min(tolerance, 2e-3)
    ours = value_and_gradients(cheaper_layers.LayerNorm, dtype, **fields)
    praxis = value_and_gradients(layers.LayerNorm, dtype, **fields)

    def compare(a, b):
        np.testing.assert_allclose(np.float32(a), np.float32(b), rtol=tolerance, atol=tolerance * 10)

    jax.tree.map(compare, ours, praxis)


@pytest.mark.parametrize("experiment", [stdlib.StdlibBytes, cloud.LmCloudSpmd2B, cloud.LmCloudSpmdPipeline9B])
def test_experiments_use_it_throughout(experiment):
    model_p = experiment().task().model
    found = [fdl.get_callable(p) for p in selectors.select(model_p, layers.LayerNorm)]
    assert found
    assert set(found) == {cheaper_layers.LayerNorm}


def test_fields_stay_and_other_classes_are_left_alone():
    stack_p = Config(layers.TransformerLm, model_dims=8, vocab_size=8)
    stack_p.final_ln_tpl.epsilon = 0.5
    stack_p.stacked_transformer_tpl.transformer_layer_params_tpl.ln_tpl = Config(Special)
    cheaper_layers.use_layer_norm(stack_p)
    assert fdl.get_callable(stack_p.final_ln_tpl) is cheaper_layers.LayerNorm
    assert stack_p.final_ln_tpl.epsilon == 0.5
    assert fdl.get_callable(stack_p.stacked_transformer_tpl.transformer_layer_params_tpl.ln_tpl) is Special
