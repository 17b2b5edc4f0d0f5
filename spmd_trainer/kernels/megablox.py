"""Grouped products by JAX's megablox (`jax.experimental.pallas.ops.tpu.megablox`), Pallas kernels for TPUs.

The kernels compute only blocks of rows that belong to a group. Megablox expects groups for all rows, so rows after the last
group become a group without a matrix, which it skips. Rows are padded to a multiple of the block. On other platforms than TPU,
Pallas interprets the kernels, for tests.
"""

from __future__ import annotations

import importlib

import jax
import jax.numpy as jnp

from spmd_trainer.kernels import chips

# The package has a function of the same name as this module.
_MODULE = importlib.import_module("jax.experimental.pallas.ops.tpu.megablox.gmm")
# Number of rows and inputs in a block, and bytes of a row of its outputs; less where arrays are smaller. These are the largest
# sizes for which the kernels compile for v4, v5e, v5p and v6e with XLA's default limits of VMEM. Megablox masks partly filled
# blocks, but the number of rows must be a multiple of the block's.
_ROWS, _INPUTS, _OUTPUT_BYTES = 256, 1024, 2048
# Lanes and sublanes of a vector register: the kernels' blocks must be multiples of them.
_LANES, _SUBLANES = 128, 16


def reasons_against(rows: jax.ShapeDtypeStruct, weights: jax.ShapeDtypeStruct, platform: str) -> list[str]:
    """Returns the reasons why megablox can't multiply such rows and weights; see `GroupedKernel.reasons_against`."""
    reasons = []
    if platform != "tpu":
        reasons.append(f"it is a kernel for TPUs, but the device is a {platform}")
    if rows.dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"the rows are {rows.dtype.name}, not bfloat16 or float32")
    return reasons


def product(rows: jax.Array, weights: jax.Array, sizes: jax.Array, *, transposed: bool) -> jax.Array:
    """Multiplies the rows of each group by the group's matrix; see `GroupedKernel.product`."""
    count, inputs = rows.shape
    tiling = _tiling(count, inputs, weights.shape[1 if transposed else 2], rows.dtype)
    rows, sizes = _with_rest(rows, sizes, tiling[0])
    return _MODULE.gmm(
        rows, weights, sizes, rows.dtype, tiling, jnp.zeros((), jnp.int32), None, transposed, _interpreted()
    )[:count]


def weights_product(rows: jax.Array, others: jax.Array, sizes: jax.Array) -> jax.Array:
    """Sums the outer products of each group's rows; see `GroupedKernel.weights_product`."""
    groups = sizes.shape[0]
    tiling = _tiling(rows.shape[0], rows.shape[1], others.shape[1], rows.dtype)
    others, _ = _with_rest(others, sizes, tiling[0])
    rows, sizes = _with_rest(rows, sizes, tiling[0])
    return _MODULE.tgmm(
        rows.T, others, sizes, rows.dtype, tiling, jnp.zeros((), jnp.int32), groups, None, _interpreted()
    )


def _interpreted() -> bool:
    return chips.current_target().platform != "tpu"


def _tiling(rows: int, inputs: int, outputs: int, dtype: jnp.dtype) -> tuple[int, int, int]:
    """Returns the size of a block, (rows, inputs, outputs), for arrays with these numbers of rows, inputs and outputs."""
    most_outputs = _OUTPUT_BYTES // dtype.itemsize
    sizes = ((rows, _ROWS, _SUBLANES), (inputs, _INPUTS, _LANES), (outputs, most_outputs, _LANES))
    block_rows, block_inputs, block_outputs = (min(most, size + -size % multiple) for size, most, multiple in sizes)
    return block_rows, block_inputs, block_outputs


def _with_rest(rows: jax.Array, sizes: jax.Array, block: int) -> tuple[jax.Array, jax.Array]:
    """Pads the rows to a multiple of `block`, and adds a group for the rows after the last group. Returns rows and sizes."""
    missing = -rows.shape[0] % block
    rows = jnp.pad(rows, ((0, missing), (0, 0)))
    rest = rows.shape[0] - jnp.sum(sizes)
    return rows, jnp.concatenate([sizes, rest[None]]).astype(jnp.int32)
