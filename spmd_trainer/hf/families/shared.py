"""Definitions shared by several families: config.json keys, defaults, sliding windows, experts, Llama-style tensor names."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spmd_trainer.hf.errors import HfError
from spmd_trainer.hf.families.family import NON_TRAINABLE, Names, Rule, Settings
from spmd_trainer.models.decoder_spec import DecoderSpec, MoeSpec

KEYS = {
    "vocab_size": "vocab_size",
    "model_dims": "hidden_size",
    "hidden_dims": "intermediate_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dims": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "max_positions": "max_position_embeddings",
    "tied_embeddings": "tie_word_embeddings",
    "activation": "hidden_act",
}
DEFAULTS: Mapping[str, Any] = {
    "num_key_value_heads": None,
    "head_dim": None,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "attention_bias": False,
}
MOE_DEFAULTS: Mapping[str, Any] = {"router_aux_loss_coef": 0.001, "output_router_logits": False}
# Settings for choosing experts, with the values that are allowed in families without such a setting.
ROUTING_OFF: Mapping[str, tuple[Any, ...]] = {
    "scoring_func": (None, "softmax"),
    "topk_method": (None, "greedy"),
    "norm_topk_prob": (None, True),
    "routed_scaling_factor": (None, 1, 1.0),
    "n_group": (None, 1),
    "topk_group": (None, 1),
    "n_shared_experts": (None, 0),
    "shared_expert_intermediate_size": (None, 0),
    "first_k_dense_replace": (None, 0),
}
# Maximum number of layers of a folder's model.
MOST_LAYERS = 10_000
SLIDING, FULL = "sliding_attention", "full_attention"
# Keys for n where `layer_types` is missing: every n-th layer has full attention. Gemma 2, OLMo 3 and gpt-oss have no such key;
# their families set `_every`.
_EVERY = ("full_attention_interval", "sliding_window_pattern", "_sliding_window_pattern", "_every")


def head_dims(dims: int, heads: int, dims_key: str, heads_key: str) -> int:
    """Returns the default head width, dims / heads. Raises HfError, which names both keys, if it is not a whole number."""
    if dims % heads:
        raise HfError(f"{heads_key}={heads} does not divide {dims_key}={dims}, and there is no head_dim")
    return dims // heads


def layer_numbers(config: Settings) -> range:
    """Returns range(number of layers). Raises HfError if there are more than `MOST_LAYERS`."""
    count: int = config["num_hidden_layers"]
    if count > MOST_LAYERS:
        raise HfError(f"num_hidden_layers={count}; a folder may have up to {MOST_LAYERS:,} layers")
    return range(count)


def shortest_pattern(kinds: Sequence[str]) -> tuple[str, ...]:
    """Returns the shortest pattern that gives the kinds of all layers when repeated."""
    lengths = range(1, len(kinds) + 1)
    length = next(n for n in lengths if all(kind == kinds[i % n] for i, kind in enumerate(kinds)))
    return tuple(kinds[:length])


def read_biases(config: Settings, fields: Settings) -> None:
    """Reads `attention_bias`, which switches the biases of queries, keys, values and attention output on or off."""
    fields["qkv_bias"] = fields["output_bias"] = bool(config["attention_bias"])


def write_biases(spec: DecoderSpec, config: Settings) -> None:
    config["attention_bias"] = spec.qkv_bias


def read_window_of_all(config: Settings, fields: Settings) -> None:
    """Reads the sliding window for families such as Mistral and Mixtral, where all layers have it, or none."""
    fields["window"] = config["sliding_window"]
    fields["layer_pattern"] = ("global",) if config["sliding_window"] is None else ("local",)


def write_window_of_all(spec: DecoderSpec, config: Settings) -> None:
    config["sliding_window"] = spec.window if "local" in spec.layer_kinds else None


def read_layer_types(config: Settings, fields: Settings, other: str = SLIDING, kind: str = "local") -> None:
    """Reads the kinds of the layers, for families whose config lists the kind of each layer.

    Args:
      config: the config with its defaults. If it lacks `layer_types`, every n-th layer has full attention, where n is the
        value of the first key in `_EVERY` that the config has.
      fields: the DecoderSpec fields to add to.
      other, kind: the names of layers without full attention: `other` in config.json, `kind` in a DecoderSpec.
    """
    types = layer_types(config, other)
    unknown = sorted(set(types) - {other, FULL})
    if unknown:
        raise HfError(f"layer_types has {unknown[0]!r}; {FULL!r} and {other!r} are supported")
    if len(types) != config["num_hidden_layers"]:
        raise HfError(f"layer_types has {len(types)} entries, and num_hidden_layers is {config['num_hidden_layers']}")
    kinds = [kind if found == other else "global" for found in types]
    fields["layer_pattern"] = shortest_pattern(kinds)
    fields["window"] = config["sliding_window"] if "local" in kinds else None


def layer_types(config: Settings, other: str = SLIDING) -> list[str]:
    """Returns the type of each layer, from `layer_types` or its default; see `read_layer_types`."""
    if (types := config["layer_types"]) is None:
        every = next(config[key] for key in _EVERY if config.get(key))
        types = [other if (i + 1) % every else FULL for i in layer_numbers(config)]
    return list(types)


def write_layer_types(spec: DecoderSpec, config: Settings, other: str = SLIDING, kind: str = "local") -> None:
    """Adds the kinds of the layers to a config; the inverse of `read_layer_types`."""
    config["layer_types"] = [other if found == kind else FULL for found in spec.layer_kinds]
    if kind == "local":
        config["sliding_window"] = spec.window


def read_moe(config: Settings, experts: str, width: str, **others: Any) -> MoeSpec:
    """Reads the settings of a mixture of experts whose router uses a softmax.

    Args:
      config: the config with its defaults.
      experts, width: the config keys that give the number of experts and the width of an expert.
      others: other fields of the MoeSpec, with their values.
    """
    return MoeSpec(
        num_experts=config[experts],
        num_experts_per_token=config["num_experts_per_tok"],
        hidden_dims=config[width],
        aux_loss_weight=float(config["router_aux_loss_coef"]) if config["output_router_logits"] else 0.0,
        **others,
    )


def write_moe(moe: MoeSpec, config: Settings, experts: str, width: str) -> None:
    """Adds the settings of a mixture of experts to a config; the inverse of `read_moe`."""
    config[experts], config[width] = moe.num_experts, moe.hidden_dims
    config["num_experts_per_tok"] = moe.num_experts_per_token
    config["output_router_logits"] = moe.aux_loss_weight != 0
    if moe.aux_loss_weight:
        config["router_aux_loss_coef"] = float(moe.aux_loss_weight)


def names_like_llama(
    spec: DecoderSpec,
    attention: Callable[[DecoderSpec, str], Sequence[Rule]] | None = None,
    experts: Callable[[MoeSpec], Sequence[Rule]] | None = None,
    inside: str = "mlp",
) -> Names:
    """Returns the tensor names of a model in the style of Llama, which all families but GPT-2 have.

    Args:
      spec: the model.
      attention: function (spec, kind of a layer) -> rules for its attention; None for `softmax_attention`.
      experts: function (spec.moe) -> rules for a layer's experts; None for `named_experts`.
      inside: name prefix of the tensors of a feed-forward layer.
    """
    model = [Rule("token_emb/w", "embed_tokens.weight", "v d -> v d"), *norm("final_norm", "norm")]
    if not spec.tied_embeddings:
        model.append(Rule("logits/w", "lm_head.weight", "v d -> d v"))
    norms = [rule for ours, theirs in _NORM_NAMES[spec.norm_placement].items() for rule in norm(ours, theirs)]

    def in_layer(kind: str, has_experts: bool) -> tuple[Rule, ...]:
        mixer = (attention or softmax_attention)(spec, kind)
        if has_experts and spec.moe is not None:
            return (*norms, *mixer, *(named_experts if experts is None else experts)(spec.moe))
        return (*norms, *mixer, *_feed_forward(spec, inside))

    return Names("model.", "layers.{layer}.", tuple(model), in_layer)


_NORM_NAMES = {
    "pre": {"attention_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm"},
    "pre_and_post": {
        "attention_norm": "input_layernorm",
        "attention_post_norm": "post_attention_layernorm",
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm",
    },
    "post": {"attention_post_norm": "post_attention_layernorm", "mlp_post_norm": "post_feedforward_layernorm"},
}


def norm(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    found = [Rule(f"{ours}/scale", f"{theirs}.weight", "d -> d")]
    return [*found, Rule(f"{ours}/bias", f"{theirs}.bias", "d -> d")] if bias else found


def softmax_attention(spec: DecoderSpec, kind: str) -> list[Rule]:
    """Returns the rules for softmax attention in layers of this kind: all projections, their biases, query and key norms."""
    found = []
    for ours, n in (("query", "n"), ("key", "k"), ("value", "k")):
        if ours == "value" and spec.heads_of(kind).values_are_keys:
            continue
        theirs = f"self_attn.{ours[0]}_"
        if ours == "query" and spec.gated_attention:
            for part, path in enumerate(("query", "gate")):
                found.append(Rule(f"attention/{path}/w", f"{theirs}proj.weight", "(n (h + h)) d -> d n h", part))
        else:
            found.append(Rule(f"attention/{ours}/w", f"{theirs}proj.weight", f"({n} h) d -> d {n} h"))
        if spec.qkv_bias:
            found.append(Rule(f"attention/{ours}/b", f"{theirs}proj.bias", f"({n} h) -> {n} h"))
        if spec.has_query_key_scales and ours != "value":
            layout = "h -> h" if spec.query_key_norm == "head" else f"({n} h) -> {n} h"
            found.append(Rule(f"attention/{ours}_norm/scale", f"{theirs}norm.weight", layout))
    return [*found, *attention_output(spec)]


def attention_output(spec: DecoderSpec) -> list[Rule]:
    found = [Rule("attention/output/w", "self_attn.o_proj.weight", "d (n u) -> n u d")]
    if spec.output_bias:
        found.append(Rule("attention/output/b", "self_attn.o_proj.bias", "d -> d"))
    return found


def _feed_forward(spec: DecoderSpec, inside: str) -> list[Rule]:
    found = gated("mlp", inside, "f")
    for ours, theirs in _USUAL_PARTS.items() if spec.mlp_bias else ():
        found.append(Rule(f"mlp/{ours}/b", f"{inside}.{theirs}.bias", "d -> d" if ours == "down" else "f -> f"))
    return found


_USUAL_PARTS = {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}


def gated(place: str, inside: str, width: str, parts: Mapping[str, str] = _USUAL_PARTS) -> list[Rule]:
    """Returns the rules for the matrices of a gated feed-forward layer, or of experts that have separate tensors.

    Args:
      place: path of the layer's variables.
      inside: name prefix of the layer's tensors.
      width: the layout letter that stands for the layer's hidden width.
      parts: {matrix's name in this package's variables: its name in the tensors}.
    """
    found = []
    for ours, theirs in parts.items():
        layout = f"d {width} -> {width} d" if ours == "down" else f"{width} d -> d {width}"
        found.append(Rule(f"{place}/{ours}/w", f"{inside}.{theirs}.weight", layout))
    return found


def named_experts(
    moe: MoeSpec, inside: str = "mlp", parts: Mapping[str, str] = _USUAL_PARTS, shared: str = "shared_experts"
) -> list[Rule]:
    """Returns the rules for a router, for experts that have separate tensors, and for shared experts.

    Args:
      moe: the settings of the experts.
      inside: name prefix of the layer's tensors.
      parts: {name of an expert's matrix in this package's variables: its name in the tensors}.
      shared: name of the shared experts in the tensors.
    """
    found = [Rule("moe/router/w", f"{inside}.gate.weight", "e d -> d e")]
    if moe.choice_bias:
        name = f"{inside}.gate.e_score_correction_bias"
        found.append(Rule("moe/router/choice_bias", name, "e -> e", root=NON_TRAINABLE))
    if moe.shared_gate:
        found.append(Rule("moe/shared_gate/w", f"{inside}.{shared}_gate.weight", "1 d -> d 1"))
    found += gated("moe", inside + ".experts.{expert}", "x", parts)
    return [*found, *gated("moe/shared", f"{inside}.{shared}", "s", parts)] if moe.shared_dims else found
