"""Grouped products by JAX's Pallas kernels for Hopper (`jax.experimental.pallas.ops.gpu`), with its tensor cores.

The kernel of the product loads blocks of rows that may belong to two groups, and stores each group's rows alone; it leaves
rows after the last group as they were in memory. It computes all blocks that there is room for: a split of the experts saves
no arithmetic with it, as with `grouped_blocks.py` on GPUs. The kernel of the weights' gradient computes each group's blocks only.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

from spmd_trainer.kernels.chips import Target

# Part of the operations' names, by which the planner (`hlo_kernels.py`) knows the kernels.
_NAME = "mosaic_grouped_dot"
# The kernels' instructions (wgmma) are those of this compute capability alone.
_HOPPER = (9, 0)
_MULTIPROCESSORS = 132
_DTYPES = (jnp.bfloat16, jnp.float16)
# Outputs of a block, the first that divides the width; a width must be a multiple of the last one. A gradient's block of
# 192 x 192 would not fit in the registers.
_OUTPUTS, _GRADIENT_INPUTS = (128, 192, 64), (128, 64)
# Rows of a block of the product, the first that divides the array's. No kernel reads or writes after the last row.
_ROWS = (128, 64)
# Inputs of a block of the product, and rows of one of the gradient.
_CONTRACTED = 64
# Blocks in shared memory, of 40 KiB at most.
_STEPS = 4


def _on_hopper(kernel: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Returns a kernel for the multiprocessors of an H100. JAX's asks the first device of this process, which may be a host
    that compiles for others.
    """
    hopper = types.SimpleNamespace(core_count=_MULTIPROCESSORS)
    seen = types.SimpleNamespace(**{**vars(jax), "devices": lambda: [hopper]})
    made = types.FunctionType(kernel.__code__, {**kernel.__globals__, "jax": seen}, kernel.__name__)
    made.__kwdefaults__ = kernel.__kwdefaults__
    return made


_transposed_ragged_dot = _on_hopper(transposed_ragged_dot_mgpu.transposed_ragged_dot)


class Mosaic:
    """The kernel 'mosaic'; see `grouped_dot.GroupedKernel`."""

    name = "mosaic"

    def reasons_against(self, rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, target: Target) -> list[str]:
        """See `GroupedKernel.reasons_against`."""
        reasons = []
        if target.platform != "cuda" or target.compute_capability != _HOPPER:
            reasons.append(f"it is a kernel for NVIDIA's Hopper, but the device is a {target.kind or target.platform}")
        if rows.dtype not in _DTYPES:
            reasons.append(f"the rows are {rows.dtype.name}, not bfloat16 or float16")
        if rows.shape[0] % _ROWS[-1]:
            reasons.append(f"a device has {rows.shape[0]} rows, not a multiple of {_ROWS[-1]}")
        if any(width % _OUTPUTS[-1] for width in weights.shape[1:]):
            widths = " and ".join(map(str, weights.shape[1:]))
            reasons.append(f"the widths on a device are {widths}, not multiples of {_OUTPUTS[-1]}")
        return reasons

    def product(self, rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
        """See `GroupedKernel.product`."""
        count, outputs = rows.shape[0], weights.shape[1 if transposed else 2]
        block = _block(outputs, _OUTPUTS)
        with jax.named_scope(_NAME):
            out = ragged_dot_mgpu.ragged_dot(
                rows,
                weights,
                group_sizes=sizes,
                block_m=_block(count, _ROWS),
                block_n=block,
                block_k=_CONTRACTED,
                max_concurrent_steps=_STEPS,
                grid_block_n=_together(outputs // block),
                transpose_rhs=transposed,
            )
        is_stored = lax.broadcasted_iota(jnp.int32, (count, 1), 0) < jnp.sum(sizes)
        return jnp.where(is_stored, out, jnp.zeros((), out.dtype))

    def weights_product(self, rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
        """See `GroupedKernel.weights_product`."""
        block = _block(others.shape[1], _OUTPUTS)
        with jax.named_scope(_NAME):
            return _transposed_ragged_dot(
                rows,
                others,
                group_sizes=sizes,
                block_m=_block(rows.shape[1], _GRADIENT_INPUTS),
                block_n=block,
                block_k=_CONTRACTED,
                max_concurrent_steps=_STEPS,
                grid_block_n=_together(others.shape[1] // block),
            )


KERNEL = Mosaic()


def _block(width: int, blocks: Sequence[int]) -> int:
    return next(block for block in blocks if width % block == 0)


def _together(blocks: int) -> int:
    """Returns the setting with which all blocks of outputs are computed for some rows before the next rows. A divisor of their
    number would make the kernels' arithmetic of indices divide by 0, which XLA's compiler for CPUs dies of.
    """
    return blocks + 1
