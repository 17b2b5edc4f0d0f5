"""Decoding with a cache of keys and values gives the logits of the whole text, for every form of attention."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from decoder_helpers import LINEAR, Decoder, evaluating, random_ids, small_spec
from facts import raises_naming
from praxis import base_layer, decoder_hparams, layers
from praxis.pax_fiddle import Config
from praxis.py_utils import NestedMap

from spmd_trainer.decoder import lm
from spmd_trainer.errors import UserError
from spmd_trainer.models.decoder_spec import HeadSpec, LatentSpec, MoeSpec, RotaryScaling, TemperatureSpec

LENGTHS = np.array([5, 2, 1])
STEPS = 4
LOCAL = {"layer_pattern": ("local",), "window": 3}


def scaling(kind):
    return {
        "rotary_scaling": Config(RotaryScaling, kind=kind, factor=4.0, original_max_positions=6),
        "rotary_base": 20.0,
    }


FORMS = {
    "window": LOCAL,
    "soft cap": {"attention_softcap": 0.5, "final_softcap": 1.0},
    "linear": scaling("linear"),
    "llama3": scaling("llama3"),
    "yarn": scaling("yarn"),
    "learned": {"positions": "learned", "max_positions": 9, "norm": "layer", "qkv_bias": True},
    "two bases": {
        **scaling("linear"),
        "num_layers": 5,
        "layer_pattern": ("local", "global"),
        "window": 3,
        "local_rotary_base": 100.0,
        "query_key_norm": "head",
        "norm_placement": "pre_and_post",
    },
    "last layers only": {"num_layers": 1, "layer_pattern": ("local", "global"), "window": 3},
    "latent": {
        "num_kv_heads": 6,
        "head_dims": 10,
        "rotary_dims": 4,
        "rotary_pairs_adjacent": True,
        "latent": Config(LatentSpec, query_dims=7, key_value_dims=5, value_dims=3),
        "layer_pattern": ("global", "local"),
        "window": 3,
    },
    "linear attention": LINEAR,
    "wide heads in global layers": {
        "num_layers": 3,
        "layer_pattern": ("local", "global"),
        "window": 3,
        "global_heads": Config(HeadSpec, num_kv_heads=3, head_dims=10, values_are_keys=True),
        "rotary_scaling": Config(RotaryScaling, kind="proportional", share=0.4),
        "query_key_norm": "head",
        "value_norm": True,
        "layer_scale": True,
    },
    "chunks": {
        "num_layers": 5,
        "layer_pattern": ("chunked", "global"),
        "window": 3,
        "unrotated_kinds": ("global",),
        "query_key_norm": "unit",
        "temperature": Config(TemperatureSpec, factor=0.5, interval=2),
        "moe": Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5, every=2, weigh_inputs=True),
    },
    "sinks": {**LOCAL, "attention_sinks": True},
    "experts": {"moe": Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=5), "query_key_norm": "all"},
    "all of a router": {
        "moe": Config(
            MoeSpec,
            num_experts=6,
            num_experts_per_token=2,
            hidden_dims=5,
            score="sigmoid",
            scaling_factor=2.5,
            num_groups=3,
            num_chosen_groups=2,
            shared_dims=4,
            choice_bias=True,
            dense_layers=1,
        ),
        "num_layers": 3,
        "layer_pattern": ("local", "global"),
        "window": 3,
        "rotary_dims": 2,
    },
}


def texts():
    """Returns ids [3, 9], of which LENGTHS are the prompt and STEPS follow."""
    return random_ids((3, LENGTHS.max() + STEPS))


def next_tokens(ids, step):
    return jnp.take_along_axis(jnp.asarray(ids), jnp.asarray(LENGTHS + step)[:, None], axis=1)[:, 0]


def incremental(layer):
    """Returns the logits after the prompts and after each further token, [3, STEPS + 1, V]."""
    ids = texts()
    logits = [layer.prefill(ids[:, : LENGTHS.max()], LENGTHS, ids.shape[1])]
    for step in range(STEPS):
        logits.append(layer.extend_step(next_tokens(ids, step)).logits)
    return jnp.stack(logits, axis=1)


def assert_same_as_whole(decoder, logits):
    whole = decoder(texts()).logits
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row], whole[row, length - 1 : length + STEPS], atol=2e-5)


@pytest.mark.parametrize(
    "form", [form if form in ("window", "latent") else pytest.param(form, marks=pytest.mark.full) for form in FORMS]
)
def test_steps_give_the_logits_of_the_whole_text(form):
    decoder = Decoder(small_spec(**FORMS[form]))
    assert_same_as_whole(decoder, decoder.decode(incremental)[0])


def test_latent_attention_caches_one_small_vector_of_each_token():
    _, cache = Decoder(small_spec(**FORMS["latent"])).decode(incremental)
    assert jax.tree.map(jnp.shape, cache["layers"]["sub"]["layer0"]["layer_0"]["attention"]) == {
        "key_state": (3, 9, 1, 5 + 4)
    }


@functools.cache
def linear_decoder():
    return Decoder(small_spec(**LINEAR))


def test_linear_attention_caches_a_state_whose_size_is_fixed():
    shapes = []
    for width in (5, 9):
        ids = random_ids((3, width))
        _, cache = linear_decoder().decode(lambda layer, ids=ids: layer.prefill(ids, LENGTHS, ids.shape[1] + 7))
        shapes.append(jax.tree.map(jnp.shape, cache["last_layers_0"]["attention"]))
    assert shapes[0] == shapes[1]
    assert shapes[0]["state"] == (3, 3, 2, 5, 4)
    assert (shapes[0]["key_past"], shapes[0]["value_past"]) == ((3, 2, 3, 5), (3, 2, 3, 2, 4))


@pytest.mark.full
def test_a_loop_over_the_layers_has_a_stacked_cache():
    fields = FORMS["two bases"]
    looped = Decoder(small_spec(**fields), unroll_in_decode=False)
    logits, cache = looped.decode(incremental)
    assert_same_as_whole(looped, logits)
    assert cache["layers"]["sub"]["layer_1"]["attention"]["key_state"].shape == (2, 3, 9, 2, 4)
    _, cache = Decoder(small_spec(**fields)).decode(incremental)
    assert cache["layers"]["sub"]["layer1"]["layer_1"]["attention"]["value_state"].shape == (3, 9, 2, 4)
    assert cache["last_layers_0"]["attention"]["key_state"].shape == (3, 9, 2, 4)
    assert cache["time_step"] == 9
    np.testing.assert_array_equal(cache["first_index"], 5 - LENGTHS)


@pytest.mark.full
@pytest.mark.parametrize("fields", [LOCAL, LINEAR], ids=["local", "linear"])
def test_several_tokens_in_one_step(fields):
    decoder = Decoder(small_spec(**fields))
    ids = texts()

    def run(layer):
        first = layer.prefill(ids[:, : LENGTHS.max()], LENGTHS, ids.shape[1])
        rest = layer.extend_step(jnp.stack([next_tokens(ids, step) for step in range(STEPS)], axis=1)).logits
        return jnp.concatenate([first[:, None], rest], axis=1)

    assert_same_as_whole(decoder, decoder.decode(run)[0])


@pytest.mark.full
def test_the_padding_of_a_prompt_does_not_matter():
    decoder = Decoder(small_spec())
    ids = texts()[:, : LENGTHS.max()]
    padded = np.where(np.arange(ids.shape[1]) < LENGTHS[:, None], ids, 30)
    first, second = (decoder.decode(lambda layer, x=x: layer.prefill(x, LENGTHS, 9))[0] for x in (ids, padded))
    np.testing.assert_array_equal(first, second)


@pytest.mark.full
@pytest.mark.parametrize("num_samples", [1, 2])
@pytest.mark.parametrize("fprop_for_prefix", [True, False])
def test_praxis_decoders_work_with_it(fprop_for_prefix, num_samples):
    decoder = Decoder(small_spec(**LOCAL))
    prompts = texts()[:, : LENGTHS.max()]
    if num_samples == 1:
        hparams = Config(decoder_hparams.GreedyDecoderHParams)
    else:
        hparams = Config(decoder_hparams.SampleDecoderHParams, num_samples=2, temperature=0.0, k=3)
    # Token by token from the start, praxis counts the prompt's tokens as steps too.
    steps = STEPS if fprop_for_prefix else None
    hparams.set(seqlen=9, max_decode_steps=steps, eos_id=99, fprop_for_prefix=fprop_for_prefix)
    lm_p = Config(lm.DecoderLm, spec=small_spec(**LOCAL))
    model = base_layer.instantiate(Config(layers.LanguageModel, name="model", lm_tpl=lm_p, decoder_tpl=hparams))
    paddings = (np.arange(prompts.shape[1]) >= LENGTHS[:, None]).astype(np.float32)
    batch = NestedMap(ids=jnp.asarray(prompts), paddings=jnp.asarray(paddings))
    with evaluating():
        outputs, _ = model.apply(
            {"params": {"lm": decoder.variables["params"]}},
            batch,
            method=lambda model, batch: model.decode(batch),
            mutable=[base_layer.DECODE_CACHE],
            rngs={base_layer.RANDOM: jax.random.PRNGKey(0)},
        )
    for row, length in enumerate(LENGTHS):
        text = list(prompts[row, :length])
        for _ in range(STEPS):
            text.append(int(np.argmax(decoder(np.array([text], np.int32)).logits[0, -1])))
        for sample in range(num_samples):
            np.testing.assert_array_equal(outputs[1].output_ids[row, sample, : length + STEPS], text)


@pytest.mark.full
@pytest.mark.parametrize("unrolled", [True, False])
def test_linear_attention_in_bfloat16_and_in_a_loop_over_the_layers(unrolled):
    decoder = Decoder(small_spec(**{**LINEAR, "num_layers": 4}), fprop_dtype=jnp.bfloat16, unroll_in_decode=unrolled)
    logits, cache = decoder.decode(incremental)
    whole = decoder(texts()).logits
    for row, length in enumerate(LENGTHS):
        np.testing.assert_allclose(logits[row], whole[row, length - 1 : length + STEPS], atol=0.5)
    names = {name.key: x.dtype for (*_, name), x in jax.tree_util.tree_leaves_with_path(cache)}
    assert (names["state"], names["key_past"]) == (jnp.float32, jnp.bfloat16)


def test_linear_attention_refuses_to_begin_at_another_token_than_the_last():
    ids = texts()

    def run(layer):
        layer(ids, np.zeros(ids.shape, np.float32))
        return layer.extend_step(ids[:, 0])

    with raises_naming(UserError, "praxis", "generation", "DecoderLanguageModel"):
        linear_decoder().decode(run)
