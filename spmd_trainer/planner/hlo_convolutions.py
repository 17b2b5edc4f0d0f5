"""FLOPs of convolutions, which TPU programs also use for matrix products, from their shapes and windows."""

from __future__ import annotations

import functools
import math
import re

from spmd_trainer.planner import hlo_text
from spmd_trainer.planner.hlo_text import Instruction


def flops(convolution: Instruction, image_shape: str, kernel_shape: str, output_shape: str) -> float:
    """Returns a convolution's FLOPs. Products with padding don't count, because TPU programs write batched matrix
    products as padded convolutions.

    Args:
      convolution: the instruction, for its window and the meaning of its dimensions.
      image_shape, kernel_shape, output_shape: in XLA's notation. A gradient's FLOPs are those of its forward convolution.
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
    """Returns how many pairs of output and kernel positions of one dimension meet an element of the image, not padding."""
    # Output o and kernel k meet place o * stride + k * kernel_dilation - low, which is an element of the image if it is a
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
