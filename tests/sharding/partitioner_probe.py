"""Tiny programs on a mesh, split at random, forward and backward: does XLA compute what one device does?

    python tests/sharding/partitioner_probe.py 4000 [first seed]         plain JAX: what docs/partitioner_faults.md lists
    python tests/sharding/partitioner_probe.py 4000 [first seed] evenly  as the trainer runs them: nothing may differ

XLA aborts the process on some programs, so they run in processes of their own, one after the other.
"""

from __future__ import annotations

import collections
import dataclasses
import os
import random
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

if __name__ == "__main__":
    os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding.even_program import evenly

MESHES = [(2, 2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (8,)]
SIZES, EVEN_SIZES = [1, 2, 3, 5, 7, 8, 9, 10, 12, 13], [8, 12, 24]
CHEAP = {"xla_backend_optimization_level": 0}
TOLERANCE = 1e-4


@dataclasses.dataclass(frozen=True)
class Op:
    """An operation.

    Attributes:
      fn: of the operands.
      shapes: (n, k, c) -> shapes of the operands.
      below: (n, k, c) -> indices of integer operands are below this; None: all operands are floats.
    """

    fn: Callable[..., jax.Array]
    shapes: Callable[[int, int, int], Sequence[tuple[int, ...]]]
    integers: tuple[int, ...] = ()
    below: Callable[[int, int, int], int] = lambda n, k, c: n


def _convolution(x: jax.Array, w: jax.Array, groups: int = 1) -> jax.Array:
    numbers = ("NHC", "HIO", "NHC")
    return lax.conv_general_dilated(x, w, (1,), "SAME", dimension_numbers=numbers, feature_group_count=groups)


def _normalised(x: jax.Array, dim: int) -> jax.Array:
    return (x - x.mean(dim, keepdims=True)) / jnp.sqrt(x.var(dim, keepdims=True) + 1e-2)


def _loss(x: jax.Array, i: jax.Array) -> jax.Array:
    return -jnp.take_along_axis(jax.nn.log_softmax(x), i[:, None], 1)[:, 0]


def _attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k)), v)


def _recurrent(x: jax.Array, w: jax.Array) -> jax.Array:
    w = w / np.sqrt(w.shape[0])  # else 24 steps make a rounding error large
    return lax.scan(lambda h, r: (jnp.tanh(h @ w + r), h), jnp.zeros(x.shape[1:]), x)[1]


def _matrix(n: int, k: int, c: int) -> list[tuple[int, ...]]:
    return [(n, c)]


_M = _matrix
OPS: dict[str, Op] = {
    "gather": Op(lambda t, i: t[i], lambda n, k, c: [(n, c), (k,)], (1,)),
    "gather of a matrix of indices": Op(lambda t, i: t[i], lambda n, k, c: [(n, c), (k, 3)], (1,)),
    "gather of columns": Op(lambda t, i: t[:, i], lambda n, k, c: [(n, c), (k,)], (1,), lambda n, k, c: c),
    "gather in each row": Op(
        lambda x, i: jnp.take_along_axis(x, i, 1), lambda n, k, c: [(n, c), (n, k)], (1,), lambda n, k, c: c
    ),
    "gather, mapped": Op(jax.vmap(lambda t, i: t[i]), lambda n, k, c: [(n, k, c), (n, 4)], (1,), lambda n, k, c: k),
    "scatter-add": Op(lambda t, i, u: t.at[i].add(u), lambda n, k, c: [(n, c), (k,), (k, c)], (1,)),
    "scatter-add, mapped": Op(
        jax.vmap(lambda t, i, u: t.at[i].add(u)),
        lambda n, k, c: [(n, k, c), (n, 4), (n, 4, c)],
        (1,),
        lambda n, k, c: k,
    ),
    "scatter-max": Op(lambda t, i, u: t.at[i].max(u), lambda n, k, c: [(n, c), (k,), (k, c)], (1,)),
    "segment sum": Op(
        lambda u, i: jax.ops.segment_sum(u, i, 7), lambda n, k, c: [(n, c), (n,)], (1,), lambda n, k, c: 7
    ),
    "histogram": Op(lambda i, w: jnp.zeros(7).at[i].add(w), lambda n, k, c: [(n,), (n,)], (0,), lambda n, k, c: 7),
    "matrix product": Op(lambda x, w: x @ w, lambda n, k, c: [(n, k), (k, c)]),
    "product of rank 3": Op(lambda x, w: x @ w, lambda n, k, c: [(n, 3, k), (k, c)]),
    "batched product": Op(lambda x, w: x @ w, lambda n, k, c: [(n, 4, k), (n, k, c)]),
    "product over rows": Op(lambda x, y: x.T @ y, lambda n, k, c: [(n, k), (n, c)]),
    "one-hot product": Op(
        lambda i, w: jax.nn.one_hot(i, w.shape[0]) @ w, lambda n, k, c: [(n,), (k, c)], (0,), lambda n, k, c: k
    ),
    "attention": Op(_attention, lambda n, k, c: [(n, 4, c), (n, k, c), (n, k, c)]),
    "sum over rows": Op(lambda x: x.sum(0), _M),
    "mean": Op(lambda x: x.mean(), _M),
    "maximum": Op(lambda x: x.max(0), _M),
    "product of elements": Op(lambda x: x.prod(1), _M),
    "log-sum-exp": Op(lambda x: jax.nn.logsumexp(x, 0), _M),
    "arg max": Op(lambda x: jnp.argmax(x, 0), _M),
    "norm over rows": Op(lambda x: _normalised(x, 0), _M),
    "norm over features": Op(lambda x: _normalised(x, 1), _M),
    "cross entropy": Op(_loss, lambda n, k, c: [(n, c), (n,)], (1,), lambda n, k, c: c),
    "concatenate rows": Op(lambda x, y: jnp.concatenate([x, y], 0), lambda n, k, c: [(n, c), (k, c)]),
    "concatenate features": Op(lambda x, y: jnp.concatenate([x, y], 1), lambda n, k, c: [(n, c), (n, k)]),
    "slice": Op(lambda x: x[1:-2], lambda n, k, c: [(n + 3, c)]),
    "strided slice": Op(lambda x: x[::2], _M),
    "roll": Op(lambda x: jnp.roll(x, 1, 0), _M),
    "reverse": Op(lambda x: x[::-1], _M),
    "pad": Op(lambda x: jnp.pad(x, ((1, 2), (0, 1))), _M),
    "merge dimensions": Op(lambda x: x.reshape(-1, x.shape[-1]), lambda n, k, c: [(n, k, c)]),
    "flatten": Op(lambda x: x.reshape(-1), _M),
    "divide a dimension": Op(lambda x: x.reshape(x.shape[0] // 2, 2, -1), lambda n, k, c: [(2 * n, c)]),
    "transpose": Op(lambda x: x.T, _M),
    "sort rows": Op(lambda x: jnp.sort(x, 0), _M),
    "sort features": Op(lambda x: jnp.sort(x, 1), _M),
    "arg sort": Op(lambda x: jnp.argsort(x, 0), _M),
    "top-k": Op(lambda x: lax.top_k(x, 3)[0], lambda n, k, c: [(n, c + 2)]),
    "cumulative sum": Op(lambda x: jnp.cumsum(x, 0), _M),
    "cumulative maximum": Op(lambda x: lax.cummax(x, axis=0), _M),
    "cumulative log-sum-exp": Op(lambda x: lax.cumlogsumexp(x, axis=0), _M),
    "scan over rows": Op(_recurrent, lambda n, k, c: [(n, c), (c, c)]),
    "scan over time": Op(_recurrent, lambda n, k, c: [(4, n, c), (c, c)]),
    "scan over layers": Op(
        lambda x, w: lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, w)[0], lambda n, k, c: [(n, c), (3, c, c)]
    ),
    "convolution": Op(_convolution, lambda n, k, c: [(n, 6, c), (3, c, k)]),
    "convolution of a long row": Op(_convolution, lambda n, k, c: [(2, n, c), (3, c, k)]),
    "convolution by features": Op(lambda x, w: _convolution(x, w, x.shape[2]), lambda n, k, c: [(n, 6, c), (3, 1, c)]),
    "max pool": Op(lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (2, 1), (1, 1), "SAME"), _M),
    "dynamic slice": Op(lambda x, i: lax.dynamic_slice_in_dim(x, i[0], 3, 0), lambda n, k, c: [(n + 3, c), (1,)], (1,)),
    "dynamic update": Op(
        lambda x, u, i: lax.dynamic_update_slice_in_dim(x, u, i[0], 0),
        lambda n, k, c: [(n + 3, c), (3, c), (1,)],
        (2,),
    ),
    "select": Op(lambda x, y: jnp.where(x > y, x, y), lambda n, k, c: [(n, c), (n, c)]),
    "repeat": Op(lambda x, y: x[:, None] + y[None], lambda n, k, c: [(n, c), (k, c)]),
    "times positions": Op(lambda x: x * jnp.arange(x.shape[0])[:, None], _M),
    "random numbers": Op(lambda x: x * jax.random.uniform(jax.random.key(0), x.shape), _M),
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A program: an operation, its operands and how they are split.

    Attributes:
      name: the operation's.
      sizes: of the mesh.
      args: operands.
      specs: of the operands.
      result: spec of the result.
      divides: whether all axes divide all dimensions that they split.
    """

    name: str
    sizes: tuple[int, ...]
    args: list[np.ndarray]
    specs: list[PartitionSpec]
    result: PartitionSpec
    divides: bool

    def __str__(self) -> str:
        shapes = [x.shape for x in self.args]
        return f"{self.name} on {self.sizes}: {shapes} {self.specs} -> {self.result}"


def draw(seed: int, name: str | None = None) -> Case:
    """Draws a program."""
    rng, values = random.Random(seed), np.random.default_rng(seed)
    name, sizes, divides = name or rng.choice(sorted(OPS)), rng.choice(MESHES), rng.random() < 0.4
    n, k, c = (rng.choice(EVEN_SIZES if divides else SIZES) for _ in range(3))
    op = OPS[name]
    args = [
        values.integers(0, op.below(n, k, c), shape).astype(np.int32)
        if number in op.integers
        else values.normal(size=shape).astype(np.float32)
        for number, shape in enumerate(op.shapes(n, k, c))
    ]
    result = jax.eval_shape(op.fn, *args).shape
    specs = [_spec(rng, x.shape, sizes, divides) for x in args]
    return Case(name, sizes, args, specs, _spec(rng, result, sizes, divides), divides)


def _spec(rng: random.Random, shape: Sequence[int], sizes: Sequence[int], divides: bool) -> PartitionSpec:
    free = rng.sample(range(len(sizes)), len(sizes))
    entries: list[Any] = [None] * len(shape)
    for dim in rng.sample(range(len(shape)), len(shape)):
        taken = [free.pop() for _ in range(min(rng.choice([0, 1, 1, 2]), len(free)))]
        if divides and shape[dim] % int(np.prod([sizes[axis] for axis in taken])):
            continue
        entries[dim] = tuple(f"axis{axis}" for axis in taken) or None
    return PartitionSpec(*entries)


def mesh_of(sizes: Sequence[int]) -> Mesh:
    """Returns a mesh with the axes axis0, axis1, ..."""
    devices = np.array(jax.devices()[: int(np.prod(sizes))]).reshape(sizes)
    return Mesh(devices, [f"axis{n}" for n in range(len(sizes))], axis_types=(AxisType.Auto,) * len(sizes))


def program(case: Case, mesh: Mesh | None) -> Callable[..., list[jax.Array]]:
    """Returns the operation and its gradients by all float operands, with constraints if there is a mesh."""
    op = OPS[case.name]
    floats = [number for number in range(len(case.args)) if number not in op.integers]

    def split(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        return x if mesh is None else lax.with_sharding_constraint(x, NamedSharding(mesh, spec))

    def run(*args: jax.Array) -> list[jax.Array]:
        args = tuple(split(x, spec) for x, spec in zip(args, case.specs, strict=True))

        def total(values: list[jax.Array]) -> tuple[jax.Array, jax.Array]:
            given = list(args)
            for number, x in zip(floats, values, strict=True):
                given[number] = x
            y = split(op.fn(*given), case.result)
            weights = jnp.cos(jnp.arange(y.size, dtype=jnp.float32)).reshape(y.shape)
            return jnp.sum(y.astype(jnp.float32) * weights), y

        if not floats:
            return [total([])[1]]
        (_, y), grads = jax.value_and_grad(total, has_aux=True)([args[number] for number in floats])
        return [y, *(split(g * 1.0, case.specs[number]) for g, number in zip(grads, floats, strict=True))]

    return run


def errors(case: Case, wrap: Callable[[Any, Mesh], Any] = lambda fn, mesh: fn) -> list[float]:
    """Returns the largest error of the result and of each gradient, relative to 1 + its largest value."""
    mesh = mesh_of(case.sizes)
    replicated = NamedSharding(mesh, PartitionSpec())
    run = jax.jit(wrap(program(case, mesh), mesh), out_shardings=replicated, compiler_options=CHEAP)
    return largest_errors(run(*case.args), jax.jit(program(case, None), compiler_options=CHEAP)(*case.args))


def largest_errors(got: Sequence[Any], wanted: Sequence[Any]) -> list[float]:
    """Returns the largest error of each array; infinity where one is not a number."""
    found = []
    for x, y in zip(got, wanted, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        error = np.max(np.abs(x - y), initial=0) / (1 + np.max(np.abs(y), initial=0))
        found.append(float(error) if np.isfinite(error) else np.inf)
    return found


def _worker(first: int, last: int, wrap: Any) -> None:
    """Prints a line before and a line after each program; the process may end in between."""
    for seed in range(first, last):
        case = draw(seed)
        print(f"begin {seed}", flush=True)
        try:
            worst = max(errors(case, wrap))
            how = "right" if worst <= TOLERANCE else f"WRONG by {worst:.2g}"
        except Exception as error:
            how = f"REFUSED by the compiler: {str(error).splitlines()[0][:80]}"
        print(f"end {seed} {how}", flush=True)


def main(args: Sequence[str]) -> int:
    """Runs the programs, prints those that are not right and a table; returns 1 if there are any."""
    count, first = int(args[0]), int(args[1]) if len(args) > 1 and args[1].isdigit() else 0
    table: collections.Counter[tuple[str, bool, str]] = collections.Counter()
    seed, last = first, first + count
    while seed < last:
        command = [sys.executable, __file__, "worker", str(seed), str(last), *args[-1:]]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
            assert child.stdout is not None
            for line in child.stdout:
                kind, number, *how = line.split(maxsplit=2)
                seed = int(number) + (kind == "end")
                if kind == "end" and how[0].strip() != "right":
                    _count(table, int(number), how[0].strip())
        if child.returncode:
            _count(table, seed, "ABORTS the process")
            seed += 1
    for (name, divides, how), times in sorted(table.items()):
        print(f"{name} | {'divide' if divides else 'uneven'} | {how} | {times}")
    print(f"{count} programs from seed {first}: {sum(table.values())} not right")
    return int(bool(table))


def _count(table: collections.Counter[tuple[str, bool, str]], seed: int, how: str) -> None:
    case = draw(seed)
    print(f"{how}: seed {seed}: {case}", flush=True)
    table[case.name, case.divides, how.split()[0]] += 1


if __name__ == "__main__":
    if sys.argv[1] == "worker":
        _worker(int(sys.argv[2]), int(sys.argv[3]), evenly if sys.argv[-1] == "evenly" else lambda fn, mesh: fn)
        sys.exit(0)
    sys.exit(main(sys.argv[1:]))
