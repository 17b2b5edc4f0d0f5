"""The grouped product of sparse experts: each group of rows times the matrix of its expert.

`grouped_dot` picks a kernel for the device and runs it on each device's part of the arrays. The kernels are:

- `megablox.py`: JAX's grouped product for TPUs.
- `hopper.py`: Pallas kernels for NVIDIA's Hopper GPUs.
- `grouped_blocks.py`: blocks of rows in `jax.numpy`, for every device.

`token_groups.py` sorts tokens by expert, and undoes this. Both modules write all collectives explicitly, because XLA would turn
a sort of all tokens, and the gathers that follow it, into all-gathers of all tokens.

The product is a JAX primitive, so that code that reads programs (LoRA, the planner's count of FLOPs) sees one operation, whatever
kernel computes it.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from contextlib import AbstractContextManager
from typing import Any, Protocol, cast

import jax
import jax.extend
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, mlir
from jax.sharding import AbstractMesh, PartitionSpec

from spmd_trainer.errors import UserError, did_you_mean
from spmd_trainer.kernels import chips, kernels

# The kernels of one platform, tried before 'blocks'.
_OF_PLATFORM = {"tpu": ("megablox",), "cuda": ("hopper",)}
# A part of the names of instructions in compiled programs, before a number; see `GroupedSplit.scope`.
ROWS_OF_PART = "rows_of_part_"
_MODULES = {"megablox": "megablox", "hopper": "hopper", "blocks": "grouped_blocks"}


class GroupedKernel(Protocol):
    """A module that computes grouped products on one device. Products are summed in float32 on one device; sums over devices are
    in the arrays' dtype."""

    def reasons_against(self, rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, platform: str) -> list[str]:
        """Returns the reasons why the kernel can't multiply such rows and weights on this platform; [] if it can."""
        ...

    def product(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
        """Multiplies the rows of each group by the group's matrix. Returns [rows, outputs], with zeros after the last group.

        Args:
          rows: [rows, inputs], sorted by group.
          weights: [groups, inputs, outputs], or [groups, outputs, inputs] if `transposed`; of the rows' dtype.
          sizes: int32 [groups], number of rows of each group. Their sum is at most the number of rows.
          transposed: True to contract the last dimension of `weights`.
        """
        ...

    def weights_product(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        """Sums the outer products of `rows` and `others` over the rows of each group. Returns [groups, K, N], of their dtype.

        Args:
          rows: [rows, K], sorted by group.
          others: [rows, N], sorted by group.
          sizes: int32 [groups], number of rows of each group.
        """
        ...


@dataclasses.dataclass(frozen=True)
class GroupedSplit:
    """The mesh axes that split the dimensions of a grouped product (() if not split), and its other static settings.

    Attributes:
      tokens: axes that split the tokens: dimension 0 of the rows.
      experts: axes that split the experts: dimension 1 of the rows, and dimension 0 of the weights.
      inputs, outputs: axes that split the inputs and outputs of the weights. Over axes that also split tokens, the weights are
        gathered for the product, and their gradients reduced and scattered. Over other axes, the rows' features are split too.
      mesh: the mesh; None for one device. `grouped_dot` sets it.
      num_pairs: number of (token, expert) pairs, i.e. of rows that all parts multiply in total. `grouped_dot` sets it.
    """

    tokens: tuple[str, ...] = ()
    experts: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    mesh: AbstractMesh | None = None
    num_pairs: int = 0

    def kept(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of `axes`, which split a dimension of the weights, that also split the rows' features."""
        return tuple(axis for axis in axes if axis not in (*self.tokens, *self.experts))

    def gathered(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Returns those of `axes`, which split a dimension of the weights, over which the weights are gathered."""
        return tuple(axis for axis in axes if axis in self.tokens)

    def of_rows(self, axes: tuple[str, ...]) -> PartitionSpec:
        """Returns the PartitionSpec of rows, [token parts, expert parts, rows, features].

        `axes`: the mesh axes that split the dimension of the weights with the same features.
        """
        return PartitionSpec(self.tokens or None, self.experts or None, None, self.kept(axes) or None)

    @property
    def of_sizes(self) -> PartitionSpec:
        """The PartitionSpec of the group sizes, [token parts, expert parts, experts of a part]."""
        return PartitionSpec(self.tokens or None, self.experts or None, None)

    @property
    def of_weights(self) -> PartitionSpec:
        """The PartitionSpec of the weights, [experts, inputs, outputs]."""
        features = [(*self.kept(axes), *self.gathered(axes)) or None for axes in (self.inputs, self.outputs)]
        return PartitionSpec(self.experts or None, *features)

    def over(self, inputs: tuple[str, ...], outputs: tuple[str, ...]) -> GroupedSplit:
        """Returns the split for multiplying the rows by other weights, whose inputs and outputs are split over these axes."""
        return dataclasses.replace(self, inputs=inputs, outputs=outputs)

    def product(
        self,
        rows: jax.Array,
        weights: jax.Array,
        sizes: jax.Array,
        pair: jax.Array | None = None,
        kernel: str | None = None,
        name: str = "",
    ) -> jax.Array:
        """Computes the grouped product with this split; see `grouped_dot`."""
        dtype = jnp.result_type(rows, weights)
        widths = [
            self.padded(size, axes) // num_parts(self.mesh, self.kept(axes))
            for size, axes in zip(weights.shape[1:], (self.inputs, self.outputs), strict=True)
        ]
        choice = _choose(
            jax.ShapeDtypeStruct((rows.shape[2], widths[0]), dtype),
            jax.ShapeDtypeStruct((sizes.shape[2], *widths), dtype),
            kernel,
        )
        if name:
            kernels.record(name, choice)
        given = (rows.astype(dtype), weights.astype(dtype), sizes, *([] if pair is None else [pair]))
        out: jax.Array = grouped_dot_p.bind(*given, split=self, kernel=choice.kernel, transposed=False)
        return out

    def scope(self) -> AbstractContextManager[None]:
        """Returns a `jax.named_scope` for a part's product. Its name has the number of rows that a part multiplies on average.

        The arrays of a part have room for more rows (`token_groups.py`), which kernels that skip empty blocks don't multiply.
        """
        return jax.named_scope(
            f"{ROWS_OF_PART}{-(-self.num_pairs // num_parts(self.mesh, (*self.tokens, *self.experts)))}"
        )

    def padded(self, size: int, axes: tuple[str, ...]) -> int:
        """Returns the size of a dimension of the weights, padded so that the mesh axes `axes` divide it."""
        return size + -size % num_parts(self.mesh, (*self.kept(axes), *self.gathered(axes)))

    def padded_weights(self, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        """Pads weights [experts, inputs, outputs] so that the mesh axes divide all dimensions. Added experts have no rows."""
        inputs, outputs = self.padded(weights.shape[1], self.inputs), self.padded(weights.shape[2], self.outputs)
        return _padded(weights, (sizes.shape[1] * sizes.shape[2], inputs, outputs))


def mesh_of_experts() -> AbstractMesh | None:
    """Returns the ambient mesh; None for one device, and under a `jax.shard_map`, where arrays belong to one device."""
    mesh = jax.sharding.get_abstract_mesh()
    return None if mesh.manual_axes or mesh.size <= 1 else mesh


def num_parts(mesh: AbstractMesh | None, axes: tuple[str, ...]) -> int:
    """Returns the number of parts that these axes of a mesh split a dimension into; 1 on one device."""
    return 1 if mesh is None else math.prod(mesh.shape[axis] for axis in axes)


def grouped_dot(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *,
    split: GroupedSplit = GroupedSplit(),
    pair: jax.Array | None = None,
    num_pairs: int | None = None,
    kernel: str | None = None,
    name: str = "",
) -> jax.Array:
    """Multiplies each row by the matrix of its expert. Returns [S, X, M, N], with zeros after the last expert's rows.

    On a mesh, tokens are split into S parts and experts into X parts, and each device computes one part of both. S and X are 1
    without a mesh. Part x has the experts x * G to x * G + G - 1. If X * G exceeds E, the experts from E on must have no rows.

    Args:
      rows: [S, X, M, K], M rows of K inputs in each part, sorted by expert.
      weights: [E, K, N], for E experts, K inputs and N outputs.
      sizes: int32 [S, X, G], number of rows of each of the G experts of a part. The sum over a part is at most M. Rows of a part
        after the last expert's are ignored, but must be finite.
      split: how the arrays are split over the ambient mesh (`jax.set_mesh`).
      pair: int32 [S, X, M], each row's (token, expert) pair, as an index into [batch, time, experts of a token]. None is enough
        unless LoRA is used with dropout or with several adapters.
      num_pairs: total number of (token, expert) pairs, for estimates of FLOPs; None for S * M.
      kernel: name of the kernel to use; None for the first that can be used.
      name: the layer's name, under which `kernels.record` records the chosen kernel.

    Raises:
      UserError: the requested kernel can't be used.
    """
    mesh = mesh_of_experts()
    count = rows.shape[0] * rows.shape[2] if num_pairs is None else num_pairs
    split = dataclasses.replace(GroupedSplit() if mesh is None else split, mesh=mesh, num_pairs=count)
    return split.product(rows, weights, sizes, pair, kernel, name)


def _choose(rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, asked: str | None) -> kernels.Choice:
    platform = chips.current_target().platform

    def reasons_against(name: str) -> list[str]:
        return _kernel(name).reasons_against(rows, weights, platform)

    if asked is not None:
        if against := reasons_against(asked):
            raise UserError(f"grouped kernel {asked!r} can't be used: {'; '.join(against)}; leave the choice with None")
        return kernels.Choice(asked, of="experts")
    return kernels.first_usable((*_OF_PLATFORM.get(platform, ()), "blocks"), reasons_against, of="experts")


@functools.cache
def _kernel(name: str) -> GroupedKernel:
    if name not in _MODULES:
        meant = did_you_mean(name, _MODULES, otherwise="")
        raise UserError(f"there is no grouped kernel {name!r}; kernels: {', '.join(_MODULES)}{meant}")
    return cast(GroupedKernel, importlib.import_module(f"{__package__}.{_MODULES[name]}"))


grouped_dot_p = jax.extend.core.Primitive("grouped_dot")
# The gradient of the weights: rows [S, X, M, K] and others [S, X, M, N] -> sums of outer products [E, K, N].
grouped_weights_p = jax.extend.core.Primitive("grouped_weights")


@grouped_dot_p.def_abstract_eval
def _shape(rows: Any, weights: Any, sizes: Any, *pair: Any, transposed: bool, **_: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((*rows.shape[:3], weights.shape[1 if transposed else 2]), rows.dtype)


@grouped_weights_p.def_abstract_eval
def _weights_shape(rows: Any, others: Any, sizes: Any, *, num_experts: int, **_: Any) -> jax.core.ShapedArray:
    return jax.core.ShapedArray((num_experts, rows.shape[3], others.shape[3]), rows.dtype)


def _evaluate(
    rows: jax.Array,
    weights: jax.Array,
    sizes: jax.Array,
    *pair: jax.Array,
    split: GroupedSplit,
    kernel: str,
    transposed: bool,
) -> jax.Array:
    width = weights.shape[1 if transposed else 2]
    weights = split.padded_weights(weights, sizes)
    rows = _padded(rows, (*rows.shape[:3], weights.shape[2 if transposed else 1]))
    contracted, free = (split.outputs, split.inputs) if transposed else (split.inputs, split.outputs)

    def local(rows: jax.Array, weights: jax.Array, sizes: jax.Array) -> jax.Array:
        for dim, axes in enumerate((split.inputs, split.outputs), start=1):
            if over := split.gathered(axes):
                weights = lax.all_gather(weights, over, axis=dim, tiled=True)
        with split.scope():
            out = _kernel(kernel).product(rows[0, 0], weights, sizes[0, 0], transposed=transposed)
        if over := split.kept(contracted):
            out = lax.psum(out, over)
        return out[None, None]

    if split.mesh is None:
        return local(rows, weights, sizes)
    specs = (split.of_rows(contracted), split.of_weights, split.of_sizes)
    out: jax.Array = jax.shard_map(
        local, mesh=split.mesh, in_specs=specs, out_specs=split.of_rows(free), check_vma=False
    )(rows, weights, sizes)
    return out[..., :width]


def _evaluate_weights(
    rows: jax.Array, others: jax.Array, sizes: jax.Array, *, split: GroupedSplit, kernel: str, num_experts: int
) -> jax.Array:
    widths = rows.shape[3], others.shape[3]
    rows = _padded(rows, (*rows.shape[:3], split.padded(widths[0], split.inputs)))
    others = _padded(others, (*others.shape[:3], split.padded(widths[1], split.outputs)))

    def local(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        with split.scope():
            found = _kernel(kernel).weights_product(rows[0, 0], others[0, 0], sizes[0, 0])
        scattered: list[str] = []
        for dim, axes in enumerate((split.inputs, split.outputs), start=1):
            if over := split.gathered(axes):
                found = lax.psum_scatter(found, over, scatter_dimension=dim, tiled=True)
                scattered += over
        rest = tuple(axis for axis in split.tokens if axis not in scattered)
        return lax.psum(found, rest) if rest else found

    if split.mesh is None:
        return local(rows, others, sizes)
    specs = (split.of_rows(split.inputs), split.of_rows(split.outputs), split.of_sizes)
    found: jax.Array = jax.shard_map(
        local, mesh=split.mesh, in_specs=specs, out_specs=split.of_weights, check_vma=False
    )(rows, others, sizes)
    return found[:num_experts, : widths[0], : widths[1]]


def _padded(x: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    if x.shape == shape:
        return x
    return jnp.pad(x, [(0, size - held) for size, held in zip(shape, x.shape, strict=True)])


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    """Returns the product and its tangent. The product is linear in the rows and in the weights.

    JAX calls this only if rows or weights have a tangent.
    """
    rows, weights, sizes, *pair = primals
    of_rows, of_weights, *_ = tangents
    # The tangents are computed without the pairs, which the backward pass would otherwise have to store.
    terms = []
    if type(of_rows) is not ad.Zero:
        terms.append(grouped_dot_p.bind(of_rows, weights, sizes, **params))
    if type(of_weights) is not ad.Zero:
        terms.append(grouped_dot_p.bind(rows, of_weights, sizes, **params))
    out = grouped_dot_p.bind(rows, weights, sizes, *pair, **params)
    return out, sum(terms[1:], terms[0])


def _transpose(cotangent: Any, rows: Any, weights: Any, sizes: Any, *, transposed: bool, **params: Any) -> list[Any]:
    if type(cotangent) is ad.Zero:
        return [None, None, None]
    if ad.is_undefined_primal(rows):
        return [grouped_dot_p.bind(cotangent, weights, sizes, transposed=not transposed, **params), None, None]
    factors = (cotangent, rows) if transposed else (rows, cotangent)
    return [None, grouped_weights_p.bind(*factors, sizes, num_experts=weights.aval.shape[0], **params), None]


_STATIC = ("split", "kernel")
grouped_dot_p.def_impl(jax.jit(_evaluate, static_argnames=(*_STATIC, "transposed")))
grouped_weights_p.def_impl(jax.jit(_evaluate_weights, static_argnames=(*_STATIC, "num_experts")))
ad.primitive_jvps[grouped_dot_p] = _jvp
ad.primitive_transposes[grouped_dot_p] = _transpose
mlir.register_lowering(grouped_dot_p, mlir.lower_fun(_evaluate, multiple_results=False))
mlir.register_lowering(grouped_weights_p, mlir.lower_fun(_evaluate_weights, multiple_results=False))
