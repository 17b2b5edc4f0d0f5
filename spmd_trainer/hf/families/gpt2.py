"""Describes the model family GPT-2."""

from __future__ import annotations

from spmd_trainer.hf.families import shared
from spmd_trainer.hf.families.family import Family, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec

_WITHOUT_EFFECT = frozenset(
    {
        "attn_pdrop",
        "embd_pdrop",
        "n_ctx",
        "reorder_and_upcast_attn",
        "resid_pdrop",
        "summary_activation",
        "summary_first_dropout",
        "summary_proj_to_labels",
        "summary_type",
        "summary_use_proj",
    }
)


def _read(config: Settings, fields: Settings) -> None:
    dims, heads = config["n_embd"], config["n_head"]
    fields["num_kv_heads"] = heads
    fields["head_dims"] = shared.head_dims(dims, heads, "n_embd", "n_head")
    fields["hidden_dims"] = config["n_inner"] or 4 * dims
    # None: the scale depends on the head width.
    fields["query_scale"] = None if config["scale_attn_weights"] else 1.0


def _write(spec: DecoderSpec, config: Settings) -> None:
    config["n_inner"] = spec.hidden_dims
    config["scale_attn_weights"] = spec.query_scale is None


def _names(spec: DecoderSpec) -> Names:
    del spec
    layer = (
        *shared.norm("attention_norm", "ln_1", bias=True),
        *shared.norm("mlp_norm", "ln_2", bias=True),
        *_attention(),
        Rule("mlp/up/w", "mlp.c_fc.weight", "d f -> d f"),
        Rule("mlp/up/b", "mlp.c_fc.bias", "f -> f"),
        Rule("mlp/down/w", "mlp.c_proj.weight", "f d -> f d"),
        Rule("mlp/down/b", "mlp.c_proj.bias", "d -> d"),
    )
    return Names(
        base="transformer.",
        layer="h.{layer}.",
        model=(
            Rule("token_emb/w", "wte.weight", "v d -> v d"),
            Rule("position_emb/w", "wpe.weight", "p d -> p d"),
            *shared.norm("final_norm", "ln_f", bias=True),
        ),
        in_layer=lambda kind, has_experts: layer,
    )


def _attention() -> list[Rule]:
    found = [
        Rule("attention/output/w", "attn.c_proj.weight", "(n h) d -> n h d"),
        Rule("attention/output/b", "attn.c_proj.bias", "d -> d"),
    ]
    fused = "(n h + k h + k h)"
    for part, (ours, n) in enumerate((("query", "n"), ("key", "k"), ("value", "k"))):
        found.append(Rule(f"attention/{ours}/w", "attn.c_attn.weight", f"d {fused} -> d {n} h", part))
        found.append(Rule(f"attention/{ours}/b", "attn.c_attn.bias", f"{fused} -> {n} h", part))
    return found


FAMILIES = (
    Family(
        "GPT2LMHeadModel",
        "gpt2",
        {
            "vocab_size": "vocab_size",
            "model_dims": "n_embd",
            "num_layers": "n_layer",
            "num_heads": "n_head",
            "max_positions": "n_positions",
            "norm_epsilon": "layer_norm_epsilon",
            "activation": "activation_function",
            "tied_embeddings": "tie_word_embeddings",
        },
        {
            "n_inner": None,
            "n_positions": 1024,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "scale_attn_weights": True,
        },
        {
            "gated": False,
            "norm": "layer",
            "positions": "learned",
            "qkv_bias": True,
            "output_bias": True,
            "mlp_bias": True,
        },
        _read,
        _write,
        _names,
        off={"scale_attn_by_inverse_layer_idx": (None, False)},
        without_effect=_WITHOUT_EFFECT,
    ),
)
