"""Orders the exchanges of a traced program around its loops, to prevent deadlocks on host (CPU) devices.

An exchange is communication between devices, such as an all-gather. XLA's CPU runtime starts every operation whose inputs are
ready. If a loop and an exchange don't depend on each other, one device may wait in the loop and another in the exchange,
forever (`docs/partitioner_faults.md`). Exchanges appear only when XLA partitions the program, after tracing. So every
operation that XLA may partition is made to depend on the loop before it:

- An operation whose result is needed by loops is placed just before the first of these loops. All other operations come after
  the last loop.
- Each loop carries, besides its own values, a number called the token. A loop starts with the token that the previous loop
  returned. A `cond` whose branches have loops is treated as a loop.
- An operation after a loop reads its inputs through a `select` on the loop's token. Exceptions are elementwise operations,
  which need no exchange if their operands have the same sharding, and the arrays that a scan slices.

`docs/limits.md` lists what stays unordered. Programs with side effects are not changed: the order of their effects matters too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core
from jax.sharding import NamedSharding

from spmd_trainer.sharding.even_rules import ELEMENTWISE
from spmd_trainer.sharding.host_devices import known_after
from spmd_trainer.sharding.jaxprs import CALLS, REMAT, called, live, scan_sizes, source_of

_Atom: TypeAlias = core.Var | core.Literal


def ordered(
    closed: core.ClosedJaxpr, shardings: Sequence[NamedSharding] = (), num_variables: int = 0
) -> core.ClosedJaxpr:
    """Orders a program's communication between devices around its loops. Programs without loops or with effects stay unchanged.

    Args:
      closed: the traced program, which several devices run.
      shardings: the shardings of the program's first arguments. Fully replicated arguments need no communication.
      num_variables: how many of the first arguments are model variables, which get no sharding constraints.
    """
    if closed.jaxpr.effects or not _has_loop(closed.jaxpr):
        return closed
    return _rewritten(live(closed), shardings, num_variables)


def _rewritten(
    closed: core.ClosedJaxpr,
    shardings: Sequence[NamedSharding] = (),
    num_variables: int = 0,
    *,
    has_token: bool = False,
) -> core.ClosedJaxpr:
    """Returns the reordered program. With `has_token`, the loops' token is an additional first argument and first result."""
    arguments, flat, found = [core.Var(var.aval) for var in closed.jaxpr.invars], _Equations(), _Equations()
    results = flat.add(closed, arguments)
    own = [core.Var(jax.typeof(jnp.zeros(())))] if has_token else []
    (token,) = own or found.call(lambda: jnp.zeros(()))
    new = _InOrder(found, token, flat.constants, dict(zip(arguments, shardings, strict=False)), num_variables)
    for loops, eqn in _with_loops_before(flat.eqns):
        new.add(eqn, loops)
    outvars = [new.result(atom) for atom in results]
    if own:  # changed even if there is no loop inside
        outvars = [*found.call(jnp.cos, new.token), *outvars]
    constants, info = {**flat.constants, **found.constants}, closed.jaxpr.debug_info
    jaxpr = closed.jaxpr.replace(
        constvars=[*constants],
        invars=[*own, *arguments],
        outvars=outvars,
        eqns=found.eqns,
        debug_info=info.with_unknown_names() if own else info,
    )
    return core.ClosedJaxpr(jaxpr, [*constants.values()])


class _Equations:
    """Collects the equations of a new program.

    Attributes:
      eqns: the equations.
      constants: {variable: value} of the constants that the equations use.
    """

    def __init__(self) -> None:
        self.eqns: list[core.JaxprEqn] = []
        self.constants: dict[core.Var, Any] = {}

    def add(self, closed: core.ClosedJaxpr, arguments: Sequence[_Atom], within: Any = None) -> list[_Atom]:
        """Adds a copy of a program's equations that reads `arguments`. Returns the variables that hold the copy's results.

        Calls that have loops, and calls of `jax.checkpoint`, are inlined. `within` is the name stack of the program's caller.
        """
        constants = [core.Var(var.aval) for var in closed.jaxpr.constvars]
        self.constants.update(zip(constants, closed.consts, strict=True))
        inner = (*closed.jaxpr.constvars, *closed.jaxpr.invars)
        known: dict[core.Var, _Atom] = dict(zip(inner, (*constants, *arguments), strict=True))

        def read(atom: _Atom) -> _Atom:
            return known[atom] if isinstance(atom, core.Var) else atom

        for eqn in closed.jaxpr.eqns:
            name, operands, source = eqn.primitive.name, [read(atom) for atom in eqn.invars], eqn.source_info
            stack = source.name_stack if within is None else within + source.name_stack
            if name in REMAT:
                if eqn.params["differentiated"]:
                    operands = self._barrier(operands, eqn.params["prevent_cse"])
                results = self.add(core.ClosedJaxpr(*called(eqn)), operands, stack.extend("checkpoint"))
            elif name in CALLS and _has_loop(called(eqn)[0]):
                if "name" in eqn.params:
                    stack = stack.extend(f"jit({eqn.params['name']})")
                results = self.add(core.ClosedJaxpr(*called(eqn)), operands, stack)
            else:
                results = [core.Var(var.aval) for var in eqn.outvars]
                self.eqns.append(
                    eqn.replace(invars=operands, outvars=results, source_info=source.replace(name_stack=stack))
                )
            known.update(zip(eqn.outvars, results, strict=True))
        return [read(atom) for atom in closed.jaxpr.outvars]

    def call(self, fn: Callable[..., Any], *operands: _Atom) -> list[_Atom]:
        """Traces a function of arrays, and adds the equations of `fn(*operands)`. Returns the variables of its results."""
        return self.add(jax.make_jaxpr(fn)(*(atom.aval for atom in operands)), operands)

    def _barrier(self, operands: Sequence[_Atom], prevent_cse: bool | Sequence[bool]) -> list[_Atom]:
        """Keeps XLA from reusing forward-pass results in a `jax.checkpoint` call. Returns the call's new operands."""
        where = [prevent_cse] * len(operands) if isinstance(prevent_cse, bool) else prevent_cse
        kept = [operand for operand, is_kept in zip(operands, where, strict=True) if is_kept]
        results = iter(self.call(lambda *arrays: lax.optimization_barrier(arrays), *kept) if kept else ())
        return [next(results) if is_kept else operand for operand, is_kept in zip(operands, where, strict=True)]


class _InOrder:
    """Adds a program's equations to `found`, and makes each of them wait for the loops that must come before it.

    Args:
      found: the equations of the new program.
      token: the token with which the program's first loop starts.
      constants: {variable: value} of the program's constants.
      split: {variable: sharding} of the program's first arguments.
      num_variables: how many of these arguments are model variables.
    """

    def __init__(
        self,
        found: _Equations,
        token: _Atom,
        constants: Mapping[core.Var, Any],
        split: Mapping[core.Var, NamedSharding],
        num_variables: int,
    ):
        self._found = found
        self.token = token  # the token after the loops added so far
        # A constraint on a variable could change the order of its axes (`constraints.computable`), which is an exchange.
        self._inputs: dict[_Atom, NamedSharding] = dict([*split.items()][num_variables:])
        self._whole: set[_Atom] = {*constants, *(var for var, over in split.items() if over.is_fully_replicated)}
        self._after: dict[_Atom, int] = {}  # {variable: the number of loops before it}
        self._held: dict[tuple[_Atom, int], _Atom] = {}
        self._holds: dict[tuple[Any, NamedSharding | None], core.ClosedJaxpr] = {}  # traced `_hold`
        self._new: dict[_Atom, _Atom] = {}  # {result of a loop in the old program: its variable in the new one}

    def result(self, atom: _Atom) -> _Atom:
        """Returns the variable (or literal) of the new program that corresponds to `atom` of the old program."""
        return atom if isinstance(atom, core.Literal) else self._new.get(atom, atom)

    def add(self, eqn: core.JaxprEqn, loops: int) -> None:
        """Adds an equation that comes after the first `loops` loops."""
        name, operands = eqn.primitive.name, [self.result(atom) for atom in eqn.invars]
        if name == "optimization_barrier":  # XLA removes it, so each result waits for its own operand only
            self._found.eqns.append(eqn.replace(invars=operands))
            for operand, result in zip(operands, eqn.outvars, strict=True):
                self._add_results([result], self._loops_before(operand), is_whole=self._is_whole(operand))
            return
        stack = eqn.source_info.name_stack
        if _is_loop(eqn):
            # XLA may exchange a loop's constants and initial values before the loop, and removes a token that nothing uses.
            held = _num_held(eqn)
            operands = [self._read(atom, loops, stack) if n < held else atom for n, atom in enumerate(operands)]
            self.token, *results = self._found.call(functools.partial(_with_token, eqn), self.token, *operands)
            self._new.update(zip(eqn.outvars, results, strict=True))
            self._add_results(results, loops + 1)
            return
        if name not in ELEMENTWISE:
            operands = [self._read(atom, loops, stack) for atom in operands]
        self._found.eqns.append(eqn.replace(invars=operands))
        is_whole = name in ELEMENTWISE and all(map(self._is_whole, operands))
        self._add_results(eqn.outvars, max(map(self._loops_before, operands), default=0), is_whole=is_whole)

    def _add_results(self, results: Sequence[_Atom], loops: int, *, is_whole: bool = False) -> None:
        self._after.update(dict.fromkeys(results, loops))
        if is_whole:
            self._whole.update(results)

    def _loops_before(self, atom: _Atom) -> int:
        return 0 if isinstance(atom, core.Literal) else self._after.get(atom, 0)

    def _is_whole(self, atom: _Atom) -> bool:
        return isinstance(atom, core.Literal) or atom in self._whole

    def _read(self, atom: _Atom, loops: int, stack: Any) -> _Atom:
        """Returns `atom`; or, if devices may exchange its value, a copy that waits for the first `loops` loops."""
        if self._loops_before(atom) >= loops or self._is_whole(atom) or not _may_be_exchanged(atom.aval):
            return atom
        if (atom, loops) not in self._held:
            key = (atom.aval, self._inputs.get(atom))
            if key not in self._holds:
                self._holds[key] = jax.make_jaxpr(functools.partial(_hold, sharding=key[1]))(atom.aval, self.token.aval)
            (self._held[atom, loops],) = self._found.add(self._holds[key], [atom, self.token], stack)
            self._after[self._held[atom, loops]] = loops
        return self._held[atom, loops]


def _hold(array: jax.Array, token: jax.Array, sharding: NamedSharding | None) -> jax.Array:
    """Returns `array` unchanged, but makes XLA wait for `token` before it uses the array. Applies `sharding`, if given."""
    held = known_after(token > 1, array)  # XLA doesn't know that a cosine doesn't exceed 1
    # Without this, XLA may exchange an input before it reads the token.
    return held if sharding is None else lax.with_sharding_constraint(held, sharding)


def _is_loop(eqn: core.JaxprEqn) -> bool:
    """Returns True for a `scan`, for a `while`, and for a `cond` whose branches have loops.

    Returns False for a vmapped `while` and for `lax.platform_dependent`: JAX's public functions can't rebuild them with a token.
    """
    params = eqn.params
    match eqn.primitive.name:
        case "scan":
            return True
        case "while":
            return not params["cond_jaxpr"].out_avals[0].shape
        case "cond":
            return not params.get("branches_platforms") and any(_has_loop(b.jaxpr) for b in params["branches"])
    return False


def _has_loop(jaxpr: core.Jaxpr) -> bool:
    return any(
        _is_loop(eqn) or (eqn.primitive.name in CALLS | REMAT and _has_loop(called(eqn)[0])) for eqn in jaxpr.eqns
    )


def _with_loops_before(eqns: Sequence[core.JaxprEqn]) -> list[tuple[int, core.JaxprEqn]]:
    """Returns (number of loops that come before the equation, equation) for all equations, in their new order."""
    loops = [index for index, eqn in enumerate(eqns) if _is_loop(eqn)]
    number = {index: position for position, index in enumerate(loops)}
    needed: dict[_Atom, int] = {}  # {variable: the first loop that needs it}
    found = []
    for index in reversed(range(len(eqns))):
        eqn = eqns[index]
        first = min([number.get(index, len(loops)), *(needed.get(var, len(loops)) for var in eqn.outvars)])
        for atom in eqn.invars:
            if isinstance(atom, core.Var):
                needed[atom] = min(first, needed.get(atom, len(loops)))
        found.append((first, index in number, index))
    # A loop comes after all operations that it needs.
    return [(first, eqns[index]) for first, _, index in sorted(found)]


def _may_be_exchanged(aval: Any) -> bool:
    """Returns True for arrays in device memory; False for scalars, PRNG keys and arrays in host memory."""
    if not getattr(aval, "shape", ()) or jax.dtypes.issubdtype(aval.dtype, jax.dtypes.extended):
        return False
    return bool(getattr(aval, "memory_space", None) != jax.memory.Space.Host)


def _num_held(loop: core.JaxprEqn) -> int:
    """Returns how many of a loop's operands wait for the previous loop: the first ones, before the arrays that a scan slices."""
    return sum(scan_sizes(loop.params)) if loop.primitive.name == "scan" else len(loop.invars)


def _with_token(eqn: core.JaxprEqn, token: jax.Array, *arrays: Any) -> list[Any]:
    """Runs a loop (or a `cond` with loops) so that it carries `token`. Returns [the token after it, *its results]."""

    def carrying(closed: core.ClosedJaxpr) -> Callable[..., list[Any]]:
        run: Callable[..., list[Any]] = core.jaxpr_as_fun(_rewritten(closed, has_token=True))
        return run

    params = eqn.params
    with source_of(eqn):
        match eqn.primitive.name:
            case "scan":
                return _scan_with_token(params, carrying(params["jaxpr"]), token, arrays)
            case "while":
                return _while_with_token(params, carrying(params["body_jaxpr"]), token, arrays)
        index, *operands = arrays
        found: list[Any] = lax.switch(index, [carrying(branch) for branch in params["branches"]], token, *operands)
        return found


def _scan_with_token(
    params: Mapping[str, Any], body: Callable[..., list[Any]], token: jax.Array, arrays: Sequence[Any]
) -> list[Any]:
    """Runs a scan that carries a token. `params` are its equation's parameters; `body` takes and returns the token first."""
    num_consts, num_carry = scan_sizes(params)
    consts, carry, slices = arrays[:num_consts], arrays[num_consts:][:num_carry], arrays[num_consts + num_carry :]

    def step(carried: Sequence[Any], slices: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        found = body(carried[0], *consts, *carried[1:], *slices)
        return found[: 1 + num_carry], found[1 + num_carry :]

    options = {name: params[name] for name in ("length", "reverse", "unroll")}
    carried, stacked = lax.scan(step, [token, *carry], slices, **options)
    return [*carried, *stacked]


def _while_with_token(
    params: Mapping[str, Any], body: Callable[..., list[Any]], token: jax.Array, arrays: Sequence[Any]
) -> list[Any]:
    """Runs a `while` loop that carries a token; arguments as in `_scan_with_token`."""
    num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
    of_cond, of_body, carry = arrays[:num_cond], arrays[num_cond:][:num_body], arrays[num_cond + num_body :]
    cond: Callable[..., list[Any]] = core.jaxpr_as_fun(params["cond_jaxpr"])
    found: list[Any] = lax.while_loop(
        lambda carried: cond(*of_cond, *carried[1:])[0],
        lambda carried: body(carried[0], *of_body, *carried[1:]),
        [token, *carry],
    )
    return found
