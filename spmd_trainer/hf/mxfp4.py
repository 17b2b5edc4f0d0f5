"""Reads weights in MXFP4, the format of gpt-oss: 4-bit floats in blocks of 32 with a scale 2^n per block (OCP Microscaling 1.0).

A tensor NAME [experts, inputs, outputs] is stored as two uint8 tensors. `NAME_blocks` [experts, outputs, inputs / 32, 16] holds
two values per byte, the first value in the lower bits. `NAME_scales` [experts, outputs, inputs / 32] holds n + 127 for each
block. The values are read as bfloat16. This is exact, except that values beyond the range of bfloat16 become infinite.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import numpy.typing as npt

from spmd_trainer.hf.errors import HfDamagedError
from spmd_trainer.hf.safetensors_file import Tensor

_BLOCKS, _SCALES = "_blocks", "_scales"
_BYTES_OF_BLOCK, _EXPONENT_BIAS = 16, 127
_POSITIVE = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_VALUES = np.concatenate([_POSITIVE, -_POSITIVE])
# The two values of each byte, the lower bits first.
_PAIRS = np.stack([np.tile(_VALUES, 16), np.repeat(_VALUES, 16)], axis=1)


@dataclasses.dataclass(frozen=True)
class Mxfp4Tensor(Tensor):
    """A bfloat16 tensor that is dequantized from MXFP4 when it is read; see `Tensor`.

    Attributes:
      blocks, scales: the stored tensors of 4-bit values and of their scales.
    """

    blocks: Tensor
    scales: Tensor

    def read_rows(self, first: int, last: int) -> npt.NDArray[ml_dtypes.bfloat16]:
        """Reads the rows [first, last) and dequantizes them; see `Tensor.read_rows`."""
        stored = (tensor.read_rows(first, last) for tensor in (self.blocks, self.scales))
        return dequantised(*stored).transpose(0, 2, 1)


def dequantised(blocks: npt.NDArray[np.uint8], scales: npt.NDArray[np.uint8]) -> npt.NDArray[ml_dtypes.bfloat16]:
    """Converts N blocks of MXFP4 values, uint8 [..., N, 16], with scales, uint8 [..., N], to bfloat16 [..., 32 * N]."""
    exponents = scales.astype(np.int32) - _EXPONENT_BIAS
    with np.errstate(over="ignore"):  # the largest ones end in infinity, as in transformers
        values = np.ldexp(np.take(_PAIRS, blocks, axis=0), exponents[..., None, None])
    found: npt.NDArray[ml_dtypes.bfloat16] = values.astype(ml_dtypes.bfloat16).reshape(*scales.shape[:-1], -1)
    return found


def combined(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the tensors of a folder, by name, with an `Mxfp4Tensor` in place of each pair `NAME_blocks`, `NAME_scales`.

    Raises:
      HfDamagedError: blocks have no scales, or the shapes or dtypes of blocks and scales don't fit.
    """
    found = dict(tensors)
    for name, blocks in tensors.items():
        if not name.endswith(_BLOCKS):
            continue
        base = name.removesuffix(_BLOCKS)
        scales = found.pop(base + _SCALES, None)
        if scales is None:
            raise HfDamagedError(f"{blocks.path} has {name} and no {base + _SCALES}. Copy the folder again.")
        if (
            (len(blocks.shape), *blocks.shape[3:]) != (4, _BYTES_OF_BLOCK)
            or scales.shape != blocks.shape[:3]
            or {blocks.dtype, scales.dtype} != {np.dtype(np.uint8)}
        ):
            raise HfDamagedError(
                f"{blocks.path}: {name} is {blocks.dtype.name} {blocks.shape}, and {scales.name} {scales.dtype.name} "
                f"{scales.shape}; MXFP4 has uint8 [experts, outputs, inputs / 32, 16], and the same without the last dimension"
            )
        experts, outputs, number, _ = blocks.shape
        shape = (experts, number * 2 * _BYTES_OF_BLOCK, outputs)
        del found[name]
        found[base] = Mxfp4Tensor(
            base, np.dtype(ml_dtypes.bfloat16), shape, blocks.path, blocks.start, blocks=blocks, scales=scales
        )
    return found
