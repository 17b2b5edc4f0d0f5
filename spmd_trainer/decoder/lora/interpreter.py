"""Evaluates a model's jaxpr with adapted weights in place of arrays.

Operations that read no adapted weight are bound unchanged. Loops, branches and rematerialized functions that read adapted
weights are rebuilt in the same form: a scan stays a scan, and a `jax.checkpoint` keeps its policy.
"""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax

from spmd_trainer.decoder.lora import adapted_weight, products
from spmd_trainer.decoder.lora.adapted_weight import AdaptedWeight
from spmd_trainer.errors import UserError
from spmd_trainer.sharding.even_rules import bind
from spmd_trainer.sharding.jaxprs import PLAIN_CALLS, REMAT, called, equations, scan_sizes, source_of
from spmd_trainer.step import tracked_dims as dims
from spmd_trainer.step.matrix_uses import GROUPED


def is_adapted(x: Any) -> bool:
    return isinstance(x, AdaptedWeight)


@dataclasses.dataclass
class Interpreter:
    """Evaluates jaxprs with adapted weights.

    Attributes:
      on_merge: called with (path of a weight, name of an operation) if the operation needs the weight merged with its adapters.
      dropout: probability of dropping an element of the adapters' input.
      key: PRNG key of the dropout masks; None for no dropout.
      rows: int32 [rows], index of each batch row's adapter, -1 for none; None if all rows use the same adapter.
      multiplied: a list that records each product with an adapted weight: (its path, shape of the other operand); or None.
    """

    on_merge: Callable[[str, str], None]
    dropout: float = 0.0
    key: jax.Array | None = None
    rows: jax.Array | None = None
    multiplied: list[tuple[str, tuple[int, ...]]] | None = None
    _num_keys: int = 0

    def run(self, jaxpr: Any, consts: Sequence[Any], args: Sequence[Any]) -> list[Any]:
        """Evaluates a jaxpr and returns its results. Arguments and results may be adapted weights."""
        env: dict[Any, Any] = {}

        def read(var: Any) -> Any:
            return var.val if isinstance(var, jax.extend.core.Literal) else env[var]

        env.update(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *args], strict=True))
        last_use = {var: i for i, eqn in enumerate(jaxpr.eqns) for var in eqn.invars if not hasattr(var, "val")}
        kept = {var for var in jaxpr.outvars if not hasattr(var, "val")}
        for i, eqn in enumerate(jaxpr.eqns):
            values = [read(var) for var in eqn.invars]
            with source_of(eqn):
                found = self._one(eqn, values) if any(map(is_adapted, values)) else bind(eqn, values)
            env.update(zip(eqn.outvars, found, strict=True))
            for var in {v for v in eqn.invars if not hasattr(v, "val")}:
                if last_use[var] == i and var not in kept:
                    del env[var]  # outside of jit, this frees the array's memory as early as possible
        return [read(var) for var in jaxpr.outvars]

    def _one(self, eqn: Any, values: list[Any]) -> list[Any]:
        name, params = eqn.primitive.name, eqn.params
        if name == "dot_general":
            return [self._product(eqn, *values)]
        if name == GROUPED:
            return [self._grouped(eqn, *values)]
        if name in PLAIN_CALLS:
            return self.run(*called(eqn), values)
        if name in REMAT:
            inside = self._inside(self._fresh_key())
            run = jax.checkpoint(
                lambda *args: inside.run(params["jaxpr"], (), args),
                policy=_for_base_only(params["policy"], params["jaxpr"]),
                prevent_cse=params["prevent_cse"],
            )
            return list(run(*values))
        if name == "scan":
            return self._scan(eqn, values)
        if name == "while":
            return self._while(eqn, values)
        if name == "cond":
            return self._cond(eqn, values)
        return self._moved(eqn, values)

    def _moved(self, eqn: Any, values: list[Any]) -> list[Any]:
        weight, *others = values
        if is_adapted(weight) and not any(map(is_adapted, others)):
            moves = [dims.Move(weight.dims)] if is_gather(eqn) else dims.moves(eqn, weight.dims)
            if moves is not None and all(map(weight.follows, moves)):
                arrays = bind(eqn, [weight.w, *others])
                return [weight.moved(w, move, others) for w, move in zip(arrays, moves, strict=True)]
        return bind(eqn, self._merged(values, eqn.primitive.name))

    def _merged(self, values: Sequence[Any], operation: str) -> list[Any]:
        for value in values:
            if is_adapted(value):
                self.on_merge(value.path, operation)
        return [adapted_weight.merge(value) if is_adapted(value) else value for value in values]

    def _product(self, eqn: Any, left: Any, right: Any) -> jax.Array:
        if is_adapted(left) and is_adapted(right):
            (right,) = self._merged([right], "dot_general with another target")
        weight, x = (left, right) if is_adapted(left) else (right, left)
        if self.multiplied is not None:
            self.multiplied.append((weight.path, x.shape))
        found: Any = products.multiply(
            x,
            weight,
            eqn.params,
            weight_is_left=is_adapted(left),
            drop=self._dropper(weight.path),
            rows=self.rows,
        )
        if found is None:
            found = bind(eqn, self._merged([left, right], "dot_general of another form"))[0]
        return cast(jax.Array, found)

    def _grouped(self, eqn: Any, rows: Any, weight: Any, sizes: jax.Array, *pair: jax.Array) -> jax.Array:
        """Evaluates a `grouped_dot`, which multiplies each row by its expert's weight. Each expert has its own adapter."""
        found = None
        if not is_adapted(rows):
            found = products.multiply_grouped(
                rows,
                weight,
                sizes,
                eqn,
                drop=self._pairs_dropper(weight.path, *pair),
                chosen=self._adapters_of_pairs(weight.path, eqn.params["split"].num_pairs, *pair),
            )
        if found is None:
            found = bind(eqn, self._merged([rows, weight, sizes, *pair], eqn.primitive.name))[0]
        return cast(jax.Array, found)

    def _adapters_of_pairs(self, path: str, num_pairs: int, pair: jax.Array | None = None) -> jax.Array | None:
        """Returns the adapter index of each row of a `grouped_dot`: that of its token's batch row. None with one adapter."""
        if self.rows is None:
            return None
        if pair is None:
            raise UserError(
                f"task.lora.adapters: the model multiplies {path} by grouped_dot without pair=, which tells the rows of the "
                "batch from each other; give it and num_pairs=, as token_groups.sort returns them"
            )
        if self.multiplied is not None:
            self.multiplied.append((path, (num_pairs,)))
        return self.rows[pair // max(1, num_pairs // self.rows.shape[0])]

    def _scan(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        body, (num_consts, num_carry) = params["jaxpr"], scan_sizes(params)
        consts, carry, xs = (
            values[:num_consts],
            self._merged(values[num_consts : num_consts + num_carry], "scan carry"),
            values[num_consts + num_carry :],
        )
        key = self._fresh_key()
        stacked = [_stacked(x) or self._merged([x], "scan")[0] if is_adapted(x) else x for x in xs]

        def step(carry: list[Any], x: tuple[jax.Array, list[Any]]) -> tuple[list[Any], list[Any]]:
            index, parts = x
            inside = self._inside(None if key is None else jax.random.fold_in(key, index))
            found = inside.run(body.jaxpr, body.consts, [*consts, *carry, *parts])
            found = inside._merged(found, "scan result")
            return found[:num_carry], found[num_carry:]

        indices = jnp.arange(params["length"], dtype=jnp.uint32)
        new_carry, ys = lax.scan(
            step,
            carry,
            (indices, stacked),
            length=params["length"],
            reverse=params["reverse"],
            unroll=params["unroll"],
        )
        return [*new_carry, *ys]

    def _while(self, eqn: Any, values: list[Any]) -> list[Any]:
        params = eqn.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        cond_consts, body_consts = values[:num_cond], values[num_cond : num_cond + num_body]
        carry = self._merged(values[num_cond + num_body :], "while carry")
        # A loop of unknown length can't be differentiated, so it needs no dropout.
        inside = self._inside(None)

        def cond(carry: Iterable[Any]) -> Any:
            jaxpr = params["cond_jaxpr"]
            return inside.run(jaxpr.jaxpr, jaxpr.consts, [*cond_consts, *carry])[0]

        def body(carry: Iterable[Any]) -> list[Any]:
            jaxpr = params["body_jaxpr"]
            return inside._merged(inside.run(jaxpr.jaxpr, jaxpr.consts, [*body_consts, *carry]), "while result")

        return list(lax.while_loop(cond, body, carry))

    def _cond(self, eqn: Any, values: list[Any]) -> list[Any]:
        index, *operands = values
        key = self._fresh_key()

        def branch(jaxpr: Any) -> Callable[..., list[Any]]:
            def run(*args: Any) -> list[Any]:
                inside = self._inside(key)
                return inside._merged(inside.run(jaxpr.jaxpr, jaxpr.consts, args), "cond result")

            return run

        return list(lax.switch(index, [branch(jaxpr) for jaxpr in eqn.params["branches"]], *operands))

    def _inside(self, key: jax.Array | None) -> Interpreter:
        """Returns an interpreter with a different dropout key, for an inner jaxpr such as a loop's body."""
        return dataclasses.replace(self, key=key, _num_keys=0)

    def _fresh_key(self) -> jax.Array | None:
        self._num_keys += 1
        return None if self.key is None else jax.random.fold_in(self.key, self._num_keys)

    def _mask_key(self, path: str) -> jax.Array | None:
        key = self._fresh_key()
        return None if key is None or not self.dropout else jax.random.fold_in(key, zlib.crc32(path.encode()))

    def _dropper(self, path: str) -> Callable[[jax.Array], jax.Array]:
        key = self._mask_key(path)
        return lambda x: x if key is None else self._masked(x, jax.random.bernoulli(key, 1 - self.dropout, x.shape))

    def _pairs_dropper(self, path: str, pair: jax.Array | None = None) -> Callable[[jax.Array], jax.Array]:
        """Returns the dropout function for the rows of a `grouped_dot`.

        A row's mask depends on its (token, expert) pair instead of its index, because the order of the rows depends on the mesh.
        """
        key = self._mask_key(path)
        if key is None:
            return lambda x: x
        if pair is None:
            raise UserError(
                f"task.lora.dropout: the model multiplies {path} by grouped_dot without pair=, which the masks follow from; give "
                "it, as token_groups.sort returns it, or set dropout=0"
            )
        # With other kinds of keys, such as rbg, numbers drawn for a batch of keys differ from those drawn for each key alone.
        seed = jax.random.key(jax.random.bits(key), impl="threefry2x32")

        def drop(x: jax.Array) -> jax.Array:
            def of_row(pair: jax.Array) -> jax.Array:
                return jax.random.bernoulli(jax.random.fold_in(seed, pair), 1 - self.dropout, x.shape[-1:])

            return self._masked(x, jnp.vectorize(of_row, signature="()->(k)")(pair))

        return drop

    def _masked(self, x: jax.Array, kept: jax.Array) -> jax.Array:
        return jnp.where(kept, x / (1 - self.dropout), jnp.zeros((), x.dtype))


def _stacked(weight: AdaptedWeight) -> AdaptedWeight | None:
    """Prepares a weight for a scan over its dimension 0, so that slicing its arrays gives the adapted weight of one step.

    In the adapters' arrays, the scanned dimension is moved to the front, and its name is removed. Returns None if an adapter
    matrix lacks this dimension.
    """
    name = weight.dims[0].name
    if name not in weight.a.names or name not in weight.b.names:
        return None

    def front(factor: Any) -> Any:
        if factor is None:
            return None
        names = tuple(n for n in factor.names if n != name)
        return adapted_weight.Factor(factor.arranged([name, *names]), names)

    parts = {part: front(getattr(weight, part)) for part in ("a", "b", "magnitude", "gain")}
    return dataclasses.replace(weight, dims=weight.dims[1:], **parts)


def _for_base_only(policy: Callable[..., Any] | None, jaxpr: Any) -> Callable[..., Any] | None:
    """Returns a `jax.checkpoint` policy like `policy`, except that it saves no matrix products of the adapters.

    Otherwise a policy that saves matrix products would save three of them for each weight.
    """
    if policy is None:
        return None
    products = (eqn for eqn in equations(jaxpr) if eqn.primitive.name == "dot_general")
    known = {_signature(eqn.params, [var.aval for var in eqn.invars]) for eqn in products}

    def keeps(primitive: Any, *avals: Any, **params: Any) -> Any:
        if primitive.name == "dot_general" and _signature(params, avals) not in known:
            return False
        return policy(primitive, *avals, **params)

    return keeps


def _signature(params: Mapping[str, Any], avals: Sequence[Any]) -> Any:
    return params["dimension_numbers"], tuple(aval.shape for aval in avals)


def is_gather(eqn: Any) -> bool:
    """Returns True for an equation that all-gathers a sharded variable (one operand, one result)."""
    if eqn.primitive.name == "all_gather":
        return bool(eqn.params["tiled"])
    if eqn.primitive.name != "custom_vjp_call" or len(eqn.invars) != 1 or len(eqn.outvars) != 1:
        return False
    names = {inner.primitive.name for inner in eqn.params["call_jaxpr"].jaxpr.eqns}
    return "all_gather" in names and names <= {"all_gather", "slice", "convert_element_type", "jit", "pjit", "copy"}
