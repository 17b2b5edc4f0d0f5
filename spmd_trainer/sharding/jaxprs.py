"""Reads traced programs: which operations run other programs, and all operations at any depth."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.interpreters.partial_eval
from jax.extend import core

# Operations that run a program on their own arguments; the latter have derivatives of their own.
PLAIN_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
OWN_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
CALLS = PLAIN_CALLS | OWN_DERIVATIVES
# `jax.checkpoint` in past and present versions of JAX.
REMAT = frozenset({"checkpoint", "remat", "remat2"})

_are_products_shown: contextvars.ContextVar[bool] = contextvars.ContextVar("products are shown", default=False)


@contextlib.contextmanager
def products_shown(is_on: bool = True) -> Iterator[None]:
    """In this context, functions with derivatives of their own leave the products with variables to be seen in the program.

    JAX's caches of traces don't know of it: a function that a model has jitted itself keeps the form of its first trace.
    """
    token = _are_products_shown.set(is_on)
    try:
        yield
    finally:
        _are_products_shown.reset(token)


def are_products_shown() -> bool:
    """Returns True in `products_shown`."""
    return _are_products_shown.get()


def called(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Returns the program that an operation of `CALLS` or `REMAT` runs, and its constants."""
    found: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return (found.jaxpr, found.consts) if isinstance(found, core.ClosedJaxpr) else (found, ())


def live(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns a program without the operations whose results nothing uses."""
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns the numbers of constants and of carried values of a `scan`. `params`: those of its equation."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11: a tree of all operands
    return len(list(consts)), len(list(carry))


def equations(jaxpr: core.Jaxpr, skipped: Collection[str] = ()) -> Iterator[core.JaxprEqn]:
    """Yields the operations of a program and of the programs in them, but not of those in the operations `skipped`."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name not in skipped:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from equations(inner, skipped)
