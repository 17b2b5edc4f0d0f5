"""What becomes of a batch that the devices do not divide: the step removes the rows that `Layout.put` added."""

from __future__ import annotations

import collections
import math
from collections.abc import Mapping

import jax
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from spmd_trainer.sharding.even_values import slice_off
from spmd_trainer.sharding.specs import axes_by_dim, axes_text
from spmd_trainer.sharding.variables import named_leaves
from spmd_trainer.train_states import NestedPartitionSpec, NestedShapeDtypeStruct


def without_added(mesh: Mesh, x: jax.Array, logical: jax.ShapeDtypeStruct) -> jax.Array:
    """Removes the rows that `Layout.put` added. Under jit. Each process added rows after its own rows."""
    rows = logical.shape[0]
    if x.shape[0] == rows:
        return x
    if jax.process_count() == 1:
        return slice_off(x, (rows, *x.shape[1:]))
    # The batch is split over the mesh's devices in order, and the devices of a process need not be adjacent.
    per_device, own_rows = x.shape[0] // mesh.size, rows // jax.process_count()
    seen: dict[int, int] = collections.Counter()
    kept: list[int] = []
    added: list[int] = []
    for position, device in enumerate(mesh.devices.flat):
        first = seen[device.process_index]
        seen[device.process_index] += per_device
        for i in range(per_device):
            (kept if first + i < own_rows else added).append(position * per_device + i)
    return slice_off(x[np.array(kept + added)], (rows, *x.shape[1:]))


def notes(inputs: NestedShapeDtypeStruct, specs: NestedPartitionSpec, sizes: Mapping[str, int]) -> list[str]:
    """Returns a sentence for each dimension of a batch that its axes don't divide: what it costs, and which sizes cost nothing.

    Args:
      inputs: ShapeDtypeStructs of the global batch.
      specs: PartitionSpecs in which the step computes on it, same structure.
      sizes: {axis: size} of the mesh.
    """
    found: dict[tuple[int, int, tuple[str, ...]], str] = {}
    is_spec = lambda x: isinstance(x, PartitionSpec)  # noqa: E731
    for (path, x), spec in zip(named_leaves(inputs), jax.tree.leaves(specs, is_leaf=is_spec), strict=True):
        for dim, (size, axes) in enumerate(zip(x.shape, axes_by_dim(spec, len(x.shape)), strict=True)):
            shards = math.prod(sizes[axis] for axis in axes)
            if not size % shards:
                continue
            held = -(-size // shards) * shards
            what = f"the batch has {size} rows" if dim == 0 else f"dimension {dim} of input {path!r} has size {size}"
            below = f"{held - shards} or " if held > shards else ""
            # Inputs share their rows, so that they are named once.
            found.setdefault(
                (dim, size, axes) if dim == 0 else (dim, id(x), axes),
                f"{what}, which {axes_text(axes, sizes)} does not divide: each step computes {held} "
                f"({held / size - 1:.1%} more). {below}{held} cost nothing.",
            )
    return list(found.values())
