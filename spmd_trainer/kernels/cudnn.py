"""Attention by cuDNN's fused kernels, for NVIDIA GPUs of compute capability 8.0 and later.

No array has both a query and a key dimension: there is neither a mask nor a bias. Packed rows are described to cuDNN by the
offset and the length of each segment ("ragged" tensors). The maximum number of segments is static in the program. A batch with
more segments, or with a segment in several pieces, is computed by the chunked kernel instead, in the same program. A batch in
which each row is one segment is computed without packing, because with packing, cuDNN clears buffers as if each segment were as
long as a row, which took 12% of a training step of Llama-3.2-1B on an H200.

JAX's own function (`jax.nn.dot_product_attention`) doesn't support packed rows, and checks the capabilities of this process' GPU,
which may differ from the compile target. So this module uses the function's primitives.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as fused
from jax._src.lib import cuda_versions
from jax.ad_checkpoint import checkpoint_name

from spmd_trainer.errors import installation
from spmd_trainer.kernels import chunked
from spmd_trainer.kernels.kernels import Call, Pattern, Rows

# Maximum number of segments per row, averaged over a device's rows. With 32 segments and heads of 128, cuDNN's statistics of the
# softmax, float32 [segments, heads, tokens], are half as large as the output.
MAX_SEGMENTS = 32
_DTYPES = (jnp.bfloat16, jnp.float16)
# {major compute capability: maximum head width of the backward pass}, from cuDNN's support matrix
# (https://docs.nvidia.com/deeplearning/cudnn/frontend/latest/operations/Attention.html).
_WIDEST_HEAD = {9: 256}
_WIDEST_HEAD_ELSE = 128
# {compute capability: oldest version of cuDNN that JAX accepts} (`fused_attention_stablehlo.check_is_flash_attention`).
_OLDEST_CUDNN = {(10, 3): 91100}
# Arguments of later versions of JAX, for masks given as functions.
_NEWER_ARGUMENTS = {
    name: None
    for name in ("score_mod_name", "score_mod_jaxpr")
    if name in inspect.signature(fused._dot_product_attention_fwd_cuda_lowering).parameters
}

Arrays: TypeAlias = tuple[jax.Array, ...]
# (arrays with the rows as dimension 0, or None, packing) -> results
_Call: TypeAlias = Callable[[tuple[Any, ...], "Packing | None"], Arrays]


class Packing(NamedTuple):
    """The segments (texts) of B rows of T tokens: at most M per row on average, in the order of their tokens over all rows.

    Attributes:
      lengths: number of tokens of each segment, int32 [B, M]; 0 after the last segment.
      offsets: first token of each segment, counted over all rows, int32 [B, M + 1]; B * T after the last segment.
      fits: bool []; False if there are more than B * M segments, or if two segments of a row have the same id.
      whole: bool []; True if each row is one segment.
    """

    lengths: jax.Array
    offsets: jax.Array
    fits: jax.Array
    whole: jax.Array

    @property
    def way(self) -> jax.Array:
        """How to compute the attention, int32 []: 0: cuDNN without packing; 1: cuDNN with packing; 2: the chunked kernel."""
        return jnp.where(self.whole, 0, jnp.where(self.fits, 1, 2))


def packing(segment_ids: jax.Array, max_segments: int) -> Packing:
    """Finds the segments of packed rows. A segment is a run of tokens of one row with the same id.

    Args:
      segment_ids: int32 [rows, tokens].
      max_segments: maximum number of segments per row, averaged over the rows; at least 2.
    """
    batch, length = segment_ids.shape
    changes = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(changes, ((0, 0), (1, 0)), constant_values=True).reshape(-1)
    end, count = batch * length, batch * max_segments
    offsets = jnp.nonzero(starts, size=count + 1, fill_value=end)[0].astype(jnp.int32)
    # cuDNN reads the first B * M + 1 offsets, but the JAX primitive requires the shape [B, M + 1].
    padded = jnp.pad(offsets, (0, batch - 1), constant_values=end)
    fits = (starts.sum() <= count) & _all_differ(offsets[:-1], segment_ids)
    return Packing(jnp.diff(offsets).reshape(batch, -1), padded.reshape(batch, -1), fits, ~changes.any())


def _all_differ(starts: jax.Array, segment_ids: jax.Array) -> jax.Array:
    """Returns True if no row has two segments with the same id.

    `starts`: first token of each segment, counted over all rows; the number of all tokens after the last segment.
    """
    batch, length = segment_ids.shape
    rows = starts // length
    ids = jnp.take(segment_ids.reshape(-1), starts, mode="clip")
    order = jnp.lexsort((ids, rows))
    rows, ids = rows[order], ids[order]
    return ~jnp.any((rows[1:] == rows[:-1]) & (ids[1:] == ids[:-1]) & (rows[1:] < batch))


def folded(packed: Packing, num_tokens: int) -> Packing:
    """Merges the packings of several batches, stacked along a leading axis, into one. A batch has `num_tokens` tokens."""
    size, rows, segments = packed.lengths.shape
    first = num_tokens * jnp.arange(size, dtype=jnp.int32)
    offsets = packed.offsets.reshape(size, -1)[:, : rows * segments] + first[:, None]
    end = size * num_tokens
    padded = jnp.pad(offsets.reshape(-1), (0, size * rows), constant_values=end)
    return Packing(
        packed.lengths.reshape(size * rows, -1), padded.reshape(size * rows, -1), packed.fits.all(), packed.whole.all()
    )


def reasons_against(call: Call) -> list[str]:
    """Returns the reasons why cuDNN can't compute a call; see `Kernel.reasons_against`."""
    if call.target.platform != "cuda":
        return [f"it is a kernel for NVIDIA GPUs, but the device is a {call.target.kind or call.target.platform}"]
    return [*_device_reasons(call), *_call_reasons(call)]


def attend(rows: Rows, pattern: Pattern) -> jax.Array:
    """Computes attention on one device, see `Kernel.attend`. `rows.sinks` must be None."""
    packed = None if rows.segment_ids is None else packing(rows.segment_ids, MAX_SEGMENTS)
    return _attention(pattern, rows, packed)


def _device_reasons(call: Call) -> list[str]:
    capability = call.target.compute_capability
    if cuda_versions is None:
        return [f"cuDNN is not installed; install it with `{installation.install_extra('cuda12')}` (or cuda13)"]
    if capability is None:
        return [f"the compute capability of {call.target.kind!r} is unknown"]
    reasons = []
    shown = ".".join(map(str, capability))
    if capability < (8, 0):
        reasons.append(f"the GPU's compute capability is {shown}, below 8.0")
    try:
        installed = cuda_versions.cudnn_get_version()
    except RuntimeError:
        return [*reasons, f"JAX finds no cuDNN; install it with `{installation.install_extra('cuda12')}` (or cuda13)"]
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
        "it has no sinks": call.sinks,
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
def _attention(pattern: Pattern, rows: Rows, packed: Packing | None) -> jax.Array:
    return _forward(pattern, False, rows, packed)[0]


def _attention_forward(pattern: Pattern, rows: Rows, packed: Packing | None) -> tuple[jax.Array, tuple[Any, ...]]:
    # Named so that a rematerialization policy that saves the layers' outputs needs no second forward pass.
    output, statistics = (checkpoint_name(x, "context") for x in _forward(pattern, True, rows, packed))
    return output, (rows, packed, output, statistics)


def _attention_backward(pattern: Pattern, kept: tuple[Any, ...], gradient: jax.Array) -> tuple[Rows, None]:
    rows, packed, *of_output = kept

    def call(arrays: tuple[Any, ...], packed: Packing | None) -> Arrays:
        rows, output, statistics, gradient = arrays

        def by_cudnn(packed: Packing | None) -> Arrays:
            needed = statistics if packed is not None else statistics[: len(rows.query)]
            return backward_call(pattern, (*rows[:3], needed, output, gradient), packed)

        if packed is None:
            return by_cudnn(None)
        by_chunks = functools.partial(_chunked_backward, pattern, rows, gradient)
        ways = (lambda: by_cudnn(None), lambda: by_cudnn(packed), by_chunks)
        return jax.lax.switch(packed.way, ways)

    return Rows(*_with_batching(call)((rows, *of_output, gradient), packed)), None


_attention.defvjp(_attention_forward, _attention_backward)


def _forward(pattern: Pattern, with_statistics: bool, rows: Rows, packed: Packing | None) -> Arrays:
    """Computes the output and, if `with_statistics` is True, the softmax statistics for the backward pass, float32.

    The statistics are [rows, heads, tokens] without packing and [maximum number of segments, heads, tokens] with it. If
    packed rows don't fit (see `Packing.fits`), the chunked kernel computes them.
    """

    def call(arrays: tuple[Any, ...], packed: Packing | None) -> Arrays:
        (rows,) = arrays
        batch, length, heads, _ = rows.query.shape

        def by_cudnn(packed: Packing | None) -> Arrays:
            return forward_call(pattern, with_statistics, rows[:3], packed)[: 1 + with_statistics]

        if packed is None:
            return by_cudnn(None)
        num_segments = packed.lengths.size

        def without_packing() -> Arrays:
            output, *statistics = by_cudnn(None)
            more = ((0, num_segments - batch), (0, 0), (0, 0))
            return (output, *(jnp.pad(x, more) for x in statistics))

        def by_chunks() -> Arrays:
            output = _chunked_forward(pattern, rows)
            # Nothing reads these statistics: the backward pass computes the logits again.
            statistics = jnp.zeros((num_segments, heads, length), jnp.float32)
            return (output, statistics) if with_statistics else (output,)

        # The branch is chosen inside the call that `jax.vmap` turns into one with more rows, because for a condition with a
        # batch dimension, `jax.vmap` would compute all branches.
        return jax.lax.switch(packed.way, (without_packing, lambda: by_cudnn(packed), by_chunks))

    return _with_batching(call)((rows,), packed)


def _chunked_forward(pattern: Pattern, rows: Rows) -> jax.Array:
    def call(rows: Rows) -> Arrays:
        return (chunked.attend(rows, pattern),)

    return _head_by_head(call, rows, like=rows[:1])[0]


def _chunked_backward(pattern: Pattern, rows: Rows, gradient: jax.Array) -> Arrays:
    def call(rows: Rows, of_output: jax.Array) -> Arrays:
        _, pull_back = jax.vjp(lambda q, k, v: chunked.attend(Rows(q, k, v, rows.segment_ids), pattern), *rows[:3])
        gradients: Arrays = pull_back(of_output)
        return gradients

    return _head_by_head(call, rows, gradient, like=rows[:3])


def _head_by_head(call: Callable[..., Arrays], rows: Rows, *more: jax.Array, like: Arrays) -> Arrays:
    """Calls a function for one batch row and one key head at a time, so that chunked attention needs memory for one head only.

    A "part" of an array is one batch row, with the heads that belong to one key head.

    Args:
      call: function (parts of `rows`, parts of `more`) -> parts of the results.
      rows: the arrays of the attention call.
      *more: further arguments of `call`, [rows, tokens, heads, width], such as the output's gradient.
      like: arrays with the shapes and dtypes of the results.
    """
    segment_ids, kv_heads = rows.segment_ids, rows.key.shape[2]
    assert segment_ids is not None  # only packed rows may not fit

    def body(index: jax.Array, results: Arrays) -> Arrays:
        row, head = index // kv_heads, index % kv_heads

        def part(x: jax.Array) -> jax.Array:
            count = x.shape[2] // kv_heads
            return jax.lax.dynamic_slice(x, (row, 0, head * count, 0), (1, x.shape[1], count, x.shape[3]))

        query, key, value = map(part, rows[:3])
        one = Rows(query, key, value, jax.lax.dynamic_slice_in_dim(segment_ids, row, 1))
        parts = call(one, *map(part, more))
        return tuple(
            jax.lax.dynamic_update_slice(whole, new, (row, 0, head * new.shape[2], 0))
            for whole, new in zip(results, parts, strict=True)
        )

    results: Arrays = jax.lax.fori_loop(0, segment_ids.shape[0] * kv_heads, body, tuple(map(jnp.zeros_like, like)))
    return results


def _with_batching(call: _Call) -> _Call:
    """Lets `jax.vmap` map `call` by merging the mapped axis into the rows. JAX's primitives can't be batched for packed rows."""
    batched_call = jax.custom_batching.custom_vmap(call)

    @batched_call.def_vmap
    def fold(size: int, batched: Any, arrays: tuple[Any, ...], packed: Packing | None) -> tuple[Arrays, Any]:
        arrays, packed = jax.tree.map(
            lambda x, has_axis: x if has_axis else jnp.broadcast_to(x, (size, *x.shape)),
            (arrays, packed),
            tuple(batched),
        )
        rows, length = arrays[0].query.shape[1:3]
        if packed is not None:
            packed = folded(packed, rows * length)
        results = batched_call(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), arrays), packed)
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in results), (True,) * len(results)

    batchable: _Call = batched_call
    return batchable


def forward_call(pattern: Pattern, with_statistics: bool, arrays: Arrays, packed: Packing | None) -> Arrays:
    """Calls JAX's primitive for cuDNN's forward pass. `arrays`: query, key and value."""
    query, key, _ = arrays
    outputs = fused._dot_product_attention_fwd_p.bind(
        *arrays,
        *_operands(query, key, packed),
        **_arguments(pattern, query.shape[1], packed),
        is_training=with_statistics,
    )
    return tuple(outputs)


def backward_call(pattern: Pattern, arrays: Arrays, packed: Packing | None) -> Arrays:
    """Calls JAX's primitive for cuDNN's backward pass. `arrays`: query, key, value, statistics, output and its gradient."""
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
    """Returns the primitives' operands that follow query, key and value: bias, lengths, offsets and page tables."""
    unused = jnp.zeros(0, query.dtype)
    if packed is None:
        return (unused,) * 7
    # cuDNN counts offsets in elements. JAX's own function multiplies key offsets by the number of query heads (JAX 0.10).
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
        # Both cuDNN's window and ours count the query itself.
        "sliding_window_length": window if window is not None and window < length else None,
        **_NEWER_ARGUMENTS,
    }
