"""Settings that describe a decoder-only language model. Model families differ only in the values of these settings.

The table lists a model's variables, whose paths begin with `params/lm/`. V is the vocabulary size, D the model's width, N and K
the numbers of query heads and of key/value heads, H the width of a head, F the width of a feed-forward layer or expert, E the
number of experts, S moe.shared_dims, and P rotary_dims. Q, R and U are query_dims, key_value_dims and value_dims of
`LatentSpec`. G, J, A, B and W are num_heads, values_per_head, key_dims, value_dims and conv_width of `DeltaSpec`.

| variable | shape | present if |
|---|---|---|
| `token_emb/w` | [V, D] | always |
| `position_emb/w` | [max_positions, D] | positions='learned' |
| LAYER/`attention_norm/scale`, LAYER/`mlp_norm/scale` | [D] | norm_placement 'pre' or 'pre_and_post' |
| LAYER/`attention_post_norm/scale`, LAYER/`mlp_post_norm/scale` | [D] | norm_placement 'post' or 'pre_and_post' |
| LAYER/`attention/query/w` | [D, N, H]; [Q, N, H] if Q > 0 | always |
| LAYER/`attention/key/w` | [D, K, H] | no latent |
| LAYER/`attention/value/w` | [D, K, H] | no latent, and not a global layer with global_heads.values_are_keys |
| LAYER/`attention/query/b`; `.../key/b`, `.../value/b` | [N, H]; [K, H] | qkv_bias |
| LAYER/`attention/query_down/w`, `.../query_down_norm/scale` | [D, Q], [Q] | latent, Q > 0 |
| LAYER/`attention/key_value_down/w`, `.../key_value_norm/scale` | [D, R + P], [R] | latent |
| LAYER/`attention/key_value/w` | [R, N, H - P + U] | latent |
| LAYER/`attention/output/w` | [N, H, D]; with latent [N, U, D] | always |
| LAYER/`attention/output/b` | [D] | output_bias |
| LAYER/`attention/sinks` | [N] | attention_sinks |
| LAYER/`attention/query_norm/scale`, `.../key_norm/scale` | [H] | query_key_norm='head' |
| LAYER/`attention/query_norm/scale`; `.../key_norm/scale` | [N, H]; [K, H] | query_key_norm='all' |
| LAYER/`attention/gate/w` | [D, N, H] | gated_attention |
| LAYER/`mlp/gate/w` | [D, F] | gated, layer without experts |
| LAYER/`mlp/up/w`; `mlp/down/w` | [D, F]; [F, D] | layer without experts |
| LAYER/`mlp/gate/b`, `mlp/up/b`; `mlp/down/b` | [F]; [D] | mlp_bias, layer without experts |
| LAYER/`moe/router/w` | [D, E] | layer with experts |
| LAYER/`moe/gate/w`, `moe/up/w`; `moe/down/w` | [E, D, F]; [E, F, D] | layer with experts |
| LAYER/`moe/router/b` | [E] | moe.biases |
| LAYER/`moe/gate/b`, `moe/up/b`; `moe/down/b` | [E, F]; [E, D] | moe.biases |
| LAYER/`moe/shared/gate/w`, `moe/shared/up/w`; `moe/shared/down/w` | [D, S]; [S, D] | S > 0 |
| LAYER/`moe/shared_gate/w` | [D, 1] | moe.shared_gate |
| `final_norm/scale` | [D] | always |
| `logits/w` | [D, V] | not tied_embeddings |
| MTP/`token_norm/scale`, MTP/`hidden_norm/scale`, MTP/`final_norm/scale` | [D] | mtp_layers |
| MTP/`token/w`, MTP/`hidden/w` | [D, D] | mtp_layers |

MTP is `mtp/layer_{k}` for k < mtp_layers. MTP/`layer` also has the variables of the model's last layer.

A layer of kind 'linear' has the following variables below LAYER/`attention` instead:

| variable | shape |
|---|---|
| `query/w`, `key/w`; `value/w`, `gate/w` | [D, G, A]; [D, G, J, B] |
| `query_conv/w`, `key_conv/w`; `value_conv/w` | [W, G, A]; [W, G, J, B] |
| `decay/w`, `beta/w` | [D, G, J] |
| `log_decay_rate`, `decay_bias` | [G, J] |
| `norm/scale` | [B] |
| `output/w` | [G, J, B, D] |

A norm of kind 'layer' also has a `/bias` of the same shape as its scale. Below `non_trainable/lm/` are LAYER/`layer_scale` [1],
if layer_scale is set, and LAYER/`moe/router/choice_bias` [E], if moe.choice_bias is set. For global layers, K and H are those of
`global_heads`, if it is given.

LAYER stands for a layer's path. Let dense = moe.dense_layers (0 without moe), period = the least common multiple of
len(layer_pattern) and moe.every (1 without moe), and repeats = (num_layers - dense) // period.

- The first `dense` layers, which have no experts, are separate: `first_layers_{j}` is layer j.
- The next repeats * period layers are stacked: `layers/sub/layer_{p}` for p < period. Its variables have a leading dimension of
  size `repeats`; index r is layer dense + r * period + p.
- The remaining layers are separate: `last_layers_{j}` is layer dense + repeats * period + j.
"""

from __future__ import annotations

import dataclasses
import math

from spmd_trainer.errors import UserError
from spmd_trainer.models.layer_specs import (
    DeltaSpec,
    HeadSpec,
    LatentSpec,
    LayerSpec,
    MoeSpec,
    RotaryScaling,
    TemperatureSpec,
    not_one_of,
    not_positive,
    not_whole,
)

__all__ = [
    "DecoderSpec", "DeltaSpec", "HeadSpec", "LatentSpec", "LayerSpec", "MoeSpec", "RotaryScaling", "TemperatureSpec",
]  # fmt: skip

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
NORMS = ("rms", "layer")
NORM_PLACEMENTS = ("pre", "pre_and_post", "post")
QUERY_KEY_NORMS = (None, "head", "all", "unit")
POSITIONS = ("rotary", "learned")
LAYER_KINDS = ("global", "local", "chunked", "linear")


@dataclasses.dataclass
class DecoderSpec:
    """Architecture and sizes of a decoder-only transformer.

    Attributes:
      vocab_size: number of token ids, V.
      model_dims: width of the residual stream, D.
      hidden_dims: width of the feed-forward layers, F. With `moe`, only the layers without experts use it.
      num_layers: number of layers.
      num_heads: number of query heads, N.
      num_kv_heads: number of key and value heads, K; it must divide num_heads.
      head_dims: width of a head's queries and keys, H; without `latent` also of its values.
      global_heads: K and H of the global layers, if they differ from those of the other layers; otherwise None.
      activation: activation of the feed-forward layers: 'silu', 'gelu', 'gelu_tanh' (the approximation) or 'relu'.
      gated: if True, the feed-forward layer is down(activation(gate(x)) * up(x)); if False, down(activation(up(x))).
      norm: 'rms' (root mean square, only a scale) or 'layer' (mean and variance, scale and bias).
      norm_epsilon: number that is added to the mean square or variance.
      norm_scale_offset: number that is added to the scale variable; 1 for Gemma, whose variables hold the scale minus 1.
      norm_placement: where attention and feed-forward layers have norms. 'pre': at their input. 'post': at their output,
        before the residual addition. 'pre_and_post': at input and output.
      qkv_bias: True if query, key and value projections have biases.
      output_bias: True if the attention's output projection has a bias.
      mlp_bias: True if the feed-forward layers have biases.
      query_key_norm: RMS norm of queries and keys. None: no norm. 'head': over a head's width, with the same scale for all
        heads. 'all': over all heads together. 'head' and 'all' come before the rotary embedding. 'unit': after the rotary
        embedding, over a head's width, without a scale, and only in layers with rotary embeddings.
      value_norm: True divides values by their root mean square over a head's width.
      query_scale: multiplier of the attention logits; None for head_dims ** -0.5.
      temperature: makes attention sharper at later positions, in layers without rotary embeddings; None: no change.
      gated_attention: True multiplies each head's output by a sigmoid of another projection of the token (arXiv:2505.06708).
      attention_sinks: True adds a learned logit to each head's softmax; its probability is discarded (arXiv:2309.17453).
      positions: 'rotary' embeddings in attention, or 'learned' embeddings that are added to the token embeddings.
      max_positions: maximum sequence length. With positions='learned' it is a dimension of a variable; otherwise it is only
        informative.
      rotary_dims: number of a head's dimensions that are rotated: the first ones, or with `latent` the last ones. 0 rotates
        all dimensions (not allowed with `latent`).
      rotary_pairs_adjacent: True rotates dimensions 2i and 2i + 1 as a pair; False rotates i and i + n, of 2n rotated
        dimensions.
      rotary_base: base of the rotary frequencies (rope theta).
      rotary_scaling: scaling of the frequencies for long sequences; None for no scaling.
      local_rotary_base: rotary base of the local layers; rotary_scaling then doesn't apply to them. None: local layers have
        the same frequencies as global layers.
      unrotated_kinds: kinds of layers without rotary embeddings.
      layer_pattern: kinds of the layers, 'global', 'local', 'chunked' or 'linear'; the pattern is repeated over all layers.
      window: a token of a local layer sees itself and the window - 1 tokens before it. A chunked layer divides each text into
        chunks of `window` tokens; a token sees itself and the tokens before it in its chunk.
      attention_softcap: attention logits x become cap * tanh(x / cap), where cap is this number; None for no cap.
      final_softcap: like attention_softcap, for the logits of the vocabulary.
      tied_embeddings: True computes the logits of the vocabulary with the token embedding matrix.
      mtp_layers: number of multi-token prediction layers (arXiv:2412.19437). The first predicts the token after the next one,
        each further layer one token later. They add a loss in training and evaluation, and are not used in decoding.
      mtp_weight: weight of the mean of these layers' losses in the total loss. A layer's loss is a mean over the tokens that it
        predicts. If minibatches have different numbers of such tokens, their average loss differs from that of the whole batch.
      embedding_scale: multiplier of the token embeddings.
      layer_scale: True multiplies the residual stream after each layer by a scalar variable that is not trained.
      moe: mixture of experts in place of feed-forward layers; None: no experts.
      latent: multi-head latent attention, which needs num_kv_heads = num_heads; None: ordinary attention.
      delta: linear attention in the layers of kind 'linear', or None if there are no such layers.
      dropout: dropout probability of the embeddings, and of the outputs of attention and feed-forward layers.
      attention_dropout: dropout probability of the attention probabilities.
      initializer_range: standard deviation of the initial values of weights and embeddings.
    """

    vocab_size: int = 0
    model_dims: int = 0
    hidden_dims: int = 0
    num_layers: int = 0
    num_heads: int = 0
    num_kv_heads: int = 0
    head_dims: int = 0
    global_heads: HeadSpec | None = None
    activation: str = "silu"
    gated: bool = True
    norm: str = "rms"
    norm_epsilon: float = 1e-6
    norm_scale_offset: float = 0.0
    norm_placement: str = "pre"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    query_key_norm: str | None = None
    value_norm: bool = False
    query_scale: float | None = None
    temperature: TemperatureSpec | None = None
    gated_attention: bool = False
    attention_sinks: bool = False
    positions: str = "rotary"
    max_positions: int = 0
    rotary_dims: int = 0
    rotary_pairs_adjacent: bool = False
    rotary_base: float = 10_000.0
    rotary_scaling: RotaryScaling | None = None
    local_rotary_base: float | None = None
    unrotated_kinds: tuple[str, ...] = ()
    layer_pattern: tuple[str, ...] = ("global",)
    window: int | None = None
    attention_softcap: float | None = None
    final_softcap: float | None = None
    tied_embeddings: bool = False
    mtp_layers: int = 0
    mtp_weight: float = 0.1
    embedding_scale: float = 1.0
    layer_scale: bool = False
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    delta: DeltaSpec | None = None
    dropout: float = 0.0
    attention_dropout: float = 0.0
    initializer_range: float = 0.02

    @property
    def layers(self) -> tuple[LayerSpec, ...]:
        """All layers, in order."""
        return tuple(self._layer(index) for index in range(self.num_layers))

    @property
    def first_layers(self) -> tuple[LayerSpec, ...]:
        """The first `moe.dense_layers` layers, which have no experts; empty without `moe`."""
        return self.layers[: self._num_first]

    @property
    def repeated_layers(self) -> tuple[LayerSpec, ...]:
        """The layers of the first period after `first_layers`. The layers' kinds and experts repeat with this period."""
        period = math.lcm(len(self.layer_pattern), 1 if self.moe is None else self.moe.every)
        return tuple(self._layer(self._num_first + index) for index in range(period))

    @property
    def num_repeats(self) -> int:
        """Number of whole periods (see `repeated_layers`) after `first_layers`."""
        return (self.num_layers - self._num_first) // len(self.repeated_layers)

    @property
    def last_layers(self) -> tuple[LayerSpec, ...]:
        """The layers after the last whole period (see `repeated_layers`)."""
        return self.layers[self._num_first + self.num_repeats * len(self.repeated_layers) :]

    @property
    def layer_kinds(self) -> tuple[str, ...]:
        """The kinds of all layers ('global', 'local', ...), in order."""
        return tuple(layer.kind for layer in self.layers)

    @property
    def num_layers_with_experts(self) -> int:
        """Number of layers with experts."""
        if self.moe is None:
            return 0
        return max(0, self.num_layers // self.moe.every - self.moe.dense_layers // self.moe.every)

    @property
    def has_query_key_scales(self) -> bool:
        """True if the norms of queries and keys have learned scales."""
        return self.query_key_norm in ("head", "all")

    def heads_of(self, kind: str) -> HeadSpec:
        """Returns the number and width of the key and value heads in the layers of kind `kind`, e.g. 'local'."""
        usual = HeadSpec(self.num_kv_heads, self.head_dims)
        return self.global_heads if kind == "global" and self.global_heads is not None else usual

    def value_dims_of(self, kind: str) -> int:
        """Returns the width of a head's values in the layers of kind `kind`, e.g. 'local'."""
        return self.heads_of(kind).head_dims if self.latent is None else self.latent.value_dims

    @property
    def query_input_dims(self) -> int:
        """Width of the vectors that queries are computed from."""
        return self.model_dims if self.latent is None else self.latent.query_dims or self.model_dims

    def matrix_flops(self, num_params: float, num_frozen: float, length: int) -> float:
        """Returns the FLOPs per token of all matrix products, forward and backward, without embedding lookups.

        In global layers, a token attends to half of the row on average; in local layers, to at most its window; in chunked
        layers, to half of its chunk. For a linear layer, three products with each state are counted: reading the key's value,
        writing a value, and reading the output.

        Args:
          num_params: number of trainable parameters that a token uses.
          num_frozen: number of frozen parameters that a token uses; their gradients are not computed.
          length: number of tokens in a row.
        """
        lookups = 0 if self.tied_embeddings else self.vocab_size * self.model_dims
        lookups += self.max_positions * self.model_dims if self.positions == "learned" else 0
        window = min(self.window or length, length)
        rest = length % window
        seen = {  # keys that a token sees on average
            "global": length / 2,
            "local": window - window * window / (2 * length),
            "chunked": ((length - rest) * window + rest * rest) / (2 * length),
        }
        attention = {
            kind: 6.0 * self.num_heads * (self.heads_of(kind).head_dims + self.value_dims_of(kind)) * keys
            for kind, keys in seen.items()
        }
        delta = self.delta or DeltaSpec()
        attention["linear"] = 6.0 * 3 * delta.num_heads * delta.values_per_head * delta.key_dims * delta.value_dims
        # The embedding is trainable if there are no frozen parameters, otherwise it is frozen.
        params, frozen = (num_params, num_frozen - lookups) if num_frozen else (num_params - lookups, 0.0)
        output_layer = (4.0 if num_frozen else 6.0) * self.vocab_size * self.model_dims
        further = attention[self.layer_kinds[-1]] + output_layer
        return (
            6.0 * params + 4.0 * frozen + sum(attention[kind] for kind in self.layer_kinds) + self.mtp_layers * further
        )

    def problems(self) -> list[str]:
        """Returns the problems with the settings: one sentence each, which begins with the name of the field."""
        sizes = ["vocab_size", "model_dims", "num_layers", "num_heads", "num_kv_heads", "head_dims"]
        has_dense = self.moe is None or self.moe.dense_layers or self.moe.every > 1
        found = not_positive(self, [*sizes, "hidden_dims"] if has_dense else sizes)
        found += not_one_of("activation", self.activation, ACTIVATIONS)
        found += not_one_of("norm", self.norm, NORMS)
        found += not_one_of("norm_placement", self.norm_placement, NORM_PLACEMENTS)
        found += not_one_of("query_key_norm", self.query_key_norm, QUERY_KEY_NORMS)
        found += not_one_of("positions", self.positions, POSITIONS)
        for name, few in {"": self.num_kv_heads, "global_heads.": self.heads_of("global").num_kv_heads}.items():
            if few > 0 and self.num_heads % few and (not name or self.global_heads is not None):
                found.append(f"{name}num_kv_heads={few} does not divide num_heads={self.num_heads}")
        for field in ("dropout", "attention_dropout"):
            if not 0 <= getattr(self, field) < 1:
                found.append(f"{field}={getattr(self, field)}; give a probability of at least 0 and below 1")
        for field in ("attention_softcap", "final_softcap", "query_scale"):
            if getattr(self, field) is not None and not getattr(self, field) > 0:
                found.append(f"{field}={getattr(self, field)}; give a number above 0, or None")
        found += not_whole(self, ("mtp_layers",), at_least=0)
        found += not_positive(self, ["mtp_weight"]) if self.mtp_layers else []
        found += self._problems_of_positions() + self._problems_of_layers() + self._problems_of_latent()
        for field in ("global_heads", "rotary_scaling", "temperature", "moe", "latent", "delta"):
            inner = getattr(self, field)
            found += [] if inner is None else [f"{field}.{problem}" for problem in inner.problems()]
        return found

    def check(self, where: str = "spec") -> None:
        """Raises UserError if settings are invalid. The message names `where`, the path of this spec, and all problems."""
        if found := self.problems():
            raise UserError(f"{where} can't be built: " + "; ".join(found))

    @property
    def _num_first(self) -> int:
        return 0 if self.moe is None else self.moe.dense_layers

    def _layer(self, index: int) -> LayerSpec:
        has_experts = self.moe is not None and index >= self._num_first and (index + 1) % self.moe.every == 0
        return LayerSpec(self.layer_pattern[index % len(self.layer_pattern)], has_experts)

    def _problems_of_positions(self) -> list[str]:
        found = []
        for kind in self.unrotated_kinds:
            found += not_one_of("unrotated_kinds has a kind", kind, LAYER_KINDS[:-1])
        if self.positions == "learned":
            if self.unrotated_kinds or self.query_key_norm == "unit":
                found.append("unrotated_kinds and query_key_norm='unit' need positions='rotary', not 'learned'")
            return found + not_positive(self, ["max_positions"])
        if self.temperature is not None and not {*self.unrotated_kinds} & {*self.layer_pattern}:
            found.append(
                "temperature is of layers without rotary embeddings, and unrotated_kinds names none of the layers"
            )
        found += not_positive(self, ["rotary_base"])
        rotated = {*self.layer_pattern} - {*self.unrotated_kinds, "linear"}
        for own in sorted({"global_heads." if kind == "global" and self.global_heads else "" for kind in rotated}):
            width = self.heads_of("global" if own else "local").head_dims
            if not self.rotary_dims and width % 2:
                found.append(f"{own}head_dims={width} is odd; rotary embeddings need an even width")
            if self.rotary_dims % 2 or not 0 <= self.rotary_dims <= width:
                found.append(f"rotary_dims={self.rotary_dims}; give 0, or an even number up to {own}head_dims={width}")
        if self.local_rotary_base is not None and not self.local_rotary_base > 0:
            found.append(f"local_rotary_base={self.local_rotary_base}; give a number above 0, or None")
        return found

    def _problems_of_layers(self) -> list[str]:
        if not self.layer_pattern:
            return ["layer_pattern is empty; give e.g. ('global',)"]
        found = []
        for kind in self.layer_pattern:
            found += not_one_of("layer_pattern has a kind", kind, LAYER_KINDS)
        windowed = [kind for kind in ("local", "chunked") if kind in self.layer_pattern]
        if windowed and (self.window is None or self.window < 1):
            found.append(f"window={self.window}; {windowed[0]} layers need 1 or more")
        if self.moe is not None and self.moe.every > 0 and not self.num_layers_with_experts:
            found.append(
                f"moe.dense_layers={self.moe.dense_layers}, moe.every={self.moe.every}; num_layers={self.num_layers} leaves no "
                "layer with experts"
            )
        if ("linear" in self.layer_pattern) != (self.delta is not None):
            found.append(f"delta={self.delta}; it must be given if, and only if, layer_pattern has linear layers")
        return found

    def _problems_of_latent(self) -> list[str]:
        if self.latent is None:
            return []
        found = []
        if self.num_kv_heads != self.num_heads:
            found.append(f"num_kv_heads={self.num_kv_heads}; with latent it must be num_heads={self.num_heads}")
        if self.latent.value_dims > self.head_dims:
            found.append(f"latent.value_dims={self.latent.value_dims} is greater than head_dims={self.head_dims}")
        if self.positions == "rotary" and not 0 < self.rotary_dims < self.head_dims:
            found.append(
                f"rotary_dims={self.rotary_dims}; with latent give more than 0 and less than head_dims={self.head_dims}"
            )
        needed: dict[str, object] = dict.fromkeys(("qkv_bias", "value_norm", "gated_attention"), False)
        needed |= {"query_key_norm": None, "positions": "rotary", "unrotated_kinds": (), "global_heads": None}
        return found + [
            f"{field}={getattr(self, field)!r}; with latent it must be {value!r}"
            for field, value in needed.items()
            if getattr(self, field) != value
        ]
