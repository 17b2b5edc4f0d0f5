"""Groups of settings for a decoder's layers (positions, experts, latent and linear attention), used as `DecoderSpec` fields."""

from __future__ import annotations

import dataclasses
import math

from spmd_trainer.errors import did_you_mean

ROUTER_SCORES = ("softmax", "sigmoid")
ROTARY_SCALINGS = ("linear", "llama3", "yarn", "proportional")


@dataclasses.dataclass
class RotaryScaling:
    """Changes of a rotary embedding's frequencies for sequences longer than in pretraining.

    Attributes:
      kind: 'linear' divides all frequencies by `factor` (arXiv:2306.15595). 'llama3' divides low frequencies by `factor`, keeps
        high ones, and interpolates between them. 'yarn' (arXiv:2309.00071) does the same with different bounds, and also scales
        sine and cosine. 'proportional' (Gemma 4) rotates only the fraction `share` of a head's dimension pairs, and divides the
        frequencies of these pairs by `factor`.
      factor: new sequence length divided by the original one.
      original_max_positions: sequence length in pretraining, the original length. 'llama3' and 'yarn' need it.
      low_freq_factor, high_freq_factor: for 'llama3'. Frequencies with fewer than low_freq_factor rotations in the original
        length are divided by `factor`; frequencies with more than high_freq_factor rotations are kept.
      beta_fast, beta_slow: for 'yarn'. Frequencies with more than beta_fast rotations in the original length are kept;
        frequencies with fewer than beta_slow rotations are divided by `factor`.
      attention_factor: for 'yarn': multiplier of sine and cosine; None computes it from factor, mscale and mscale_all_dim.
      mscale, mscale_all_dim: for 'yarn': coefficients of log(factor) in the numerator and the denominator of attention_factor.
        If either is 0, attention_factor is 0.1 log(factor) + 1.
      share: for 'proportional': fraction of the dimension pairs that is rotated, the pairs with the highest frequencies.
      truncate: for 'yarn': True rounds the bounds of the interpolation to whole dimensions.
    """

    kind: str = "linear"
    factor: float = 1.0
    original_max_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: float | None = None
    mscale: float = 0.0
    mscale_all_dim: float = 0.0
    share: float = 1.0
    truncate: bool = True

    def log_scale(self, mscale: float) -> float:
        """Returns YaRN's scale of sine and cosine, 0.1 * mscale * log(factor) + 1, which `query_scale` uses too."""
        return 0.1 * mscale * math.log(self.factor) + 1.0 if self.factor > 1 else 1.0

    def query_scale(self, head_dims: int) -> float:
        """Returns DeepSeek V3's multiplier of the attention logits, for heads of width `head_dims`."""
        scale: float = head_dims**-0.5 * self.log_scale(self.mscale_all_dim) ** 2
        return scale

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        found = not_one_of("kind", self.kind, ROTARY_SCALINGS)
        if not 0 < self.share <= 1:
            found.append(f"share={self.share}; give a number above 0, at most 1")
        if not self.factor >= 1:
            found.append(f"factor={self.factor}; give 1 or more")
        if self.kind in ("llama3", "yarn") and self.original_max_positions < 1:
            found.append(f"original_max_positions={self.original_max_positions}; kind={self.kind!r} needs 1 or more")
        if self.kind == "llama3" and not self.low_freq_factor <= self.high_freq_factor:
            found.append(
                f"low_freq_factor={self.low_freq_factor} is greater than high_freq_factor={self.high_freq_factor}"
            )
        return found


@dataclasses.dataclass
class HeadSpec:
    """Number and width of the key and value heads in the layers of one kind.

    Attributes:
      num_kv_heads: number of key and value heads, K; it must divide `DecoderSpec.num_heads`.
      head_dims: width of a head, H.
      values_are_keys: True uses a head's keys, before their norm and rotary embedding, as its values. There is then no value
        projection.
    """

    num_kv_heads: int = 0
    head_dims: int = 0
    values_are_keys: bool = False

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        return not_positive(self, ("num_kv_heads", "head_dims"))


@dataclasses.dataclass
class LayerSpec:
    """One layer of a decoder.

    Attributes:
      kind: kind of the layer's attention, see `DecoderSpec.layer_pattern`.
      has_experts: True if the layer has a mixture of experts in place of a feed-forward layer.
    """

    kind: str
    has_experts: bool


@dataclasses.dataclass
class TemperatureSpec:
    """Makes attention sharper at later positions (arXiv:2501.19399), in layers without rotary embeddings.

    The query at position p is multiplied by 1 + factor * log(1 + floor((p + 1) / interval)).

    Attributes:
      factor: how strongly the multiplier grows with the position.
      interval: number of positions after which the multiplier changes. The first interval - 1 positions have multiplier 1.
    """

    factor: float = 0.1
    interval: int = 8192

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        return not_positive(self, ("factor", "interval"))


@dataclasses.dataclass
class MoeSpec:
    """A mixture of experts in place of feed-forward layers. No token is dropped.

    Attributes:
      num_experts: number of experts in a layer, E.
      num_experts_per_token: number of experts that compute each token.
      hidden_dims: width of an expert, F.
      dense_layers: number of layers at the beginning of the model that have a feed-forward layer of width
        `DecoderSpec.hidden_dims` in place of experts.
      every: of each `every` consecutive layers, only the last one has experts; the others have a feed-forward layer like the
        first `dense_layers` layers.
      score: how the router's logits become scores: 'softmax' over the experts, or 'sigmoid' of each logit.
      normalise_top_k: True divides the scores of a token's experts by the sum of these scores.
      scaling_factor: multiplier of the routed experts' weights, applied after `normalise_top_k`.
      weigh_inputs: True multiplies an expert's input by the expert's weight; False multiplies its output.
      num_groups: number of equally large groups of experts. A token's experts are chosen from its best `num_chosen_groups`
        groups; a group's score is the sum of its two highest expert scores (DeepSeek V3, arXiv:2412.19437). 1 disables this.
      num_chosen_groups: number of groups that a token's experts are chosen from.
      shared_dims: width of the shared experts, a feed-forward layer beside the routed experts that all tokens go through. 0: no
        shared experts.
      shared_gate: True multiplies the shared experts' output by a sigmoid of a projection of the token to one number.
      biases: True gives biases to the router and the experts, but not to the shared experts.
      swiglu_limit: limit L of an expert's activations: its gate is clipped to at most L, and its `up` to [-L, L]. The expert is
        then down(gate * sigmoid(swiglu_alpha * gate) * (up + 1)), as in gpt-oss (arXiv:2508.10925). None: experts use
        `DecoderSpec.activation`.
      swiglu_alpha: see `swiglu_limit`.
      choice_bias: True chooses experts and groups by score + bias, with one bias for each expert; an expert's weight is still
        computed from its score without the bias. After each training step, the bias of an expert with less than the mean load
        rises by `choice_bias_rate`, and that of an expert with more load falls by it (arXiv:2408.15664). The load is the number
        of the expert's tokens in the whole batch, without padding. Training only adapters doesn't change the biases.
      choice_bias_rate: see `choice_bias`. 0 keeps the biases unchanged.
      aux_loss_weight: weight of the load-balancing loss (arXiv:2101.03961, equation 4; averaged over the layers) in the total
        loss. For this loss, 'sigmoid' scores are divided by their sum.
      z_loss_weight: weight of the router z-loss in the total loss: the mean square of the log-sum-exp of the router's logits
        (arXiv:2202.08906, equation 5; averaged over the layers).
    """

    num_experts: int = 0
    num_experts_per_token: int = 0
    hidden_dims: int = 0
    dense_layers: int = 0
    every: int = 1
    score: str = "softmax"
    normalise_top_k: bool = True
    scaling_factor: float = 1.0
    weigh_inputs: bool = False
    num_groups: int = 1
    num_chosen_groups: int = 1
    shared_dims: int = 0
    shared_gate: bool = False
    biases: bool = False
    swiglu_limit: float | None = None
    swiglu_alpha: float = 1.702
    choice_bias: bool = False
    choice_bias_rate: float = 0.001
    aux_loss_weight: float = 0.0
    z_loss_weight: float = 0.0

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        found = not_positive(self, ("num_experts", "num_experts_per_token", "hidden_dims", "scaling_factor"))
        found += not_whole(self, ("every",), at_least=1)
        if self.swiglu_limit is not None:
            found += not_positive(self, ("swiglu_limit", "swiglu_alpha"))
        found += not_one_of("score", self.score, ROUTER_SCORES)
        if self.num_experts_per_token > self.num_experts:
            found.append(
                f"num_experts_per_token={self.num_experts_per_token} is greater than num_experts={self.num_experts}"
            )
        found += negative(self, ("shared_dims", "choice_bias_rate", "aux_loss_weight", "z_loss_weight", "dense_layers"))
        if self.shared_gate and not self.shared_dims:
            found.append("shared_gate=True; it needs shared_dims above 0")
        return found or self._problems_of_groups()

    def _problems_of_groups(self) -> list[str]:
        if not 1 <= self.num_chosen_groups <= self.num_groups:
            return [f"num_chosen_groups={self.num_chosen_groups}; give 1 to num_groups={self.num_groups}"]
        if self.num_experts % self.num_groups:
            return [f"num_groups={self.num_groups} does not divide num_experts={self.num_experts}"]
        size = self.num_experts // self.num_groups
        if size < 2 and self.num_groups > 1:
            return [f"num_groups={self.num_groups}: a group of num_experts={self.num_experts} has fewer than 2 experts"]
        if self.num_experts_per_token > size * self.num_chosen_groups:
            return [
                f"num_experts_per_token={self.num_experts_per_token} is greater than the {size * self.num_chosen_groups} "
                f"experts of num_chosen_groups={self.num_chosen_groups}"
            ]
        return []


@dataclasses.dataclass
class LatentSpec:
    """Multi-head latent attention (DeepSeek V2, arXiv:2405.04434): keys and values are computed from one small vector per token.

    In place of keys and values, decoding caches this vector and the rotated part of the key, which all heads share.

    Attributes:
      query_dims: width of the vector that queries are computed from, Q. 0 computes queries from the residual stream.
      key_value_dims: width of the vector that keys and values are computed from, R.
      value_dims: width of a head's values, U; at most `DecoderSpec.head_dims`.
      norm_epsilon: number that is added to the mean square in the RMS norms of these two vectors.
    """

    query_dims: int = 0
    key_value_dims: int = 0
    value_dims: int = 0
    norm_epsilon: float = 1e-6

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        return [*not_positive(self, ("key_value_dims", "value_dims")), *negative(self, ("query_dims",))]


@dataclasses.dataclass
class DeltaSpec:
    """Linear attention by the gated delta rule (arXiv:2412.06464), in the layers of kind 'linear'.

    A head has a state, a matrix that maps keys to values. For each token, the state is first multiplied by the token's decay.
    Then the value to which it maps the token's key is moved toward the token's value, by the fraction beta of the difference.
    The output is the value to which the new state maps the token's query. So the cost per token and the size of the decode cache
    do not grow with the sequence length. The tokens of a text must be consecutive, without padding between them.

    Attributes:
      num_heads: number of key heads, G.
      values_per_head: number of value heads per key head, J. They share queries and keys, and each has its own state.
      key_dims: width of queries and keys, A.
      value_dims: width of values, B.
      conv_width: width of the causal convolution of queries, keys and values in tokens, W: a token and the W - 1 before it.
    """

    num_heads: int = 0
    values_per_head: int = 1
    key_dims: int = 0
    value_dims: int = 0
    conv_width: int = 4

    def problems(self) -> list[str]:
        """Returns the problems with the settings, one sentence each."""
        return not_positive(self, [field.name for field in dataclasses.fields(self)])


def not_positive(spec: object, fields: list[str] | tuple[str, ...]) -> list[str]:
    """Returns an error sentence for each of the given fields of `spec` whose value is not above 0."""
    return [
        f"{field}={getattr(spec, field)}; give a number above 0" for field in fields if not getattr(spec, field) > 0
    ]


def not_whole(spec: object, fields: tuple[str, ...], *, at_least: int) -> list[str]:
    """Returns an error sentence for each of the given fields of `spec` that isn't a whole number, or is below `at_least`."""
    values = {field: getattr(spec, field) for field in fields}
    return [
        f"{field}={value}; give a whole number of {at_least} or more"
        for field, value in values.items()
        if not (isinstance(value, int) and value >= at_least)
    ]


def negative(spec: object, fields: tuple[str, ...]) -> list[str]:
    """Returns an error sentence for each of the given fields of `spec` whose value is below 0."""
    return [f"{field}={getattr(spec, field)}; give 0 or more" for field in fields if not getattr(spec, field) >= 0]


def not_one_of(field: str, value: object, known: tuple[str | None, ...]) -> list[str]:
    """Returns a list with one error sentence, which suggests the nearest name, if `value` is not in `known`; otherwise []."""
    if value in known:
        return []
    hint = did_you_mean(value, [name for name in known if name], otherwise="") if isinstance(value, str) else ""
    return [f"{field}={value!r}; give one of {', '.join(map(repr, known))}{hint}"]
