"""Re-evaluates a traced program on padded arrays, so that XLA sees only dimensions that are divisible by their shard counts.

Models see logical shapes, so a training step slices the padding off its variables and its batch. XLA pads such uneven slices
itself, e.g. 17 rows over 4 devices, and then computes some operations wrongly (`docs/partitioner_faults.md`). So the step is
traced on logical shapes, and its operations are then evaluated one by one on padded arrays:

- `slice_off` leaves the array padded, and only its logical shape is recorded;
- a sharding constraint pads each dimension that its mesh axes don't divide;
- each operation's rule (`even_rules`, `even_indexing`) decides which dimensions keep their padding, and where it is masked;
- an operation without a rule gets arrays without padding, and dimensions that had padding are unsharded there;
- `put_back` fills the padding with zeros.

In all sharding constraints, the mesh axes are put in an order for which XLA computes matrix products correctly
(`constraints.computable`). XLA computes some operations wrongly even on evenly sharded arrays: windowed reductions, grouped
convolutions, strided slices. Their dimensions with windows, groups or strides are left unsharded.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.extend
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding import even_indexing, even_products, even_rules, exchange_order
from spmd_trainer.sharding.constraints import (
    AxesPair,
    axes_pairs,
    computable,
    constraints_of,
    own_constraints,
    place_of,
    split_axes,
    uneven,
    unsplit,
)
from spmd_trainer.sharding.even_rules import Rule, bind, without_padding
from spmd_trainer.sharding.even_values import PUT_BACK, SLICE_OFF, Pins, Shape, Value, agreed_axes, padded_sizes
from spmd_trainer.sharding.jaxprs import CALLS, REMAT, called, scan_sizes, source_of
from spmd_trainer.sharding.specs import PyTree, mesh_shape_of

_RULES: dict[str, Rule] = {**even_rules.RULES, **even_indexing.RULES}


def evenly(
    fn: Callable[..., PyTree],
    mesh: Mesh,
    report: Callable[[list[str], list[str]], None] | None = None,
    specs: Sequence[PartitionSpec] = (),
    returns_variables: bool = False,
    others: Sequence[NamedSharding] = (),
) -> Callable[..., PyTree]:
    """Returns a version of `fn` in which XLA sees only evenly sharded arrays (see the module). Call it under `jax.jit`.

    Args:
      fn: a function of pytrees of arrays; it is traced once.
      mesh: the mesh.
      report: called with two lists: the 'file:line' of each sharding constraint in user code; and a warning for each dimension
        that these constraints shard unevenly, and for each dimension that a constraint can't shard. None reports nothing.
      specs: the PartitionSpecs of the variables, which are the first arrays among the arguments. The mesh axes of sharding
        constraints are ordered to suit these specs.
      returns_variables: True if the first results are the new values of the same variables.
      others: the shardings of the other arguments. Used on host (CPU) devices only, to find the arrays that devices may
        exchange (see `exchange_order`).
    """

    @functools.wraps(fn)  # keeps the argument names of the compiled program
    def run(*args: PyTree) -> PyTree:
        closed, shapes = jax.make_jaxpr(fn, return_shape=True)(*args)
        arrays, own = jax.tree.leaves(args), {} if report is None else own_constraints(closed.jaxpr)
        if mesh.size > 1 and mesh.devices.flat[0].platform == "cpu":
            shardings = [*(NamedSharding(mesh, spec) for spec in specs), *others]
            closed = exchange_order.ordered(closed, shardings, len(specs))
        constraints = [
            sharding.spec for _, sharding in constraints_of(closed.jaxpr) if isinstance(sharding, NamedSharding)
        ]
        pairs = axes_pairs([*specs, *constraints], mesh_shape_of(mesh))
        split = [split_axes(spec, x.ndim) for spec, x in zip(specs, arrays, strict=False)]
        asked = even_products.asked_splits(closed.jaxpr, split if returns_variables else ())
        program = EvenProgram(Pins(mesh), pairs, asked)
        if report is not None:
            whole = unsplit(constraints, mesh_shape_of(mesh), pairs)
            report(list(own), [*(note for notes in own.values() for note in notes), *whole])
        if program.changes(closed.jaxpr):
            given = [program.pins.value(x, axes=axes) for x, axes in itertools.zip_longest(arrays, split)]
            values = program.run(closed.jaxpr, closed.consts, given)
            found = [value.at(value.shape) for value in values]
        else:
            found = jax.extend.core.jaxpr_as_fun(closed)(*arrays)
        return jax.tree.unflatten(jax.tree.structure(shapes), found)

    return run


@dataclasses.dataclass(frozen=True)
class EvenProgram:
    """An interpreter of jaxprs on arrays that may have padding (`Value`s).

    Attributes:
      pins: makes `Value`s, and constrains dimensions to be unsharded.
      pairs: the `axes_pairs` of the program's arrays, for `constraints.computable`.
      asked: the shardings that the program requests for the results of its products, from `even_products.asked_splits`.
    """

    pins: Pins
    pairs: frozenset[AxesPair] = frozenset()
    asked: Mapping[int, even_products.Splits] = dataclasses.field(default_factory=dict)

    def changes(self, jaxpr: Any) -> bool:
        """Returns True if the jaxpr must be re-evaluated, because XLA may compute an operation in it wrongly."""
        return any(self._changes(eqn) for eqn in jaxpr.eqns)

    def _changes(self, eqn: Any) -> bool:
        name, params = eqn.primitive.name, eqn.params
        if _mark_of(eqn):
            return True
        if self.pins.mesh is not None and name == "dot_general":
            sizes, asked = mesh_shape_of(self.pins.mesh), self.asked.get(id(eqn), frozenset())
            return even_products.is_changed(eqn, asked, sizes)
        if name == "sharding_constraint":
            return bool(place_of(eqn)) or self._must_change(params["sharding"], eqn.invars[0].aval.shape)
        if self.pins.mesh is not None and self.pins.mesh.size > 1 and _is_unsafe(name, params):
            return True
        if name == "shard_map":  # each device's own program, which XLA does not partition
            return False
        return any(self.changes(inner) for inner in jax.extend.core.jaxprs_in_params(params))

    def _must_change(self, sharding: Any, shape: Shape) -> bool:
        """Returns True if a constraint's axes don't divide a dimension's size, or if `computable` reorders these axes."""
        if not isinstance(sharding, NamedSharding):
            return False
        order = computable(sharding.spec, mesh_shape_of(sharding.mesh), self.pairs)
        return bool(uneven(sharding, shape)) or order != sharding.spec

    def run(self, jaxpr: Any, consts: Sequence[Any], values: Sequence[Value]) -> list[Value]:
        env: dict[Any, Value] = {}

        def read(var: Any) -> Value:
            return self.pins.value(var.val) if isinstance(var, jax.extend.core.Literal) else env[var]

        given = [*(self.pins.value(x) for x in consts), *values]
        env.update(zip([*jaxpr.constvars, *jaxpr.invars], given, strict=True))
        for eqn in jaxpr.eqns:
            with source_of(eqn):
                found = self._one(eqn, [read(var) for var in eqn.invars])
            env.update(zip(eqn.outvars, found, strict=True))
        return [read(var) for var in jaxpr.outvars]

    def _one(self, eqn: Any, values: list[Value]) -> list[Value]:
        name = eqn.primitive.name
        if _has_keys(eqn) and name not in CALLS and name not in _CONTROL and name != "random_bits":
            return without_padding(self.pins, eqn, values)
        if name == "device_put" and len(values) == 1:
            return [self._like(x, values[0]) for x in bind(eqn, [values[0].array])]
        if name not in CALLS and name not in _CONTROL and _on_host(eqn):
            return without_padding(self.pins, eqn, values)
        mark = _mark_of(eqn)
        if mark == SLICE_OFF:
            return [self.pins.value(values[0].array, eqn.outvars[0].aval.shape, values[0].axes)]
        if mark == PUT_BACK:
            shape = tuple(eqn.outvars[0].aval.shape)
            return [self.pins.value(values[0].masked(range(len(shape)), 0, shape))]
        if name == "sharding_constraint":
            return [self._constrained(eqn, values[0])]
        if name == "optimization_barrier":
            return [self._like(x, v) for x, v in zip(bind(eqn, [v.array for v in values]), values, strict=True)]
        if name == "dot_general":
            x, y = values
            return [even_products.product(self.pins, eqn, x, y, self.asked.get(id(eqn), frozenset()))]
        if name in CALLS:
            return self.run(*called(eqn), values)
        if name in _CONTROL and (any(v.is_padded or not v.is_held for v in values) or self._changes(eqn)):
            return _CONTROL[name](self, eqn, values)
        return _RULES.get(name, without_padding)(self.pins, eqn, values)

    def _like(self, array: jax.Array, value: Value) -> Value:
        """Returns a `Value` that holds `array`, with the logical shape and axes of `value`."""
        return self.pins.value(array, value.shape, value.axes)

    def _constrained(self, eqn: Any, value: Value) -> Value:
        sharding = eqn.params["sharding"]
        if not isinstance(sharding, NamedSharding):
            return without_padding(self.pins, eqn, [value])[0]
        rank, sizes = len(value.shape), mesh_shape_of(sharding.mesh)
        free = {dim for dim, entry in enumerate(sharding.spec) if entry is PartitionSpec.UNCONSTRAINED}
        spec = computable(sharding.spec, sizes, self.pairs)
        axes = split_axes(spec, rank)
        is_own = self.pins.mesh is not None and sizes == mesh_shape_of(self.pins.mesh)
        physical = padded_sizes(value.shape, value.physical, axes, sizes)
        physical = tuple(value.physical[dim] if dim in free else size for dim, size in enumerate(physical))
        kept = NamedSharding(sharding.mesh, spec, memory_kind=sharding.memory_kind)
        array = lax.with_sharding_constraint(value.at(physical), kept)
        known = tuple(None if dim in free or not is_own else over for dim, over in enumerate(axes))
        return self.pins.value(array, value.shape, known)

    def _remat(self, eqn: Any, values: list[Value]) -> list[Value]:
        physical: list[Value] = []

        def inside(*arrays: Any) -> list[Any]:
            given = [self._like(x, v) for x, v in zip(arrays, values, strict=True)]
            found = self.run(eqn.params["jaxpr"], (), given)
            physical[:] = found
            return [v.array for v in found]

        arrays = [v.array for v in values]
        closed = jax.make_jaxpr(inside)(*arrays)
        consts = list(closed.consts)
        if consts:  # a `jax.checkpoint` equation takes no constants

            def with_consts(consts: list[Any], arrays: list[Any]) -> list[Any]:
                fixed = jax.extend.core.ClosedJaxpr(closed.jaxpr, consts)
                return list(jax.extend.core.jaxpr_as_fun(fixed)(*arrays))

            closed = jax.make_jaxpr(with_consts)(consts, arrays)
        again = eqn.params["prevent_cse"]
        if isinstance(again, tuple):
            again = (False,) * len(consts) + again
        found = bind(eqn, [*consts, *arrays], jaxpr=closed.jaxpr, prevent_cse=again)
        return [self._like(x, v) for x, v in zip(found, physical, strict=True)]

    def _scan(self, eqn: Any, values: list[Value]) -> list[Value]:
        params, pins = eqn.params, self.pins
        body, (num_consts, num_carry) = params["jaxpr"], scan_sizes(params)
        consts, carry = values[:num_consts], values[num_consts : num_consts + num_carry]
        stacked = values[num_consts + num_carry :]
        xs = [v.at(v.without_padding_of([0])) for v in stacked]
        fixed = [v.array for v in consts]  # computed here, so that no deferred array is computed in the body

        def inside(carry: Sequence[Value], parts: Sequence[Any]) -> list[Value]:
            slices = [pins.value(x, v.shape[1:], v.axes[1:]) for x, v in zip(parts, stacked, strict=True)]
            given = [self._like(x, v) for x, v in zip(fixed, consts, strict=True)]
            return self.run(body.jaxpr, body.consts, [*given, *carry, *slices])

        first = [jax.ShapeDtypeStruct(x.shape[1:], x.dtype) for x in xs]
        held = self._settled(carry, values, lambda given, parts: inside(given, parts)[:num_carry], first)
        parts: list[Value] = []

        def step(arrays: list[Any], slices: list[Any]) -> tuple[list[Any], list[Any]]:
            given = [self._like(x, v) for x, v in zip(arrays, carry, strict=True)]
            found = inside(given, slices)
            new = [v.at(shape) for v, shape in zip(found[:num_carry], held, strict=True)]
            parts[:] = found[num_carry:]
            return new, [v.array for v in parts]

        arrays = [v.at(shape) for v, shape in zip(carry, held, strict=True)]
        options = {name: params[name] for name in ("length", "reverse", "unroll")}
        arrays, ys = lax.scan(step, arrays, xs, **options)
        new_carry = [self._like(x, v) for x, v in zip(arrays, carry, strict=True)]
        length = params["length"]
        return [
            *new_carry,
            *(pins.value(y, (length, *v.shape), (None, *v.axes)) for y, v in zip(ys, parts, strict=True)),
        ]

    def _while(self, eqn: Any, values: list[Value]) -> list[Value]:
        params, pins = eqn.params, self.pins
        if params["cond_jaxpr"].out_avals[0].shape:  # vmapped: JAX lowers this loop in a special way
            return without_padding(pins, eqn, values)
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = values[:num_cond], values[num_cond : num_cond + num_body]
        carry = values[num_cond + num_body :]
        fixed = {v: v.array for v in (*cond_consts, *body_consts)}

        def inside(which: str, consts: Sequence[Value], carry: Sequence[Value]) -> list[Value]:
            given = [self._like(fixed[v], v) for v in consts]
            return self.run(params[which].jaxpr, params[which].consts, [*given, *carry])

        held = self._settled(carry, values, lambda given, _: inside("body_jaxpr", body_consts, given), [])

        def values_of(arrays: Sequence[Any]) -> list[Value]:
            return [self._like(x, v) for x, v in zip(arrays, carry, strict=True)]

        def cond(arrays: Sequence[Any]) -> Any:
            return inside("cond_jaxpr", cond_consts, values_of(arrays))[0].array

        def step(arrays: Sequence[Any]) -> Sequence[Any]:
            found = inside("body_jaxpr", body_consts, values_of(arrays))
            return [v.at(shape) for v, shape in zip(found, held, strict=True)]

        arrays = [v.at(shape) for v, shape in zip(carry, held, strict=True)]
        return values_of(lax.while_loop(cond, step, arrays))

    def _cond(self, eqn: Any, values: list[Value]) -> list[Value]:
        index, *operands = values
        branches = eqn.params["branches"]

        def inside(branch: Any, arrays: Sequence[Any]) -> list[Value]:
            given = [self._like(x, v) for x, v in zip(arrays, operands, strict=True)]
            return self.run(branch.jaxpr, branch.consts, given)

        arrays, axes = [v.array for v in operands], []

        def measured(branch: Any) -> list[Any]:
            def run(*arrays: Any) -> list[Any]:
                found = inside(branch, arrays)
                axes.append([v.axes for v in found])
                return [v.array for v in found]

            return list(jax.eval_shape(run, *arrays))

        shapes = [measured(branch) for branch in branches]
        held = [tuple(map(max, zip(*(x.shape for x in results), strict=True))) for results in zip(*shapes, strict=True)]

        def branch_of(branch: Any) -> Callable[..., list[Any]]:
            return lambda *a: [v.at(shape) for v, shape in zip(inside(branch, a), held, strict=True)]

        found = lax.switch(index.array, [branch_of(branch) for branch in branches], *arrays)
        agreed = [agreed_axes(several) for several in zip(*axes, strict=True)]
        return [
            self.pins.value(x, var.aval.shape, over) for x, var, over in zip(found, eqn.outvars, agreed, strict=True)
        ]

    def _settled(
        self,
        carry: Sequence[Value],
        operands: Sequence[Value],
        step: Callable[[list[Value], Sequence[Any]], list[Value]],
        others: Sequence[jax.ShapeDtypeStruct],
    ) -> list[Shape]:
        """Returns a physical shape for each array in a loop's carry, which the array can have in all iterations.

        Args:
          carry: the initial carry.
          operands: all operands of the loop.
          step: one iteration: (carry, slices of the scanned arrays) -> new carry.
          others: shapes and dtypes of these slices; empty for a `while` loop.
        """
        held = [v.physical for v in carry]
        if all(v.is_held and not v.is_padded for v in operands):
            return held  # saves a trace of the body
        types = [jax.typeof(v.array) for v in carry]
        while True:

            def probe(arrays: list[Any], others: list[Any]) -> list[Any]:
                given = [self._like(x, v) for x, v in zip(arrays, carry, strict=True)]
                return [v.array for v in step(given, others)]

            arrays = [of.update(shape=shape) for shape, of in zip(held, types, strict=True)]
            found = jax.eval_shape(probe, arrays, list(others))
            new = [tuple(map(max, zip(old, x.shape, strict=True))) for old, x in zip(held, found, strict=True)]
            if new == held:
                return held
            held = new


_CONTROL: Mapping[str, Callable[[EvenProgram, Any, list[Value]], list[Value]]] = {
    **dict.fromkeys(REMAT, EvenProgram._remat),
    "cond": EvenProgram._cond,
    "scan": EvenProgram._scan,
    "while": EvenProgram._while,
}


def _has_keys(eqn: Any) -> bool:
    """Returns True for an operation on PRNG keys, which can't be padded."""
    dtypes = [getattr(var.aval, "dtype", None) for var in (*eqn.invars, *eqn.outvars)]
    return any(dtype is not None and jax.dtypes.issubdtype(dtype, jax.dtypes.extended) for dtype in dtypes)


def _on_host(eqn: Any) -> bool:
    return any(getattr(var.aval, "memory_space", None) == jax.memory.Space.Host for var in (*eqn.invars, *eqn.outvars))


def _mark_of(eqn: Any) -> str | None:
    """Returns SLICE_OFF or PUT_BACK for a call of `slice_off` or `put_back`; None otherwise (also for its derivative)."""
    name = eqn.params.get("name")
    if name not in (SLICE_OFF, PUT_BACK) or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return None
    last = eqn.params["jaxpr"].eqns[-1].primitive.name if eqn.params["jaxpr"].eqns else ""
    return str(name) if last == {SLICE_OFF: "slice", PUT_BACK: "pad"}[name] else None


def _is_unsafe(name: str, params: Mapping[str, Any]) -> bool:
    """Returns True for an operation that XLA may compute wrongly even on evenly sharded arrays."""
    if name == "conv_general_dilated":
        return True
    if name == "slice":
        return any(stride != 1 for stride in params["strides"] or ())
    if name == "pad":
        return any(interior for _, _, interior in params["padding_config"])
    return name.startswith("reduce_window") or name.startswith("select_and_")
