"""FLOPs of library kernels and Pallas kernels in a compiled program, from the shapes and settings in the program's text."""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from collections.abc import Sequence

from spmd_trainer.kernels.grouped_dot import ROWS_OF_PART
from spmd_trainer.planner import hlo_text
from spmd_trainer.planner.hlo_text import Instruction

_TARGET = re.compile(r'custom_call_target="([^"]*)"')
# Custom calls that reserve memory, or mark the start or end of another operation.
_NOTHING = frozenset(
    {
        "AllocateBuffer",
        "AsyncCollectiveDone",
        "AsyncCollectiveStart",
        "ConcatBitcast",
        "MoveToDevice",
        "MoveToHost",
        "Sharding",
        "SPMDFullToShardShape",
        "SPMDShardToFullShape",
    }
)
_GEMM, _CONTRACTING = re.compile(r"__cublas\$"), re.compile(r'"lhs_contracting_dimensions":\s*\[([^\]]*)\]')
_ATTENTION = re.compile(r"__cudnn\$fmha")
_CONVOLUTION = re.compile(r"__cudnn\$conv")
# Matrix products of attention: logits and their product with the values; five in the backward pass, which computes the logits
# again (arXiv:2205.14135, algorithm 4).
_FORWARD_PRODUCTS, _BACKWARD_PRODUCTS = 2, 5


def target(instruction: Instruction) -> str:
    found = _TARGET.search(instruction.rest)
    return found[1] if found else ""


def moves_nothing(instruction: Instruction) -> bool:
    """Returns True for custom calls that neither compute nor move data."""
    return target(instruction) in _NOTHING


@dataclasses.dataclass(frozen=True)
class Attention:
    """Work of one execution of an attention kernel.

    Attributes:
      flops: FLOPs of the kernel's matrix products.
      is_backward: True for a kernel of the backward pass.
      width: head dimension (number of elements of a query in one attention head).
      vector_ops: number of element-wise operations on the logits; 0 for cuDNN's kernels, whose measured rates include these.
    """

    flops: float
    is_backward: bool
    width: int
    vector_ops: float = 0.0


def attention(instruction: Instruction, shapes: Sequence[str]) -> Attention | None:
    """Returns the work of a custom call that is an attention kernel (cuDNN or splash attention); None for other calls.

    Args:
      instruction: the custom call.
      shapes: the shapes of the call's operands in XLA's notation.
    """
    name = target(instruction)
    if _ATTENTION.match(name):
        return _cudnn_attention(instruction, shapes, is_backward=name.endswith("Backward"))
    return _splash_attention(instruction) if name == "tpu_custom_call" else None


def flops(instruction: Instruction, shapes: Sequence[str]) -> float:
    """Returns the FLOPs of a custom call's matrix products; 0 for unknown kernels. Arguments as for `attention`."""
    name = target(instruction)
    if found := attention(instruction, shapes):
        return found.flops
    if _GEMM.match(name):
        left, contracting = hlo_text.dimensions(shapes[0]), re.search(_CONTRACTING, instruction.rest)
        contracted = math.prod(left[int(n)] for n in re.findall(r"\d+", contracting[1])) if contracting else 1
        return 2.0 * math.prod(hlo_text.dimensions(hlo_text.arrays(instruction.shape)[0])) * contracted
    if _CONVOLUTION.match(name):
        return _convolution_flops(instruction, shapes)
    if rows := _rows_of_part(instruction):
        return _grouped_flops(rows, (instruction.shape, *shapes))
    if name == "tpu_custom_call":
        stated = re.search(r'"cost_estimate":\s*\{[^}]*"flops":\s*"?(\d+)', instruction.rest)
        return float(stated[1]) if stated else 0.0
    return 0.0


def share_of_rows(instruction: Instruction, shapes: Sequence[str]) -> float:
    """Returns the fraction of matrix rows that a `kernels.grouped_dot` kernel reads and writes; 1.0 for other kernels.

    The matrices are the kernel's two-dimensional operands and results. Their number of rows is the size that they all have
    in common. Arguments as for `attention`.
    """
    if not (rows := _rows_of_part(instruction)):
        return 1.0
    matrices = [set(array) for array in _float_arrays((instruction.shape, *shapes)) if len(array) == 2]
    in_common = set[int]().union(*matrices[:1]).intersection(*matrices[1:])
    return min(1.0, rows / max(in_common)) if in_common else 1.0


def _rows_of_part(instruction: Instruction) -> int:
    """Returns the mean number of rows that a `kernels.grouped_dot` kernel multiplies on a device; 0 for other instructions."""
    is_kernel = target(instruction).startswith(("tpu_custom_call", "mosaic_gpu"))
    found = re.search(rf"\b{ROWS_OF_PART}(\d+)", instruction.made_by) if is_kernel else None
    return int(found[1]) if found else 0


def _grouped_flops(rows: int, shapes: Sequence[str]) -> float:
    # The only floating-point array with three dimensions is the weights, [groups, inputs, outputs], or their gradient.
    return next((2.0 * rows * math.prod(array[1:]) for array in _float_arrays(shapes) if len(array) == 3), 0.0)


def _float_arrays(shapes: Sequence[str]) -> list[Sequence[int]]:
    return [
        hlo_text.dimensions(array)
        for shape in shapes
        for array in hlo_text.arrays(shape)
        if array.startswith(("bf16", "f16", "f32"))
    ]


def _convolution_flops(instruction: Instruction, shapes: Sequence[str]) -> float:
    """Returns the FLOPs of a cuDNN convolution, or of a cuDNN call that computes a convolution's gradient."""
    result = hlo_text.arrays(instruction.shape)[0]
    if "BackwardInput" in target(instruction):  # (gradient of the output, kernel) -> gradient of the image
        return convolution_flops(instruction, result, shapes[1], shapes[0])
    if "BackwardFilter" in target(instruction):  # (image, gradient of the output) -> gradient of the kernel
        return convolution_flops(instruction, shapes[0], result, shapes[1])
    return convolution_flops(instruction, shapes[0], shapes[1], result)


def _cudnn_attention(instruction: Instruction, shapes: Sequence[str], *, is_backward: bool) -> Attention | None:
    """Returns the work of a cuDNN attention kernel; None if its text lacks the logits' shape [batch, heads, queries, keys]."""
    logits = re.search(r'"intermediate_tensor_shape":.*?"dimensions":\s*\[([^\]]*)\]', instruction.rest)
    if not logits:
        return None
    batch, heads, queries, keys = (int(n) for n in re.findall(r"\d+", logits[1]))
    width = hlo_text.dimensions(shapes[0])[-1]
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', instruction.rest)
    pairs = seen_pairs(queries, keys, causal="CAUSAL" in instruction.rest, window=int(window[1]) if window else None)
    products = _BACKWARD_PRODUCTS if is_backward else _FORWARD_PRODUCTS
    return Attention(products * 2.0 * batch * heads * pairs * width, is_backward, width)


def seen_pairs(queries: int, keys: int, *, causal: bool, window: int | None = None) -> float:
    """Returns the number of (query, key) pairs that attention computes.

    Args:
      queries, keys: the number of queries and of keys. The first query and the first key have the same position.
      causal: True if a query attends only to keys up to its own position.
      window: if `causal`, a query attends only to the last `window` of these keys. None or 0: no such limit.
    """
    if not causal:
        return float(queries * keys)
    too_far = _causal_pairs(queries - window, keys) if window else 0
    return float(_causal_pairs(queries, keys) - too_far)


def _causal_pairs(queries: int, keys: int) -> int:
    growing = max(0, min(queries, keys))
    return growing * (growing + 1) // 2 + max(0, queries - keys) * keys


# {part of a splash attention kernel's name: (setting with its query block size, setting with its key block size, its matrix
# products per pair of blocks, its vector operations per logit)}. Matrix products: the logits, and their product with the values;
# the backward pass computes the logits again, and the gradients of keys and values or of queries. Vector operations, counted in
# jax/experimental/pallas/ops/tpu/splash_attention: four for the mask, three for the exponential, and two for maximum and sum, or
# in the backward pass for the gradient and its conversions.
_SPLASH = {
    "splash_mha_fwd": ("block_q", "block_kv", 2, 9),
    "splash_mqa_fwd": ("block_q", "block_kv", 2, 9),
    "splash_mha_dkv": ("block_q_dkv", "block_kv_dkv", 4, 11),
    "splash_mqa_dkv": ("block_q_dkv", "block_kv_dkv", 4, 11),
    "splash_mha_dq": ("block_q_dq", "block_kv_dq", 3, 10),
    "splash_mqa_dq": ("block_q_dq", "block_kv_dq", 3, 10),
}
# Optionally, the kernel for keys and values also computes the gradient of the queries.
_SPLASH_FUSED_PRODUCTS = 5


def _splash_attention(instruction: Instruction) -> Attention | None:
    """Returns the work of a splash attention kernel; None for other Pallas kernels.

    The kernel computes only some (query block, key block) pairs. Its first operand, a table [1, query blocks, key blocks], shows
    how many: with a window, the last dimension is the maximum number of key blocks that any query block needs. In the kernel for
    the gradients of keys and values, dimension 1 is the maximum number of query blocks that any key block needs.
    """
    known = next((settings for name, settings in _SPLASH.items() if name in instruction.made_by), None)
    layouts = re.search(r"operand_layout_constraints=\{(.*?\})\}", instruction.rest)
    if known is None or layouts is None:
        return None
    (query_block, key_block, products, operations), operands = known, hlo_text.arrays(layouts[1])
    settings = {name: int(size) for name, size in re.findall(r'\\"(\w+)\\": (\d+)', instruction.rest)}
    arrays = [hlo_text.dimensions(array) for array in operands]
    first = next(n for n, array in enumerate(operands) if array.startswith(("bf16", "f32")))
    queries, keys = arrays[first], arrays[first + 1]
    rows, columns = settings[query_block], settings[key_block]
    # Masked kernels read the queries' positions; segments, if there are any, take two further arrays of integers.
    causal = sum(array.startswith("s32") for array in operands[first:]) % 2 == 1
    pairs = _pairs_of_blocks(
        queries[-2] // rows,
        keys[-2] // columns,
        rows,
        columns,
        arrays[0][-2:],
        causal=causal,
        by_key="_dkv" in query_block,
    )
    if "_dkv" in query_block and '\\"use_fused_bwd_kernel\\": true' in instruction.rest:
        products = _SPLASH_FUSED_PRODUCTS
    logits, width = float(math.prod(queries[:-2]) * pairs * rows * columns), queries[-1]
    return Attention(products * 2.0 * logits * width, query_block != "block_q", width, operations * logits)


def _pairs_of_blocks(
    num_rows: int, num_columns: int, rows: int, columns: int, table: Sequence[int], *, causal: bool, by_key: bool
) -> int:
    if not causal:
        return num_rows * num_columns
    if by_key:  # from the first query that sees the block's first key
        return sum(min(table[0], num_rows - column * columns // rows) for column in range(num_columns))
    return sum(min(table[1], num_columns, -(-(row + 1) * rows // columns)) for row in range(num_rows))


def convolution_flops(convolution: Instruction, image_shape: str, kernel_shape: str, output_shape: str) -> float:
    """Returns a convolution's FLOPs. Multiplications by padding are not counted.

    Args:
      convolution: the instruction. Its text has the window and the dimension labels.
      image_shape, kernel_shape, output_shape: shapes in XLA's notation. For a gradient, give the shapes of the forward
        convolution, which takes the same number of FLOPs.
    """
    found = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", convolution.rest)
    if not found:
        return 0.0
    image, kernel, output = map(hlo_text.dimensions, (image_shape, kernel_shape, output_shape))
    into = dict(zip(found[1], image, strict=True))
    at = dict(zip(found[2], kernel, strict=True))
    out = dict(zip(found[3], output, strict=True))
    window = {
        name: re.search(rf"\b{name}=([\dx_-]+)", convolution.rest)
        for name in ("stride", "pad", "lhs_dilate", "rhs_dilate")
    }

    def setting(name: str, index: int, default: str) -> str:
        match = window[name]
        return match[1].split("x")[index] if match else default

    # TPU programs write batched matrix products as convolutions with much padding.
    products = 2.0 * out["b"] * out["f"] * at["i"]
    for label in sorted(label for label in found[2] if label.isdigit()):
        index = int(label)
        products *= _positions(
            into[label],
            at[label],
            out[label],
            stride=int(setting("stride", index, "1")),
            low=int(setting("pad", index, "0_0").split("_")[0]),
            image_dilation=int(setting("lhs_dilate", index, "1")),
            kernel_dilation=int(setting("rhs_dilate", index, "1")),
        )
    return products


@functools.cache
def _positions(
    image: int, kernel: int, output: int, *, stride: int, low: int, image_dilation: int, kernel_dilation: int
) -> int:
    """Returns how many (output position, kernel position) pairs in one dimension of a convolution read an image element."""
    # Output o and kernel k read position o * stride + k * kernel_dilation - low, which is an element of the image if it is a
    # multiple of image_dilation: for every `period`-th k, or for none.
    common = math.gcd(kernel_dilation, image_dilation)
    period = image_dilation // common
    inverse = pow(kernel_dilation // common, -1, period)
    last, found = (image - 1) * image_dilation, 0
    for o in range(output):
        offset = low - o * stride
        if offset % common:
            continue
        phase = offset // common * inverse % period
        least, most = max(0, -(-offset // kernel_dilation)), min(kernel - 1, (offset + last) // kernel_dilation)
        found += max(0, (most - phase) // period - (least - 1 - phase) // period)
    return found
