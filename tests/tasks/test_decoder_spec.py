"""A decoder's settings are checked before anything is built, and each message names the field and its value."""

import re

import pytest
from decoder_helpers import LINEAR, Decoder, small_spec
from facts import raises_naming
from praxis import layers, pax_fiddle
from praxis.pax_fiddle import Config

from spmd_trainer.errors import UserError
from spmd_trainer.models.decoder_spec import (
    DeltaSpec,
    HeadSpec,
    LatentSpec,
    LayerSpec,
    MoeSpec,
    RotaryScaling,
    TemperatureSpec,
)


def problems(**fields):
    return pax_fiddle.build(small_spec(**fields)).problems()


def latent(value_dims=3, **fields):
    heads = {"num_kv_heads": 6, "head_dims": 10, "rotary_dims": 4}
    return {**heads, "latent": Config(LatentSpec, key_value_dims=5, value_dims=value_dims), **fields}


def moe(**fields):
    return Config(MoeSpec, **{"num_experts": 6, "num_experts_per_token": 3, "hidden_dims": 4, **fields})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"vocab_size": 0}, "vocab_size=0; give a number above 0"),
        ({"num_kv_heads": 4}, "num_kv_heads=4 does not divide num_heads=6"),
        ({"head_dims": 5}, "head_dims=5 is odd"),
        (latent(num_kv_heads=3), "num_kv_heads=3; with latent it must be num_heads=6"),
        (latent(11), "latent.value_dims=11 is greater than head_dims=10"),
        (latent(0), "latent.value_dims=0; give a number above 0"),
        (latent(rotary_dims=0), "rotary_dims=0; with latent give more than 0"),
        (latent(qkv_bias=True), "qkv_bias=True; with latent it must be False"),
        (latent(query_key_norm="head"), "query_key_norm='head'; with latent it must be None"),
        (latent(positions="learned", max_positions=9), "positions='learned'; with latent"),
        (latent(gated_attention=True), "gated_attention=True; with latent it must be False"),
        ({"layer_pattern": ("linear", "global")}, "delta=None; it must be given if"),
        ({**LINEAR, "layer_pattern": ("global",)}, r"delta=DeltaSpec\(.*; it must be given if"),
        ({**LINEAR, "delta": Config(DeltaSpec, num_heads=2, key_dims=3)}, "delta.value_dims=0; give a number above 0"),
        ({"activation": "silo"}, "activation='silo'; give one of .*; did you mean silu"),
        ({"norm": "batch"}, "norm='batch'; give one of 'rms', 'layer'"),
        ({"norm_placement": "before"}, "norm_placement='before'"),
        ({"query_key_norm": "heads"}, "query_key_norm='heads'"),
        ({"positions": "rope"}, "positions='rope'"),
        ({"unrotated_kinds": ("golbal",)}, "unrotated_kinds has a kind='golbal'; .*did you mean global"),
        ({"unrotated_kinds": ("global",), "positions": "learned", "max_positions": 9}, "unrotated_kinds .*'learned'"),
        ({"query_key_norm": "unit", "positions": "learned", "max_positions": 9}, ".*query_key_norm='unit' .*'learned'"),
        ({"temperature": Config(TemperatureSpec)}, "temperature is of layers without rotary embeddings"),
        ({"layer_pattern": ("chunked",)}, "window=None; chunked layers need 1 or more"),
        (
            {"global_heads": Config(HeadSpec, num_kv_heads=4, head_dims=8)},
            "global_heads.num_kv_heads=4 does not divide",
        ),
        (
            {"global_heads": Config(HeadSpec, num_kv_heads=2, head_dims=7)},
            "global_heads.head_dims=7 is odd; rotary embeddings",
        ),
        (
            {"global_heads": Config(HeadSpec, num_kv_heads=2, head_dims=4), "rotary_dims": 6, "head_dims": 8},
            r"rotary_dims=6; give 0, or an even number up to global_heads.head_dims=4",
        ),
        ({"mtp_layers": 1.5}, "mtp_layers=1.5; give a whole number of 0 or more"),
        ({"mtp_layers": 1, "mtp_weight": 0.0}, "mtp_weight=0.0; give a number above 0"),
        ({"moe": moe(every=3)}, "moe.dense_layers=0, moe.every=3; num_layers=2 leaves no layer with experts"),
        ({"moe": moe(dense_layers=5)}, "moe.dense_layers=5, moe.every=1; num_layers=2 leaves no layer with experts"),
        ({"moe": moe(every=0)}, "moe.every=0; give a whole number of 1 or more"),
        ({"positions": "learned"}, "max_positions=0; give a number above 0"),
        ({"rotary_base": -1.0}, "rotary_base=-1.0"),
        ({"local_rotary_base": 0.0}, "local_rotary_base=0.0"),
        ({"layer_pattern": ()}, "layer_pattern is empty"),
        ({"layer_pattern": ("global", "loca")}, "layer_pattern has a kind='loca'; .*did you mean local"),
        ({"layer_pattern": ("local",)}, "window=None; local layers need 1 or more"),
        ({"attention_softcap": 0.0}, "attention_softcap=0.0; give a number above 0, or None"),
        ({"dropout": 1.0}, "dropout=1.0"),
        ({"rotary_scaling": Config(RotaryScaling, kind="lama3")}, "rotary_scaling.kind='lama3'; .*did you mean llama3"),
        ({"rotary_scaling": Config(RotaryScaling, kind="yarn")}, "rotary_scaling.original_max_positions=0"),
        ({"rotary_scaling": Config(RotaryScaling, factor=0.5)}, "rotary_scaling.factor=0.5"),
        (
            {"moe": Config(MoeSpec, num_experts=2, num_experts_per_token=3, hidden_dims=4)},
            "moe.num_experts_per_token=3 is greater than num_experts=2",
        ),
        ({"moe": moe(score="sigmod")}, "moe.score='sigmod'; .*did you mean sigmoid"),
        ({"moe": moe(z_loss_weight=-0.1)}, "moe.z_loss_weight=-0.1; give 0 or more"),
        ({"moe": moe(shared_gate=True)}, "moe.shared_gate=True; it needs shared_dims above 0"),
        ({"moe": moe(num_groups=4)}, "moe.num_groups=4 does not divide num_experts=6"),
        ({"moe": moe(num_groups=6)}, "moe.num_groups=6: .* fewer than 2"),
        ({"moe": moe(num_groups=2, num_chosen_groups=3)}, "moe.num_chosen_groups=3; give 1 to num_groups=2"),
        ({"moe": moe(num_groups=3)}, "moe.num_experts_per_token=3 is greater than the 2 experts"),
    ],
)
def test_wrong_settings_are_named(fields, text):
    (problem,) = problems(**fields)
    assert re.match(text, problem)
    with pytest.raises(UserError, match=rf"task\.model\.lm_tpl\.spec .*{text}"):
        Decoder(small_spec(**fields))


def test_all_wrong_settings_are_named_at_once():
    with pytest.raises(UserError, match=r"model_dims=0.*; num_layers=-1"):
        pax_fiddle.build(small_spec(model_dims=0, num_layers=-1)).check()


def test_good_settings_have_no_problems():
    assert problems() == []
    assert problems(hidden_dims=0, moe=Config(MoeSpec, num_experts=3, num_experts_per_token=2, hidden_dims=4)) == []


def test_layers_after_the_last_whole_pattern():
    spec = pax_fiddle.build(small_spec(num_layers=8, layer_pattern=("local", "local", "global"), window=2))
    assert (spec.num_repeats, spec.last_layers) == (2, (LayerSpec("local", has_experts=False),) * 2)
    assert spec.layer_kinds == ("local", "local", "global") * 2 + ("local", "local")


def test_experts_in_every_second_layer_after_the_first_ones():
    moe = Config(MoeSpec, num_experts=3, num_experts_per_token=1, hidden_dims=4, dense_layers=1, every=2)
    spec = pax_fiddle.build(small_spec(num_layers=9, layer_pattern=("local", "local", "global"), window=2, moe=moe))
    assert [layer.has_experts for layer in spec.layers] == [False, True] * 4 + [False]
    assert spec.num_layers_with_experts == 4
    # 6 layers have both patterns whole; they begin after the first one.
    assert [layer.kind for layer in spec.repeated_layers] == ["local", "global", "local", "local", "global", "local"]
    assert (spec.num_repeats, len(spec.first_layers), len(spec.last_layers)) == (1, 1, 2)
    assert spec.layers == (*spec.first_layers, *spec.repeated_layers, *spec.last_layers)


def test_only_causal_models():
    with raises_naming(UserError, "model_type", "PREFIX", "CAUSAL"):
        Decoder(small_spec(), model_type=layers.LanguageModelType.PREFIX)
