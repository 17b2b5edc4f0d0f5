"""Attention by JAX's splash attention (`jax.experimental.pallas.ops.tpu.splash_attention`), a Pallas kernel for TPUs.

The kernel computes logits block by block and skips pairs of blocks in which no query sees any key. Its tables of blocks are
made on the host and become constants of the program. Segments are masked inside of blocks, but no block is skipped for them.

Rows are padded to a multiple of the block. Padding follows the row, so causal queries never see it; for bidirectional attention
it becomes a separate segment. Heads may have any width (the compiler pads them to 128 lanes). With N query heads and K key heads,
keys need not be repeated: the kernel reads key head n // (N / K) for query head n.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu.splash_attention import (
    splash_attention_kernel,
    splash_attention_mask,
    splash_attention_mask_info,
)

from spmd_trainer.kernels import chips
from spmd_trainer.kernels.kernels import Call, Pattern, Rows

# Possible numbers of tokens in a block. The kernel requires multiples of 128, the lanes of a vector register.
_BLOCKS = (128, 256, 384, 512, 640, 768, 1024)
# A pair of blocks costs as many products as it has pairs of tokens, plus a fixed time for its grid step, also if it is skipped.
# With this fixed cost, most rows of 1,024 tokens and more get blocks of 1,024, the largest that fit. It is an estimate, not a
# measurement. MaxText's default is 512; its tuned configurations (benchmarks/maxtext_*_model_configs.py) for v5e, v5p and v6e
# have up to 2,048, with a raised limit of VMEM.
_STEP_COST = 2**17
# Keys of a block are multiplied in parts of at most this many, so that the float32 logits of a part fit into VMEM.
_MOST_LOGITS = 640 * 640
# {bytes of one token's head: largest block that compiles for v4, v5e, v5p and v6e with XLA's default limits of VMEM (16 MiB; v6e
# 32 MiB), with segments and a soft cap}
_LARGEST_BLOCK = {512: 1024, 1024: 512, 4096: 256}
# The tables of blocks are in scalar memory, which has 1 MiB (`jax.experimental.pallas.tpu.get_tpu_info`).
_LARGEST_TABLES = 768 * 2**10
# Segment id of padding.
_PADDING = np.iinfo(np.int32).min


def reasons_against(call: Call) -> list[str]:
    """Returns the reasons why this kernel can't compute a call. Only TPUs compile it; others interpret it, for tests."""
    reasons = []
    if call.target.platform != "tpu":
        reasons.append(f"it is a kernel for TPUs, but the device is a {call.target.kind or call.target.platform}")
    elif call.target.kind.startswith(("TPU v2", "TPU v3")):
        reasons.append(f"{call.target.kind} is older than TPU v4")
    if call.dropout:
        reasons.append("it can't drop probabilities")
    dtype = jnp.result_type(call.query.dtype, call.key.dtype)
    if dtype not in (jnp.bfloat16, jnp.float32):
        reasons.append(f"the queries and keys are {dtype.name}, not bfloat16 or float32")
    length, width = call.query.shape[1], call.query.shape[3]
    if not _blocks_that_fit(width, dtype):
        reasons.append(f"head width {width} is too large for the chip's vector memory")
    elif _block(length, width, dtype, call.pattern) is None:
        reasons.append(f"the tables of blocks of {length:,} tokens are too large for the chip's scalar memory")
    return reasons


def attend(rows: Rows, pattern: Pattern) -> jax.Array:
    """Computes attention on one device, see `Kernel.attend`. Segment ids must be larger than -2**31."""
    query, key, value, segment_ids, sinks = rows
    length = query.shape[1]
    # The kernel's output has the query's dtype.
    dtype = jnp.result_type(query, key, value)
    block = _block(length, query.shape[3], dtype, pattern)
    if block is None:
        raise ValueError(f"splash attention can't compute rows of {length} tokens with heads of {query.shape[3]}")
    if pattern.scale != 1:
        # In float32: the scale is not rounded to bfloat16, and the product is rounded once.
        query = query.astype(jnp.float32) * pattern.scale
    padding = -length % block
    if padding and not pattern.causal and segment_ids is None:
        segment_ids = jnp.zeros(query.shape[:2], jnp.int32)
    if segment_ids is not None:
        segment_ids = jnp.pad(segment_ids, ((0, 0), (0, padding)), constant_values=_PADDING)
    window = None if pattern.window is None or pattern.window >= length else pattern.window
    kernel = _kernel(
        _Shape(length + padding, block, pattern.causal, window),
        pattern.softcap,
        interpret=chips.current_target().platform != "tpu",
    )

    def of_row(
        query: jax.Array, key: jax.Array, value: jax.Array, ids: jax.Array | None, sinks: jax.Array | None
    ) -> Any:
        segments = None if ids is None else splash_attention_kernel.SegmentIds(ids, ids)
        return kernel(query, key, value, segments, sinks)

    queries, keys, values = (
        jnp.pad(x.astype(dtype).transpose(0, 2, 1, 3), ((0, 0), (0, 0), (0, padding), (0, 0)))
        for x in (query, key, value)
    )
    if sinks is not None:
        sinks = _with_float32_gradient(sinks)
    out: jax.Array = jax.vmap(of_row)(queries, keys, values, segment_ids, sinks)
    return out[:, :, :length].transpose(0, 2, 1, 3).astype(value.dtype)


def _blocks_that_fit(width: int, dtype: Any) -> list[int]:
    token_bytes = -(-width // 128) * 128 * jnp.dtype(dtype).itemsize
    largest = max((block for most, block in _LARGEST_BLOCK.items() if token_bytes <= most), default=0)
    return [block for block in _BLOCKS if block <= largest]


def _block(length: int, width: int, dtype: Any, pattern: Pattern) -> int | None:
    """Returns the cheapest block size that fits the chip's memories; None if there is none."""
    costs = {}
    for block in _blocks_that_fit(width, dtype):
        rows = -(-length // block)
        seen = rows if pattern.window is None else min(rows, -(-(pattern.window - 1) // block) + 1)
        computed = rows * seen - seen * (seen - 1) // 2 if pattern.causal else rows * rows
        # The largest tables are for the queries' gradients: an index, int8 or int16, and an int8 for each pair.
        parts = block // _part(block)
        if rows * seen * parts * (2 if rows * parts <= 128 else 3) <= _LARGEST_TABLES:
            costs[block] = rows * seen * _STEP_COST + computed * block**2
    return min(costs, key=lambda block: costs[block], default=None)


@jax.custom_vjp
def _with_float32_gradient(sinks: jax.Array) -> jax.Array:
    """Returns float32 sinks unchanged, and converts their gradient to float32: JAX's kernel gives it the output's dtype."""
    return sinks


_with_float32_gradient.defvjp(lambda sinks: (sinks, None), lambda _, grads: (grads.astype(jnp.float32),))


@dataclasses.dataclass(frozen=True)
class _Shape:
    """What decides which pairs of blocks are computed: the number of tokens per row and per block, and the attention mask."""

    length: int
    block: int
    causal: bool
    window: int | None


class _Band(splash_attention_mask.LocalMask):
    """Causal mask, with or without a window, that can be cut into blocks quickly.

    For T tokens, JAX's masks compute all T^2 values to find empty and full blocks, which takes minutes for 131,072 tokens.
    JAX only calls `any()` and `all()` on a block, so here a block is an array of its distinct values. Where a block has both
    values, the kernel computes its mask by `mask_function`.
    """

    def __init__(self, length: int, window: int | None) -> None:
        self._window = length if window is None else window
        super().__init__((length, length), (None if window is None else window - 1, 0), offset=0)

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """Returns the distinct values in a block of the mask, bool [1, 1 or 2]."""
        queries, keys = idx
        # Distances from key to query in the block.
        smallest, largest = queries.start - (keys.stop - 1), queries.stop - 1 - keys.start
        if largest < 0 or smallest >= self._window:
            return np.array([[False]])
        return np.array([[True]]) if smallest >= 0 and largest < self._window else np.array([[True, False]])


class _Everything(splash_attention_mask.FullMask):
    """Mask of bidirectional attention. Each of its blocks is the array [[True]], which is all that JAX needs (see `_Band`)."""

    def __getitem__(self, idx: tuple[slice, slice]) -> np.ndarray:
        """Returns the distinct values in a block of the mask, bool [1, 1]."""
        return np.array([[True]])


def _part(block: int) -> int:
    """Returns the number of keys of a block that are multiplied at once, a multiple of 128."""
    return block if block**2 <= _MOST_LOGITS else block // 2


@functools.lru_cache(maxsize=64)
def _kernel(shape: _Shape, softcap: float | None, *, interpret: bool) -> splash_attention_kernel.SplashAttentionKernel:
    """Returns JAX's kernel for rows of this shape and any number of heads.

    Its tables of blocks are NumPy arrays, so the cached kernel can be used in every trace.
    """
    block = shape.block
    part = _part(block)
    sizes = splash_attention_kernel.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=part,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=part,
        block_q_dq=block,
        block_kv_dq=part,
    )
    square = (shape.length, shape.length)
    mask = _Band(shape.length, shape.window) if shape.causal else _Everything(square)
    # One mask: all heads of a call have the same.
    masks = splash_attention_mask.MultiHeadMask([mask])
    # JAX's make_splash_mha would put the tables on the devices of the ambient mesh, which may be a topology's.
    forward, mask_function = splash_attention_mask_info.process_mask(masks, (block, block))
    query_grad, _ = splash_attention_mask_info.process_mask(masks, (block, part))
    key_grad, _ = splash_attention_mask_info.process_mask_dkv(masks, (block, block))
    return splash_attention_kernel.SplashAttentionKernel(
        forward,
        query_grad,
        key_grad,
        block_sizes=sizes,
        is_mqa=False,
        save_residuals=False,
        mask_value=splash_attention_kernel.DEFAULT_MASK_VALUE,
        attn_logits_soft_cap=softcap,
        # Named like the attention layers' outputs: a rematerialization policy that saves these needs no second forward pass.
        residual_checkpoint_name="context",
        mask_function=mask_function,
        interpret=interpret,
    )
