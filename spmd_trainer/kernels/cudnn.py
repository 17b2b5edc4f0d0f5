"""Attention by cuDNN's fused kernels, for NVIDIA GPUs of compute capability 8.0 and later.

No array has both a query and a key dimension: there is neither a mask nor a bias. Packed rows go to cuDNN as the offset and the
length of each segment ("ragged" tensors). The number of segments is static there; a batch with more of them, or with a segment
in several pieces, is computed by the chunked kernel instead, in the same program.

JAX's own function (`jax.nn.dot_product_attention`) has no packed rows, and checks the capabilities of
this process' GPU, which may differ from the compile target. So this module uses the function's primitives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.lib import cuda_versions
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.kernels.chunked import KERNEL as CHUNKED
from spmd_trainer.kernels.kernels import Call
from spmd_trainer.kernels.packing import Packing, folded, packing
from spmd_trainer.kernels.pattern import Pattern

# Segments that the rows of a device may have, on average. cuDNN's statistics of the softmax, float32 [segments, N, T], are half
# as large as the output with 32 segments and heads of 128.
MAX_SEGMENTS = 32
_DTYPES = (jnp.bfloat16, jnp.float16)
# The widest heads of the backward pass by major compute capability: cuDNN's support matrix
# (https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html).
_WIDEST_HEAD = {9: 256}
_WIDEST_HEAD_ELSE = 128
# What JAX requires of cuDNN for a compute capability (`fused_attention_stablehlo.check_is_flash_attention`).
_OLDEST_CUDNN = {(10, 3): 91100}
# Arguments of later versions of JAX, for masks given as functions.
_NEWER_ARGUMENTS = {
    name: None
    for name in ("score_mod_name", "score_mod_jaxpr")
    if name in inspect.signature(fused._dot_product_attention_fwd_cuda_lowering).parameters
}

Arrays: TypeAlias = tuple[jax.Array, ...]


class Cudnn:
    """The kernel 'cudnn'.

    Attributes:
      name: 'cudnn'.
      max_segments: most segments per row of a device, on average.
    """

    name = "cudnn"

    def __init__(self, max_segments: int = MAX_SEGMENTS) -> None:
        self.max_segments = max_segments

    def reasons_against(self, call: Call) -> list[str]:
        """See `Kernel.reasons_against`."""
        if call.target.platform != "cuda":
            return [f"it is a kernel for NVIDIA GPUs, but the device is a {call.target.kind or call.target.platform}"]
        return [*_device_reasons(call), *_call_reasons(call)]

    def __call__(
        self, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None, pattern: Pattern
    ) -> jax.Array:
        """See `Kernel.__call__`."""
        if segment_ids is None:
            return _whole_rows(pattern, query, key, value)
        return _packed_rows(pattern, query, key, value, segment_ids, packing(segment_ids, self.max_segments))


def _device_reasons(call: Call) -> list[str]:
    capability = call.target.compute_capability
    if cuda_versions is None:
        return ["cuDNN is not installed; install it with `uv sync --extra cuda12` (or cuda13)"]
    if capability is None:
        return [f"the compute capability of {call.target.kind!r} is unknown"]
    reasons = []
    shown = ".".join(map(str, capability))
    if capability < (8, 0):
        reasons.append(f"the GPU's compute capability is {shown}, below 8.0")
    try:
        installed = cuda_versions.cudnn_get_version()
    except RuntimeError:
        return [*reasons, "JAX finds no cuDNN; install it with `uv sync --extra cuda12` (or cuda13)"]
    if installed < _OLDEST_CUDNN.get(capability, 0):
        reasons.append(f"cuDNN is {installed}; compute capability {shown} needs {_OLDEST_CUDNN[capability]} or later")
    if call.segments and capability < (9, 0):
        reasons.append(f"packed rows need compute capability 9.0, and the GPU's is {shown}")
    widest, width = _WIDEST_HEAD.get(capability[0], _WIDEST_HEAD_ELSE), call.query.shape[3]
    if width > widest:
        reasons.append(f"head width {width} is over {widest}, the most for compute capability {shown}")
    return reasons


def _call_reasons(call: Call) -> list[str]:
    batch, length, heads, width = call.query.shape
    checks = {
        "it can't drop probabilities": call.dropout,
        f"it can't cap logits, and softcap is {call.pattern.softcap}": call.pattern.softcap is not None,
        f"queries are {call.query.dtype} and keys are {call.key.dtype}; both must be bfloat16, or both float16": (
            call.query.dtype not in _DTYPES or call.key.dtype != call.query.dtype
        ),
        f"head width {width} is not a multiple of 8": width % 8,
        "rows have 1 token, and its backward pass needs at least 2": length == 1,
        "the queries of a device have 2**31 elements or more, which the int32 offsets of packed rows can't count": (
            call.segments and batch * length * heads * width >= 2**31
        ),
    }
    return [reason for reason, applies in checks.items() if applies]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _whole_rows(pattern: Pattern, query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
    return forward(pattern, query, key, value, None, with_statistics=False)[0]


def _whole_rows_forward(
    pattern: Pattern, query: jax.Array, key: jax.Array, value: jax.Array
) -> tuple[jax.Array, Arrays]:
    output, statistics = _named(forward(pattern, query, key, value, None, with_statistics=True))
    return output, (query, key, value, statistics, output)


def _whole_rows_backward(pattern: Pattern, kept: Arrays, gradient: jax.Array) -> Arrays:
    query, key, value, statistics, output = kept
    return backward(pattern, query, key, value, statistics, output, gradient, None)


_whole_rows.defvjp(_whole_rows_forward, _whole_rows_backward)


def _named(arrays: Arrays) -> Arrays:
    """Names arrays so that a rematerialisation policy that saves the layers' outputs needs no second forward pass."""
    return tuple(checkpoint_name(x, "context") for x in arrays)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _packed_rows(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    packed: Packing,
) -> jax.Array:
    return _packed_forward(pattern, query, key, value, segment_ids, packed, with_statistics=False)[0]


def _packed_rows_forward(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    packed: Packing,
) -> tuple[jax.Array, tuple[Any, ...]]:
    output, statistics = _named(_packed_forward(pattern, query, key, value, segment_ids, packed, with_statistics=True))
    return output, (query, key, value, statistics, output, segment_ids, packed)


def _packed_rows_backward(pattern: Pattern, kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Any, ...]:
    query, key, value, statistics, output, segment_ids, packed = kept

    def call(arrays: Arrays, packed: Packing | None) -> Arrays:
        assert packed is not None
        *of_cudnn, segment_ids = arrays
        query, key, value, _, _, gradient = of_cudnn
        return jax.lax.cond(
            packed.fits,
            lambda: backward_call(pattern, tuple(of_cudnn), packed),
            lambda: _chunked_backward(pattern, query, key, value, segment_ids, gradient),
        )

    gradients = _with_batching(call)((query, key, value, statistics, output, gradient, segment_ids), packed)
    return (*gradients, None, None)


_packed_rows.defvjp(_packed_rows_forward, _packed_rows_backward)


def _packed_forward(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    packed: Packing,
    *,
    with_statistics: bool,
) -> Arrays:
    """Returns the output and, if asked, the statistics of packed rows, by cuDNN or by the chunked kernel."""

    def call(arrays: Arrays, packed: Packing | None) -> Arrays:
        # Choose here, inside the call that `jax.vmap` turns into one with more rows: for a condition with a batch dimension,
        # `jax.vmap` would compute both branches.
        assert packed is not None
        query, key, value, segment_ids = arrays
        lengths = packed.lengths

        def by_chunks() -> Arrays:
            output = _chunked_forward(pattern, query, key, value, segment_ids)
            # Nothing reads these statistics: the backward pass computes the logits again.
            statistics = jnp.zeros((lengths.size, query.shape[2], query.shape[1]), jnp.float32)
            return (output, statistics) if with_statistics else (output,)

        of_cudnn = functools.partial(forward_call, pattern, with_statistics, (query, key, value), packed)
        return jax.lax.cond(packed.fits, lambda: of_cudnn()[: 1 + with_statistics], by_chunks)

    return _with_batching(call)((query, key, value, segment_ids), packed)


def _chunked_forward(
    pattern: Pattern, query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array
) -> jax.Array:
    def call(arrays: Arrays, segment_ids: jax.Array) -> Arrays:
        query, key, value = arrays
        return (CHUNKED(query, key, value, segment_ids, pattern),)

    return _head_by_head(call, (query, key, value), segment_ids, key.shape[2], like=(query,))[0]


def _chunked_backward(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array,
    gradient: jax.Array,
) -> Arrays:
    def call(arrays: Arrays, segment_ids: jax.Array) -> Arrays:
        query, key, value, of_output = arrays
        _, pull_back = jax.vjp(lambda q, k, v: CHUNKED(q, k, v, segment_ids, pattern), query, key, value)
        gradients: Arrays = pull_back(of_output)
        return gradients

    return _head_by_head(call, (query, key, value, gradient), segment_ids, key.shape[2], like=(query, key, value))


def _head_by_head(
    call: Callable[[Arrays, jax.Array], Arrays], arrays: Arrays, segment_ids: jax.Array, kv_heads: int, like: Arrays
) -> Arrays:
    """Calls a function for each row and key head in turn, to limit the fallback's memory.

    Args:
      call: (parts of the arrays [1, T, heads, H], segment ids [1, T]) -> parts of the results.
      arrays: [B, T, heads, H]; the heads are a multiple of `kv_heads`.
      segment_ids: int32 [B, T].
      kv_heads: number of key heads.
      like: arrays with the shapes and dtypes of the results.
    """

    def body(index: jax.Array, results: Arrays) -> Arrays:
        row, head = index // kv_heads, index % kv_heads

        def part(x: jax.Array) -> jax.Array:
            count = x.shape[2] // kv_heads
            return jax.lax.dynamic_slice(x, (row, 0, head * count, 0), (1, x.shape[1], count, x.shape[3]))

        parts = call(tuple(map(part, arrays)), jax.lax.dynamic_slice_in_dim(segment_ids, row, 1))
        return tuple(
            jax.lax.dynamic_update_slice(whole, new, (row, 0, head * new.shape[2], 0))
            for whole, new in zip(results, parts, strict=True)
        )

    results: Arrays = jax.lax.fori_loop(0, segment_ids.shape[0] * kv_heads, body, tuple(map(jnp.zeros_like, like)))
    return results


def forward(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    packed: Packing | None,
    *,
    with_statistics: bool,
) -> Arrays:
    """Calls cuDNN's forward pass.

    Returns:
      The output [B, T, N, H], and optionally the softmax statistics for `backward`, float32 [B or B * M, N, T].
    """
    call = functools.partial(forward_call, pattern, with_statistics)
    return _with_batching(call)((query, key, value), packed)


def backward(
    pattern: Pattern,
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    statistics: jax.Array,
    output: jax.Array,
    gradient: jax.Array,
    packed: Packing | None,
) -> Arrays:
    """Calls cuDNN's backward pass; returns the gradients of query, key and value."""
    call = functools.partial(backward_call, pattern)
    return _with_batching(call)((query, key, value, statistics, output, gradient), packed)


def _with_batching(call: Callable[[Arrays, Packing | None], Arrays]) -> Callable[[Arrays, Packing | None], Arrays]:
    """Makes `jax.vmap` turn a call into one with more rows, because JAX's primitives have no rule for packed rows."""
    batched_call = jax.custom_batching.custom_vmap(call)

    @batched_call.def_vmap
    def fold(size: int, batched: Any, arrays: Arrays, packed: Packing | None) -> tuple[Arrays, Any]:
        arrays, packed = jax.tree.map(
            lambda x, has_axis: x if has_axis else jnp.broadcast_to(x, (size, *x.shape)),
            (arrays, packed),
            tuple(batched),
        )
        rows, length = arrays[0].shape[1:3]
        if packed is not None:
            packed = folded(packed, rows * length)
        results = batched_call(tuple(x.reshape(-1, *x.shape[2:]) for x in arrays), packed)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    batchable: Callable[[Arrays, Packing | None], Arrays] = batched_call
    return batchable


def forward_call(pattern: Pattern, with_statistics: bool, arrays: Arrays, packed: Packing | None) -> Arrays:
    """Binds JAX's primitive of cuDNN's forward pass to query, key and value."""
    query, key, _ = arrays
    outputs = fused._dot_product_attention_fwd_p.bind(
        *arrays,
        *_operands(query, key, packed),
        **_arguments(pattern, query.shape[1], packed),
        is_training=with_statistics,
    )
    return tuple(outputs)


def backward_call(pattern: Pattern, arrays: Arrays, packed: Packing | None) -> Arrays:
    """Binds JAX's primitive of cuDNN's backward pass to query, key, value, statistics, output and its gradient."""
    query, key, value, *of_output = arrays
    gradients = fused._dot_product_attention_bwd_p.bind(
        query,
        key,
        value,
        *_operands(query, key, packed),
        *of_output,
        **_arguments(pattern, query.shape[1], packed),
    )
    return tuple(gradients)


def _operands(query: jax.Array, key: jax.Array, packed: Packing | None) -> Arrays:
    """Returns the primitives' operands after the values: bias, lengths and offsets of queries and keys, two page tables."""
    unused = jnp.zeros(0, query.dtype)
    if packed is None:
        return (unused,) * 7
    # cuDNN counts offsets in elements. JAX's own function multiplies those of grouped keys with the query heads (JAX 0.10).
    of_queries = packed.offsets * (query.shape[2] * query.shape[3])
    of_keys = packed.offsets * (key.shape[2] * key.shape[3])
    return unused, packed.lengths, packed.lengths, of_queries, of_keys, unused, unused


def _arguments(pattern: Pattern, length: int, packed: Packing | None) -> dict[str, Any]:
    if packed is None:
        mask = fused.MaskType.CAUSAL if pattern.causal else fused.MaskType.NO_MASK
    else:
        mask = fused.MaskType.PADDING_CAUSAL if pattern.causal else fused.MaskType.PADDING
    window = pattern.window
    return {
        "scale": float(pattern.scale),
        "seed": 0,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),  # neither a bias nor its gradient
        "mask_type": mask,
        "layout": fused.AttentionLayout.BTNH.value,
        # Both count the query itself.
        "sliding_window_length": window if window is not None and window < length else None,
        **_NEWER_ARGUMENTS,
    }


KERNEL = Cudnn()
