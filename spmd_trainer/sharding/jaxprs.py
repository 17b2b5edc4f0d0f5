"""Helpers that read jaxprs: equations at any depth, inner jaxprs of calls, and the removal of unused equations."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import jax.interpreters.partial_eval
from jax.extend import core, source_info_util

# Operations that run an inner program on their own arguments. Those in OWN_DERIVATIVES have custom derivatives.
PLAIN_CALLS = frozenset({"jit", "pjit", "closed_call", "core_call", "core_closed_call"})
OWN_DERIVATIVES = frozenset({"custom_jvp_call", "custom_vjp_call"})
CALLS = PLAIN_CALLS | OWN_DERIVATIVES
# `jax.checkpoint` in past and present versions of JAX.
REMAT = frozenset({"checkpoint", "remat", "remat2"})

_are_products_shown: contextvars.ContextVar[bool] = contextvars.ContextVar("products are shown", default=False)


@contextlib.contextmanager
def products_shown(is_on: bool = True) -> Iterator[None]:
    """Context manager. If `is_on`, functions with custom derivatives show their matrix products with variables in the jaxpr.

    JAX's trace caches ignore this context: a function that the model jits itself keeps the form of its first trace.
    """
    token = _are_products_shown.set(is_on)
    try:
        yield
    finally:
        _are_products_shown.reset(token)


def are_products_shown() -> bool:
    """Returns True inside the context manager `products_shown`."""
    return _are_products_shown.get()


def called(eqn: core.JaxprEqn) -> tuple[core.Jaxpr, Sequence[Any]]:
    """Returns (inner jaxpr, its constants) of a call, i.e. of an equation whose primitive is in `CALLS` or `REMAT`."""
    found: Any = eqn.params.get("jaxpr") or eqn.params["call_jaxpr"]
    return (found.jaxpr, found.consts) if isinstance(found, core.ClosedJaxpr) else (found, ())


def live(closed: core.ClosedJaxpr) -> core.ClosedJaxpr:
    """Returns the program without unused equations (dead code)."""
    used = [True] * len(closed.jaxpr.outvars)
    jaxpr, _ = jax.interpreters.partial_eval.dce_jaxpr(closed.jaxpr, used, instantiate=True)
    return core.ClosedJaxpr(jaxpr, closed.consts)


def scan_sizes(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns (number of constants, number of carried values) of a `scan`, from its equation's `params`."""
    if "num_consts" in params:
        return params["num_consts"], params["num_carry"]
    consts, carry, _ = params["ft_in"].unpack()  # JAX 0.11: a tree of all operands
    return len(list(consts)), len(list(carry))


def equations(jaxpr: core.Jaxpr, skipped: Collection[str] = ()) -> Iterator[core.JaxprEqn]:
    """Yields the equations of a jaxpr and of its inner jaxprs, except those inside primitives named in `skipped`."""
    for eqn in jaxpr.eqns:
        yield eqn
        if eqn.primitive.name not in skipped:
            for inner in core.jaxprs_in_params(eqn.params):
                yield from equations(inner, skipped)


@contextlib.contextmanager
def source_of(eqn: Any) -> Iterator[None]:
    """Context manager: operations traced inside it get the name stack and source line of `eqn`."""
    stack = source_info_util.current_name_stack() + eqn.source_info.name_stack
    with source_info_util.user_context(eqn.source_info.traceback, name_stack=stack), eqn.ctx.manager:
        yield
