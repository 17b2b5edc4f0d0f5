"""The mapping between a Hugging Face folder's tensors and a decoder's variables, with the order of their dimensions.

A layout writes both shapes as in einops: '(n h) d -> d n h' is a tensor with first dimension heads * head width, for a variable
[D, N, H]. Letters: v vocabulary, p positions, d model width, n and k query and key/value heads, h head width, u a value's width,
f feed-forward width, e experts, x an expert's width, s the shared experts' width; c parts fused in one tensor (GPT-2's query,
key and value; gpt-oss' gate and up, interleaved). For latent attention: q and r are the widths of its vectors, query_dims and
key_value_dims; l is r + the rotated width of a key; m is the other width of a key + u.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from spmd_trainer.hf.families import Family
from spmd_trainer.models.decoder_spec import DecoderSpec, LatentSpec, MoeSpec

ROOT = "mdl_vars/params/lm/"
# Of variables that don't learn.
_NON_TRAINABLE = "mdl_vars/non_trainable/lm/"
FUSED = "c"


@dataclasses.dataclass(frozen=True)
class Rule:
    """A variable and the tensor that holds it, for one layer and one expert.

    Attributes:
      path: path of the variable, below `root` or below a layer.
      name: name of the tensor, below the model or below a layer; '{expert}' is the number of an expert.
      layout: order of the dimensions, see the module docstring. It omits the variable's leading dimensions (stacked layers,
        experts in '{expert}').
      part: index among the parts that are fused along 'c' in the tensor.
      root: prefix of the variable's path.
    """

    path: str
    name: str
    layout: str
    part: int = 0
    root: str = ROOT

    @property
    def of_experts(self) -> bool:
        """True if each expert has a separate tensor."""
        return "{expert}" in self.name


@dataclasses.dataclass(frozen=True)
class Names:
    """Tensor names of a family.

    Attributes:
      base: prefix of all tensors except the projection to the vocabulary.
      layer: prefix of a layer, below `base`.
      model: rules of the variables outside the layers.
      in_layer: rules of a layer's variables.
      in_first_layer: rules of the variables of the first layers, without experts, in a model with experts.
    """

    base: str
    layer: str
    model: tuple[Rule, ...]
    in_layer: tuple[Rule, ...]
    in_first_layer: tuple[Rule, ...] = ()


@dataclasses.dataclass(frozen=True)
class Piece:
    """A tensor that holds part of a variable.

    Attributes:
      name: the tensor's name in the folder.
      leading: the index in the variable's leading dimensions: (repeat,), (repeat, expert), (expert,) or ().
      groups: for each dimension of the tensor, the letters of the variable's dimensions in it.
      order: the letters of the variable's dimensions after the leading ones.
      sizes: the size of each letter.
      part: see `Rule`.
    """

    name: str
    leading: tuple[int, ...]
    groups: tuple[tuple[str, ...], ...]
    order: tuple[str, ...]
    sizes: Mapping[str, int]
    part: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(math.prod(self.sizes[letter] for letter in group) for group in self.groups)


@dataclasses.dataclass(frozen=True)
class Variable:
    """A variable of a model and the tensors that hold it.

    Attributes:
      path: path of the variable in the train state.
      shape: logical shape.
      pieces: the tensors, in the order of the leading dimensions.
    """

    path: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @property
    def learns(self) -> bool:
        """True if the optimizer updates the variable."""
        return not self.path.startswith(_NON_TRAINABLE)


def names_of(spec: DecoderSpec, family: Family) -> Names:
    return _gpt2() if family.model_type == "gpt2" else _llama_like(spec, family.model_type)


def _gpt2() -> Names:
    fused = {"query": ("n", 0), "key": ("n", 1), "value": ("n", 2)}
    return Names(
        base="transformer.",
        layer="h.{layer}.",
        model=(
            Rule("token_emb/w", "wte.weight", "v d -> v d"),
            Rule("position_emb/w", "wpe.weight", "p d -> p d"),
            *_norm("final_norm", "ln_f", bias=True),
        ),
        in_layer=(
            *_norm("attention_norm", "ln_1", bias=True),
            *_norm("mlp_norm", "ln_2", bias=True),
            *(
                Rule(f"attention/{ours}/w", "attn.c_attn.weight", f"d (c {n} h) -> d {n} h", part)
                for ours, (n, part) in fused.items()
            ),
            *(
                Rule(f"attention/{ours}/b", "attn.c_attn.bias", f"(c {n} h) -> {n} h", part)
                for ours, (n, part) in fused.items()
            ),
            Rule("attention/output/w", "attn.c_proj.weight", "(n h) d -> n h d"),
            Rule("attention/output/b", "attn.c_proj.bias", "d -> d"),
            Rule("mlp/up/w", "mlp.c_fc.weight", "d f -> d f"),
            Rule("mlp/up/b", "mlp.c_fc.bias", "f -> f"),
            Rule("mlp/down/w", "mlp.c_proj.weight", "f d -> f d"),
            Rule("mlp/down/b", "mlp.c_proj.bias", "d -> d"),
        ),
    )


def _llama_like(spec: DecoderSpec, model_type: str) -> Names:
    """Returns the tensor names of all families except GPT-2."""
    model = [Rule("token_emb/w", "embed_tokens.weight", "v d -> v d"), *_norm("final_norm", "norm")]
    if not spec.tied_embeddings:
        model.append(Rule("logits/w", "lm_head.weight", "v d -> d v"))
    layer: list[Rule] = []
    for ours, theirs in _NORM_NAMES[spec.norm_placement].items():
        layer += _norm(ours, theirs)
    layer += _attention_inputs(spec) if spec.latent is None else _latent_inputs(spec)
    layer.append(Rule("attention/output/w", "self_attn.o_proj.weight", "d (n u) -> n u d"))
    if spec.output_bias:
        layer.append(Rule("attention/output/b", "self_attn.o_proj.bias", "d -> d"))
    if spec.attention_sinks:
        layer.append(Rule("attention/sinks", "self_attn.sinks", "n -> n"))
    dense = (*layer, *_feed_forward(spec))
    usual = dense if spec.moe is None else (*layer, *_experts(spec.moe, model_type))
    return Names("model.", "layers.{layer}.", tuple(model), usual, dense)


def _attention_inputs(spec: DecoderSpec) -> list[Rule]:
    found = []
    for ours, n in (("query", "n"), ("key", "k"), ("value", "k")):
        theirs = f"self_attn.{ours[0]}_"
        found.append(Rule(f"attention/{ours}/w", f"{theirs}proj.weight", f"({n} h) d -> d {n} h"))
        if spec.qkv_bias:
            found.append(Rule(f"attention/{ours}/b", f"{theirs}proj.bias", f"({n} h) -> {n} h"))
        if spec.query_key_norm is not None and ours != "value":
            layout = "h -> h" if spec.query_key_norm == "head" else f"({n} h) -> {n} h"
            found.append(Rule(f"attention/{ours}_norm/scale", f"{theirs}norm.weight", layout))
    return found


def _latent_inputs(spec: DecoderSpec) -> list[Rule]:
    found = [
        Rule("attention/key_value_down/w", "self_attn.kv_a_proj_with_mqa.weight", "l d -> d l"),
        Rule("attention/key_value_norm/scale", "self_attn.kv_a_layernorm.weight", "r -> r"),
        Rule("attention/key_value/w", "self_attn.kv_b_proj.weight", "(n m) r -> r n m"),
    ]
    if spec.latent is None or not spec.latent.query_dims:
        return [*found, Rule("attention/query/w", "self_attn.q_proj.weight", "(n h) d -> d n h")]
    return [
        *found,
        Rule("attention/query_down/w", "self_attn.q_a_proj.weight", "q d -> d q"),
        Rule("attention/query_down_norm/scale", "self_attn.q_a_layernorm.weight", "q -> q"),
        Rule("attention/query/w", "self_attn.q_b_proj.weight", "(n h) q -> q n h"),
    ]


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


def _feed_forward(spec: DecoderSpec) -> list[Rule]:
    found = []
    for ours, layout in (("gate", "f d -> d f"), ("up", "f d -> d f"), ("down", "d f -> f d")):
        found.append(Rule(f"mlp/{ours}/w", f"mlp.{ours}_proj.weight", layout))
        if spec.mlp_bias:
            found.append(Rule(f"mlp/{ours}/b", f"mlp.{ours}_proj.bias", "d -> d" if ours == "down" else "f -> f"))
    return found


def _experts(moe: MoeSpec, model_type: str) -> list[Rule]:
    if model_type == "gpt_oss":
        return _experts_of_gpt_oss()
    if model_type == "mixtral":
        inside, theirs = "block_sparse_moe", {"gate": "w1", "up": "w3", "down": "w2"}
    else:
        inside, theirs = "mlp", {"gate": "gate_proj", "up": "up_proj", "down": "down_proj"}
    found = [Rule("moe/router/w", f"{inside}.gate.weight", "e d -> d e")]
    if moe.choice_bias:
        name = f"{inside}.gate.e_score_correction_bias"
        found.append(Rule("moe/router/choice_bias", name, "e -> e", root=_NON_TRAINABLE))
    places = {"moe": ("experts.{expert}", "x"), **({"moe/shared": ("shared_experts", "s")} if moe.shared_dims else {})}
    for place, (name, width) in places.items():
        for ours, projection in theirs.items():
            layout = f"d {width} -> {width} d" if ours == "down" else f"{width} d -> d {width}"
            found.append(Rule(f"{place}/{ours}/w", f"{inside}.{name}.{projection}.weight", layout))
    return found


def _experts_of_gpt_oss() -> list[Rule]:
    found = [
        Rule("moe/router/w", "mlp.router.weight", "e d -> d e"),
        Rule("moe/router/b", "mlp.router.bias", "e -> e"),
        Rule("moe/down/w", "mlp.experts.down_proj", "e x d -> e x d"),
        Rule("moe/down/b", "mlp.experts.down_proj_bias", "e d -> e d"),
    ]
    for part, ours in enumerate(("gate", "up")):
        found.append(Rule(f"moe/{ours}/w", "mlp.experts.gate_up_proj", "e d (x c) -> e d x", part))
        found.append(Rule(f"moe/{ours}/b", "mlp.experts.gate_up_proj_bias", "e (x c) -> e x", part))
    return found


def _norm(ours: str, theirs: str, *, bias: bool = False) -> list[Rule]:
    found = [Rule(f"{ours}/scale", f"{theirs}.weight", "d -> d")]
    return [*found, Rule(f"{ours}/bias", f"{theirs}.bias", "d -> d")] if bias else found


def variables_of(spec: DecoderSpec, family: Family) -> dict[str, Variable]:
    """Returns the variables of a model by path, each with its tensors, named as in `family`."""
    names, sizes = names_of(spec, family), {**_sizes(spec), FUSED: 2 if family.model_type == "gpt_oss" else 3}
    found = {}
    for rule in names.model:
        base = "" if rule.name.startswith("lm_head.") else names.base
        found[ROOT + rule.path] = _variable(ROOT + rule.path, (), [((), base, rule)], sizes)
    for prefix, layers in _layers(spec):
        for rule in names.in_first_layer if prefix.startswith("first_layers_") else names.in_layer:
            path = f"{rule.root}{prefix}/{rule.path}"
            stacked = (len(layers),) if prefix.startswith("layers/") else ()
            entries = [
                ((r,) if stacked else (), names.base + names.layer.format(layer=layer), rule)
                for r, layer in enumerate(layers)
            ]
            found[path] = _variable(path, stacked, entries, sizes)
    return found


def _layers(spec: DecoderSpec) -> Iterator[tuple[str, list[int]]]:
    """Yields (path of a layer, or of stacked layers, in the model; numbers of these layers in the folder)."""
    period, repeats, first = len(spec.layer_pattern), spec.num_repeats, len(spec.first_layers)
    for j in range(first):
        yield f"first_layers_{j}", [j]
    if repeats:
        for p in range(period):
            yield f"layers/sub/layer_{p}", [first + r * period + p for r in range(repeats)]
    for j in range(len(spec.last_layers)):
        yield f"last_layers_{j}", [first + repeats * period + j]


def _variable(
    path: str, stacked: tuple[int, ...], entries: Sequence[tuple[tuple[int, ...], str, Rule]], sizes: Mapping[str, int]
) -> Variable:
    rule = entries[0][2]
    groups, order = parse_layout(rule.layout)
    experts = (sizes["e"],) if rule.of_experts else ()
    pieces = []
    for leading, prefix, _ in entries:
        for expert in range(sizes["e"]) if rule.of_experts else [None]:
            name = prefix + (rule.name if expert is None else rule.name.format(expert=expert))
            index = leading if expert is None else (*leading, expert)
            pieces.append(Piece(name, index, groups, order, sizes, rule.part))
    shape = (*stacked, *experts, *(sizes[letter] for letter in order))
    return Variable(path, shape, tuple(pieces))


def parse_layout(layout: str) -> tuple[tuple[tuple[str, ...], ...], tuple[str, ...]]:
    """Parses a layout, e.g. 'd (n h) -> n h d'. Returns the letters of each dimension of the tensor, and of the variable."""
    tensor, _, variable = layout.partition(" -> ")
    groups: list[tuple[str, ...]] = []
    for part in tensor.replace("(", "|(").replace(")", ")|").split("|"):
        letters = part.strip("() ").split()
        groups += [tuple(letters)] if part.startswith("(") else [(letter,) for letter in letters]
    return tuple(groups), tuple(variable.split())


def _sizes(spec: DecoderSpec) -> dict[str, int]:
    latent = LatentSpec() if spec.latent is None else spec.latent
    return {
        "v": spec.vocab_size,
        "p": spec.max_positions,
        "d": spec.model_dims,
        "n": spec.num_heads,
        "k": spec.num_kv_heads,
        "h": spec.head_dims,
        "u": spec.value_dims,
        "f": spec.hidden_dims,
        "e": 0 if spec.moe is None else spec.moe.num_experts,
        "x": 0 if spec.moe is None else spec.moe.hidden_dims,
        "s": 0 if spec.moe is None else spec.moe.shared_dims,
        "q": latent.query_dims,
        "r": latent.key_value_dims,
        "l": latent.key_value_dims + spec.rotary_dims,
        "m": spec.head_dims - spec.rotary_dims + spec.value_dims,
    }
