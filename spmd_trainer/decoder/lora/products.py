"""Matrix products with an adapted weight: the base model's product, plus two small products with the adapters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.decoder.lora import adapted_weight
from spmd_trainer.decoder.lora.adapted_weight import ADAPTER, RANK, AdaptedWeight, Factor, Product
from spmd_trainer.step.matrix_uses import GROUPED_NUMBERS


def multiply(
    x: jax.Array,
    weight: AdaptedWeight,
    params: dict[str, Any],
    *,
    weight_is_left: bool,
    drop: Callable[[jax.Array], jax.Array],
    rows: jax.Array | None,
) -> jax.Array | None:
    """Computes a `dot_general` of `x` and the adapted weight W + scale * a b, without forming this sum.

    Args:
      x: the operand that is not the weight. If `rows` is given, dimension 0 of `x` must be the batch.
      weight: the adapted weight.
      params: parameters of the `dot_general`.
      weight_is_left: True if the weight is the left operand.
      drop: dropout function, applied to the adapters' input.
      rows: int32 [batch], the index of each batch row's adapter, -1 for a row without an adapter; None if there is one adapter,
        which all rows use.

    Returns:
      The product, like the result of the `dot_general`; None if the adapters' dimensions don't fit this product.
    """
    contract, batch = params["dimension_numbers"]
    (xc, wc), (xb, wb) = (pair[::-1] if weight_is_left else pair for pair in (contract, batch))
    plan = weight.plan(wc, wb)
    if plan is None or (rows is not None and (0 in xc or 0 in xb)):
        return None
    weight = adapted_weight.with_gain(weight)
    kept = [i for i in range(x.ndim) if i not in xc and i not in xb]
    x_names: list[Any] = [("x", i) for i in range(x.ndim)]
    for dims, names in ((xc, plan.contracted), (xb, plan.batch)):
        for dim, name in zip(dims, names, strict=True):
            x_names[dim] = name
    free = [x_names[i] for i in kept]
    out_names = [*plan.batch, *(plan.free if weight_is_left else free), *(free if weight_is_left else plan.free)]
    scaled = x
    after: Factor | None = None
    if weight.gain is not None:
        gain = _of_rows(weight.gain, rows, x, missing=1.0)
        # A transposed product contracts the weight's outputs, so the gain belongs to its input.
        if plan.transposed:
            scaled = _times(x, x_names, gain)
        else:
            after = gain
    operands = (weight.w, scaled) if weight_is_left else (scaled, weight.w)
    out: jax.Array = lax.dot_general_p.bind(*operands, **params)
    delta = _delta(drop(scaled), x_names, weight, plan, rows, params, weight_is_left, out_names)
    out = out + delta.astype(out.dtype)
    return out if after is None else _times(out, out_names, after)


def multiply_grouped(
    rows: jax.Array,
    weight: AdaptedWeight,
    sizes: jax.Array,
    eqn: Any,
    *,
    drop: Callable[[jax.Array], jax.Array],
    chosen: jax.Array | None,
) -> jax.Array | None:
    """Multiplies each row by its expert's weight W + scale * a b, without forming this sum. Returns [S, X, M, outputs], or None
    if the adapters' dimensions don't fit. See `grouped_dot` for S, X and M.

    Args:
      rows: [S, X, M, inputs], sorted by expert.
      weight: the adapted weight, [experts, inputs, outputs].
      sizes: number of rows of each expert.
      eqn: the `grouped_dot` equation without adapters.
      drop: dropout function, applied to the adapters' input.
      chosen: int32 [S, X, M], index of each row's adapter, -1 for none; None if all rows use the same adapter. Each row is
        multiplied by all adapters of its expert, and other adapters' results are set to 0. So FLOPs grow with their number.
    """
    (_, contracted), (_, batch) = GROUPED_NUMBERS
    plan = weight.plan(contracted, batch)
    if plan is None or plan.transposed:
        return None
    weight = adapted_weight.with_gain(weight)
    split = eqn.params["split"]
    from_rank = split.over((), split.outputs)
    adapter = [] if chosen is None else [ADAPTER]
    experts, inputs, outputs = weight.w.shape
    a = weight.a.arranged([*plan.batch, *plan.contracted, *adapter, RANK]).reshape(experts, inputs, -1)
    b = weight.b.arranged([*plan.batch, *adapter, RANK, *plan.free]).reshape(experts, -1, outputs)
    hidden = split.over(split.inputs, ()).product(drop(rows), a.astype(rows.dtype), sizes) * weight.scale
    own = jnp.ones((*rows.shape[:3], 1), rows.dtype)
    if chosen is not None:
        count = weight.a.array.shape[weight.a.names.index(ADAPTER)]
        own = jax.nn.one_hot(chosen, count, dtype=rows.dtype)
        hidden = hidden * jnp.repeat(own, hidden.shape[3] // count, axis=3)
    # The primitive is taken from the equation, so that this module does not import it from `kernels`.
    out: jax.Array = eqn.primitive.bind(rows, weight.w, sizes, **eqn.params)
    out = out + from_rank.product(hidden, b.astype(rows.dtype), sizes)
    if weight.gain is None:
        return out
    gain = weight.gain.arranged([*plan.batch, *adapter, *plan.free]).reshape(experts, -1, outputs).astype(rows.dtype)
    # Each expert has its own gains; a grouped product gives each row those of its expert. Rows without an adapter get 1.
    gains: jax.Array = from_rank.product(own, gain, sizes) + (1 - jnp.sum(own, axis=3, keepdims=True))
    return out * gains


def _delta(
    x: jax.Array,
    x_names: list[Any],
    weight: AdaptedWeight,
    plan: Product,
    rows: jax.Array | None,
    params: dict[str, Any],
    weight_is_left: bool,
    out_names: list[Any],
) -> jax.Array:
    """Returns scale * (x a) b, with its dimensions in the order `out_names`, as in the product with W."""
    first, second = plan.factors(weight)
    precision, dtype = params["precision"], params["preferred_element_type"]
    if rows is not None:
        first, second = (_of_rows(factor, rows, x, missing=0.0) for factor in (first, second))
        inner = [*plan.batch, ("x", 0), RANK, *(n for n in x_names[1:] if n not in (*plan.batch, *plan.contracted))]
        hidden = adapted_weight.einsum(
            [(x, x_names), (first.array.astype(x.dtype), first.names)], inner, precision, None
        )
        pair = [(hidden * weight.scale, inner), (second.array.astype(x.dtype), second.names)]
        return adapted_weight.einsum(pair, out_names, precision, dtype)
    num_batch, num_contracted = len(plan.batch), len(plan.contracted)
    a = first.arranged([*plan.batch, *plan.contracted, RANK]).astype(x.dtype)
    b = second.arranged([*plan.batch, RANK, *plan.free]).astype(x.dtype)
    xc, xb = ([x_names.index(name) for name in names] for names in (plan.contracted, plan.batch))
    batch = list(range(num_batch))
    ac = list(range(num_batch, num_batch + num_contracted))
    if weight_is_left:
        hidden = lax.dot_general(a, x, ((ac, xc), (batch, xb)), precision) * weight.scale
        numbers = (([num_batch], [num_batch]), (batch, batch))
        return lax.dot_general(b, hidden, numbers, precision, preferred_element_type=dtype)
    hidden = lax.dot_general(x, a, ((xc, ac), (xb, batch)), precision) * weight.scale
    numbers = (([hidden.ndim - 1], [num_batch]), (batch, batch))
    return lax.dot_general(hidden, b, numbers, precision, preferred_element_type=dtype)


def _of_rows(factor: Factor, rows: jax.Array | None, x: jax.Array, *, missing: float) -> Factor:
    """Selects each row's adapter from `factor`, which stacks several adapters. Returns a factor with the dimension ('x', 0) for
    the rows. Rows without an adapter get the value `missing`. If `rows` is None, returns `factor` unchanged.
    """
    if rows is None:
        return factor
    count, num_rows = x.shape[0], rows.shape[0]
    # Samples of one batch row are adjacent. `LoraModel` has checked that dimension 0 is the batch.
    index = jnp.repeat(rows, count // num_rows, total_repeat_length=count)
    axis = factor.names.index(ADAPTER)
    array = jnp.moveaxis(factor.array, axis, 0)[jnp.maximum(index, 0)]
    has = (index >= 0).reshape(-1, *[1] * (array.ndim - 1))
    names = (("x", 0), *factor.names[:axis], *factor.names[axis + 1 :])
    return Factor(jnp.where(has, array, jnp.asarray(missing, array.dtype)), names)


def _times(x: jax.Array, names: Sequence[Any], gain: Factor) -> jax.Array:
    kept = [name for name in names if name in gain.names]
    sizes = [n if name in gain.names else 1 for name, n in zip(names, x.shape, strict=True)]
    return x * gain.arranged(kept).reshape(sizes).astype(x.dtype)
