"""Grouped products on NVIDIA GPUs of compute capability 9.0 (Hopper), by Pallas kernels for Mosaic.

`product` is JAX's `ragged_dot` (`jax.experimental.pallas.ops.gpu.ragged_dot_mgpu`), which computes only blocks that have rows of
a group. `weights_product` is a kernel of this module, because JAX's kernel for it queries the GPU of this process, and so can't
be compiled for other GPUs.

Both work on blocks of 128 inputs and outputs; other sizes are padded with zeros. Products are summed in float32.
"""

from __future__ import annotations

import functools
import importlib
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from spmd_trainer.kernels import chips

# Block sizes that were fastest on an H200, with 64 groups of 2,048 x 1,024 and 131,072 rows: 480 to 600 TFLOP/s of bfloat16.
_BLOCK, _STEP, _STAGES = 128, 64, 4
# Numbers of adjacent output blocks that may be computed one after the other, because they read the same rows from the cache.
_NEIGHBOURS = (8, 4, 2, 1)
# Number of streaming multiprocessors that is assumed for GPUs that `chips` doesn't know.
_CORES = 132


def reasons_against(rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, platform: str) -> list[str]:
    """Returns the reasons why these kernels can't multiply such rows and weights; see `GroupedKernel.reasons_against`."""
    if platform != "cuda":
        return [f"it is a kernel for NVIDIA GPUs, but the device is a {platform}"]
    reasons, capability = [], chips.current_target().compute_capability
    if capability is None or capability[0] != 9:
        shown = "unknown" if capability is None else ".".join(map(str, capability))
        reasons.append(f"it needs compute capability 9.0, and the GPU's is {shown}")
    if rows.dtype not in (jnp.bfloat16, jnp.float16):
        reasons.append(f"the rows are {rows.dtype.name}, not bfloat16 or float16")
    return reasons


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix; see `GroupedKernel.product`."""
    width = weights.shape[1 if transposed else 2]
    count, rows, weights = rows.shape[0], _filled(rows), _filled(weights)
    blocks = weights.shape[1 if transposed else 2] // _BLOCK
    out = importlib.import_module("jax.experimental.pallas.ops.gpu.ragged_dot_mgpu").ragged_dot(
        rows,
        weights,
        group_sizes=sizes,
        block_m=_BLOCK,
        block_n=_BLOCK,
        block_k=_STEP,
        max_concurrent_steps=_STAGES,
        grid_block_n=next(n for n in _NEIGHBOURS if blocks % n == 0),
        transpose_rhs=transposed,
    )[:count, :width]
    # The kernel writes no rows after the last group's.
    is_own = lax.broadcasted_iota(jnp.int32, (count, 1), 0) < jnp.sum(sizes)
    return jnp.where(is_own, out, jnp.zeros((), out.dtype))


def weights_product(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sums the outer products of each group's rows; see `GroupedKernel.weights_product`."""
    out = _outer_products(_filled(rows), _filled(others), sizes)
    return out[:, : rows.shape[1], : others.shape[1]]


def _filled(x: jax.Array) -> jax.Array:
    """Pads [rows, inputs] to multiples of (`_STEP`, `_BLOCK`), or [groups, inputs, outputs] to (1, `_BLOCK`, `_BLOCK`)."""
    multiples = (_STEP, _BLOCK) if x.ndim == 2 else (1, _BLOCK, _BLOCK)
    missing = [-size % multiple for size, multiple in zip(x.shape, multiples, strict=True)]
    return jnp.pad(x, [(0, size) for size in missing]) if any(missing) else x


class _Groups(NamedTuple):
    """The rows of each group, and the steps of `_STEP` rows that cover them. All arrays are int32 [groups].

    Attributes:
      starts, ends: the group's first row, and the row after its last one.
      first_steps: index of the first step that has rows of the group.
      num_steps: number of steps that have rows of the group.
    """

    starts: jax.Array
    ends: jax.Array
    first_steps: jax.Array
    num_steps: jax.Array

    @classmethod
    def of(cls, sizes: jax.Array) -> _Groups:
        """Returns the rows and steps of groups of these sizes, int32 [groups]. Empty groups have no steps."""
        ends = jnp.cumsum(sizes).astype(jnp.int32)
        starts = (ends - sizes).astype(jnp.int32)
        first_steps = starts // _STEP
        return cls(
            starts, ends, first_steps, jnp.where(sizes > 0, -(-ends // _STEP) - first_steps, 0).astype(jnp.int32)
        )


def _outer_products(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sums the outer products of each group's rows. For `rows` [M, K], `others` [M, N] and G groups, returns [G, K, N].

    `_BLOCK` must divide K and N. Each multiprocessor computes one [128, 128] block of a group's result at a time, in steps of
    `_STEP` rows. Steps begin at multiples of `_STEP`, so the first and last may include other groups' rows; these are zeroed.
    `rows` and `others` must be finite everywhere.
    """
    tiles = (rows.shape[1] // _BLOCK, others.shape[1] // _BLOCK)
    neighbours = next(n for n in _NEIGHBOURS if tiles[1] % n == 0)
    tiling = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(starts, ends, first_steps, num_steps, rows, others, out) -> None:
        @plgpu.nd_loop((sizes.shape[0], tiles[0] * tiles[1]), collective_axes="sm")
        def tile(loop: plgpu.NDLoopInfo) -> None:
            group, place = loop.index
            row, column = plgpu.planar_snake(place, tiles, 1, neighbours)
            first = pl.multiple_of(first_steps[group] * _STEP, _STEP)

            def step(index, x, y, total) -> None:
                @pl.when((index[0] == 0) | (index[0] == num_steps[group] - 1))
                def without_others() -> None:
                    number = plgpu.layout_cast(lax.broadcasted_iota(jnp.int32, (_STEP, _BLOCK), 0), plgpu.Layout.WGMMA)
                    number = number + (first + index[0] * _STEP)
                    is_own = ((number >= starts[group]) & (number < ends[group])).astype(x.dtype)
                    x[...] = x[...] * is_own
                    plgpu.commit_smem()

                plgpu.wgmma(total, _transposed(x), y)

            def add_up(total) -> jax.Array:
                @pl.when(num_steps[group] > 0)
                def steps() -> None:
                    spec = functools.partial(plgpu.BlockSpec, (_STEP, _BLOCK), delay_release=1, transforms=tiling)
                    plgpu.emit_pipeline(
                        functools.partial(step, total=total),
                        grid=(num_steps[group],),
                        in_specs=[spec(lambda i: (i, row)), spec(lambda i: (i, column))],
                        max_concurrent_steps=_STAGES,
                    )(rows.at[pl.ds(first, rows.shape[0]), :], others.at[pl.ds(first, rows.shape[0]), :])

                return total[...]

            found = pl.run_scoped(add_up, plgpu.ACC((_BLOCK, _BLOCK)))
            target = out.at[group, pl.ds(row * _BLOCK, _BLOCK), pl.ds(column * _BLOCK, _BLOCK)]
            store = functools.partial(_store, found=found, target=target)
            pl.run_scoped(store, plgpu.SMEM((_BLOCK, _BLOCK), dtype=out.dtype, transforms=tiling))

    result: jax.Array = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((sizes.shape[0], rows.shape[1], others.shape[1]), rows.dtype),
        grid=(_num_cores(),),
        grid_names=("sm",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(*_Groups.of(sizes), rows, others)
    return result


def _store(held, found: jax.Array, target) -> None:
    held[...] = found.astype(held.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(held, target)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)


def _transposed(x):
    # JAX 0.11 has a method where 0.10 has a function.
    return x.transpose((1, 0)) if hasattr(x, "transpose") else plgpu.transpose_ref(x, (1, 0))


def _num_cores() -> int:
    known = chips.chip(chips.current_target().kind)
    return _CORES if known is None or known.gpu is None else known.gpu.multiprocessors
