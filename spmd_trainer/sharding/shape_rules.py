"""Sharding by shape alone: for arrays of which nothing is known but their size, on a mesh with the usual axis names.

The names and the order of methods are those of a helper in use elsewhere, whose specs could be refused by `device_put`
(it checked the product of two dimensions), whose size limit counted differently per method, and which left axes idle.
Here each axis takes a dimension that it divides by itself, and the limit counts the elements of the piece a device
holds.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmd_trainer.sharding.messages import mesh_text, nearest_text
from spmd_trainer.sharding.planning import plan_leaves
from spmd_trainer.sharding.specs import check_divides, check_spec, mesh_shape_of
from spmd_trainer.sharding.variables import named_leaves, named_shardings

Method = tuple[str, ...]

# In order of preference. A method of two axes splits dimensions for both, or neither.
METHODS: tuple[Method, ...] = (("fsdp", "sp"), ("dp",), ("sp",), ("tp",), ("fsdp",))


class MeshPartitionHelper:
    """Splits arrays over a mesh by their shapes.

    Axes called fsdp, dp, sp and tp are used where the mesh has them; axes of size 1 are never named. On a mesh
    (dp=2, fsdp=2, tp=2) a (512, 256, 6) array goes `P('dp', 'tp', 'fsdp')`: each axis in the order of the methods takes
    the first whole dimension that it divides.
    """

    def __init__(self, mesh: Mesh):
        """Takes the mesh to split over."""
        self.mesh = mesh
        self._sizes = mesh_shape_of(mesh)

    def analyze_pytree(self, tree: Any) -> dict[tuple[int, ...], list[Method]]:
        """The methods that apply to each shape in `tree`, in order of preference.

        Args:
          tree: any pytree of arrays or ShapeDtypeStructs.

        Returns:
          {shape: tuples of axis names}: ('fsdp', 'sp') for rank 2 and more, then ('dp',), ('sp',), ('tp',), ('fsdp',),
          each where the mesh has those axes; none for scalars.
        """
        shapes = dict.fromkeys(tuple(np.shape(leaf)) for leaf in jax.tree.leaves(tree))
        return {shape: self._methods(shape) for shape in shapes}

    def create_partition_spec(
        self, shape: Sequence[int], methods: Sequence[Method], min_shard_size: int = 1024
    ) -> PartitionSpec:
        """A spec that `jax.device_put` accepts for `shape`.

        Each method in turn takes, for each of its axes, the first dimension that is whole and that the axis divides, if
        the piece that a device then holds keeps at least `min_shard_size` elements. A method of several axes takes a
        dimension for each or none at all; an axis that is still idle at the end gets a last chance by itself.

        Args:
          shape: the array's shape.
          methods: tuples of axis names, as `analyze_pytree` gives them.
          min_shard_size: least number of elements of a piece.

        Returns:
          An entry per dimension, or `P()` where nothing is split.

        Raises:
          ValueError: a method names an axis that the mesh does not have.
        """
        shape = tuple(shape)
        axes = [axis for method in methods for axis in method]
        for axis in axes:
            if axis not in self._sizes:
                raise ValueError(
                    f"Method axis {axis!r} (for shape {shape}) is not on the mesh {mesh_text(self._sizes)}."
                    f"{nearest_text(axis, self._sizes)} `analyze_pytree` lists the methods this mesh has."
                )
        taken: list[str | None] = [None] * len(shape)
        for method in [*methods, *((axis,) for axis in axes)]:
            self._take(shape, taken, method, min_shard_size)
        return PartitionSpec(*taken) if any(taken) else PartitionSpec()

    def shard_array(self, x: Any, spec: PartitionSpec) -> jax.Array:
        """Puts `x` on the mesh.

        Raises:
          ValueError: the spec does not fit the array or the mesh, or a dimension does not divide.
        """
        return self._put("array", x, spec)

    def auto_shard_pytree(self, tree: Any, min_shard_size: int = 1024) -> Any:
        """Puts every leaf on the mesh, split by its shape.

        Args:
          tree: any pytree of arrays.
          min_shard_size: least number of elements of a piece.

        Returns:
          A tree like `tree` of arrays on the mesh.
        """
        shardings = jax.tree.leaves(named_shardings(self.plan_sharding(tree, min_shard_size), self.mesh))
        leaves = [
            self._put(path, leaf, sharding.spec)
            for (path, leaf), sharding in zip(named_leaves(tree), shardings, strict=True)
        ]
        return jax.tree.unflatten(jax.tree.structure(tree), leaves)

    def plan_sharding(self, tree: Any, min_shard_size: int = 1024) -> Any:
        """What `auto_shard_pytree` decides, as records with the reason.

        Args:
          tree: any pytree of arrays or ShapeDtypeStructs.
          min_shard_size: least number of elements of a piece.

        Returns:
          A tree like `tree` of VariableSpecs; reasons read `shape rule: dp, tp` or `replicated: ...`.
        """

        @functools.cache  # a state has few shapes
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
        """Gives each axis of `method` a whole dimension in `taken`, or leaves `taken` as it is."""
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
            return f"no axis larger than 1 among fsdp, sp, dp, tp on mesh {mesh_text(self._sizes)}"
        dividing = {axis: size for axis, size in sizes.items() if any(n % size == 0 for n in shape)}
        if not dividing:
            return f"no dimension of {shape} divides by any of {mesh_text(sizes)}"
        return (
            f"split over {mesh_text(dividing)}, a piece of {shape} has fewer than min_shard_size={min_shard_size} "
            "elements"
        )

    def _put(self, path: str, x: Any, spec: PartitionSpec) -> jax.Array:
        check_spec(path, np.shape(x), spec, self._sizes)
        check_divides(path, np.shape(x), spec, self._sizes)
        return jax.device_put(x, NamedSharding(self.mesh, spec))
