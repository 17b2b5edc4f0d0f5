"""Grouped products in blocks of rows, in plain JAX for every device.

Each group's rows are cut into blocks of equal size; the last block of a group may be partly filled. A scan multiplies one block
at a time by its group's matrix. The number of steps is static, so the scan has enough steps for the worst case of group sizes.
CPUs skip the blocks that the actual sizes don't need. GPUs compute these blocks on zeros, because to skip a block, the host
would have to wait for the device. So on GPUs that `hopper.py` doesn't support, unused rows of an array are multiplied, too. If a
token chooses k experts, and a device has G experts, `token_groups.py` allocates min(k, G) rows per token on the device. So
sharding the experts saves arithmetic only if G < k.

The block size is chosen so that the partly filled blocks add at most a sixteenth to the rows, or is `_SMALLEST` if there are few
rows for each group.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Number of rows in a block. In blocks smaller than this, reading the matrix takes as long as multiplying by it.
_SMALLEST, _LARGEST = 8, 256
# Partly filled blocks may add at most one row in this many.
_ROWS_PER_WASTED = 16


def reasons_against(rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, platform: str) -> list[str]:
    """Returns [], because this kernel can multiply all arrays; see `GroupedKernel.reasons_against`."""
    return []


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix; see `GroupedKernel.product`."""
    (count, _), contracted = rows.shape, 2 if transposed else 1
    width = weights.shape[3 - contracted]
    dtype = jnp.result_type(rows, weights)
    blocks = _Blocks.of(sizes, count)
    padded = jnp.pad(rows, ((0, blocks.size), (0, 0)))

    def step(out: jax.Array, block: _Block) -> jax.Array:
        x = lax.dynamic_slice_in_dim(padded, block.first, blocks.size)
        w = lax.dynamic_index_in_dim(weights, block.group, keepdims=False)
        numbers = (((1,), (contracted - 1,)), ((), ()))
        y = lax.dot_general(x, w, numbers, preferred_element_type=jnp.float32).astype(dtype)
        # Rows of `y` after the group's end are zeros. They belong to later groups, whose blocks overwrite them.
        return lax.dynamic_update_slice_in_dim(out, _within(block, y), block.first, 0)

    return blocks.fold(step, jnp.zeros((count + blocks.size, width), dtype))[:count]


def weights_product(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sums the outer products of each group's rows; see `GroupedKernel.weights_product`."""
    blocks = _Blocks.of(sizes, rows.shape[0])
    dtype = jnp.result_type(rows, others)
    rows, others = (jnp.pad(x, ((0, blocks.size), (0, 0))) for x in (rows, others))
    shape = (sizes.shape[0], rows.shape[1], others.shape[1])

    def step(total: jax.Array, block: _Block) -> jax.Array:
        x, y = (_within(block, lax.dynamic_slice_in_dim(array, block.first, blocks.size)) for array in (rows, others))
        old = lax.dynamic_index_in_dim(total, block.group, keepdims=False)
        new = old + lax.dot_general(x, y, (((0,), (0,)), ((), ())), preferred_element_type=total.dtype)
        return lax.dynamic_update_index_in_dim(total, new, block.group, 0)

    return blocks.fold(step, jnp.zeros(shape, jnp.promote_types(dtype, jnp.float32))).astype(dtype)


class _Block(NamedTuple):
    """One block, as int32 scalars, or several, as int32 arrays [number of blocks].

    Attributes:
      group: index of the block's group.
      first: index of the block's first row.
      filled: number of the block's rows that belong to its group.
    """

    group: jax.Array
    first: jax.Array
    filled: jax.Array


class _Blocks(NamedTuple):
    """The blocks of all groups in order, of `size` rows each.

    Blocks that the group sizes don't need are at the end; they have no rows and begin after the last row.
    """

    size: int
    each: _Block

    @classmethod
    def of(cls, sizes: jax.Array, num_rows: int) -> _Blocks:
        """Returns the blocks of groups of these sizes, int32 [groups], whose sum is at most `num_rows`."""
        most_groups = min(sizes.shape[0], num_rows)
        size = _SMALLEST
        while size < _LARGEST and 2 * size * most_groups * _ROWS_PER_WASTED <= num_rows:
            size *= 2
        number = jnp.arange((num_rows + most_groups * (size - 1)) // size, dtype=jnp.int32)
        counts, ends = -(-sizes // size), jnp.cumsum(sizes)
        last = jnp.cumsum(counts)
        group = jnp.minimum(jnp.searchsorted(last, number, side="right"), sizes.shape[0] - 1).astype(jnp.int32)
        first = (ends - sizes)[group] + (number - (last - counts)[group]) * size
        is_needed = number < last[-1]
        filled = jnp.where(is_needed, jnp.minimum(ends[group] - first, size), 0)
        return cls(size, _Block(group, jnp.where(is_needed, first, num_rows), filled))

    def fold(self, step: Callable[[jax.Array, _Block], jax.Array], initial: jax.Array) -> jax.Array:
        """Applies `step` (result so far, block) to one block after the other, beginning with `initial`. Returns the last result.

        For a block without rows, `step` must not change the result. CPUs skip such blocks, including the copy of the result.
        """

        def if_needed(held: jax.Array, block: _Block) -> jax.Array:
            out: jax.Array = lax.cond(block.filled > 0, step, lambda held, block: held, held, block)
            return out

        def body(held: jax.Array, block: _Block) -> tuple[jax.Array, None]:
            return lax.platform_dependent(held, block, cpu=if_needed, default=step), None

        out: jax.Array = lax.scan(body, initial, self.each)[0]
        return out


def _within(block: _Block, x: jax.Array) -> jax.Array:
    """Returns the block's rows [size, width], with zeros in the rows of other groups."""
    is_own = lax.broadcasted_iota(jnp.int32, x.shape, 0) < block.filled
    return jnp.where(is_own, x, jnp.zeros((), x.dtype))
