"""The order of a row's tokens on the devices of the mesh axes that split the row.

With a causal mask, ring attention gives n devices equal work if a row is cut into 2 n chunks and device i has chunks i and
2 n - 1 - i (zig-zag). A model reorders its inputs once, before the first layer, and undoes this for its outputs:

    order = sequence_order.of_rows(length, ("seq",), context_parallel)
    ids, segment_ids = order.apply(ids), order.apply(segment_ids, fill=-1)   # [batch, order.padded_length]
    ...
    log_probs = order.undo(log_probs)                                        # [batch, length, vocabulary]

All-to-all attention keeps the order of the row. Both kinds of attention pad rows so that all chunks are equally long.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Literal, TypeAlias, TypeVar, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec

Form: TypeAlias = Literal["ring", "all_to_all"]
FORMS: tuple[str, ...] = get_args(Form)
DEFAULT_FORM: Form = "ring"
Shard = TypeVar("Shard", int, np.ndarray, jax.Array)


@dataclasses.dataclass(frozen=True)
class SequenceOrder:
    """The order of a row's tokens on the mesh axes that split the row.

    Attributes:
      length: number of tokens in a row.
      axes: mesh axes that the row is split over; empty if each device has the whole row.
      count: number of devices on these axes, n.
      is_zigzag: True if device i has chunks i and 2 n - 1 - i of 2 n chunks; False if it has chunk i of n chunks.
    """

    length: int
    axes: tuple[str, ...] = ()
    count: int = 1
    is_zigzag: bool = False

    @property
    def padded_length(self) -> int:
        """The row's length with the padding that makes all chunks equally long."""
        chunks = 2 * self.count if self.is_zigzag else self.count
        return -(-self.length // chunks) * chunks

    def apply(self, x: jax.Array, fill: float = 0) -> jax.Array:
        """Pads dimension 1 to `padded_length`, and reorders it from row order to this order. Call under jit if rows are split.

        Args:
          x: [batch, length, ...].
          fill: value of the padding, which comes after the row's tokens.
        """
        if missing := self.padded_length - self.length:
            x = jnp.pad(x, [(0, missing if dim == 1 else 0) for dim in range(x.ndim)], constant_values=fill)
        return self._moved(x, back=False)

    def undo(self, x: jax.Array) -> jax.Array:
        """Inverts `apply`: [batch, padded_length, ...] -> [batch, length, ...], in row order."""
        in_order = self._moved(x, back=True)
        return in_order[:, : self.length] if self.padded_length > self.length else in_order

    def _moved(self, x: jax.Array, *, back: bool) -> jax.Array:
        if not self.is_zigzag:
            return x
        spec = PartitionSpec(None, self.axes)
        move = functools.partial(_move_chunks, axes=self.axes, count=self.count, back=back)
        # The other axes stay with the compiler, so the batch and further dimensions may be split in any way.
        moved: jax.Array = jax.shard_map(
            move, in_specs=(spec, PartitionSpec(self.axes)), out_specs=spec, axis_names=set(self.axes), check_vma=False
        )(x, jnp.arange(self.count))
        return moved


def of_rows(length: int, axes: tuple[str, ...], form: str | None = None) -> SequenceOrder:
    """Returns the token order that attention needs on the ambient mesh (`jax.set_mesh`).

    Args:
      length: number of tokens in a row.
      axes: mesh axes that split rows. Without a mesh, or with one device on these axes, rows keep their order.
      form: one of `FORMS`; None for `DEFAULT_FORM`.
    """
    count = num_shards(axes)
    if count == 1:
        return SequenceOrder(length)
    return SequenceOrder(length, axes, count, is_zigzag=(form or DEFAULT_FORM) == "ring")


def num_shards(axes: tuple[str, ...]) -> int:
    """Returns the number of pieces into which the compiler splits a dimension over these axes of the ambient mesh.

    Returns 1 under any `shard_map`, even over other axes, because attention then computes whole rows.
    """
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.manual_axes else math.prod(mesh.shape[axis] for axis in axes if axis in mesh.shape)


def chunks_of(shard: Shard, count: int) -> tuple[Shard, Shard]:
    """Returns the two of the 2 * `count` chunks that the device `shard` holds in zig-zag order, the earlier chunk first."""
    return shard, 2 * count - 1 - shard


def _move_chunks(x: jax.Array, device: jax.Array, *, axes: tuple[str, ...], count: int, back: bool) -> jax.Array:
    """Moves chunks from row order to zig-zag order, or back, by two permutations: one for even chunks and one for odd ones.

    In row order, device d has chunks 2 d and 2 d + 1. In zig-zag order, each device has one even and one odd chunk. The even
    one comes first on devices with an even index, and second on the others. `device`, int32 [1], is this device's index. It
    is an argument, because XLA can't partition `lax.axis_index` inside of a loop over layers.
    """
    owners = [min(chunk, 2 * count - 1 - chunk) for chunk in range(2 * count)]
    moves = [[(device, owners[2 * device + parity]) for device in range(count)] for parity in (0, 1)]
    is_even = device[0] % 2 == 0

    def swapped_on_odd(first: jax.Array, second: jax.Array) -> list[jax.Array]:
        return [jnp.where(is_even, first, second), jnp.where(is_even, second, first)]

    parts = jnp.split(x, 2, axis=1)
    if back:
        parts = swapped_on_odd(*parts)
        moves = [[(target, source) for source, target in pairs] for pairs in moves]
    parts = [lax.ppermute(part, axes, pairs) for part, pairs in zip(parts, moves, strict=True)]
    return jnp.concatenate(parts if back else swapped_on_odd(*parts), axis=1)
