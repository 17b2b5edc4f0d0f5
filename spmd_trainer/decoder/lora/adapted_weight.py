"""A weight with its adapters, and operations on the weight that are applied to the adapters too."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from spmd_trainer.errors import UserError
from spmd_trainer.step import tracked_dims as dims_lib
from spmd_trainer.step.product_results import MatrixDims
from spmd_trainer.step.tracked_dims import Dims, Name

RANK = "rank"
ADAPTER = "adapter"
_OTHER_RANK = "other rank"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Factor:
    """An array with the names of its dimensions."""

    array: jax.Array
    names: tuple[Name, ...] = dataclasses.field(metadata={"static": True})

    def arranged(self, names: Sequence[Name]) -> jax.Array:
        """Returns the array with its dimensions in the order of `names`."""
        order = [self.names.index(name) for name in names]
        return self.array if order == list(range(len(order))) else lax.transpose(self.array, order)

    def edited(self, edit: dims_lib.Edit, starts: Sequence[Any]) -> Factor:
        """Applies a slice, squeeze or reshape of a weight to this array, if the array has the dimensions that change.

        Args:
          edit: the slice, squeeze or reshape.
          starts: start indices, if `edit` is a dynamic slice.
        """
        if isinstance(edit, dims_lib.Reshape):
            return self._reshaped(edit)
        if edit.name not in self.names:
            return self
        axis = self.names.index(edit.name)
        if isinstance(edit, dims_lib.Squeeze):
            return Factor(lax.squeeze(self.array, (axis,)), (*self.names[:axis], *self.names[axis + 1 :]))
        if edit.start is None:
            return Factor(lax.dynamic_slice_in_dim(self.array, starts[edit.operand], edit.size, axis), self.names)
        end = edit.start + edit.size
        return Factor(lax.slice_in_dim(self.array, edit.start, end, edit.stride, axis), self.names)

    def _reshaped(self, edit: dims_lib.Reshape) -> Factor:
        if edit.old[0] not in self.names:
            return self
        first = self.names.index(edit.old[0])
        others = [name for name in self.names if name not in edit.old]
        before = sum(name not in edit.old for name in self.names[:first])
        array = self.arranged([*others[:before], *edit.old, *others[before:]])
        rest = array.shape[before + len(edit.old) :]
        shape = (*array.shape[:before], *edit.sizes, *rest)
        return Factor(array.reshape(shape), (*others[:before], *edit.new, *others[before:]))


@dataclasses.dataclass(frozen=True)
class Product:
    """A matrix product with a weight, described by the names of the weight's dimensions.

    Attributes:
      batch, contracted, free: names of the weight's batch, contracted and other dimensions, each in the product's order.
      transposed: True if the product contracts the weight's outputs instead of its inputs.
    """

    batch: tuple[Name, ...]
    contracted: tuple[Name, ...]
    free: tuple[Name, ...]
    transposed: bool

    def factors(self, weight: AdaptedWeight) -> tuple[Factor, Factor]:
        """Returns the adapter matrices in the order of multiplication: a and b, or b and a if transposed."""
        return (weight.b, weight.a) if self.transposed else (weight.a, weight.b)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class AdaptedWeight:
    """A weight W with its adapters. It stands for the array W + scale * a b or, with DoRA, for gain * (W + scale * a b).

    Attributes:
      w: the array W.
      a: the adapter matrix a, [*stack, *inputs, rank].
      b: the adapter matrix b, [*stack, rank, *outputs].
      magnitude: DoRA's magnitude, [*stack, *outputs]; None without DoRA.
      gain: DoRA's factor for each output, [*stack, *outputs]: magnitude / norm of the output's weights; None until computed.
      dims: the dimensions of `w`, each with its name and the variable's dimensions that it comes from.
      path: the variable's path.
      roles: the variable's stack, input and output dimensions in the model's matrix products.
      scale: factor by which the product a b is multiplied.
    """

    w: jax.Array
    a: Factor
    b: Factor
    magnitude: Factor | None
    gain: Factor | None
    dims: Dims = dataclasses.field(metadata={"static": True})
    path: str = dataclasses.field(metadata={"static": True})
    roles: MatrixDims = dataclasses.field(metadata={"static": True})
    scale: float = dataclasses.field(metadata={"static": True})

    def follows(self, move: dims_lib.Move) -> bool:
        """Returns True if an operation on the weight can be applied to each adapter matrix too.

        `move` is the operation's effect on the weight's dimensions. If a reshape merges dimensions, it can't be applied to an
        adapter matrix that has only some of these dimensions.
        """
        for factor in (self.a, self.b, self.magnitude, self.gain):
            names = set(() if factor is None else factor.names)
            for edit in move.edits:
                if isinstance(edit, dims_lib.Reshape):
                    inside = names.intersection(edit.old)
                    if inside and inside != set(edit.old):
                        return False
                    names |= set(edit.new) if inside else set()
        return True

    def moved(self, w: jax.Array, move: dims_lib.Move, starts: Sequence[Any] = ()) -> AdaptedWeight:
        """Applies an operation on the weight to its adapters too. Returns the resulting adapted weight.

        Args:
          w: the operation's result for the array W.
          move: the operation's effect on the dimensions.
          starts: start indices, if the operation is a dynamic slice.
        """
        inputs = {dim.name for dim in self.dims if dim.origins & frozenset(self.roles.inputs)}
        if any(isinstance(edit, dims_lib.Slice) and edit.name in inputs for edit in move.edits):
            self = with_gain(self)  # before inputs are sliced off, because the norms are over all inputs
        parts: dict[str, Any] = {}
        for name in ("a", "b", "magnitude", "gain"):
            factor = getattr(self, name)
            for edit in move.edits if factor is not None else ():
                factor = factor.edited(edit, starts)
            parts[name] = factor
        return dataclasses.replace(self, w=w, dims=move.dims, **parts)

    def plan(self, contracted: Sequence[int], batch: Sequence[int]) -> Product | None:
        """Describes a matrix product with this weight. Returns None if the adapters' dimensions don't fit the product.

        Args:
          contracted: the dimensions of `w` that the product contracts.
          batch: the batch dimensions of `w` in the product.
        """
        free = [i for i in range(len(self.dims)) if i not in contracted and i not in batch]
        ends = [dims_lib.origins([self.dims[i] for i in group]) for group in (contracted, free)]
        roles = [frozenset(self.roles.inputs), frozenset(self.roles.outputs)]
        if ends not in (roles, roles[::-1]):
            return None
        found = Product(
            batch=tuple(self.dims[i].name for i in batch),
            contracted=tuple(self.dims[i].name for i in contracted),
            free=tuple(self.dims[i].name for i in free),
            transposed=ends != roles,
        )
        first, second = found.factors(self)
        shared = {*found.batch, RANK, *({ADAPTER} & set(self.a.names))}
        fits = set(first.names) == shared | set(found.contracted) and set(second.names) == shared | set(found.free)
        return found if fits else None


def norm(weight: AdaptedWeight) -> Factor:
    """Returns the norm of each output's weights in W + scale * a b, float32 [*stack, *outputs]. It has no gradient.

    The sum W + scale * a b is not formed: the squared norm is |W|^2 + 2 scale <W, a b> + scale^2 |a b|^2 for each output.
    """
    w, a, b = (lax.stop_gradient(x) for x in (weight.w, weight.a.array, weight.b.array))
    names = [dim.name for dim in weight.dims]
    inputs = [dim.name for dim in weight.dims if dim.origins <= frozenset(weight.roles.inputs)]
    a_names, b_names = weight.a.names, weight.b.names
    result = [name for name in b_names if name != RANK]

    def other(of: Sequence[Name]) -> list[Name]:
        return [_OTHER_RANK if name == RANK else name for name in of]

    def product(out: Sequence[Name], *operands: tuple[jax.Array, Sequence[Name]]) -> jax.Array:
        exact = None if any(x.dtype == jnp.bfloat16 for x, _ in operands) else lax.Precision.HIGHEST
        return einsum(operands, out, exact, jnp.float32)

    squares = jnp.sum(jnp.square(w.astype(jnp.float32)), axis=[names.index(name) for name in inputs])
    own = Factor(squares, tuple(name for name in names if name not in inputs))
    with_w = product(b_names, (a.astype(w.dtype), a_names), (w, names))
    a, b = a.astype(jnp.float32), b.astype(jnp.float32)
    cross = product(result, (with_w, b_names), (b, b_names))
    shared = [name for name in a_names if name not in (*inputs, RANK)]
    gram_names = [*shared, RANK, _OTHER_RANK]
    gram = product(gram_names, (a, a_names), (a, other(a_names)))
    square = product(result, (gram, gram_names), (b, b_names), (b, other(b_names)))
    # Where there are several adapters, their dimension is the first of the result.
    total = (
        own.arranged([name for name in result if name in own.names])
        + 2 * weight.scale * cross
        + weight.scale**2 * square
    )
    return Factor(jnp.sqrt(jnp.maximum(total, 0.0)), tuple(result))


def einsum(
    operands: Sequence[tuple[jax.Array, Sequence[Name]]], out: Sequence[Name], precision: Any, dtype: Any
) -> jax.Array:
    """Returns `jnp.einsum` of arrays with named dimensions. `out`: names of the result's dimensions."""
    letters: dict[Name, str] = {}
    for _, names in operands:
        for name in names:
            letters.setdefault(name, chr(ord("a") + len(letters)))
    texts = ["".join(letters[name] for name in names) for _, names in operands]
    equation = f"{','.join(texts)}->{''.join(letters[name] for name in out)}"
    return jnp.einsum(equation, *[x for x, _ in operands], precision=precision, preferred_element_type=dtype)


def with_gain(weight: AdaptedWeight) -> AdaptedWeight:
    """Returns the weight with DoRA's gain computed. A weight without a magnitude is returned unchanged."""
    if weight.magnitude is None or weight.gain is not None:
        return weight
    below = norm(weight)
    magnitude = weight.magnitude.arranged(below.names).astype(jnp.float32)
    # An output whose weights are all 0 stays 0.
    gain = magnitude / jnp.where(below.array == 0, 1.0, below.array)
    return dataclasses.replace(weight, gain=Factor(gain, below.names))


def merge(weight: AdaptedWeight) -> jax.Array:
    """Returns the array W + scale * a b (with DoRA, times the gain), computed in float32 and cast to the dtype of W.

    Raises:
      UserError: the weight has several adapters.
    """
    if ADAPTER in weight.a.names:
        raise UserError(
            f"task.lora.adapters: the model uses {weight.path} in an operation that needs the weight and its adapters merged, "
            "which differ by row; leave the target out, or decode with one adapter"
        )
    names = [dim.name for dim in weight.dims]
    factors = [(factor.array.astype(jnp.float32), factor.names) for factor in (weight.a, weight.b)]
    # The model added the other dimensions; they have size 1.
    own = [name for name in names if any(name in of for _, of in factors)]
    delta = einsum(factors, own, lax.Precision.HIGHEST, None)
    delta = jnp.expand_dims(delta, [axis for axis, name in enumerate(names) if name not in own])
    total = weight.w.astype(jnp.float32) + weight.scale * delta
    gain = with_gain(weight).gain
    if gain is not None:
        kept = [name for name in names if name in gain.names]
        shape = [n if name in gain.names else 1 for name, n in zip(names, weight.w.shape, strict=True)]
        total = total * gain.arranged(kept).reshape(shape)
    return total.astype(weight.w.dtype)
