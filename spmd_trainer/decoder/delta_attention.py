"""Linear attention by the gated delta rule, as in Qwen3-Next, for layers of kind 'linear'."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import ClassVar

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from praxis import base_layer

from spmd_trainer.decoder.axes import Norm, Projection, SpecLayer
from spmd_trainer.decoder.context import Context
from spmd_trainer.decoder.feed_forward import ACTIVATION_FNS
from spmd_trainer.errors import UserError
from spmd_trainer.kernels.delta_rule import causal_convolution, gated_delta_rule
from spmd_trainer.models.decoder_spec import DeltaSpec

# Added to the squared length of a query or key before the vector is divided by the root.
_EPSILON = 1e-6
# At initialization, a token multiplies a state by exp(-0.01 * rate), for rates from 1/16 to 16: a decay by 0.06% to 15%.
_LARGEST_LOG_RATE, _FIRST_DECAY_BIAS = math.log(16), math.log(math.expm1(0.01))


class DeltaAttention(SpecLayer):
    """Linear attention of one layer; see `DeltaSpec` for the sizes, and `DecoderSpec` for the variables.

    The decode cache has a fixed size per row. It holds `state`, float32 [batch, key heads, values per key head, key width, value
    width], and the last inputs of the convolutions, `query_past`, `key_past` and `value_past`.

    Attributes:
      layer_kind: always 'linear'.
    """

    layer_kind: str = "linear"
    convolved: ClassVar[tuple[str, ...]] = ("query", "key", "value")

    def setup(self) -> None:
        delta = self._delta
        heads, values = (delta.num_heads,), (delta.num_heads, delta.values_per_head)
        shapes: dict[str, tuple[int, ...]] = dict.fromkeys(("query", "key"), (*heads, delta.key_dims))
        shapes |= dict.fromkeys(("value", "gate"), (*values, delta.value_dims))
        axes = {2: ("heads", "head_dims"), 3: ("heads", "norm", "head_dims")}
        for name, shape in shapes.items():
            self._child_projection(name, shape, axes[len(shape)])
            if name in self.convolved:
                self.child(
                    f"{name}_conv",
                    Convolution,
                    shape=(delta.conv_width, *shape),
                    split_axes=("norm", *axes[len(shape)]),
                )
        for name in ("decay", "beta"):
            self._child_projection(name, values, ("heads", "norm"))
        exact = [base_layer.WeightHParamsCollection.DISALLOW_BFLOAT16_CONVERSION]
        rates = base_layer.WeightInit.Uniform(_LARGEST_LOG_RATE)
        self.add_weight("log_decay_rate", values, ("heads", "norm"), init=rates, collections=exact)
        self.add_weight("decay_bias", values, ("heads", "norm"), init=_FIRST_DECAY_BIAS, collections=exact)
        self.child("norm", Norm, shape=(delta.value_dims,), kind="rms", scale_offset=0.0)
        self.child(
            "output",
            Projection,
            equation="btgjv,gjvd->btd",
            shape=(*shapes["value"], self.spec.model_dims),
            split_axes=(*axes[3], "embed"),
            output_axes=("batch", "length", "activation_embed"),
        )

    def __call__(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends over whole rows. In `DecoderLm.prefill`, stores the states after the last token in the decode cache. `x`:
        [batch, time, model_dims], with the tokens in the order `context.order`. Returns [batch, time, model_dims].
        """
        order = context.order
        assert order is not None  # None only in decode steps
        # The delta rule needs whole rows, so the mesh axes that split rows now split the heads too.
        inputs = {
            name: self._split_heads(order.undo(heads), "batch", "norm", heads="activation_linear_heads")
            for name, heads in self._projected(x).items()
        }
        heads, cache = self._attend(inputs, order.undo(context.segment_ids), {})
        if context.cache_length is not None and self.is_mutable_collection(base_layer.DECODE_CACHE):
            self._keep(cache)
        return self._project(self._split_heads(order.apply(heads), "batch", "length"), self.gate(x))

    def extend_step(self, x: jax.Array, context: Context) -> jax.Array:
        """Attends from new tokens to the cached states, and updates these. Takes and returns [batch, new tokens, model_dims].

        Raises:
          UserError: the cache has no states, because `DecoderLm.prefill` was not called.
        """
        cache = {name: self._cached_array(name) for name in self._cached}
        heads, cache = self._attend(self._projected(x), context.segment_ids, cache)
        self._keep(cache)
        return self._project(heads, self.gate(x))

    def transform_decode_state(self, transform_fn: base_layer.DecodeStateTransformFn) -> None:
        """Replaces each array of this layer's decode cache with `transform_fn(array, batch_dim=0, time_dim=-1)`."""
        for name in self._cached:
            self.update_decode_state(name, transform_fn(self._cached_array(name), 0, -1))

    def _cached_array(self, name: str) -> jax.Array:
        """Returns an array of the cache. Raises UserError if the cache was not filled by `DecoderLm.prefill`."""
        if not self.has_variable(base_layer.DECODE_CACHE, name):
            raise UserError(
                "linear attention keeps one state for all tokens of a prompt, which DecoderLm.prefill makes. praxis' decoders "
                "don't call it: decode by the settings `generation` of a DecoderLanguageModel"
            )
        found: jax.Array = self.get_decode_state(name)
        return found

    def _projected(self, x: jax.Array) -> dict[str, jax.Array]:
        """Returns {name: projection of x} for all inputs of the delta rule: query, key, value, decay and beta."""
        return {name: getattr(self, name)(x) for name in (*self.convolved, "decay", "beta")}

    def _attend(
        self, inputs: dict[str, jax.Array], segment_ids: jax.Array, cache: dict[str, jax.Array]
    ) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Returns the outputs of the heads, [batch, time, key heads, values per key head, value width], and the new cache.

        Args:
          inputs: result of `_projected`, in row order.
          segment_ids: int32 [batch, time].
          cache: {name: cached array, as it is before the first token}; {} without a cache.
        """
        activation: Callable[[jax.Array], jax.Array] = ACTIVATION_FNS[self.spec.activation]
        heads_in, new_cache = {}, {}
        for name in self.convolved:
            kernel, past = getattr(self, f"{name}_conv").kernel(), f"{name}_past"
            x, new_cache[past] = causal_convolution(inputs[name], kernel, segment_ids, cache.get(past))
            heads_in[name] = checkpoint_name(activation(x), f"{name}_proj")
        rate = jnp.exp(self.theta.log_decay_rate.astype(jnp.float32))
        log_decay = -rate * jax.nn.softplus(
            inputs["decay"].astype(jnp.float32) + self.theta.decay_bias.astype(jnp.float32)
        )
        heads, new_cache["state"] = gated_delta_rule(
            _of_length_one(heads_in["query"]),
            _of_length_one(heads_in["key"]),
            heads_in["value"],
            log_decay,
            jax.nn.sigmoid(inputs["beta"].astype(jnp.float32)),
            segment_ids,
            cache.get("state"),
        )
        return heads.astype(self.fprop_dtype), new_cache

    def _project(self, heads: jax.Array, gate: jax.Array) -> jax.Array:
        gated = self.norm(heads) * jax.nn.silu(gate.astype(jnp.float32)).astype(heads.dtype)
        output: jax.Array = self.output(gated)
        return checkpoint_name(output, "out_proj")

    def _keep(self, cache: dict[str, jax.Array]) -> None:
        for name, x in cache.items():
            leading = ("batch",) if name == "state" else ("batch", "norm")
            self.update_decode_state(name, self._split_heads(x, *leading))

    def _split_heads(self, x: jax.Array, *leading: str, heads: str = "activation_heads") -> jax.Array:
        """Constrains the sharding of x. Its logical axes are `leading`, then `heads`, then dimensions that are not sharded."""
        return self.split(x, *leading, heads, *("norm",) * (x.ndim - len(leading) - 1))

    def _child_projection(self, name: str, shape: tuple[int, ...], axes: tuple[str, ...]) -> None:
        letters = "gjv"[: len(shape)]
        self.child(
            name,
            Projection,
            equation=f"btd,d{letters}->bt{letters}",
            shape=(self.spec.model_dims, *shape),
            split_axes=("embed", *axes),
            output_axes=("batch", "length", "activation_heads", *("norm",) * (len(shape) - 1)),
        )

    @property
    def _cached(self) -> tuple[str, ...]:
        return ("state", *(f"{name}_past" for name in self.convolved))

    @property
    def _delta(self) -> DeltaSpec:
        assert self.spec.delta is not None  # the spec checks this for layers of kind 'linear'
        return self.spec.delta


class Convolution(SpecLayer):
    """The weights of a causal convolution along time, separate for each channel.

    Attributes:
      shape: [width of the convolution, *dimensions of the channels].
      split_axes: logical axes of `shape`.
    """

    shape: tuple[int, ...] = ()
    split_axes: tuple[str, ...] = ()

    def setup(self) -> None:
        self.add_weight("w", self.shape, self.split_axes)

    def kernel(self) -> jax.Array:
        return self.read("w")


def _of_length_one(x: jax.Array) -> jax.Array:
    """Scales the vectors along the last dimension of x to length one. Returns float32."""
    x = x.astype(jnp.float32)
    return x * jax.lax.rsqrt(jnp.sum(jnp.square(x), axis=-1, keepdims=True) + _EPSILON)
