"""Evaluates a jaxpr, and computes a flag for each of its floating-point or complex values: 0 finite, 1 infinite, 2 NaN.

The evaluated program consists of the jaxpr's operations and, for each value, a reduction that computes the flag. Values inside
loops (`lax.scan`) and `shard_map` get flags too. Loops are not unrolled: the flags of a loop's iterations are stacked, like the
loop's other results. The program does not call back to the host. `nan_origin.py` reads the flags. Instead of flags, a caller may
record something else: `coord_check.py` records samples of matrix products.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend import core, source_info_util
from jax.sharding import PartitionSpec

from spmd_trainer.sharding.even_rules import bind
from spmd_trainer.sharding.jaxprs import CALLS, REMAT, scan_sizes, source_of

PyTree: TypeAlias = Any
# (a value, the name of the primitive that made it or '') -> an array whose shape depends on neither, or None.
Measure: TypeAlias = Callable[[jax.Array, str], jax.Array | None]
# The possible flags of a value.
FINITE, INFINITE, NAN = 0, 1, 2
# The id of every literal.
LITERAL = -1
# Stands for the iteration of a surrounding loop in the scope of an operation.
ITERATION = "[*]"
# Operations with an inner jaxpr that is evaluated in their place.
_CALLS = CALLS | REMAT
# Operations that move or rename values: a result has the flag of its operand, so none is computed.
_MOVES = frozenset(
    {"reshape", "transpose", "broadcast_in_dim", "squeeze", "expand_dims", "copy", "copy_p", "neg", "rev"}
    | {"sharding_constraint", "name", "stop_gradient", "pvary"}
)


@dataclasses.dataclass(frozen=True)
class Operation:
    """One operation of an evaluated program (a jaxpr equation).

    Attributes:
      primitive: name of the operation's JAX primitive.
      scope: the components of the operation's name stack; `ITERATION` stands for the iteration of a loop.
      where: the operation's line of Python source.
      inputs: value ids of the operands; `LITERAL` for literals.
      body: the program inside of a scan or a `shard_map`; None for other operations.
      num_consts: number of loop-invariant arguments of a scan; 0 for other operations.
      num_carry: number of carried values of a scan; 0 for other operations.
      length: number of iterations of a scan; 0 for other operations.
      reverse: True if the scan begins with its last iteration.
    """

    primitive: str
    scope: tuple[str, ...]
    where: str
    inputs: tuple[int, ...]
    body: Frame | None = None
    num_consts: int = 0
    num_carry: int = 0
    length: int = 0
    reverse: bool = False


@dataclasses.dataclass
class Frame:
    """Record of an evaluated program, or of the body of a loop or a `shard_map`. The ids of its values are 0, 1, ...

    Attributes:
      arguments, results: value ids of the arguments and results.
      operations: the operations in the order in which they are executed.
      producers: {value id: (index of the operation that computes the value, position among this operation's results)}.
      flagged: {value id: index of the value's flag in the array of flags}.
      tags: {name: (value id, number of operations before it)} of the values that `jax.ad_checkpoint.checkpoint_name` named.
    """

    arguments: list[int] = dataclasses.field(default_factory=list)
    results: list[int] = dataclasses.field(default_factory=list)
    operations: list[Operation] = dataclasses.field(default_factory=list)
    producers: dict[int, tuple[int, int]] = dataclasses.field(default_factory=dict)
    flagged: dict[int, int] = dataclasses.field(default_factory=dict)
    tags: dict[str, tuple[int, int]] = dataclasses.field(default_factory=dict)
    num_values: int = 0


def run_with_flags(
    closed: core.ClosedJaxpr, args: Sequence[Any], until: str | None = None, measure: Measure | None = None
) -> tuple[list[Any], PyTree, Frame]:
    """Evaluates a jaxpr, and computes a flag for each of its values. Call it under `jax.jit`.

    Args:
      closed: the jaxpr.
      args: the jaxpr's arguments.
      until: prefix of a `checkpoint_name`. After the first value whose name has this prefix, only the program's results and
        values inside loops or `shard_map` get flags, which saves compile time. None: all values get flags.
      measure: computes the array to record instead of a flag for each floating-point or complex value; None to record flags.

    Returns:
      Three items: the jaxpr's results, the flags, and the `Frame` that describes the flagged program. The flags are a dict
      {'own': int32 [flagged values], 'bodies': {index of a loop or `shard_map` operation: dict with the flags of its body}}.
      In the dict of a loop's body, dimension 0 of each array is the iteration.
    """
    recorder = _Recorder(measure or _flag, until)
    consts = [recorder.value(x) for x in closed.consts]
    ids = recorder.arguments(args)
    results, recorder.frame.results = _run(closed.jaxpr, list(closed.consts), args, consts, ids, recorder, ())
    for number, x in zip(recorder.frame.results, results, strict=True):
        recorder.flag(number, x)
    return results, recorder.flags(), recorder.frame


class _Recorder:
    """Records the values of one `Frame` while it is evaluated, and their flags as traced arrays."""

    def __init__(self, measure: Measure, until: str | None = None) -> None:
        self.frame = Frame()
        self.measure = measure
        self._until = until
        self._flagging = True
        self._flags: list[jax.Array] = []
        self.bodies: dict[str, PyTree] = {}

    def value(self, x: Any, primitive: str = "") -> int:
        number = self.frame.num_values
        self.frame.num_values += 1
        if self._flagging:
            self.flag(number, x, primitive)
        return number

    def flag(self, number: int, x: Any, primitive: str = "") -> None:
        """Computes the flag of a value, e.g. whether it is finite, with `measure`, and stores it under the value's `number`.

        Does nothing for literals, integers and empty arrays, and for values that have a flag.
        """
        if number in self.frame.flagged or number == LITERAL:
            return
        if jnp.issubdtype(getattr(x, "dtype", jnp.int32), jnp.inexact) and jnp.size(x):
            measured = self.measure(x, primitive)
            if measured is not None:
                self.frame.flagged[number] = len(self._flags)
                self._flags.append(measured)

    def tag(self, name: str, number: int) -> None:
        self.frame.tags[name] = (number, len(self.frame.operations))
        if self._until is not None and name.startswith(self._until):
            self._flagging = False

    def arguments(self, args: Sequence[Any]) -> list[int]:
        self.frame.arguments = [self.value(x) for x in args]
        return self.frame.arguments

    def operation(self, operation: Operation, results: Sequence[Any]) -> list[int]:
        index = len(self.frame.operations)
        self.frame.operations.append(operation)
        ids = [self.value(x, operation.primitive) for x in results]
        self.frame.producers.update({number: (index, position) for position, number in enumerate(ids)})
        return ids

    def flags(self) -> PyTree:
        own = jnp.stack(self._flags) if self._flags else jnp.zeros((0,), jnp.int32)
        return {"own": own, "bodies": self.bodies}


def _flag(x: jax.Array, primitive: str) -> jax.Array:
    del primitive
    flags = jnp.where(jnp.isnan(x), NAN, jnp.where(jnp.isinf(x), INFINITE, FINITE))
    return jnp.max(flags).astype(jnp.int32)


def _run(
    jaxpr: Any,
    consts: Sequence[Any],
    args: Sequence[Any],
    const_ids: Sequence[int],
    arg_ids: Sequence[int],
    recorder: _Recorder,
    scope: tuple[str, ...],
) -> tuple[list[Any], list[int]]:
    variables = [*jaxpr.constvars, *jaxpr.invars]
    env = dict(zip(variables, zip([*consts, *args], [*const_ids, *arg_ids], strict=True), strict=True))

    def read(var: Any) -> tuple[Any, int]:
        return (var.val, LITERAL) if isinstance(var, core.Literal) else env[var]

    for eqn in jaxpr.eqns:
        values, ids = map(list, zip(*map(read, eqn.invars), strict=True)) if eqn.invars else ([], [])
        inner = (*scope, *str(eqn.source_info.name_stack).split("/"))
        with source_of(eqn):
            results, found = _one(eqn, values, ids, recorder, inner)
        env.update(zip(eqn.outvars, zip(results, found, strict=True), strict=True))
    pairs = [read(var) for var in jaxpr.outvars]
    return [value for value, _ in pairs], [number for _, number in pairs]


def _one(
    eqn: Any, values: list[Any], ids: list[int], recorder: _Recorder, scope: tuple[str, ...]
) -> tuple[list[Any], list[int]]:
    name, params = eqn.primitive.name, eqn.params
    if name in _CALLS:
        inner = params.get("jaxpr") or params["call_jaxpr"]
        closed = inner if isinstance(inner, core.ClosedJaxpr) else core.ClosedJaxpr(inner, ())
        if name in REMAT and params["prevent_cse"]:
            # As JAX does: otherwise the compiler would keep the first pass instead of computing it again.
            values = list(lax.optimization_barrier(tuple(values))) if values else values
        const_ids = [recorder.value(x) for x in closed.consts]
        return _run(closed.jaxpr, list(closed.consts), values, const_ids, ids, recorder, scope)
    if name == "scan" and params["length"]:
        return _scan(eqn, values, ids, recorder, scope)
    if name == "shard_map":
        return _shard_map(eqn, values, ids, recorder, scope)
    results = bind(eqn, values)
    if name == "name":
        recorder.tag(params["name"], ids[0])
    if name == "optimization_barrier":
        return results, ids
    if name in _MOVES or _widens(eqn):
        return results, ids[:1]
    operation = Operation(name, scope, source_info_util.summarize(eqn.source_info), tuple(ids))
    return results, recorder.operation(operation, results)


def _widens(eqn: Any) -> bool:
    """Returns True for a conversion to a floating-point type with at least the same range, so that finite values stay finite."""
    if eqn.primitive.name != "convert_element_type":
        return False
    old, new = eqn.invars[0].aval.dtype, eqn.params["new_dtype"]
    both_floating = jnp.issubdtype(old, jnp.floating) and jnp.issubdtype(new, jnp.floating)
    return both_floating and bool(jnp.finfo(new).max >= jnp.finfo(old).max)


def _scan(
    eqn: Any, values: list[Any], ids: list[int], recorder: _Recorder, scope: tuple[str, ...]
) -> tuple[list[Any], list[int]]:
    params, body = eqn.params, eqn.params["jaxpr"]
    num_consts, num_carry = scan_sizes(params)
    consts, rest = values[:num_consts], values[num_consts:]
    frames: list[Frame] = []  # JAX may trace a body twice; the last one counts

    def step(carry: list[Any], parts: list[Any]) -> tuple[list[Any], tuple[list[Any], PyTree]]:
        inside = _Recorder(recorder.measure)
        args = [*consts, *carry, *parts]
        const_ids = [inside.value(x) for x in body.consts]
        arg_ids, within = inside.arguments(args), (*scope, ITERATION)
        found, inside.frame.results = _run(body.jaxpr, list(body.consts), args, const_ids, arg_ids, inside, within)
        frames.append(inside.frame)
        return found[:num_carry], (found[num_carry:], inside.flags())

    carry, (stacked, flags) = lax.scan(
        step,
        rest[:num_carry],
        rest[num_carry:],
        length=params["length"],
        reverse=params["reverse"],
        unroll=params["unroll"],
    )
    recorder.bodies[str(len(recorder.frame.operations))] = flags
    where = source_info_util.summarize(eqn.source_info)
    sizes = (num_consts, num_carry, params["length"], params["reverse"])
    operation = Operation("scan", scope, where, tuple(ids), frames[-1], *sizes)
    results = [*carry, *stacked]
    return results, recorder.operation(operation, results)


def _shard_map(
    eqn: Any, values: list[Any], ids: list[int], recorder: _Recorder, scope: tuple[str, ...]
) -> tuple[list[Any], list[int]]:
    params = eqn.params
    # JAX 0.10.2 has renamed this parameter.
    axes = tuple(params["newly_manual_axes"] if "newly_manual_axes" in params else params["manual_axes"])
    frames: list[Frame] = []

    def body(*args: Any) -> tuple[list[Any], PyTree]:
        inside = _Recorder(recorder.measure)
        arg_ids = inside.arguments(args)
        found, inside.frame.results = _run(params["jaxpr"], (), args, (), arg_ids, inside, scope)
        frames.append(inside.frame)
        return found, jax.tree.map(lambda x: x[None], inside.flags())

    results, flags = jax.shard_map(
        body,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=(list(params["out_specs"]), PartitionSpec(axes)),
        axis_names=set(axes),
        check_vma=params["check_vma"],
    )(*values)
    flags = jax.tree.map(lambda x: jnp.max(x, axis=0), flags)  # maximum over all devices
    recorder.bodies[str(len(recorder.frame.operations))] = flags
    where = source_info_util.summarize(eqn.source_info)
    operation = Operation("shard_map", scope, where, tuple(ids), frames[-1])
    return results, recorder.operation(operation, results)
