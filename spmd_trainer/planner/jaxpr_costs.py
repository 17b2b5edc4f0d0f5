"""Costs of the matrix products of a traced function, before any compilation."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, cast

import jax
from jax.extend import core

from spmd_trainer.sharding.jaxprs import scan_sizes


@dataclasses.dataclass(frozen=True)
class DotCosts:
    """Costs of a function's matrix products (dots), and bytes of the values that its loops stack, summed over all devices.

    A loop's body counts once per iteration.

    Attributes:
      flops: FLOPs of all dots outside of Pallas kernels.
      batched_flops: FLOPs of dots with batch dimensions, such as attention's logits.
      batched_bytes: bytes of the operands and results of dots with batch dimensions.
      kernel_flops: FLOPs of the dots in Pallas kernels, including masked blocks. The other fields leave out these kernels.
      stacked_bytes: bytes of the values that loops stack, such as each layer's activations saved for the backward pass.
    """

    flops: float = 0.0
    batched_flops: float = 0.0
    batched_bytes: float = 0.0
    kernel_flops: float = 0.0
    stacked_bytes: float = 0.0

    def __add__(self, other: DotCosts) -> DotCosts:
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return DotCosts(*(mine + theirs for mine, theirs in pairs))

    def times(self, count: int) -> DotCosts:
        return DotCosts(*(count * cost for cost in dataclasses.astuple(self)))


def dot_costs(jaxpr: core.Jaxpr) -> DotCosts:
    """Returns the costs of all dots of a function. `jaxpr`: the function, e.g. `jax.jit(f).trace(...).jaxpr.jaxpr`."""
    total = DotCosts()
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _of_dot(equation)
        elif equation.primitive.name in ("grouped_dot", "grouped_weights"):
            total += _of_grouped(equation)
        elif equation.primitive.name == "pallas_call":
            total += _of_kernel(equation)
        else:
            inner = [dot_costs(sub) for sub in _inside(equation)]
            if equation.primitive.name == "cond":
                inner = sorted(inner, key=lambda costs: costs.flops)[-1:]
            stacked = DotCosts(stacked_bytes=_bytes(_stacked(equation)))
            total += sum(inner, DotCosts()).times(_times(equation)) + stacked
    return total


def saved_bytes(jaxpr: core.Jaxpr, lanes: int = 1) -> float:
    """Returns the bytes of the values that loops stack and that are live at the same time, on all devices.

    The bytes of loops that are not nested are added together. What an inner loop stacks is only live during one iteration of
    its outer loop, so only one iteration is counted, and only for the outer loop whose body stacks the most bytes.

    Args:
      jaxpr: as for `dot_costs`.
      lanes: the size of an array's last dimension in memory is a multiple of this number (128 on TPUs, 1 on GPUs). But a last
        dimension of size 1 is not padded, because the compiler then stores a different dimension last. How a mesh shards the
        last dimension is not considered.
    """
    own, inside = 0.0, 0.0
    for equation in jaxpr.eqns:
        inner = sum(saved_bytes(sub, lanes) for sub in _inside(equation)) * _parts(equation)
        if equation.primitive.name == "scan":
            own += _bytes(_stacked(equation), lanes)
            inside = max(inside, inner)
        else:
            own += inner
    return own + inside


def bytes_in_loops(jaxpr: core.Jaxpr, *, is_in_loop: bool = False) -> float:
    """Returns the bytes of all arrays that the bodies of loops (`scan`) compute, on all devices.

    An array counts once, whatever the number of iterations; the result of a function that the body calls counts for the call too.

    Args:
      jaxpr: as for `dot_costs`.
      is_in_loop: True if the function is called in a loop's body.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        is_loop, is_kernel = (equation.primitive.name == name for name in ("scan", "pallas_call"))
        if is_in_loop:
            total += _bytes([variable.aval for variable in equation.outvars if hasattr(variable.aval, "shape")])
        inner = [] if is_kernel else _inside(equation)
        total += sum(bytes_in_loops(sub, is_in_loop=is_in_loop or is_loop) for sub in inner) * _parts(equation)
    return total


def _of_dot(equation: core.JaxprEqn) -> DotCosts:
    (contracted, _), (batch, _) = equation.params["dimension_numbers"]
    arrays: list[Any] = [variable.aval for variable in (*equation.invars, *equation.outvars)]
    if not all(array.ndim for array in arrays[:2]):
        return DotCosts()  # a product with a number
    flops = 2.0 * math.prod(arrays[-1].shape) * math.prod(arrays[0].shape[dim] for dim in contracted)
    if not batch:
        return DotCosts(flops)
    return DotCosts(flops, flops, _bytes(arrays))


def _of_grouped(equation: core.JaxprEqn) -> DotCosts:
    """Returns the cost of a `kernels.grouped_dot`, which multiplies the rows of (token, expert) pairs by their experts' weights.

    The FLOPs depend on the number of pairs, not on the operand's shape: each shard of experts has an array that is large enough
    for the maximum number of pairs that the shard can receive.
    """
    rows, other = cast(Any, [variable.aval for variable in equation.invars[:2]])
    width = rows.shape[3]
    outputs = math.prod(other.shape[-2:]) // (width if equation.primitive.name == "grouped_dot" else other.shape[-2])
    return DotCosts(2.0 * equation.params["split"].num_pairs * width * outputs)


def _of_kernel(equation: core.JaxprEqn) -> DotCosts:
    steps = [size for size in equation.params["grid_mapping"].grid if isinstance(size, int)]
    return DotCosts(kernel_flops=math.prod(steps) * dot_costs(equation.params["jaxpr"]).flops)


def _stacked(equation: core.JaxprEqn) -> list[Any]:
    """Returns the avals of the arrays that a loop stacks; [] for equations that aren't loops."""
    if equation.primitive.name != "scan":
        return []
    _, num_carry = scan_sizes(equation.params)
    return [variable.aval for variable in equation.outvars[num_carry:]]


def _bytes(arrays: list[Any], lanes: int = 1) -> float:
    total = 0
    for array in arrays:
        *outer, last = array.shape or (1,)
        stored = 1 if last == 1 else -(-last // lanes) * lanes
        total += math.prod(outer) * stored * array.dtype.itemsize
    return float(total)


def _times(equation: core.JaxprEqn) -> int:
    return int(equation.params["length"]) if equation.primitive.name == "scan" else _parts(equation)


def _parts(equation: core.JaxprEqn) -> int:
    """Returns the number of shards for which a `shard_map` runs its function; 1 for other equations."""
    if equation.primitive.name != "shard_map":
        return 1
    # The compiler divides the work over the other axes: the function in it is for all their devices.
    sizes = equation.params["mesh"].shape
    return math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])


def _inside(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    for value in leaves:
        found: Any = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        if isinstance(found, core.Jaxpr):
            yield found
