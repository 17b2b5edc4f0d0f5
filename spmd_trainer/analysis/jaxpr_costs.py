"""FLOPs of the matrix products of a traced function, before any compilation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
from jax.extend import core


def dot_flops(jaxpr: core.Jaxpr) -> float:
    """Returns the FLOPs of all dots of a function on all devices, loops multiplied out. Kernels such as Pallas' don't count.

    Args:
      jaxpr: the function, e.g. `jax.jit(f).trace(...).jaxpr.jaxpr`.
    """
    total = 0.0
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            total += _of_dot(equation)
        elif equation.primitive.name != "pallas_call":
            inner = [dot_flops(sub) for sub in _inside(equation)]
            times = _times(equation)
            total += times * (max(inner, default=0.0) if equation.primitive.name == "cond" else sum(inner))
    return total


def _of_dot(equation: core.JaxprEqn) -> float:
    (contracted, _), _ = equation.params["dimension_numbers"]
    left: Any = equation.invars[0].aval
    result: Any = equation.outvars[0].aval
    return 2.0 * math.prod(result.shape) * math.prod(left.shape[dim] for dim in contracted)


def _times(equation: core.JaxprEqn) -> int:
    """Returns how often an equation runs the functions in it; in a shard_map, on how many parts of its mesh."""
    if equation.primitive.name == "scan":
        return int(equation.params["length"])
    if equation.primitive.name == "shard_map":
        # The compiler divides the work over the other axes: the function in it is for all their devices.
        sizes = equation.params["mesh"].shape
        return math.prod(sizes[axis] for axis in equation.params["newly_manual_axes"])
    return 1


def _inside(equation: core.JaxprEqn) -> Iterator[core.Jaxpr]:
    """Yields the functions that an equation calls."""
    leaves = jax.tree.leaves(equation.params, is_leaf=lambda x: isinstance(x, core.Jaxpr | core.ClosedJaxpr))
    for value in leaves:
        found: Any = value.jaxpr if isinstance(value, core.ClosedJaxpr) else value
        if isinstance(found, core.Jaxpr):
            yield found
