"""Sharding by shape alone, for arrays without a declared sharding, on a mesh with some of the axes fsdp, dp, sp and tp.

The names and the order of the methods (tuples of mesh axes to shard over) follow `MeshPartitionHelper` of EasyDeL's library
eformer. That class had faults. `jax.device_put` refused some of its specs, because it checked only that two axes together divide
the product of two dimensions. Its `min_shard_size` had a different meaning in different methods, and it left axes unused. In this
module, each axis shards a dimension whose size it divides, and `min_shard_size` limits the number of elements of one shard.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from spmd_trainer.sharding.messages import did_you_mean, mesh_text
from spmd_trainer.sharding.specs import PyTree, check_divides, check_spec, mesh_shape_of
from spmd_trainer.sharding.variables import named_leaves, named_shardings, plan_leaves

Method = tuple[str, ...]

# In order of preference. A method with two axes either shards one dimension over each axis, or shards nothing.
METHODS: tuple[Method, ...] = (("fsdp", "sp"), ("dp",), ("sp",), ("tp",), ("fsdp",))


class MeshPartitionHelper:
    """Shards arrays over a mesh by their shapes.

    It uses the axes fsdp, dp, sp and tp if the mesh has them; a spec never names an axis of size 1. Axes are taken in the order
    dp, sp, tp, fsdp, but on meshes with both fsdp and sp, these two come first. Each shards the first unsharded dimension whose
    size it divides: on a mesh (dp=2, fsdp=2, tp=2), a (512, 256, 6) array gets `P('dp', 'tp', 'fsdp')`.
    """

    def __init__(self, mesh: Mesh):
        self.mesh = mesh
        self._sizes = mesh_shape_of(mesh)

    def analyze_pytree(self, tree: PyTree) -> dict[tuple[int, ...], list[Method]]:
        """Returns the methods (tuples of mesh axes to shard over) that apply to each shape in `tree`, in order of preference.

        Returns:
          {shape: tuples of axis names}: ('fsdp', 'sp') for rank 2 and more, then ('dp',), ('sp',), ('tp',), ('fsdp',),
          each only if the mesh has its axes; an empty list for scalars.
        """
        shapes = dict.fromkeys(tuple(np.shape(leaf)) for leaf in jax.tree.leaves(tree))
        return {shape: self._methods(shape) for shape in shapes}

    def create_partition_spec(
        self, shape: Sequence[int], methods: Sequence[Method], min_shard_size: int = 1024
    ) -> PartitionSpec:
        """Returns a spec that `jax.device_put` accepts for `shape`.

        The methods, tuples of mesh axes, are applied in turn. A method shards, over each of its axes, the first unsharded
        dimension whose size the axis divides, if a shard keeps at least `min_shard_size` elements. A method with several axes
        either shards one dimension over each axis, or shards nothing. Finally, every unused axis is tried alone.

        Args:
          shape: the array's shape.
          methods: tuples of axis names, as `analyze_pytree` returns them.
          min_shard_size: the minimum number of elements of a shard.

        Returns:
          A spec with an entry per dimension, or `P()` if nothing is sharded.

        Raises:
          ValueError: a method names an axis missing from the mesh.
        """
        shape = tuple(shape)
        axes = [axis for method in methods for axis in method]
        for axis in axes:
            if axis not in self._sizes:
                raise ValueError(
                    f"Method axis {axis!r} (for shape {shape}) is not on the mesh ({mesh_text(self._sizes)})"
                    f"{did_you_mean(axis, self._sizes, otherwise='.')} `analyze_pytree` lists this mesh's methods."
                )
        taken: list[str | None] = [None] * len(shape)
        for method in [*methods, *((axis,) for axis in axes)]:
            self._take(shape, taken, method, min_shard_size)
        return PartitionSpec(*taken) if any(taken) else PartitionSpec()

    def shard_array(self, x: ArrayLike, spec: PartitionSpec) -> jax.Array:
        """Returns `x` on the mesh, sharded by `spec`.

        Raises:
          ValueError: the spec does not fit the array or the mesh, or a dimension is not divisible by its number of shards.
        """
        return self._put("array", x, spec)

    def auto_shard_pytree(self, tree: PyTree, min_shard_size: int = 1024) -> PyTree:
        """Puts every leaf on the mesh, with the PartitionSpec that `create_partition_spec` chooses for its shape.

        Args:
          tree: any pytree of arrays.
          min_shard_size: the minimum number of elements of a shard. Axes that would make smaller shards are not used; a leaf
            for which no axis is left is replicated.

        Returns:
          A tree like `tree` of arrays on the mesh.
        """
        shardings = jax.tree.leaves(named_shardings(self.plan_sharding(tree, min_shard_size), self.mesh))
        leaves = [
            self._put(path, leaf, sharding.spec)
            for (path, leaf), sharding in zip(named_leaves(tree), shardings, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def plan_sharding(self, tree: PyTree, min_shard_size: int = 1024) -> PyTree:
        """Returns the shardings that `auto_shard_pytree` would choose, as VariableSpecs with reasons. Moves no array.

        Args:
          tree: any pytree of arrays or ShapeDtypeStructs.
          min_shard_size: the minimum number of elements of a shard.

        Returns:
          A tree like `tree` of VariableSpecs; reasons read `shape rule: dp, tp` or `replicated: ...`.
        """

        @functools.cache  # a state has few different shapes
        def by_shape(shape: tuple[int, ...]) -> tuple[PartitionSpec, str]:
            methods = self._methods(shape)
            spec = self.create_partition_spec(shape, methods, min_shard_size)
            if any(spec):
                return spec, f"shape rule: {', '.join(axis for axis in spec if axis)}"
            return spec, f"replicated: {self._why_whole(shape, methods, min_shard_size)}"

        return plan_leaves(tree, self.mesh, lambda path, shape, leaf, spec: by_shape(shape))

    def _methods(self, shape: tuple[int, ...]) -> list[Method]:
        return [m for m in METHODS if len(shape) >= len(m) and all(axis in self._sizes for axis in m)]

    def _take(self, shape: tuple[int, ...], taken: list[str | None], method: Method, min_shard_size: int) -> None:
        """Writes each axis of `method` into `taken`, at the index of the first unsharded dimension that it divides. Leaves
        `taken` unchanged if an axis divides no dimension, or if a shard would have fewer than `min_shard_size` elements."""
        new = list(taken)
        for axis in method:
            size = self._sizes[axis]
            if size == 1 or axis in new:
                continue
            dim = next((d for d, n in enumerate(shape) if new[d] is None and n % size == 0), None)
            if dim is None:
                return
            new[dim] = axis
        pieces = math.prod(self._sizes[axis] for axis in new if axis)
        if math.prod(shape) // pieces >= min_shard_size:
            taken[:] = new

    def _why_whole(self, shape: tuple[int, ...], methods: list[Method], min_shard_size: int) -> str:
        if not shape:
            return "a scalar has no dimension to split"
        sizes = {axis: self._sizes[axis] for method in methods for axis in method if self._sizes[axis] > 1}
        if not sizes:
            return f"mesh {mesh_text(self._sizes)} has no axis fsdp, sp, dp or tp that is larger than 1"
        dividing = {axis: size for axis, size in sizes.items() if any(n % size == 0 for n in shape)}
        if not dividing:
            return f"no dimension of {shape} divides by any of {mesh_text(sizes)}"
        return (
            f"split over {mesh_text(dividing)}, a shard of {shape} has fewer than min_shard_size={min_shard_size} "
            "elements"
        )

    def _put(self, path: str, x: ArrayLike, spec: PartitionSpec) -> jax.Array:
        check_spec(path, np.shape(x), spec, self._sizes)
        check_divides(path, np.shape(x), spec, self._sizes)
        placed: jax.Array = jax.device_put(x, NamedSharding(self.mesh, spec))
        return placed
